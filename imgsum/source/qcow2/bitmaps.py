"""qcow2's persistent dirty bitmaps: which parts of the content were not written since a bitmap was begun.

Pure parsing (spec: `Bitmaps extension`, `Bitmaps`). A directory has an entry for each bitmap; a bitmap's table has an
entry for each cluster of its bits, which says where that is, or that its bits are all alike.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError, printable
from imgsum.extent import Extent
from imgsum.source import ReadBytes
from imgsum.source.qcow2.header import Header
from imgsum.source.tables import SLICE, decode
from imgsum.units import KIB, MAX_SIZE, MIB

_EXTENSION = struct.Struct(">IIQQ")
_ENTRY = struct.Struct(">QIIBBHI")
_IN_USE, _AUTO, _EXTRA_DATA_COMPATIBLE = 1, 2, 4
_DIRTY_TRACKING = 1  # the only type

_OFFSET_MASK = 0x00FFFFFFFFFFFE00
_ALL_ONES = 1

# QEMU's limits
_MAX_BITMAPS = 65535
_MAX_DIRECTORY = 64 * MIB
_MAX_NAME = 1023
_MIN_GRANULARITY_BITS, _MAX_GRANULARITY_BITS = 9, 31
_MAX_BYTES = 512 * MIB  # of one bitmap

_PIECE = 64 * KIB
"""Bytes of a bitmap that are read at once."""

_FINEST = 64 * KIB
"""Bytes of content. A byte of a bitmap that stands for no more counts as one bit: a block has as much, or more."""

_RUNS_OF_BYTES = re.compile(rb"\x00+|[^\x00]+", re.DOTALL)
_RUNS_OF_BITS = re.compile("0+|1+")


class Bitmap(NamedTuple):
    """An entry of the bitmap directory, of a bitmap that counts."""

    table_offset: int
    table_size: int
    """Entries."""
    granularity_bits: int
    """Log2 of the bytes of content that a bit stands for."""


def find_bitmap(read: ReadBytes, header: Header, name: bytes) -> Bitmap:
    """The bitmap NAME of the image with HEADER, which READ reads.

    Raises RefusedError where there is none, or it says nothing that counts; FormatError and TruncatedError.
    """
    called = printable(name.decode("utf-8", "surrogateescape"))
    found = None
    for entry_name, entry in _directory(read, header):
        if entry_name == name:
            if found is not None:
                raise FormatError(f"has two bitmaps '{called}'")
            found = entry
    if found is None:
        raise RefusedError(f"has no bitmap '{called}' (`qemu-img info` lists them)")
    table_offset, table_size, flags, kind, granularity_bits, _, extra_size = found
    if flags & _IN_USE:
        raise RefusedError(f"the bitmap '{called}' is in use, or was not saved: it may lack what was written last")
    if kind != _DIRTY_TRACKING:
        raise RefusedError(f"the bitmap '{called}' is of type {kind}, and not one of dirty tracking")
    if flags & ~(_IN_USE | _AUTO | _EXTRA_DATA_COMPATIBLE) or (extra_size and not flags & _EXTRA_DATA_COMPATIBLE):
        raise RefusedError(f"the bitmap '{called}' has flags or data that are not known")
    if not flags & _AUTO:
        raise RefusedError(f"the bitmap '{called}' is disabled: it has nothing of what was written since")
    if not _MIN_GRANULARITY_BITS <= granularity_bits <= _MAX_GRANULARITY_BITS:
        raise FormatError(f"the bitmap '{called}' has granularity_bits {granularity_bits}: not 9 to 31")
    bits = (header.size - 1 >> granularity_bits) + 1
    size = -(-bits // 8)
    if size > _MAX_BYTES:
        raise RefusedError(f"the bitmap '{called}' has {size} bytes, more than the {_MAX_BYTES} that QEMU allows")
    if table_size != -(-size // header.cluster_size):
        raise RefusedError(f"the bitmap '{called}' is not of an image of {header.size} bytes")
    _check_place(table_offset, table_size * 8, header, f"the table of the bitmap '{called}'")
    return Bitmap(table_offset, table_size, granularity_bits)


def clean_extents(read: ReadBytes, header: Header, bitmap: Bitmap) -> Iterator[Extent]:
    """The extents of the content; `zero` stands for "not dirty in BITMAP". Lazily, a piece of the bitmap at a time.

    What is dirty may be said of up to 64 KiB around. Raises FormatError, TruncatedError.
    """
    size = header.size
    shift = bitmap.granularity_bits + 3  # log2 of the content of a byte
    cluster_span = header.cluster_size << shift  # content that a cluster of bits stands for
    for first in range(0, bitmap.table_size, SLICE // 8):
        count = min(SLICE // 8, bitmap.table_size - first)
        entries, _ = decode(_exactly(read, bitmap.table_offset + first * 8, count * 8, "the bitmap's table"), 8)
        for number, entry in enumerate(entries, first):
            start = number * cluster_span
            end = min(start + cluster_span, size)
            host = entry & _OFFSET_MASK
            if entry & ~(_OFFSET_MASK | _ALL_ONES) or (host and entry & _ALL_ONES):
                raise FormatError(f"entry {number} of the bitmap's table is {entry:#x}: reserved bits are set")
            if not host:
                yield Extent(start, end - start, not entry)
                continue
            _check_place(host, header.cluster_size, header, f"entry {number} of the bitmap's table")
            length = -(-(end - start) >> shift)
            for skip in range(0, length, _PIECE):
                bits = _exactly(read, host + skip, min(_PIECE, length - skip), "the bitmap")
                yield from _extents(bits, start + (skip << shift), shift, size)


def _extents(bits: bytes, start: int, shift: int, size: int) -> Iterator[Extent]:
    """What BITS say of the content from START, up to SIZE. A byte stands for 1 << SHIFT bytes of content."""
    if 1 << shift <= _FINEST:
        for match in _RUNS_OF_BYTES.finditer(bits):
            first, end = match.span()
            at = start + (first << shift)
            yield Extent(at, min(end - first << shift, size - at), not bits[first])
        return
    digits = f"{int.from_bytes(bits, 'little'):0{8 * len(bits)}b}"[::-1]  # the lowest bit stands for the first
    shift -= 3
    for run in _RUNS_OF_BITS.finditer(digits):
        first, end = run.span()
        at = start + (first << shift)
        if at >= size:
            return
        yield Extent(at, min(end - first << shift, size - at), digits[first] == "0")


def _directory(read: ReadBytes, header: Header) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """The name of each bitmap, and the fields of its entry in the directory."""
    if header.bitmaps is None:
        return
    if not header.bitmaps_consistent:
        raise RefusedError("its bitmaps are inconsistent: a program that does not know bitmaps wrote to the image")
    if len(header.bitmaps) != _EXTENSION.size:
        raise FormatError(f"the bitmaps extension does not have {_EXTENSION.size} bytes")
    count, reserved, size, offset = _EXTENSION.unpack(header.bitmaps)
    if reserved or not 1 <= count <= _MAX_BITMAPS or not count * _ENTRY.size <= size <= _MAX_DIRECTORY:
        raise FormatError(f"the bitmaps extension makes no sense: {count} bitmaps in {size} bytes")
    _check_place(offset, size, header, "the bitmap directory")
    at, end = offset, offset + size
    for number in range(count):
        what = f"entry {number} of the bitmap directory"
        entry = _ENTRY.unpack(_exactly(read, at, _ENTRY.size, what))
        name_size, extra_size = entry[5:]
        if not 1 <= name_size <= _MAX_NAME:
            raise FormatError(f"{what} has a name of {name_size} bytes: not 1 to {_MAX_NAME}")
        length = -(-(_ENTRY.size + extra_size + name_size) // 8) * 8
        if length > end - at:
            raise FormatError(f"{what} goes beyond the directory's end")
        yield _exactly(read, at + _ENTRY.size + extra_size, name_size, what), entry
        at += length
    if at != end:
        raise FormatError(f"the bitmap directory has {end - at} bytes more than its {count} entries")


def _check_place(offset: int, length: int, header: Header, what: str) -> None:
    if not offset or offset % header.cluster_size or offset + length > MAX_SIZE:
        raise FormatError(f"{what} can't be at byte {offset} of the file")


def _exactly(read: ReadBytes, offset: int, length: int, what: str) -> bytes:
    raw = read(offset, length)
    if len(raw) < length:
        raise TruncatedError(f"truncated: the file ends at byte {offset + len(raw)}, in {what}")
    return raw
