"""VHD (QEMU's `vpc`): a footer, and for dynamic and differencing images a header, a table of blocks, and the blocks.

Sources: Microsoft's VHD specification 1.0 (`spec`), and QEMU's block/vpc.c for what it leaves open.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError, naming
from imgsum.source import OpenOptions, ReadBytes, refuse_larger
from imgsum.source.file import HostFile
from imgsum.source.layers import (
    DATA,
    MAX_LAYERS,
    UNALLOCATED,
    ZERO,
    LayeredSource,
    Run,
    Uncompressed,
    bound_work,
    check_run,
)
from imgsum.source.tables import Entries, TableCache
from imgsum.units import GIB, KIB

FIXED, DYNAMIC, DIFFERENCING = 2, 3, 4
_MAGIC = b"conectix"
_MAX_SIZE = 2040 * GIB
_NO_BLOCK = 0xFFFFFFFF
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
    unique_id: bytes
    header: int
    """Where the header of a dynamic or differencing image is."""

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
    if _sum(raw, 64) != stored:
        raise FormatError("is a VHD whose footer is damaged: its checksum is wrong")
    cylinders, heads, sectors = int.from_bytes(raw[56:58], "big"), raw[58], raw[59]
    return Footer(
        creator=raw[28:32],
        current_size=int.from_bytes(raw[48:56], "big"),
        geometry=cylinders * heads * sectors * 512,
        kind=int.from_bytes(raw[60:64], "big"),
        unique_id=raw[68:84],
        header=int.from_bytes(raw[16:24], "big"),
    )


def read_footer(read: ReadBytes, size: int) -> Footer:
    """The footer of the file of SIZE bytes that READ reads.

    Raises FormatError, TruncatedError and RefusedError.
    """
    start = read(0, 512)
    last = read(max(0, size - 512), 512)
    end = last if last.startswith(_MAGIC) else last[1:]  # 511 bytes in images of Virtual PC before 2004
    raw = start if start.startswith(_MAGIC) else end
    if not raw.startswith(_MAGIC):
        raise FormatError("is not a VHD image: it has no footer")
    kind = int.from_bytes(raw[60:64], "big")
    if kind not in (FIXED, DYNAMIC, DIFFERENCING):
        raise RefusedError(f"is a VHD of an unknown type: {kind}")
    if raw is start and not end.startswith(_MAGIC):
        raise TruncatedError("truncated: the VHD's footer is not where the file ends")
    if raw is not start and kind != FIXED:
        raise FormatError("is damaged: the copy of the VHD's footer is not where the file begins")
    footer = parse_footer(raw)
    if raw is start and size > 512 and parse_footer(end) != footer:
        raise FormatError("is a VHD whose two footers disagree")
    if not footer.size() and footer.current_size:
        raise FormatError("is a VHD whose geometry is of 0 bytes, and its current size is not")
    if footer.size() % 512:
        raise FormatError(f"is a VHD whose size is not a multiple of 512: {footer.size()}")
    if footer.size() > _MAX_SIZE:
        raise RefusedError(f"is a VHD of {footer.size()} bytes, and {_MAX_SIZE} are the most")
    if kind == FIXED and footer.size() > size - len(end):
        raise TruncatedError(f"truncated: the file has {size} of {footer.size() + len(end)} bytes")
    return footer


def _sum(raw: bytes, at: int) -> int:
    """The checksum of a footer or header that has its own AT a place."""
    return ~(sum(raw) - sum(raw[at : at + 4])) & 0xFFFFFFFF


class Header(NamedTuple):
    """The header of a dynamic or differencing image. In bytes."""

    table: int
    """Where the table of blocks is."""
    entries: int
    block: int
    bitmap: int
    """What each block has before its data: a bit for each sector."""
    parent_id: bytes
    parents: tuple[str, ...]
    """Where the parent may be, from the image's directory."""


