"""Sparse extents: headers of hosted ones (KDMV), ESXi's COWD and seSparse, and the runs that their tables say.

All have a grain directory, whose entries are the places of grain tables, whose entries are those of grains.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.source.file import HostFile
from imgsum.source.layers import COMPRESSED, DATA, UNALLOCATED, ZERO, Run, check_run, truncated
from imgsum.source.tables import SLICE, Table, TableCache, progression

SECTOR = 512
KDMV, COWD, SESPARSE = b"KDMV", b"COWD", b"\xbe\xba\xfe\xca\0\0\0\0"
_AT_END = (1 << 64) - 1
_KDMV = struct.Struct("<4sIIQQQQIQQQB4sH")
_COWD = struct.Struct("<4sIIIIII")
_SESPARSE = struct.Struct("<8s25Q")
_REDUNDANT, _ZERO_GRAINS, _IS_COMPRESSED, _MARKERS = 2, 4, 1 << 16, 1 << 17
_MAX_GRAIN = 1 << 21  # sectors
_MAX_DIRECTORY = 32 << 20  # entries
_SLICE_ENTRIES = SLICE // 8


class Shape(NamedTuple):
    """What counts of a sparse extent's header. Places and lengths in bytes."""

    size: int
    """Of its content."""
    grain: int
    per_table: int
    """Entries of a grain table."""
    directory: int
    entry_size: int = 4
    redundant_directory: int = 0
    """0: there is none."""
    has_zero_grains: bool = False
    """An entry of 1 is a grain of zeros."""
    is_compressed: bool = False
    descriptor: int = 0
    """0: there is none in it."""
    descriptor_length: int = 0
    tables: int = 0
    """seSparse: where all tables are."""
    grains: int = 0
    """seSparse: where all grains are."""

    @property
    def directory_entries(self) -> int:
        """How many there are: the last one is for less than a table."""
        return -(-self.size // (self.grain * self.per_table))


def parse(read: ReadBytes, file_size: int) -> Shape:
    """The shape of the sparse extent in the file of FILE_SIZE bytes that READ reads.

    Raises FormatError, TruncatedError, RefusedError.
    """
    raw = read(0, SECTOR)
    if len(raw) < SECTOR:
        raise TruncatedError("truncated: the file ends in its header")
    if raw.startswith(KDMV):
        shape = _hosted(raw, read, file_size)
    elif raw.startswith(COWD):
        shape = _cowd(raw)
    elif raw.startswith(SESPARSE):
        shape = _sesparse(raw, read)
    else:
        raise FormatError("is not a sparse extent of a VMDK: it does not begin as one")
    if not 0 < shape.grain <= _MAX_GRAIN * SECTOR or not shape.per_table or not shape.size:
        raise FormatError(f"is a VMDK of {shape.size} bytes in grains of {shape.grain}, which can't be")
    if shape.directory_entries > _MAX_DIRECTORY:
        raise FormatError(f"is a VMDK with {shape.directory_entries} entries in its grain directory, which can't be")
    return shape


def _hosted(raw: bytes, read: ReadBytes, file_size: int) -> Shape:
    """Of VMware's desktop products, and streamOptimized: the footer of that completes the header."""
    _, _, _, capacity, grain, _, _, per_table, _, directory, *_ = _KDMV.unpack_from(raw)
    if directory == _AT_END:
        footer = read(max(0, file_size - 3 * SECTOR), 3 * SECTOR)
        if len(footer) < 3 * SECTOR or footer[SECTOR : SECTOR + 4] != KDMV:
            raise TruncatedError("truncated: the VMDK's footer is not where the file ends")
        if footer[8:16] != b"\0\0\0\0\3\0\0\0" or any(footer[2 * SECTOR : 2 * SECTOR + 16]):
            raise FormatError("is a VMDK whose footer is damaged")
        raw = footer[SECTOR : 2 * SECTOR]
        fields = _KDMV.unpack_from(raw)
        for name, first, second in zip(
            ("capacity", "grain", "per_table"),
            (capacity, grain, per_table),
            (fields[3], fields[4], fields[7]),
            strict=True,
        ):
            if first != second:
                raise FormatError(f"is a VMDK whose header and footer disagree: {name} {first} and {second}")
    (
        _,
        version,
        flags,
        capacity,
        grain,
        descriptor,
        descriptor_length,
        per_table,
        redundant,
        directory,
        overhead,
        *rest,
    ) = _KDMV.unpack_from(raw)
    _, line_ends, compression = rest
    if version > 3:
        raise RefusedError(f"is a VMDK of version {version}, and 3 is the last that is known")
    if capacity == 0:
        # QEMU takes its descriptor for that of a split image, whose extents are any files of this host.
        raise RefusedError("is a VMDK without a capacity, whose content would be in other files")
    if flags & 1 and line_ends not in (b"\n \r\n", bytes(4)):
        raise FormatError("is a VMDK that was damaged when it was copied as text")
    if per_table > 512:
        raise FormatError(f"is a VMDK with {per_table} entries in a grain table, which can't be")
    if -(-file_size // SECTOR) < overhead:
        raise TruncatedError(
            f"truncated: the file has {file_size} bytes, and {overhead * SECTOR} before its first grain"
        )
    if compression > 1 or (compression == 1) != bool(flags & _IS_COMPRESSED) or (compression and not flags & _MARKERS):
        raise RefusedError("is a VMDK that is compressed in a way that is not known")
    return Shape(
        capacity * SECTOR,
        grain * SECTOR,
        per_table,
        directory * SECTOR,
        4,
        redundant * SECTOR if flags & _REDUNDANT else 0,
        bool(flags & _ZERO_GRAINS),
        compression == 1,
        0 if descriptor == _AT_END else descriptor * SECTOR,
        descriptor_length * SECTOR,
    )


def _cowd(raw: bytes) -> Shape:
    """ESX's, of version 3."""
    _, version, flags, capacity, grain, directory, entries = _COWD.unpack_from(raw)
    if version != 1 or flags & ~3:
        raise RefusedError(f"is a VMDK (COWD) of version {version} with flags {flags:#x}, which are not known")
    shape = Shape(capacity * SECTOR, grain * SECTOR, 4096, directory * SECTOR)
    if grain and shape.directory_entries > entries:
        raise FormatError("is a VMDK (COWD) whose grain directory is too short")
    return shape


def _sesparse(raw: bytes, read: ReadBytes) -> Shape:
    """ESXi's, which VMware has not documented: only what QEMU reads too."""
    fields = _SESPARSE.unpack_from(raw)
    _, version, capacity, grain, table, flags = fields[:6]
    volatile, directory, directory_length, tables, grains = fields[10], fields[16], fields[17], fields[18], fields[24]
    if version != 0x200000001 or grain != 8 or table != 64 or flags or any(fields[6:10]) or any(raw[208:SECTOR]):
        raise RefusedError("is a VMDK (seSparse) of a kind that is not known")
    header = read(volatile * SECTOR, SECTOR)
    if len(header) < SECTOR:
        raise TruncatedError("truncated: the file ends in its second header")
    if not header.startswith(b"\xfe\xca\xfe\xca\0\0\0\0") or any(header[32:]):
        raise FormatError("is a VMDK (seSparse) whose second header is damaged")
    if any(header[24:32]):
        raise RefusedError("is a VMDK (seSparse) with changes in its journal: ESXi replays it when it opens the disk")
    shape = Shape(capacity * SECTOR, 4096, 4096, directory * SECTOR, 8, tables=tables * SECTOR, grains=grains * SECTOR)
    if shape.directory_entries * 8 > directory_length * SECTOR:
        raise FormatError("is a VMDK (seSparse) whose grain directory is too short")
    return shape


class Grains:
    """The runs of one sparse extent. Safe from any thread. Satisfies Runs."""

    def __init__(self, file: HostFile, shape: Shape, cache: TableCache, number: int) -> None:
        """Of FILE. NUMBER tells the files that share CACHE apart."""
        self.size = shape.size
        self._file = file
        self._shape = shape
        self._cache = cache
        self._number = number
        self._span = shape.grain * shape.per_table  # content of a grain table
        self._tables = 1  # grain tables of a slice: a power of 2
        while self._tables * 2 * shape.per_table <= _SLICE_ENTRIES:
            self._tables *= 2
        self._step = (
            1 << 48 if shape.entry_size == 8 else shape.grain // SECTOR
        )  # of entries whose grains are contiguous

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """See Runs. START..END is inside the size."""
        at = start
        while at < end:
            table = at // self._span
            absent = self._absent(table, (end - 1) // self._span + 1, at)
            if absent:
                stop = min((table + absent) * self._span, end)
                yield Run(at, stop - at, UNALLOCATED)
            else:
                first = table // self._tables * self._tables
                stop = min((first + self._tables) * self._span, end)
                yield from self._slice_runs(self._slice(first, at), first * self._span, at, stop)
            at = stop

    def _absent(self, table: int, last: int, at: int) -> int:
        """How many grain tables there are not, from TABLE to LAST."""
        first = table // _SLICE_ENTRIES * _SLICE_ENTRIES
        entries = self._directory(self._shape.directory, first, at)
        if entries[table - first]:
            return 0
        return progression(0).length(entries, table - first, min(last - first, len(entries)))

    def _directory(self, offset: int, first: int, at: int) -> array[int]:
        """Entries of the grain directory at OFFSET of the file, from FIRST on: a slice."""
        count = min(_SLICE_ENTRIES, self._shape.directory_entries - first)
        size = self._shape.entry_size
        key = (self._number, offset + first * size, count)
        return self._cache.get(key, lambda: self._words(self._read(offset + first * size, count * size, at)))[0]

    def _slice(self, first: int, at: int) -> array[int]:
        """The entries of the grain tables from FIRST on, 0 where there is no table."""

        def load() -> Table:
            raw = self._tables_of(self._shape.directory, first, at)
            copy = self._shape.redundant_directory
            # QEMU reads the first one. Writers change both: where they disagree, one is damaged, or lost a write.
            if copy and raw != self._tables_of(copy, first, at):
                raise FormatError(
                    "is a VMDK whose two grain tables disagree: it is damaged",
                    name=self._file.name,
                    offset=at,
                )
            return self._words(raw)

        return self._cache.get((self._number, -1 - first), load)[0]

    def _tables_of(self, directory: int, first: int, at: int) -> bytes:
        """The raw tables of a slice, as the directory at DIRECTORY has them. Those that touch are read at once."""
        base = first // _SLICE_ENTRIES * _SLICE_ENTRIES
        entries = self._directory(directory, base, at)[first - base :][: self._tables]
        length = self._shape.per_table * self._shape.entry_size
        parts: list[bytes] = []
        number = 0
        while number < len(entries):
            count = 1
            if entries[number]:
                offset = self._table_offset(entries[number], at)
                while (
                    number + count < len(entries)
                    and entries[number + count]
                    and (self._table_offset(entries[number + count], at) == offset + count * length)
                ):
                    count += 1
                parts.append(self._read(offset, count * length, at))
            else:
                parts.append(bytes(length))
            number += count
        return b"".join(parts)

    def _table_offset(self, entry: int, at: int) -> int:
        if self._shape.entry_size == 4:
            return entry * SECTOR
        if entry >> 32 != 0x10000000:
            raise self._bad(f"entry {entry:#x} of the grain directory is not known", at)
        return self._shape.tables + (entry & 0xFFFFFFFF) * self._shape.per_table * 8

    def _read(self, offset: int, length: int, at: int) -> bytes:
        raw = self._file.read_bytes(offset, length)
        if len(raw) < length:
            raise truncated(self._file.size, "in a grain table", at, self._file.name)
        return raw

    def _words(self, raw: bytes) -> Table:
        """Little-endian entries as integers of 64 bits."""
        if self._shape.entry_size == 4:
            wide = bytearray(2 * len(raw))
            for byte in range(4):
                wide[byte::8] = raw[byte::4]
            raw = bytes(wide)
        words = array("Q", raw)
        if sys.byteorder == "big":
            words.byteswap()
        return words, None

    def _slice_runs(self, entries: array[int], slice_start: int, start: int, end: int) -> list[Run]:
        """The runs of START..END, which ENTRIES have, that are of the content from SLICE_START on."""
        grain = self._shape.grain
        index, last = (start - slice_start) // grain, -(-(end - slice_start) // grain)
        runs = []
        while index < last:
            entry = entries[index]
            at = slice_start + index * grain
            kind, host = self._grain(entry, at)
            alike = 1
            if kind in (UNALLOCATED, ZERO):
                alike = progression(0).length(entries, index, last)
            elif kind == DATA:
                alike = progression(self._step).length(entries, index, self._last_contiguous(entry, index, last))
            begin, stop = max(at, start), min(at + alike * grain, end)
            if kind == DATA:
                run = Run(begin, stop - begin, DATA, host + begin - at)
            elif kind == COMPRESSED:
                run = Run(begin, stop - begin, COMPRESSED, host, self._stored(entries, index))
            else:
                run = Run(begin, stop - begin, kind)
            check_run(run, self._file.size, self._file.name)
            runs.append(run)
            index += alike
        return runs

    def _grain(self, entry: int, at: int) -> tuple[int, int]:
        """What the grain of ENTRY, AT an offset of the content, is, and where it is."""
        if self._shape.entry_size == 4:
            if entry == 0 or (entry == 1 and self._shape.has_zero_grains):
                return (ZERO if entry else UNALLOCATED), 0
            return (COMPRESSED if self._shape.is_compressed else DATA), entry * SECTOR
        kind = entry >> 60
        if kind > 3 or (kind == 0 and entry):
            raise self._bad(f"entry {entry:#x} of a grain table is not known", at)
        if kind < 3:  # 1: unmapped by the guest, 2: zeros
            return (ZERO if kind else UNALLOCATED), 0
        number = entry >> 48 & 0xFFF | (entry & 0xFFFFFFFFFFFF) << 12
        return DATA, self._shape.grains + number * self._shape.grain

    def _last_contiguous(self, entry: int, index: int, last: int) -> int:
        """Up to where ENTRY, at INDEX, can be gone on from by adding: seSparse has the lower bits above the others."""
        return last if self._shape.entry_size == 4 else min(last, index + 4096 - (entry >> 48 & 0xFFF))

    def _stored(self, entries: array[int], index: int) -> int:
        """The most bytes that the compressed grain of INDEX takes: up to the next one, or what QEMU reads."""
        limit, after = 2 * self._shape.grain, index + 1
        while after < len(entries) and entries[after] <= 1:
            after += progression(0).length(entries, after, len(entries))
        if after < len(entries) and entries[after] > entries[index]:
            return min(limit, (entries[after] - entries[index]) * SECTOR)
        return limit

    def _bad(self, reason: str, at: int) -> FormatError:
        return FormatError(f"is a VMDK (seSparse): {reason}", name=self._file.name, offset=at)
