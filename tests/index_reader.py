"""An index by the letter of docs/index-format.md: the oracle of the tests, which shares no code with imgsum/."""

from __future__ import annotations

import json
import struct
from typing import Any

from reference import HASHES


def read_index(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The header of the index DATA, and a digest for each block. Raises ValueError for anything that is not whole."""
    line, newline, rest = data.partition(b"\n")
    header = json.loads(line)
    size, block = header["size"], header["block_size"]
    new, length = HASHES[header["algorithm"]], HASHES[header["algorithm"]]().digest_size
    zeros, folded = new(bytes(block)).digest(), new()
    digests: list[bytes] = []
    at = 0
    while True:
        (word,) = struct.unpack_from("<Q", rest, at)
        kind, count, at = word >> 56, word & (1 << 56) - 1, at + 8
        if kind == 0:
            digests += [zeros] * count
            folded.update(zeros * count)
        elif kind == 1:
            if count > 1024:
                raise ValueError("too many digests in a record")
            digests += [rest[at + i * length : at + (i + 1) * length] for i in range(count)]
            folded.update(rest[at : at + count * length])
            at += count * length
        elif kind == 2:
            if rest[at : at + 2 * length] != folded.copy().digest() + new(line + newline).digest():
                raise ValueError("a checkpoint is wrong")
            at += 2 * length
        else:
            folded.update(size.to_bytes(8, "little"))
            if len(digests) != -(-size // block) or rest[at:] != folded.digest() + new(line + newline).digest():
                raise ValueError("the end is wrong")
            return header, digests
