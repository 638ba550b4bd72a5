"""sha256 of many blocks at once, by the extension (lanes.c) where there is one and this CPU has a variant of it.

IMGSUM_LANES=off in the environment, or the name of a variant in lower case (sha-ni, avx-512, avx2, sse4.1, armv8),
decides instead of the CPU. The values are hashlib's in every case, only the time differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

BlockHash = Callable[[memoryview, int, bytes], bytes]
"""(content, block_size, zero_digest) -> the digests of the blocks, laid end to end. A whole block of zeros may have
ZERO_DIGEST without being hashed; the last block may be shorter."""


class Choice(NamedTuple):
    """How sha256 of blocks is made in this process."""

    hash_blocks: BlockHash | None
    """None: block by block, by hashlib."""
    description: str
    """For people: `SHA-NI, 4 blocks at once`, or hashlib and why."""


@lru_cache(maxsize=1)
def sha256() -> Choice:
    """The fastest variant that this CPU has and that passes its self-test, or what IMGSUM_LANES says."""
    wanted = os.environ.get("IMGSUM_LANES", "").lower()
    if wanted == "off":
        return Choice(None, "hashlib, as IMGSUM_LANES=off says")
    try:
        from imgsum.hash import _lanes
    except ImportError:
        return Choice(None, "hashlib, as the extension was not built")
    failed: list[str] = []
    for name, lanes in _lanes.variants():
        if wanted in ("", name.lower()):
            hash_blocks = _by(name)
            if _self_test(hash_blocks, lanes):
                return Choice(hash_blocks, f"{name}, {lanes} blocks at once" + "".join(failed))
            failed.append(f" ({name} failed its self-test)")
    if failed:
        return Choice(None, "hashlib" + "".join(failed))
    if wanted:
        return Choice(None, f"hashlib, as this CPU has no variant IMGSUM_LANES={wanted}")
    return Choice(None, "hashlib, as this CPU has no variant of the extension")


def _by(variant: str) -> BlockHash:
    from imgsum.hash import _lanes

    def hash_blocks(content: memoryview, block_size: int, zero_digest: bytes) -> bytes:
        digests = bytearray(-(-len(content) // block_size) * 32)
        _lanes.sha256_blocks(content, block_size, zero_digest, digests, variant)
        return bytes(digests)

    return hash_blocks


def _self_test(hash_blocks: BlockHash, lanes: int) -> bool:
    """Whether HASH_BLOCKS makes hashlib's digests: in full lanes, for each number left over, for zeros and a short end.

    Takes some 100 us.
    """
    from hashlib import sha256 as reference

    block_size = 72  # bytes: two chunks, of which the second has 8 bytes of data, and the padding
    zero_digest = b"z" * 32  # where this comes out, nothing was hashed
    data = bytes(at % 251 + 1 for at in range(2 * lanes * block_size + 10))
    content = memoryview(data[:block_size] + bytes(block_size) + data[block_size:])
    blocks = [content[at : at + block_size] for at in range(0, len(content), block_size)]
    digests = [reference(block).digest() for block in blocks]
    digests[1] = zero_digest
    return all(
        hash_blocks(content[: count * block_size], block_size, zero_digest) == b"".join(digests[:count])
        for count in range(1, len(blocks) + 1)
    )
