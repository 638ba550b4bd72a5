"""QED. Source: QEMU's block/qed.h and docs/interop/qed_spec.rst."""

from __future__ import annotations

import struct

from imgsum.source import ReadBytes
from imgsum.source.qemu.formats.links import Links
from imgsum.source.qemu.formats.tables import header_of, largest_of_tables, nonzero
from imgsum.units import KIB


def inspect(read: ReadBytes, size: int) -> Links:
    """See formats.FORMATS. QED records of its backing file's format only whether it is raw."""
    header = read(0, 64).ljust(64, b"\0")
    (features,) = struct.unpack_from("<Q", header, 16)
    offset, length = struct.unpack_from("<II", header, 56)
    if not features & 1:
        return Links()
    return Links(backing_file=read(offset, min(length, KIB)), backing_format="raw" if features & 4 else None)


def needed(read: ReadBytes, size: int) -> int:
    """See formats.FORMATS."""
    header = header_of(read, 64)
    cluster, table = struct.unpack_from("<II", header, 4)
    l1, content = struct.unpack_from("<QQ", header, 40)
    entries = table * cluster // 8
    if not entries:
        return 0
    clusters = -(-content // cluster)
    tables = nonzero(read, l1, min(entries, -(-clusters // entries)), "Q")
    last = largest_of_tables(read, tables, entries, "Q", clusters)
    if last is None or last.entry < cluster:  # 1: a cluster of zeros
        return 0
    return last.entry + int(min(cluster, content - last.number * cluster))
