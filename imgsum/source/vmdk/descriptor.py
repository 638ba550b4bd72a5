"""The descriptor: a text that says which extents a VMDK has, and which parent. It is a file, or in one."""

from __future__ import annotations

import re
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError
from imgsum.units import KIB

LIMIT = 1024 * KIB
"""Bytes of a descriptor, at most."""

NO_PARENT = "ffffffff"
_TYPES = ("monolithicFlat", "vmfs", "vmfsSparse", "seSparse", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat")
_WHITE = " \t\v\f\r\n"  # C's; Python's strip() knows more

# What QEMU's sscanf() takes, on one line. Each part begins with what the part before it can't contain: the time that
# it takes grows with the line's length, and not faster.
_EXTENT = re.compile(
    r'(RW|RDONLY|NOACCESS)[ \t]+([0-9]{1,18})[ \t]+(FLAT|SPARSE|VMFS|VMFSSPARSE|SESPARSE)[ \t]+"([^"]{1,511})"'
    r"[ \t]*(?:([0-9]{1,18})(?:[^0-9].*)?|[^0-9+\- \t].*)?"
)
_ACCESS = re.compile(r"(?:RW|RDONLY|NOACCESS)\b", re.IGNORECASE)
_LINE = re.compile(r"([^\r\n]*)(?:\r\n|[\r\n]|\Z)")


class DescribedExtent(NamedTuple):
    """An extent line of a descriptor."""

    access: str
    sectors: int
    kind: str
    name: str
    offset: int | None
    """Its first sector in that file, as FLAT has it."""

    def is_flat(self) -> bool:
        """Whether it has no tables of its own."""
        return self.kind in ("FLAT", "VMFS")


class Descriptor(NamedTuple):
    """What a descriptor says."""

    kind: str
    """Its createType."""
    extents: list[DescribedExtent]
    id: str
    """Its CID, which changes with the content, without leading zeros. Empty: there is none."""
    parent_id: str
    """The parent's CID, or NO_PARENT."""
    parent: str | None
    """The parent's name, as far as it is recorded."""

    @property
    def has_parent(self) -> bool:
        """Whether it says in any way that it has one."""
        return self.parent is not None or self.parent_id not in (NO_PARENT, "")


def parse_descriptor(raw: bytes) -> Descriptor:
    """A descriptor's lines. Each must be one that QEMU understands as we do: it skips what it doesn't understand.

    Raises RefusedError, and FormatError for what is no text.
    """
    text = raw.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    extents = []
    values: dict[str, str] = {}
    before = "#"
    for found in _LINE.finditer(text):
        line = found[1].strip(_WHITE)
        blank_before, before = not before, line
        if not line or line.startswith("#"):
            continue
        if match := _EXTENT.fullmatch(line):
            if blank_before:  # QEMU's sscanf() finds it from there too
                raise RefusedError("is a VMDK with an extent after a blank line, which QEMU would take twice")
            access, sectors, kind, name, offset = match.groups()
            extents.append(DescribedExtent(access, int(sectors), kind, name, int(offset) if offset else None))
            continue
        if not line.replace("\t", " ").isprintable():
            raise FormatError("is not a VMDK image, or is damaged: what should be its descriptor is not text")
        if _ACCESS.match(line):
            raise RefusedError(f"is a VMDK with an extent that QEMU would leave out: {line[:80]}")
        key, equals, value = line.partition("=")
        key = key.strip(_WHITE).lower()
        if not equals or not key or '"' in key:
            raise RefusedError(f"is a VMDK with a line that is not understood in its descriptor: {line[:80]}")
        values[key] = value.strip(_WHITE).strip('"')
    return Descriptor(
        values.get("createtype", ""),
        extents,
        values.get("cid", "").lower().lstrip("0"),
        values.get("parentcid", NO_PARENT).lower().lstrip("0"),
        values.get("parentfilenamehint"),
    )


def check_file(descriptor: Descriptor) -> None:
    """Raise RefusedError or FormatError unless QEMU reads the same extents of DESCRIPTOR, in a file of its own."""
    if not descriptor.extents:
        raise FormatError("is a VMDK descriptor without extents")
    if descriptor.kind not in _TYPES:
        raise RefusedError(f"is a VMDK of a type that is not read: '{descriptor.kind}'")
    for extent in descriptor.extents:
        if extent.access != "RW":
            raise RefusedError(
                f"is a VMDK with an extent that QEMU would leave out, as it is {extent.access}: '{extent.name}'"
            )
        if not extent.sectors or (extent.is_flat() and (extent.kind == "FLAT") != (extent.offset is not None)):
            raise FormatError(f"is a VMDK with an extent line that is not as it should be: '{extent.name}'")
