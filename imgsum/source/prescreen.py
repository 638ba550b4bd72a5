"""What is looked at in an image before QEMU may open it: what QEMU would read wrongly, or follow to other files.

QEMU's drivers skip what they don't understand of some formats, without an error: a checksum of that would be wrong.
Facts are from QEMU's block/qed.c, qcow.c and parallels.c, and from the specifications that they name.
Where a container says its size twice, docs/formats.md has the rules.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError
from imgsum.source import ReadBytes, detect, dmg
from imgsum.source.file import HostFile
from imgsum.source.reach import check_reach
from imgsum.units import KIB


class Links(NamedTuple):
    """What an image needs besides its own file, and what QEMU must be told."""

    backing_file: bytes | None = None
    backing_format: str | None = None
    encryption: str | None = None
    """None, `aes` or `luks`."""
    files: tuple[HostFile, ...] = ()
    """Other files that have its content, beside it."""
    size: int | None = None
    """Bytes of content, where QEMU might have another opinion."""
    note: str | None = None
    """What a user should know of the value, or None."""
    driver_options: tuple[tuple[str, str], ...] = ()
    """Options of QEMU's driver."""


_MAGIC = ("bochs", "cloop", "parallels", "qcow", "qcow2", "qed")
"""Formats that nothing but their beginning tells."""


def inspect(read: ReadBytes, size: int, format_name: str, allocated: int | None = None) -> Links:
    """What the image of SIZE bytes that READ reads refers to.

    ALLOCATED: bytes that the file has on the disk, as tables in holes cost nothing to make; None: all.
    Raises RefusedError, FormatError or TruncatedError.
    """
    if format_name in _MAGIC and detect.detect(read(0, detect.HEAD_SIZE), b"") != format_name:
        raise FormatError(f"is not a {format_name} image: it does not begin as one")
    inspector = _INSPECTORS.get(format_name)
    links = inspector(read, size) if inspector else Links()
    check_reach(read, size, format_name, allocated)
    return links


def _dmg(read: ReadBytes, size: int) -> Links:
    trailer = dmg.read_trailer(read, size)
    dmg.check_chunks(read, trailer)
    return Links(size=trailer.sectors * 512)


def _parallels(read: ReadBytes, size: int) -> Links:
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


def _bochs(read: ReadBytes, size: int) -> Links:
    header = read(0, 512).ljust(512, b"\0")
    version, _, entries = struct.unpack_from("<III", header, 64)
    (content,) = struct.unpack_from("<Q", header, 84 if version == 0x10000 else 88)
    _refuse_part_of_a_sector(content)
    if entries > 1 << 20:
        raise RefusedError(f"is a bochs image with {entries} entries in its catalog, and QEMU reads up to {1 << 20}")
    return Links()


def _refuse_part_of_a_sector(content: int) -> None:
    if content % 512:
        raise RefusedError(f"has {content} bytes of content, and QEMU would leave out the last {content % 512}")


def _qcow(read: ReadBytes, size: int) -> Links:
    """Version 1 of qcow: it does not record its backing file's format."""
    header = read(0, 48)
    backing, length = struct.unpack_from(">QI", header.ljust(48, b"\0"), 8)
    name = read(backing, min(length, KIB)) if backing else None
    _refuse_part_of_a_sector(int.from_bytes(header[24:32], "big"))
    crypt_method = int.from_bytes(header[36:40], "big")
    return Links(backing_file=name, encryption="aes" if crypt_method else None)


def _qed(read: ReadBytes, size: int) -> Links:
    """QED: it records of its backing file's format only whether it is raw."""
    header = read(0, 64).ljust(64, b"\0")
    (features,) = struct.unpack_from("<Q", header, 16)
    offset, length = struct.unpack_from("<II", header, 56)
    if not features & 1:
        return Links()
    return Links(backing_file=read(offset, min(length, KIB)), backing_format="raw" if features & 4 else None)


def _qcow2(read: ReadBytes, size: int) -> Links:
    """What QEMU reads of qcow2: mostly encrypted images. QEMU takes what a file lacks at its end for zeros."""
    from imgsum.source.qcow2.header import parse
    from imgsum.source.qcow2.mapping import Mapping
    from imgsum.source.tables import TableCache

    header = parse(read)
    if header.has_data_file:
        raise RefusedError("has its data in another file, which only imgsum's own reader follows (--reader native)")
    for _ in Mapping(header, read, size, size, TableCache(), "").runs(0, header.size):
        pass  # raises TruncatedError
    return Links(header.backing_file, header.backing_format, {0: None, 1: "aes", 2: "luks"}[header.crypt_method])


_INSPECTORS: dict[str, Callable[[ReadBytes, int], Links]] = {
    "bochs": _bochs,
    "dmg": _dmg,
    "parallels": _parallels,
    "qcow": _qcow,
    "qcow2": _qcow2,
    "qed": _qed,
}
