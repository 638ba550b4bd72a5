"""VHD (QEMU's `vpc`): the footer, and what it says of the size. Source: Microsoft's VHD specification 1.0."""

from __future__ import annotations

from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes

FIXED, DYNAMIC, DIFFERENCING = 2, 3, 4
_MAGIC = b"conectix"
_LARGEST_GEOMETRY = 65535 * 16 * 255 * 512  # larger disks have this one too

_GEOMETRY_CREATORS = (b"vpc ", b"qemu")
"""Virtual PC and QEMU (without force_size) go by the geometry. All others, known or not, by the current size."""


class Footer(NamedTuple):
    """The last 512 bytes of a VHD; a dynamic image has a copy at its start. Sizes in bytes."""

    creator: bytes
    current_size: int
    geometry: int
    """What cylinders, heads and sectors give."""
    kind: int

    def uses_geometry(self) -> bool:
        """Whether the size is what the geometry gives."""
        return self.creator in _GEOMETRY_CREATORS and self.geometry != _LARGEST_GEOMETRY

    def size(self) -> int:
        """Bytes of content."""
        return self.geometry if self.uses_geometry() else self.current_size

    def note(self) -> str | None:
        """What a user should know of the size, or None."""
        if self.geometry in (self.current_size, _LARGEST_GEOMETRY):
            return None
        which = "geometry" if self.uses_geometry() else "current size"
        creator = self.creator.rstrip(b" \0").decode("ascii", "backslashreplace")
        return (
            f"the VHD's geometry says {self.geometry} bytes, its current size {self.current_size}: the {which} counts,"
            f" as its creator is '{creator}'. Other programs may take the other one"
        )


def parse_footer(raw: bytes) -> Footer:
    """RAW's 511 or 512 bytes, which begin with the magic. Raises FormatError when its checksum is wrong."""
    stored = int.from_bytes(raw[64:68], "big")
    if ~(sum(raw) - sum(raw[64:68])) & 0xFFFFFFFF != stored:
        raise FormatError("is a VHD whose footer is damaged: its checksum is wrong")
    cylinders, heads, sectors = int.from_bytes(raw[56:58], "big"), raw[58], raw[59]
    return Footer(
        creator=raw[28:32],
        current_size=int.from_bytes(raw[48:56], "big"),
        geometry=cylinders * heads * sectors * 512,
        kind=int.from_bytes(raw[60:64], "big"),
    )


def read_footer(read: ReadBytes, size: int) -> Footer:
    """The footer of the file of SIZE bytes that READ reads.

    Raises FormatError, TruncatedError, and RefusedError for what QEMU can't read, or not rightly.
    """
    start = read(0, 512)
    last = read(max(0, size - 512), 512)
    end = last if last.startswith(_MAGIC) else last[1:]  # 511 bytes in images of Virtual PC before 2004
    raw = start if start.startswith(_MAGIC) else end
    if not raw.startswith(_MAGIC):
        raise FormatError("is not a VHD image: it has no footer")
    kind = int.from_bytes(raw[60:64], "big")
    if kind == DIFFERENCING:
        raise RefusedError(
            "is a differencing VHD: its parent has the rest of its content (merge it with its parent first)"
        )
    if kind not in (FIXED, DYNAMIC):
        raise RefusedError(f"is a VHD of a type that QEMU does not know: {kind}")
    if raw is start and not end.startswith(_MAGIC):
        raise TruncatedError("truncated: the VHD's footer is not where the file ends")
    footer = parse_footer(raw)
    if raw is start and size > 512 and parse_footer(end) != footer:
        raise FormatError("is a VHD whose two footers disagree")
    if not footer.size() and footer.current_size:
        raise FormatError("is a VHD whose geometry is of 0 bytes, and its current size is not")
    if footer.size() % 512:
        raise FormatError(f"is a VHD whose size is not a multiple of 512: {footer.size()}")
    if kind == FIXED and footer.size() > size - len(end):
        raise TruncatedError(f"truncated: the file has {size} of {footer.size() + len(end)} bytes")
    return footer
