"""VHDs and VDIs built by hand, as no QEMU writes them: each with the content that a reader must find in it.

Knows nothing of imgsum. Sources: Microsoft's VHD specification 1.0; for VDI the header in QEMU's block/vdi.c.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FIXED, DYNAMIC, DIFFERENCING = 2, 3, 4
MIB = 1 << 20


def geometry_of(sectors: int) -> tuple[int, int, int]:
    """Cylinders, heads and sectors of a track that give at most so many SECTORS."""
    return min(65535, max(1, sectors // (4 * 17))), 4, 17


def checksummed(raw: bytearray, at: int) -> bytes:
    """RAW with its checksum AT that place."""
    struct.pack_into(">I", raw, at, 0)
    struct.pack_into(">I", raw, at, ~sum(raw) & 0xFFFFFFFF)
    return bytes(raw)


def footer(
    size: int,
    kind: int,
    *,
    unique_id: bytes = b"u" * 16,
    creator: bytes = b"win ",
    geometry: tuple[int, int, int] | None = None,
    header: int = 512,
    length: int = 512,
) -> bytes:
    """A footer. GEOMETRY is cylinders, heads and sectors; LENGTH is 511 in old images."""
    raw = bytearray(length)
    struct.pack_into(">8sIIQI4sI4sQQ", raw, 0, b"conectix", 2, 0x10000, header, 0, creator, 0, b"Wi2k", size, size)
    struct.pack_into(">HBBII16s", raw, 56, *(geometry or geometry_of(size // 512)), kind, 0, unique_id)
    return checksummed(raw, 64)


class Parent(NamedTuple):
    """What a differencing image says of its parent."""

    unique_id: bytes = b"p" * 16
    name: str = ""
    """In the header."""
    locators: Sequence[tuple[bytes, bytes]] = ()
    """Codes, and what each has."""


def relative(path: str) -> tuple[bytes, bytes]:
    """The locator of a relative path, as Windows writes it."""
    return b"W2ru", path.encode("utf-16-le")


def dynamic(
    size: int,
    blocks: dict[int, tuple[bytes, bytes]],
    *,
    block: int = 2 * MIB,
    parent: Parent | None = None,
    order: Sequence[int] | None = None,
    entries: int | None = None,
    **options: object,
) -> bytes:
    """A dynamic image, or with PARENT a differencing one, of BLOCKS: {number: (sector bitmap, data)}.

    They are in the file in ORDER. The OPTIONS are the footer's.
    """
    kind = DYNAMIC if parent is None else DIFFERENCING
    tail = footer(size, kind, **options)  # type: ignore[arg-type]
    copy = footer(size, kind, **{**options, "length": 512})  # type: ignore[arg-type]
    entries = -(-size // block) if entries is None else entries
    bitmap = -(-(block // 512 // 8) // 512) * 512
    table_at = 512 + 1024 + 8 * 512
    data_at = table_at + -(-entries * 4 // 512) * 512
    header = bytearray(1024)
    struct.pack_into(">8sQQIII", header, 0, b"cxsparse", 2**64 - 1, table_at, 0x10000, entries, block)
    locators = bytearray(8 * 512)
    if parent:
        struct.pack_into(">16s", header, 40, parent.unique_id)
        name = parent.name.encode("utf-16-be")
        header[64 : 64 + len(name)] = name
        for number, (code, data) in enumerate(parent.locators):
            at = 1536 + number * 512
            struct.pack_into(">4sIIIQ", header, 576 + number * 24, code, 512, len(data), 0, at)
            locators[number * 512 : number * 512 + len(data)] = data
    table = [0xFFFFFFFF] * entries
    parts = []
    for number in order or sorted(blocks):
        bits, data = blocks[number]
        table[number] = data_at // 512
        parts.append(bits.ljust(bitmap, b"\0") + data.ljust(block, b"\0"))
        data_at += bitmap + block
    raw = struct.pack(f">{entries}I", *table)
    raw = raw.ljust(-(-len(raw) // 512) * 512, b"\xff")
    return b"".join([copy, checksummed(header, 36), locators, raw, *parts, tail])


def random_chain(rng: random.Random, directory: Path) -> tuple[Path, bytes]:
    """A chain of differencing images in DIRECTORY: the last of them, and its content."""
    size = rng.randrange(1, 5 * MIB // 512) * 512
    content = bytearray(size)
    before: bytes | None = None
    path = directory / "none"
    for number in range(rng.choice((1, 2, 3))):
        block = 1 << rng.choice((12, 16, 19, 21))
        blocks: dict[int, tuple[bytes, bytes]] = {}
        if number and rng.random() < 0.3:
            size = rng.randrange(1, 5 * MIB // 512) * 512
            content = content[:size].ljust(size, b"\0")
        for index in range(-(-size // block)):
            if rng.random() < 0.4:
                continue
            sectors = [False] * (block // 512)
            for _ in range(rng.randrange(1, 6)):
                first, count = rng.randrange(len(sectors)), rng.choice((1, 2, 8, 100, len(sectors)))
                sectors[first : first + count] = [True] * len(sectors[first : first + count])
            data = bytearray(rng.randbytes(block))  # what a differencing image's bitmap does not have is garbage
            for sector, here in enumerate(sectors):
                at, part = index * block + sector * 512, slice(sector * 512, sector * 512 + 512)
                if before is None and not here:
                    data[part] = bytes(512)
                elif here and at < size:
                    content[at : at + 512] = data[part]
            bits = int("".join("01"[here] for here in sectors).ljust(-(-len(sectors) // 8) * 8, "0"), 2)
            blocks[index] = bits.to_bytes(-(-len(sectors) // 8), "big"), bytes(data)
        order = list(blocks)
        rng.shuffle(order)
        unique_id = rng.randbytes(16)
        parent = None if before is None else Parent(before, path.name, [relative(".\\" + path.name)])
        path = directory / f"layer{number}.vhd"
        path.write_bytes(dynamic(size, blocks, block=block, parent=parent, order=order, unique_id=unique_id))
        before = unique_id
    return path, bytes(content)


def vdi(
    size: int, blocks: dict[int, bytes], *, order: Sequence[int] | None = None, discarded: Sequence[int] = ()
) -> bytes:
    """A VDI of SIZE bytes with BLOCKS, which are in the file in ORDER."""
    count = -(-size // MIB)
    header = bytearray(512)
    header[:0x40] = b"<<< Oracle VM VirtualBox Disk Image >>>\n".ljust(0x40, b"\0")
    table_size = -(-count * 4 // 512) * 512
    struct.pack_into("<IIII", header, 0x40, 0xBEDA107F, 0x10001, 0x190, 1)
    struct.pack_into("<II", header, 0x154, 512, 512 + table_size)
    struct.pack_into("<I", header, 0x168, 512)
    struct.pack_into("<QIII", header, 0x170, size, MIB, 0, count)
    struct.pack_into("<I", header, 0x184, len(blocks))
    table = [0xFFFFFFFE if number in discarded else 0xFFFFFFFF for number in range(count)]
    parts = []
    for place, number in enumerate(order or sorted(blocks)):
        table[number] = place
        parts.append(blocks[number].ljust(MIB, b"\0"))
    return b"".join([header, struct.pack(f"<{count}I", *table).ljust(table_size, b"\xff"), *parts])
