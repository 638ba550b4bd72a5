"""VMDK: headers and descriptors, as QEMU's block/vmdk.c and VMware's Virtual Disk Format 5.0 have them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.units import KIB

SECTOR = 512
DESCRIPTOR_LIMIT = 1024 * KIB
KDMV = b"KDMV"
_AT_END = (1 << 64) - 1
_SPARSE = struct.Struct("<4sIIQQQQIQQQ")
_EMBEDDED_LENGTH = 20 * SECTOR  # what QEMU reads at sector 1 to look for a parent
_WHITE = " \t\v\f\r\n"  # C's; Python's strip() knows more

# What QEMU's sscanf() takes, on one line. Each part begins with what the part before it can't contain: the time that
# it takes grows with the line's length, and not faster.
_EXTENT = re.compile(
    r'(RW|RDONLY|NOACCESS)[ \t]+([0-9]{1,18})[ \t]+(FLAT|SPARSE|VMFS|VMFSSPARSE|SESPARSE)[ \t]+"([^"]{1,511})"'
    r"[ \t]*(?:([0-9]{1,18})(?:[^0-9].*)?|[^0-9+\- \t].*)?"
)
_ACCESS = re.compile(r"(?:RW|RDONLY|NOACCESS)\b", re.IGNORECASE)
_LINE = re.compile(r"([^\r\n]*)(?:\r\n|[\r\n]|\Z)")


class SparseHeader(NamedTuple):
    """A sparse VMDK's header, or the footer that has the same fields. Places and lengths in sectors."""

    magic: bytes
    version: int
    flags: int
    capacity: int
    grain: int
    descriptor: int
    descriptor_length: int
    per_table: int
    """Entries of a grain table."""
    redundant_directory: int
    directory: int
    """2**64 - 1 in a streamOptimized image's header: only its footer says it."""
    overhead: int


class DescribedExtent(NamedTuple):
    """An extent line of a descriptor."""

    access: str
    sectors: int
    kind: str
    name: str
    offset: int
    """Its first sector in that file."""

    def is_flat(self) -> bool:
        """Whether it has no tables of its own."""
        return self.kind in ("FLAT", "VMFS")


class Descriptor(NamedTuple):
    """What a descriptor says."""

    has_parent: bool
    parent: str | None
    """The parent's name, as far as it is recorded."""
    extents: list[DescribedExtent]


def sparse_header(read: ReadBytes, size: int) -> SparseHeader:
    """What counts of a sparse file of SIZE bytes: its header, or the footer that completes it.

    Raises TruncatedError, and FormatError when header and footer disagree.
    """
    raw = read(0, SECTOR)
    if len(raw) < SECTOR:
        raise TruncatedError("truncated: the file ends in its header")
    header = SparseHeader(*_SPARSE.unpack_from(raw))
    if header.directory != _AT_END:
        return header
    # The header is repeated, completed, before the end-of-stream marker.
    raw = read(max(0, size - 1024), SECTOR)
    if not raw.startswith(KDMV) or len(raw) < SECTOR:
        raise TruncatedError("truncated: the VMDK's footer is not where the file ends")
    footer = SparseHeader(*_SPARSE.unpack_from(raw))
    for field in ("capacity", "grain", "per_table"):
        first, second = getattr(header, field), getattr(footer, field)
        if first != second:
            raise FormatError(f"is a VMDK whose header and footer disagree: {field} {first} and {second}")
    return footer


def embedded_descriptors(read: ReadBytes, header: SparseHeader) -> Iterator[Descriptor]:
    """What is read as the descriptor in a sparse file: at sector 1 by QEMU, and where HEADER says."""
    places = {(SECTOR, _EMBEDDED_LENGTH)}
    if header.descriptor != _AT_END:
        places.add((header.descriptor * SECTOR, min(header.descriptor_length * SECTOR, DESCRIPTOR_LIMIT)))
    for offset, length in places if header.descriptor else ():
        yield parse_descriptor(read(offset, length))


def parse_descriptor(raw: bytes) -> Descriptor:
    """A descriptor's lines. Each must be one that QEMU understands as we do: it skips what it doesn't understand.

    Raises RefusedError.
    """
    text = raw.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    parent: str | None = None
    parent_id = "ffffffff"
    extents = []
    before = "#"
    for found in _LINE.finditer(text):
        line = found[1].strip(_WHITE)
        blank_before, before = not before, line
        if not line or line.startswith("#"):
            continue
        if match := _EXTENT.fullmatch(line):
            if blank_before:  # QEMU's sscanf() finds it from there too
                raise RefusedError("is a VMDK with an extent after a blank line, which QEMU would take twice")
            extents.append(DescribedExtent(match[1], int(match[2]), match[3], match[4], int(match[5] or 0)))
            continue
        if _ACCESS.match(line):
            raise RefusedError(f"is a VMDK with an extent that QEMU would leave out: {line[:80]}")
        key, equals, value = line.partition("=")
        key, value = key.strip(_WHITE).lower(), value.strip(_WHITE).strip('"')
        if not equals or not key or '"' in key:
            raise RefusedError(f"is a VMDK with a line that is not understood in its descriptor: {line[:80]}")
        if key == "parentfilenamehint":
            parent = value
        elif key == "parentcid":
            parent_id = value.lower()
    return Descriptor(parent is not None or parent_id not in ("ffffffff", ""), parent, extents)


def check_capacity(said: int, header: SparseHeader, *, is_last: bool) -> None:
    """Raise FormatError unless the SAID sectors of an extent line are HEADER's capacity, which counts.

    VirtualBox rounds the capacity up, so in the last extent it may be up to 64 KiB, or a grain, larger.
    """
    more = header.capacity - said
    if more and not (is_last and 0 < more < max(header.grain, 128)):
        raise FormatError(
            f"is a VMDK that says its size twice, and differently: {said} sectors in its descriptor and"
            f" {header.capacity} in its header"
        )
