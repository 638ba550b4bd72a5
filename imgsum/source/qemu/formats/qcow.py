"""Version 1 of qcow. Source: QEMU's block/qcow.c."""

from __future__ import annotations

import struct

from imgsum.source import ReadBytes
from imgsum.source.qemu.formats.links import Links
from imgsum.source.qemu.formats.tables import header_of, nonzero, refuse_part_of_a_sector
from imgsum.units import KIB


def inspect(read: ReadBytes, size: int) -> Links:
    """Version 1 of qcow: it does not record its backing file's format."""
    header = read(0, 48)
    backing, length = struct.unpack_from(">QI", header.ljust(48, b"\0"), 8)
    name = read(backing, min(length, KIB)) if backing else None
    refuse_part_of_a_sector(int.from_bytes(header[24:32], "big"))
    crypt_method = int.from_bytes(header[36:40], "big")
    return Links(backing_file=name, encryption="aes" if crypt_method else None)


def needed(read: ReadBytes, size: int) -> int:
    """See formats.FORMATS."""
    header = header_of(read, 48)
    content, cluster_bits, l2_bits = struct.unpack_from(">QBB", header, 24)
    l1 = int.from_bytes(header[40:48], "big")
    if not (9 <= cluster_bits <= 16 and 6 <= l2_bits <= 13):
        return 0
    cluster, needed = 1 << cluster_bits, 0
    tables = nonzero(read, l1, -(-content >> cluster_bits + l2_bits), "Q", "big")
    for table, offset in tables:
        for index, entry in nonzero(read, offset, 1 << l2_bits, "Q", "big"):
            if entry >> 63:  # compressed: its length is above its offset
                offset_bits = 63 - cluster_bits
                end = (entry & (1 << offset_bits) - 1) + (entry >> offset_bits & cluster - 1)
            else:
                end = entry + min(cluster, content - ((table << l2_bits) + index) * cluster)
            needed = max(needed, end)
    return needed
