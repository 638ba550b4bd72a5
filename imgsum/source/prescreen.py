"""What is looked at in an image before QEMU may open it: what QEMU would read wrongly, or follow to other files.

QEMU's drivers skip what they don't understand of some formats, without an error: a checksum of that would be wrong.
Facts are from QEMU's block/vpc.c, vmdk.c, qed.c, qcow.c and vdi.c, and from the specifications that they name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.source.reach import AT_END, KDMV, check_reach, sparse_headers
from imgsum.units import KIB


class Links(NamedTuple):
    """What an image needs besides its own file."""

    backing_file: bytes | None = None
    backing_format: str | None = None
    encryption: str | None = None
    """None, `aes` or `luks`."""
    extents: tuple[VmdkExtent, ...] = ()
    """The files with the content of a VMDK whose own file is only a descriptor."""


class VmdkExtent(NamedTuple):
    """A file beside a VMDK descriptor."""

    name: str
    sparse: bool
    """It has tables of its own: see inspect_extent()."""
    needs: int
    """Bytes that it must have, as far as the descriptor says so."""


def inspect(read: ReadBytes, size: int, format_name: str) -> Links:
    """What the image of SIZE bytes that READ reads refers to. Raises RefusedError, FormatError or TruncatedError."""
    inspector = _INSPECTORS.get(format_name)
    links = inspector(read, size) if inspector else Links()
    check_reach(read, size, format_name)
    return links


def inspect_extent(read: ReadBytes, size: int, extent: VmdkExtent) -> None:
    """As inspect(), for a file beside a VMDK descriptor: it may not lead anywhere else."""
    if size < extent.needs:
        raise TruncatedError(f"truncated: '{extent.name}' has {size} of {extent.needs} bytes")
    if extent.sparse:
        _sparse_vmdk(read, size)
        check_reach(read, size, "vmdk")


def _vpc(read: ReadBytes, size: int) -> Links:
    """VHD: the footer, of which a dynamic image has a copy at its start."""
    start = read(0, 512)
    last = read(max(0, size - 512), 512)
    end = last if last.startswith(b"conectix") else last[1:]  # 511 bytes in images of Virtual PC before 2004
    footer = start if start.startswith(b"conectix") else end
    if not footer.startswith(b"conectix"):
        raise FormatError("is not a VHD image: it has no footer")
    kind = int.from_bytes(footer[60:64], "big")
    if kind == 4:
        raise RefusedError("is a differencing VHD: QEMU would read it without its parent (merge the two first)")
    if kind not in (2, 3):
        raise RefusedError(f"is a VHD of a type that QEMU does not know: {kind}")
    if footer is start and not end.startswith(b"conectix"):
        raise TruncatedError("truncated: the VHD's footer is not where the file ends")
    return Links()


def _qcow(read: ReadBytes, size: int) -> Links:
    """Version 1 of qcow: it does not record its backing file's format."""
    header = read(0, 48)
    backing, length = struct.unpack_from(">QI", header.ljust(48, b"\0"), 8)
    name = read(backing, min(length, KIB)) if backing else None
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
    from imgsum.source.qcow2.tables import TableCache

    header = parse(read)
    if header.has_data_file:
        raise RefusedError("has its data in another file, which only imgsum's own reader follows (--reader native)")
    for _ in Mapping(header, read, size, size, TableCache(), "").runs(0, header.size):
        pass  # raises TruncatedError
    return Links(header.backing_file, header.backing_format, {0: None, 1: "aes", 2: "luks"}[header.crypt_method])


# --- VMDK -----------------------------------------------------------------------------------------------------------

_SECTOR = 512
_DESCRIPTOR_LIMIT = 1024 * KIB
_EMBEDDED_LENGTH = 20 * _SECTOR  # what QEMU reads at sector 1 to look for a parent

_EXTENT = re.compile(
    r'(RW|RDONLY) +([0-9]{1,18}) +(FLAT|SPARSE|VMFS|VMFSSPARSE|SESPARSE) +"([^"]+)"(?: +([0-9]{1,18}))?'
)
_ACCESS = re.compile(r"(?:RW|RDONLY|NOACCESS)\b", re.IGNORECASE)
_SETTING = re.compile(r"\s*([^=\"]+?)\s*=\s*(.*?)\s*")


