"""Which part of which file holds a range of the content: L1 and L2 tables -> runs. Pure; tables are read by a callable.

A qcow2 image maps clusters of content by two levels of tables (spec: `Cluster mapping`). An entry of the L1 table is the
offset of an L2 table, which has one cluster; an entry of that says what a cluster is. A run is what many entries
together say of a contiguous range.

Tables are read in slices, only where they are needed, and kept in a bounded cache. A slice may have thousands of entries
that say one thing: those are compared in C, many at a time, as a loop over those of 1 TiB takes 3.75 s, and this 0.15 s.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from imgsum.errors import Error, FormatError, TruncatedError
from imgsum.source.qcow2.header import Header, ReadBytes
from imgsum.units import GIB, KIB, MIB

UNALLOCATED, ZERO, DATA, COMPRESSED = range(4)
"""Kinds of runs. Unallocated: whatever the backing file has there, or zeros."""


class Run(NamedTuple):
    """`length` > 0 bytes of content from `start`, all of one kind."""

    start: int
    length: int
    kind: int
    host: int = 0
    """DATA: where it is in the data's file. COMPRESSED: where the whole cluster's compressed bytes are."""
    stored: int = 0
    """COMPRESSED: how many bytes those are at most. The run is of one cluster, or of a part of it."""

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + self.length


class Layer(Protocol):
    """One image of a backing chain."""

    size: int

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """The runs of START..END, in order, tiling it. What lies past the size is ZERO."""


def resolve(layers: Sequence[Layer], start: int, end: int) -> Iterator[tuple[int, Run]]:
    """The runs of START..END of a chain, each with the index in LAYERS of the image that has it; none is UNALLOCATED.

    What an image has not allocated is looked up in the next one, range by range, so that a short image in the middle
    hides what a longer one below it has past its end, as in QEMU. Not recursive: chains can be deep.
    """
    below = len(layers) - 1
    stack = [layers[0].runs(start, end)]
    while stack:
        depth = len(stack) - 1
        for run in stack[-1]:
            if run.kind != UNALLOCATED:
                yield depth, run
            elif depth == below:
                yield depth, Run(run.start, run.length, ZERO)
            else:
                stack.append(layers[depth + 1].runs(run.start, run.start + run.length))
                break
        else:
            stack.pop()


_SLICE = 32 * KIB
"""Bytes of a table that are read at once: 256 MiB of content with 64 KiB clusters. A chain needs one for each image."""

_OFFSET_MASK = 0x00FFFFFFFFFFFE00
_COPIED, _COMPRESSED_FLAG, _ZERO_FLAG = 1 << 63, 1 << 62, 1
_ALL_ALLOCATED = 0xFFFFFFFF  # of an extended entry's bitmap: the subclusters with data; above them those that are zero
_ALL_ZERO = _ALL_ALLOCATED << 32
_SANE = 1 << 55  # no file is as long; below it, thousands of clusters can be added without reaching the flags

_LONG = GIB
"""A run of this length is not waited with for what follows it: runs come lazily."""

Table = tuple["array[int]", "array[int] | None"]
"""A slice of an L1 or L2 table: its entries, and for extended L2 entries their bitmaps."""


class TableCache:
    """Slices of tables, at most so many bytes of them, shared by all images of a chain and safe from any thread."""

    def __init__(self, limit: int = 8 * MIB) -> None:
        self._limit = limit
        self._size = 0
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[int, int], Table] = OrderedDict()

    def get(self, key: tuple[int, int], load: Callable[[], Table]) -> Table:
        """The slice of KEY, (number of the image, offset), from LOAD where it isn't known."""
        with self._lock:
            table = self._tables.get(key)
            if table is not None:
                self._tables.move_to_end(key)
                return table
        table = load()  # not under the lock: that two threads read the same slice is rare, and harmless
        with self._lock:
            if key not in self._tables:
                self._size += _cost(table)
            self._tables[key] = table
            while self._size > self._limit and len(self._tables) > 1:
                self._size -= _cost(self._tables.popitem(last=False)[1])
        return table


