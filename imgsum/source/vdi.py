"""VDI, VirtualBox's images: a header, a table with an entry for each block, and the blocks.

Sources: the header that VirtualBox's VDICore.h and QEMU's block/vdi.c describe. Of what QEMU's driver refuses all is
refused, and also what it reads without looking at it: see docs/formats.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import OpenOptions, ReadBytes, refuse_larger
from imgsum.source.file import HostFile
from imgsum.source.layers import DATA, ZERO, LayeredSource, Run, Uncompressed, bound_work, check_run
from imgsum.source.tables import Entries, TableCache
from imgsum.units import MIB

_HEADER_SIZE = 512
_MAGIC = 0xBEDA107F
_VERSION = 0x00010001
_BLOCK = MIB
_MAX_BLOCKS = (2**31 - 512) // 4  # a table of 2 GiB
_DYNAMIC, _STATIC, _UNDO, _DIFFERENCING = 1, 2, 3, 4
_NOT_A_BLOCK = 0xFFFFFFFE  # was discarded; one more: was never allocated. Both read as zeros


class Header(NamedTuple):
    """What counts of a header. In bytes."""

    size: int
    """Of the content."""
    table: int
    """Where the table of blocks is."""
    data: int
    """Where block 0 of the file is."""


def parse_header(read: ReadBytes) -> Header:
    """The header of the file that READ reads. Raises FormatError, RefusedError and TruncatedError."""
    raw = read(0, _HEADER_SIZE)
    if len(raw) < _HEADER_SIZE:
        if raw[0x40:0x44] == _MAGIC.to_bytes(4, "little"):
            raise TruncatedError("truncated: the file ends in its header")
        raise FormatError("is not a vdi image: it does not begin as one")
    magic, version, _, kind = struct.unpack_from("<IIII", raw, 0x40)
    table, data = struct.unpack_from("<II", raw, 0x154)
    (sector_size,) = struct.unpack_from("<I", raw, 0x168)
    size, block, extra, blocks = struct.unpack_from("<QIII", raw, 0x170)
    if magic != _MAGIC:
        raise FormatError("is not a vdi image: it does not begin as one")
    if version != _VERSION:
        raise RefusedError(f"is a VDI of version {version >> 16}.{version & 0xFFFF}, and 1.1 is the one that is read")
    if kind == _DIFFERENCING or any(raw[0x1A8:0x1C8]):  # the UUIDs of the image that it links to, and of its parent
        raise RefusedError(
            "is a differencing VDI: its parent has the rest of its content (merge it with its parent first)"
        )
    if kind not in (_DYNAMIC, _STATIC):
        raise RefusedError(f"is {'an undo' if kind == _UNDO else 'a'} VDI of type {kind}, not dynamic or static")
    if sector_size != 512 or table % 512 or data % 512:
        raise FormatError(
            f"is a VDI with sectors of {sector_size} bytes, its table at byte {table} and its data at byte {data}"
        )
    if block != _BLOCK or extra:
        raise RefusedError(f"is a VDI with blocks of {block} bytes and {extra} more for each, not {_BLOCK} and 0")
    if blocks != -(-size // block):
        raise FormatError(
            f"is a VDI that says its size twice, and differently: {size} bytes, and {blocks} blocks of {block}"
        )
    if blocks > _MAX_BLOCKS:
        raise RefusedError(f"is a VDI of {blocks} blocks, more than {_MAX_BLOCKS}")
    return Header(-(-size // 512) * 512, table, data)  # VBoxManage has written odd sizes


class _VdiLayer(Uncompressed):
    """The blocks of a VDI. Satisfies Layer."""

    def __init__(self, file: HostFile, header: Header, cache: TableCache) -> None:
        self.files = [file]
        self.size = header.size
        self._header = header
        self._file = file
        self._entries = Entries(file.read_bytes, file.name, "<I", cache)

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """See Runs."""
        inside = min(end, self.size)
        for index, count, entry in self._entries.stretches(self._header.table, start // _BLOCK, -(-inside // _BLOCK)):
            at, stop = max(start, index * _BLOCK), min(inside, (index + count) * _BLOCK)
            if entry >= _NOT_A_BLOCK:
                yield Run(at, stop - at, ZERO)
                continue
            if count > 1:
                raise FormatError("is damaged: several blocks of its content are in one place", name=self._file.name)
            run = Run(at, stop - at, DATA, self._header.data + entry * _BLOCK + at % _BLOCK)
            check_run(run, self._file.size, self._file.name)
            yield run
        at = max(start, inside)
        if at < end:
            yield Run(at, end - at, ZERO)


def open_image(file: HostFile, options: OpenOptions) -> LayeredSource:
    """The image in FILE, which is the source's from then on; after an imgsum.Error, the caller's."""
    header = parse_header(file.read_bytes)
    refuse_larger(header.size, options)
    cache = TableCache()
    layer = _VdiLayer(file, header, cache)
    if options.untrusted:
        bound_work(layer, cache)
    return LayeredSource("vdi", [layer], [file])