class _Descriptor(NamedTuple):
    settings: dict[str, str]
    """Keys in lower case."""
    extents: list[tuple[str, int, str, str, int]]
    """Access, sectors, type, file name, and the first sector in that file."""


def _vmdk(read: ReadBytes, size: int) -> Links:
    if read(0, 4) in (KDMV, b"COWD"):
        return _sparse_vmdk(read, size)
    descriptor = _parse_descriptor(read(0, _DESCRIPTOR_LIMIT))
    _refuse_parent(descriptor.settings)
    if not descriptor.extents:
        raise FormatError("is a VMDK descriptor without extents")
    extents = []
    for access, sectors, kind, name, offset in descriptor.extents:
        if access != "RW":
            raise RefusedError(f"is a VMDK with an extent that QEMU would leave out, as it is {access}: '{name}'")
        # The image's own files lie beside it. Anything else may be any file of this host (CVE-2022-47951).
        if "/" in name or ":" in name or name in (".", "..") or "\0" in name:
            raise RefusedError(f"is a VMDK whose content is in another place: '{name}'")
        flat = kind in ("FLAT", "VMFS")
        extents.append(VmdkExtent(name, not flat, (offset + sectors) * _SECTOR if flat else 0))
    return Links(extents=tuple(extents))


def _sparse_vmdk(read: ReadBytes, size: int) -> Links:
    """A VMDK that holds its content, and mostly its descriptor too, of which QEMU uses only the parent."""
    if read(0, 4) != KDMV:
        # COWD and SESPARSE: ESXi's, mostly snapshots. QEMU does not look at their parents.
        raise RefusedError("is a VMDK of a kind that QEMU may read wrongly: vmfsSparse or seSparse (convert it first)")
    header, footer = sparse_headers(read, size)
    if min(header.capacity, footer.capacity) == 0:
        # QEMU takes its descriptor for that of a split image, whose extents are any files of this host.
        raise RefusedError("is a VMDK without a capacity, whose content would be in other files")
    places = {(_SECTOR, _EMBEDDED_LENGTH)}
    if header.descriptor and header.descriptor != AT_END:
        length = min(header.descriptor_length * _SECTOR, _DESCRIPTOR_LIMIT)
        places.add((header.descriptor * _SECTOR, length))
    for offset, length in places if header.descriptor else ():
        descriptor = _parse_descriptor(read(offset, length))
        _refuse_parent(descriptor.settings)
        if len(descriptor.extents) > 1:
            raise RefusedError("is a VMDK of several extents, of which this file is one")
    return Links()


def _parse_descriptor(raw: bytes) -> _Descriptor:
    """A descriptor's lines. Each must be one that QEMU understands as we do: it skips what it doesn't understand."""
    text = raw.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    settings: dict[str, str] = {}
    extents = []
    before = "#"
    for line in re.split(r"\r\n|[\r\n]", text):
        stripped = line.strip()
        blank_before, before = not before, stripped
        if not stripped or stripped.startswith("#"):
            continue
        if match := _EXTENT.fullmatch(stripped):
            if blank_before:  # QEMU's sscanf() finds it from there too
                raise RefusedError("is a VMDK with an extent after a blank line, which QEMU would take twice")
            extents.append((match[1], int(match[2]), match[3], match[4], int(match[5] or 0)))
        elif _ACCESS.match(stripped):
            raise RefusedError(f"is a VMDK with an extent that QEMU would leave out: {stripped[:80]}")
        elif match := _SETTING.fullmatch(stripped):
            settings[match[1].lower()] = match[2].strip('"')
        else:
            raise RefusedError(f"is a VMDK with a line that is not understood in its descriptor: {stripped[:80]}")
    return _Descriptor(settings, extents)


def _refuse_parent(settings: dict[str, str]) -> None:
    parent = settings.get("parentfilenamehint")
    if parent is not None or settings.get("parentcid", "ffffffff").lower() not in ("ffffffff", ""):
        where = f" '{parent}'" if parent else ""
        raise RefusedError(f"is a VMDK with a parent{where}, without which it is not whole (merge the two first)")


_INSPECTORS: dict[str, Callable[[ReadBytes, int], Links]] = {
    "qcow": _qcow,
    "qcow2": _qcow2,
    "qed": _qed,
    "vmdk": _vmdk,
    "vpc": _vpc,
}
