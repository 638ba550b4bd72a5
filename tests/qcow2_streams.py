"""Random qcow2 files whose compressed clusters lie in any order, written by hand: a seed is a file and its content.

Knows nothing of imgsum, and needs no QEMU: what is right is what was compressed. Streams are packed so that they share
sectors, or lie apart, or are one stream for many clusters, in the order of the content or in any other.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any, NamedTuple

from qcow2_build import COPIED, ZERO, compressed_entry, deflate, header

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

EXTENDED_L2, ZSTD = 0x10, 0x08  # incompatible features
ORDERS = ("as they are", "backwards", "pairs swapped", "late by up to 16", "any")


class Made(NamedTuple):
    """A qcow2 file, its content, and what was made."""

    file: bytes
    content: bytes
    story: str
    tidy: bool
    """No byte of the file is used twice: what a writer might make, and --untrusted takes."""


def random_streams(seed: int | str, most: int = 1 << 20) -> Made:
    """The image of SEED, with about MOST bytes of content at most."""
    rng = random.Random(seed)
    bits = rng.choice((9, 9, 10, 12, 12, 14, 16, 16, 17, 19, 21))
    size = 1 << bits
    extended = bits >= 14 and rng.random() < 0.3
    compression = rng.choice(("zlib", "zstd"))
    order = rng.choice(ORDERS)
    gaps = rng.choice(("none", "few", "sectors", "far"))
    tidy = rng.random() < 0.7
    count = rng.randrange(1, max(4, min(300, most // size)))
    contents = [_content(rng, size) for _ in range(count)]
    kinds = rng.choices(("compressed", "data", "none", "zero"), (90, 4, 3, 3), k=count)

    per_table = size // (16 if extended else 8)  # entries
    tables = -(-count // per_table)
    l1 = 2
    l2 = l1 + -(-tables * 8 // size)
    file = bytearray((l2 + tables) * size)
    width = 2 if extended else 1  # words of an entry
    entries = [0] * (count * width)
    kept: list[tuple[int, int, bytes]] = []
    for number in _in_order(rng, order, count):
        if kinds[number] == "compressed":
            if kept and not tidy and rng.random() < 0.2:
                at, length, contents[number] = rng.choice(kept)
            else:
                stream = _compress(rng, compression, contents[number], size)
                if stream is None:
                    kinds[number] = "data"
                else:
                    file += bytes(_gap(rng, gaps))
                    at, length = len(file), len(stream)
                    file += stream
                    kept.append((at, length, contents[number]))
        if kinds[number] == "compressed":
            claimed = length if tidy else min(length + rng.choice((0, 0, 1, 512, 2000)), 2 * size - at % 512)
            entries[number * width] = compressed_entry(at, max(length, claimed), bits)
        elif kinds[number] == "data":
            file += bytes(-len(file) % size)
            entries[number * width] = len(file) | COPIED
            file += contents[number]
            if extended:
                entries[number * 2 + 1] = 0xFFFFFFFF
        else:
            contents[number] = bytes(size)
            if kinds[number] == "zero":
                entries[number * width + extended] = 0xFFFFFFFF << 32 if extended else ZERO
    struct.pack_into(f">{len(entries)}Q", file, l2 * size, *entries)  # whole tables, one after the other
    struct.pack_into(f">{tables}Q", file, l1 * size, *((l2 + table) * size | COPIED for table in range(tables)))
    content = b"".join(contents)
    cut = rng.choice((0, 0, 512 * rng.randrange(size // 512)))  # the last cluster may be longer than the image
    content = content[: len(content) - cut] if cut < size else content
    head = header(
        cluster_bits=bits,
        size=len(content),
        l1_size=tables,
        l1_table_offset=l1 * size,
        refcount_table_offset=size,
        incompatible_features=(EXTENDED_L2 if extended else 0) | (ZSTD if compression == "zstd" else 0),
        header_length=112,
        tail=bytes([compression == "zstd"]).ljust(8, b"\0"),
    )
    file[: len(head)] = head
    story = f"{count} clusters of {size}, {compression}, extended {extended}, order {order}, gaps {gaps}, tidy {tidy}"
    return Made(bytes(file), content, story, tidy)


def _in_order(rng: random.Random, order: str, count: int) -> list[int]:
    """The numbers of clusters, in the order in which the file has them."""
    numbers = list(range(count))
    if order == "backwards":
        numbers.reverse()
    elif order == "pairs swapped":
        numbers = [number ^ 1 if number ^ 1 < count else number for number in numbers]
    elif order == "late by up to 16":
        numbers.sort(key=lambda number: number + rng.randrange(17))
    elif order == "any":
        rng.shuffle(numbers)
    return numbers


def _content(rng: random.Random, size: int) -> bytes:
    kind = rng.random()
    if kind < 0.4:
        return bytes([rng.randrange(256)]) * size
    word = rng.randbytes(rng.randrange(1, 200))
    text = (word * (size // len(word) + 1))[:size]
    if kind < 0.7:
        return text
    hard = rng.randrange(size // 2)  # bytes that can't be compressed
    return rng.randbytes(hard) + text[hard:]


def _compress(rng: random.Random, compression: str, content: bytes, size: int) -> bytes | None:
    """CONTENT as a stream, or None where that is too long to be described."""
    if compression == "zlib":
        stream = deflate(content, rng.choice((12, 12, 15)))
    else:
        options: dict[Any, int] = {
            zstd.CompressionParameter.checksum_flag: rng.randrange(2),
            zstd.CompressionParameter.content_size_flag: rng.randrange(2),
        }
        stream = zstd.compress(content, options=options)
    return stream if len(stream) < size + size // 2 else None


def _gap(rng: random.Random, gaps: str) -> int:
    if gaps == "none":
        return 0
    if gaps == "few":
        return rng.choice((0, 0, 0, 1, 7, 511, 512, 513))
    if gaps == "sectors":
        return rng.randrange(1024)
    return rng.choice((0, 0, 0, 0, 0, 0, 0, 4095, 4096, 4097, 9000, 70_000))
