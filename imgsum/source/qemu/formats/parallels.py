"""Parallels. Source: QEMU's block/parallels.c."""

from __future__ import annotations

import struct

from imgsum.errors import FormatError
from imgsum.source import ReadBytes
from imgsum.source.qemu.formats.links import Links
from imgsum.source.qemu.formats.tables import header_of, largest


def inspect(read: ReadBytes, size: int) -> Links:
    """See formats.FORMATS."""
    header = read(0, 64).ljust(64, b"\0")
    tracks, entries, sectors = struct.unpack_from("<IIQ", header, 28)
    if header.startswith(b"WithoutFreeSpace"):
        sectors &= 0xFFFFFFFF
    if entries * tracks < sectors:  # QEMU would read the rest as zeros
        raise FormatError(
            f"is a parallels image that says its size twice, and differently: {sectors} sectors, and {entries} clusters"
            f" of {tracks}"
        )
    return Links()


def needed(read: ReadBytes, size: int) -> int:
    """See formats.FORMATS."""
    header = header_of(read, 64)
    tracks, entries, sectors = struct.unpack_from("<IIQ", header, 28)
    if not tracks:
        return 0
    unit = tracks if header.startswith(b"WithouFreSpacExt") else 1
    last = largest(read, 64, min(entries, -(-sectors // tracks)), "I")
    return 0 if last is None else (last.entry * unit + int(min(tracks, sectors - last.number * tracks))) * 512