def read_header(read: ReadBytes, footer: Footer) -> Header:
    """The header that FOOTER tells of. Raises FormatError, RefusedError and TruncatedError."""
    raw = read(footer.header, 1024)
    if len(raw) < 1024:
        raise TruncatedError("truncated: the file ends in the VHD's header")
    table, _, entries, block, checksum = struct.unpack_from(">QIIII", raw, 16)
    if not raw.startswith(b"cxsparse"):
        raise FormatError("is a VHD without a header where its footer says")
    if _sum(raw, 36) != checksum:
        raise FormatError("is a VHD whose header is damaged: its checksum is wrong")
    if block < 4096 or block & block - 1:  # of smaller ones QEMU takes no bitmap into account
        raise FormatError(f"is a VHD with blocks of {block} bytes")
    if entries > _MAX_SIZE // block:
        raise FormatError(f"is a VHD with a table of {entries} blocks, more than there can be")
    if entries * block < footer.size():
        raise FormatError(
            f"is a VHD that says its size twice, and differently: {footer.size()} bytes, and {entries} blocks of"
            f" {block}"
        )
    parents = tuple(_parents(read, raw)) if footer.kind == DIFFERENCING else ()
    return Header(table, entries, block, -(-(block // 512 // 8) // 512) * 512, raw[40:56], parents)


def _parents(read: ReadBytes, header: bytes) -> Iterator[str]:
    """Where the parent may be, from the image's directory: by a relative path, or beside the image by its name."""
    locators = {}
    for at in range(576, 576 + 8 * 24, 24):
        code, _, length, _, offset = struct.unpack_from(">4sIIIQ", header, at)
        locators[code] = read(offset, min(length, 4 * KIB))
    if path := locators.get(b"W2ru"):
        name = path.decode("utf-16-le", "replace").rstrip("\0").replace("\\", "/")
        if not (name.startswith("/") or re.match("[A-Za-z]:", name)):
            yield os.path.normpath(name)
    names = [header[64:576].decode("utf-16-be", "replace").partition("\0")[0]]
    names += [locators[code].decode("utf-16-le", "replace") for code in (b"W2ku",) if code in locators]
    names += [locators[code].decode("utf-8", "replace") for code in (b"MacX", b"Wi2r", b"Wi2k") if code in locators]
    for name in names:
        yield re.split(r"[/\\]", name.rstrip("\0"))[-1]


_SECTORS = 4096  # whose bits are read at once: 512 bytes, which all bitmaps are multiples of


class _VhdLayer(Uncompressed):
    """The blocks of a VHD, or all of a fixed one. Satisfies Layer."""

    def __init__(
        self, file: HostFile, size: int, kind: int, header: Header | None, cache: TableCache, number: int
    ) -> None:
        """HEADER is None for a fixed one. NUMBER tells the images that share CACHE apart."""
        self.files = [file]
        self.size = min(size, header.entries * header.block) if header else size
        self._file = file
        self._header = header
        self._block = header.block if header else 0
        self._has_bitmaps = kind == DIFFERENCING
        self._cache = cache
        self._number = number
        self._entries = Entries(file.read_bytes, file.name, ">I", cache, number)

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """See Runs."""
        inside = min(end, self.size)
        if start < inside:
            yield from self._blocks(start, inside, self._header) if self._header else self._all(start, inside)
        at = max(start, inside)
        if at < end:
            yield Run(at, end - at, ZERO)

    def _all(self, start: int, end: int) -> Iterator[Run]:
        run = Run(start, end - start, DATA, start)
        check_run(run, self._file.size, self._file.name)
        yield run

    def _blocks(self, start: int, end: int, header: Header) -> Iterator[Run]:
        block, name = header.block, self._file.name
        for index, count, entry in self._entries.stretches(header.table, start // block, -(-end // block)):
            at, stop = max(start, index * block), min(end, (index + count) * block)
            if entry == _NO_BLOCK:
                yield Run(at, stop - at, UNALLOCATED)
                continue
            if count > 1:
                raise FormatError("is damaged: several blocks of its content are in one place", name=name)
            bitmap = entry * 512
            data = bitmap + header.bitmap
            check_run(Run(index * block, block, DATA, data), self._file.size, name)
            run = Run(at, stop - at, DATA, data + at % block)
            if self._has_bitmaps:
                yield from self._sectors(run, bitmap)
            else:  # the bitmap says which sectors were ever written: the others are zeros in the file, too
                yield run

    def _sectors(self, run: Run, bitmap: int) -> Iterator[Run]:
        """RUN, which is in one block, with what the BITMAP at that place of the file leaves to the parent."""
        block_start = run.start - run.start % self._block
        first, last = (run.start - block_start) // 512, -(-(run.end - block_start) // 512)
        while first < last:
            piece = first // _SECTORS * _SECTORS
            bits, stop = self._bits(bitmap + piece // 8), min(last, piece + _SECTORS)
            while first < stop:
                bit = bits[first - piece]
                other = bits.find("01"[bit == "0"], first - piece, stop - piece)
                until = stop if other < 0 else piece + other
                at, end = max(run.start, block_start + first * 512), min(run.end, block_start + until * 512)
                if bit == "1":
                    yield Run(at, end - at, DATA, run.host + at - run.start)
                else:
                    yield Run(at, end - at, UNALLOCATED)
                first = until

    def _bits(self, offset: int) -> str:
        """The piece of a bitmap at OFFSET of the file, a character for each sector. It ends before the block's data."""
        read, key = self._file.read_bytes, (self._number, offset)
        raw = self._cache.get(key, lambda: (array("B", read(offset, _SECTORS // 8)), None))[0]
        return f"{int.from_bytes(raw, 'big'):0{_SECTORS}b}"


def open_image(file: HostFile, options: OpenOptions) -> LayeredSource:
    """The image in FILE, which is the source's from then on; after an imgsum.Error, the caller's."""
    files = [file]
    footer = read_footer(file.read_bytes, file.size)
    refuse_larger(footer.size(), options)
    if options.untrusted and footer.kind == DIFFERENCING:
        raise RefusedError("refers to a parent, which --untrusted does not allow")
    try:
        return LayeredSource("vpc", _open_layers(files, footer, options), files, footer.note())
    except BaseException:
        for parent in files[1:]:
            parent.close()
        raise


def _open_layers(files: list[HostFile], footer: Footer, options: OpenOptions) -> list[_VhdLayer]:
    """The chain from the image in FILES, with that FOOTER, down to the one without a parent. FILES gets the others."""
    cache = TableCache()
    layers: list[_VhdLayer] = []
    size = footer.size()
    while True:
        file = files[-1]
        with naming(file.name):
            header = None if footer.kind == FIXED else read_header(file.read_bytes, footer)
        layers.append(_VhdLayer(file, size, footer.kind, header, cache, len(layers)))
        if options.untrusted:
            bound_work(layers[0], cache)
        if header is None or footer.kind != DIFFERENCING:
            return layers
        if len(layers) == MAX_LAYERS:
            raise RefusedError(f"the chain of parents has more than {MAX_LAYERS} images", name=files[0].name)
        footer = _add_parent(files, header, options)
        size = footer.current_size  # who reads the image's blocks does not look at the parent's geometry


def _add_parent(files: list[HostFile], header: Header, options: OpenOptions) -> Footer:
    """Add the parent of the last of FILES, which has that HEADER, to them. Raises an imgsum.Error."""
    child = files[-1]
    tried = []
    for name in dict.fromkeys(header.parents):
        path = os.path.join(os.path.dirname(child.path), name)
        if not name or "\0" in name or not os.path.isfile(path):
            continue
        parent = HostFile(path, f"{files[0].name}: parent {path}", options)
        files.append(parent)
        with naming(parent.name):
            footer = read_footer(parent.read_bytes, parent.size)
        if any(parent.identity == other.identity for other in files[:-1]):
            raise RefusedError("the chain of parents is a loop", name=child.name)
        if footer.unique_id == header.parent_id:
            return footer
        files.pop().close()
        tried.append(path)
    if tried:
        reason = f"has a parent, and '{tried[0]}' is another image: its unique ID is not that of the parent"
    else:
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(header.parents) if name) or "its name is not recorded"
        reason = f"is a differencing VHD, and its parent is not beside it: {names}"
    raise RefusedError(reason, name=child.name)
