"""Bochs: growing redologs. Source: QEMU's block/bochs.c."""

from __future__ import annotations

import struct

from imgsum.errors import RefusedError
from imgsum.source import ReadBytes
from imgsum.source.qemu.formats.links import Links
from imgsum.source.qemu.formats.tables import header_of, last_below, refuse_part_of_a_sector


def inspect(read: ReadBytes, size: int) -> Links:
    """See formats.FORMATS."""
    header = read(0, 512).ljust(512, b"\0")
    version, _, entries = struct.unpack_from("<III", header, 64)
    (content,) = struct.unpack_from("<Q", header, 84 if version == 0x10000 else 88)
    refuse_part_of_a_sector(content)
    if entries > 1 << 20:
        raise RefusedError(f"is a bochs image with {entries} entries in its catalog, and QEMU reads up to {1 << 20}")
    return Links()


def needed(read: ReadBytes, size: int) -> int:
    """See formats.FORMATS."""
    header = header_of(read, 512)
    version, start, entries, bitmap, extent = struct.unpack_from("<IIIII", header, 64)
    (content,) = struct.unpack_from("<Q", header, 84 if version == 0x10000 else 88)
    if not extent:
        return 0
    # Each extent's bitmap, which says what of it was ever written, lies before it.
    unit = 512 * (1 + (bitmap - 1 & 0xFFFFFFFF) // 512 + 1 + (extent - 1) // 512)
    last = last_below(read, start, min(entries, -(-content // extent)), 0xFFFFFFFF)
    return int(start + 4 * entries + (last.entry + 1) * unit) if last else 0