def _cost(table: Table) -> int:
    """Bytes that a slice takes in the cache, with what Python and the cache have for each."""
    entries, bitmaps = table
    return 512 + 8 * (len(entries) + (0 if bitmaps is None else len(bitmaps)))


class Mapping:
    """The runs of one image. Safe from any thread. Satisfies Layer."""

    def __init__(
        self,
        header: Header,
        read: ReadBytes,
        file_size: int,
        data_size: int,
        cache: TableCache,
        name: str,
        number: int = 0,
    ) -> None:
        """READ reads the image's file, of FILE_SIZE bytes. Its data is in a file of DATA_SIZE: the same, or external.

        Errors are about NAME. NUMBER tells the images that share CACHE apart.
        """
        self._name = name
        self.size = header.size
        self._header = header
        self._cluster_bits = header.cluster_bits
        self._cluster_size = header.cluster_size
        self._l2_shift = header.cluster_bits + header.l2_bits  # log2 of the content of an L2 table
        self._entry_size = 16 if header.extended_l2 else 8
        self._slice_bits = header.l2_bits  # log2 of the entries of a slice of an L2 table
        while self._entry_size << self._slice_bits > _SLICE:
            self._slice_bits -= 1
        self._alike = _progression(0)
        self._contiguous = _progression(self._cluster_size)
        self._read = read
        self._file_size = file_size
        self._data_size = data_size
        self._cache = cache
        self._number = number

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """See Layer. DATA is coalesced over contiguous clusters. Raises FormatError, TruncatedError."""
        inside = min(end, self.size)
        if start < inside:
            try:
                yield from self._merge(self._pieces(start, inside))
            except Error as error:
                raise error.about(self._name) from None
        if end > inside:
            past = max(start, inside)
            yield Run(past, end - past, ZERO)

    def l2_tables(self) -> Iterator[tuple[int, int]]:
        """For each L2 table that the content needs: where the content begins that it maps, and its offset."""
        at = 0
        while at < self.size:
            offset, end = self._l2_table(at, self.size)
            if offset:
                yield at, offset
            at = end

    def _merge(self, pieces: Iterator[Run]) -> Iterator[Run]:
        """PIECES with neighbours that are one run made one, and their data checked to be in its file."""
        last = next(pieces)
        for piece in pieces:
            contiguous = piece.kind != DATA or piece.host == last.host + last.length
            if piece.kind == last.kind != COMPRESSED and contiguous and last.length < _LONG:
                last = Run(last.start, last.length + piece.length, last.kind, last.host)
            else:
                yield self._in_file(last)
                last = piece
        yield self._in_file(last)

    def _in_file(self, run: Run) -> Run:
        """RUN, unless the file ends before its data does. A compressed cluster may be cut off where it is padding."""
        if run.kind == DATA and run.host + run.length > self._data_size:
            there = max(0, self._data_size - run.host)
            raise TruncatedError(
                f"truncated: the file ends at byte {self._data_size}, before the data of the content",
                offset=run.start + there,
            )
        if run.kind == COMPRESSED and run.host >= self._file_size:
            raise TruncatedError(
                f"truncated: the file ends at byte {self._file_size}, before the compressed cluster of the content",
                offset=run.start,
            )
        return run

    def _pieces(self, start: int, end: int) -> Iterator[Run]:
        """The runs of START..END, all inside the size, cut where slices of tables are."""
        at = start
        while at < end:
            l2_table, l2_end = self._l2_table(at, end)
            if not l2_table:
                yield Run(at, l2_end - at, UNALLOCATED)
                at = l2_end
            while at < l2_end:
                slice_end = min(
                    l2_end, ((at >> self._cluster_bits + self._slice_bits) + 1) << self._cluster_bits + self._slice_bits
                )
                yield from self._slice_runs(l2_table, at, slice_end)
                at = slice_end

    def _l2_table(self, at: int, end: int) -> tuple[int, int]:
        """The offset of AT's L2 table, and where the content that it maps ends, at most END.

        0: there is none, nor for what follows up to that end.
        """
        shift = self._l2_shift
        index, last = at >> shift, (end - 1 >> shift) + 1
        if index >= self._header.l1_size:  # only a snapshot's table can be short
            return 0, end
        first = index // (_SLICE // 8) * (_SLICE // 8)
        last = min(last, first + _SLICE // 8, self._header.l1_size)
        entries, _ = self._table(self._header.l1_offset + first * 8, _SLICE, 8, last - first, at, "L1 table")
        entry = entries[index - first]
        if not entry:
            same = self._alike.length(entries, index - first, last - first)
            return 0, min(end, index + same << shift)
        offset = entry & _OFFSET_MASK
        if offset % self._cluster_size:
            raise FormatError(
                f"L1 entry {index} is {entry:#x}: the L2 table is not at a multiple of the cluster size", offset=at
            )
        return offset, min(end, index + 1 << shift)

    def _table(self, offset: int, length: int, entry_size: int, needed: int, at: int, what: str) -> Table:
        """The slice of a table, of LENGTH bytes from OFFSET of the file, fewer where it ends after NEEDED entries."""
        table = self._cache.get((self._number, offset), lambda: _decode(self._read(offset, length), entry_size))
        if len(table[0]) < needed:
            raise TruncatedError(
                f"truncated: the file ends at byte {self._file_size}, in the {what} of the content", offset=at
            )
        return table

    def _slice_runs(self, l2_table: int, start: int, end: int) -> Iterator[Run]:
        """The runs of START..END, which one slice of an L2 table maps: one for each cluster or many alike ones."""
        bits, cluster_size = self._cluster_bits, self._cluster_size
        first = start >> bits  # the clusters of the content that are meant, counted from the content's beginning ...
        slice_start = first >> self._slice_bits << self._slice_bits
        table_start = first >> self._header.l2_bits << self._header.l2_bits
        index, last = first - slice_start, (end - 1 >> bits) + 1 - slice_start  # ... and from that of the slice
        entries, bitmaps = self._table(
            l2_table + (slice_start - table_start) * self._entry_size,
            self._entry_size << self._slice_bits,
            self._entry_size,
            last,
            start,
            "L2 table",
        )
        while index < last:
            entry = entries[index]
            at = slice_start + index << bits
            if entry & _COMPRESSED_FLAG:
                yield self._compressed(entry, at, max(at, start), min(at + cluster_size, end))
                index += 1
                continue
            host = entry & _OFFSET_MASK
            kind = self._kind(entry, None if bitmaps is None else bitmaps[index], at)
            if kind is None:
                assert bitmaps is not None
                yield from self._subclusters(host, bitmaps[index], at, max(at, start), min(at + cluster_size, end))
                index += 1
                continue
            alike = 1
            step = cluster_size if host or kind == DATA else 0
            if index + 1 < last and entries[index + 1] == entry + step and host < _SANE:
                alike = (self._contiguous if step else self._alike).length(entries, index, last)
                if bitmaps is not None:
                    alike = min(alike, self._alike.length(bitmaps, index, last))
            begin, stop = max(at, start), min(at + alike * cluster_size, end)
            yield Run(begin, stop - begin, kind, host + begin - at if kind == DATA else 0)
            index += alike

    def _kind(self, entry: int, bitmap: int | None, at: int) -> int | None:
        """What the cluster of ENTRY, at AT of the content, is; None when its subclusters differ. In QEMU's order."""
        host = entry & _OFFSET_MASK
        if host % self._cluster_size:
            raise FormatError(f"L2 entry {entry:#x}: the cluster is not at a multiple of the cluster size", offset=at)
        # An offset of 0 is one in an external data file, if the entry has the flag of what is allocated.
        external = self._header.has_data_file and bool(host or entry & _COPIED)
        plain_zero = bitmap is None and entry & _ZERO_FLAG and not host
        if external and host != at and not plain_zero:
            raise FormatError(f"L2 entry {entry:#x}: the external data is not where the content is", offset=at)
        if bitmap is None:
            if entry & _ZERO_FLAG:
                if self._header.version == 2:
                    raise FormatError(f"L2 entry {entry:#x}: zero clusters need version 3", offset=at)
                return ZERO
            return DATA if host or external else UNALLOCATED
        if bitmap & bitmap >> 32 & _ALL_ALLOCATED or bitmap & _ALL_ALLOCATED and not (host or external):
            raise FormatError(f"subcluster bitmap {bitmap:#018x} contradicts itself or its entry", offset=at)
        return {_ALL_ALLOCATED: DATA, _ALL_ZERO: ZERO, 0: UNALLOCATED}.get(bitmap)

    def _subclusters(self, host: int, bitmap: int, at: int, start: int, end: int) -> Iterator[Run]:
        """The runs of START..END of the cluster at AT, whose 32 subclusters are not all alike."""
        size = self._cluster_size >> 5
        while start < end:
            number = start - at >> self._cluster_bits - 5
            kind = _subcluster_kind(bitmap, number)
            number += 1
            while number < 32 and _subcluster_kind(bitmap, number) == kind:
                number += 1
            stop = min(at + number * size, end)
            yield Run(start, stop - start, kind, host + start - at if kind == DATA else 0)
            start = stop

    def _compressed(self, entry: int, at: int, start: int, end: int) -> Run:
        """START..END of the compressed cluster at AT (spec: `Compressed Clusters Descriptor`)."""
        if self._header.has_data_file:
            raise FormatError(f"L2 entry {entry:#x}: compressed, in an image with an external data file", offset=at)
        size_shift = 62 - (self._cluster_bits - 8)
        host = entry & (1 << size_shift) - 1
        sectors = (entry >> size_shift & (1 << self._cluster_bits - 8) - 1) + 1
        return Run(start, end - start, COMPRESSED, host, sectors * 512 - host % 512)


def _subcluster_kind(bitmap: int, number: int) -> int:
    if bitmap >> 32 + number & 1:
        return ZERO
    return DATA if bitmap >> number & 1 else UNALLOCATED


def _decode(raw: bytes, entry_size: int) -> Table:
    """Big-endian entries of ENTRY_SIZE bytes -> integers. What is less than an entry at the end is dropped."""
    words = array("Q")
    words.frombytes(raw[: len(raw) // entry_size * entry_size])
    if sys.byteorder == "little":
        words.byteswap()
    return (words, None) if entry_size == 8 else (words[::2], words[1::2])


_SHORT = 32  # entries; runs up to this are found one by one, which takes 1.5 us, where the rest takes 7


class _Progression:
    """Runs of entries that are each `step` more than the one before.

    Many entries are compared as one integer that has them for its 64-bit digits: 3 ns for each, where making and
    comparing an array takes 26 and a loop 50. What is wanted mostly is what was wanted last plus a constant.
    Safe from any thread: each change is of one reference.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        count = _SLICE // 8
        ramp = _digits(array("Q", range(0, count * step, step))) if step else 0
        self._last = (0, ramp)
        ones = _digits(array("Q", [1]) * count)
        self._of_all = lru_cache(maxsize=4)(ones.__mul__)

    def length(self, entries: array[int], index: int, last: int) -> int:
        """How many of ENTRIES go on so from INDEX, before LAST; at least 1. All are below 2**64 if they do."""
        wanted, stop, at = entries[index], min(last, index + _SHORT), index
        while at < stop and entries[at] == wanted:
            at += 1
            wanted += self._step
        if at < stop or at == last:
            return at - index
        count = last - index
        differences = _digits(entries[index:last]) ^ self._from(entries[index]) & (1 << 64 * count) - 1
        return count if not differences else (differences & -differences).bit_length() - 1 >> 6

    def _from(self, first: int) -> int:
        """As many digits as a slice has entries: FIRST, FIRST + step ..."""
        last, digits = self._last
        if first != last:
            digits += self._of_all(first - last)
            self._last = first, digits
        return digits


@lru_cache(maxsize=4)
def _progression(step: int) -> _Progression:
    return _Progression(step)


def _digits(entries: array[int]) -> int:
    """ENTRIES, the first one lowest, as one integer."""
    if sys.byteorder == "big":
        entries.byteswap()
    return int.from_bytes(entries.tobytes(), "little")
