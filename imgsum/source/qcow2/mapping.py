"""Which part of which file holds a range of the content: L1 and L2 tables -> runs. Pure: a callable reads the tables.

A qcow2 image maps clusters of content by two levels of tables (spec: `Cluster mapping`). An entry of the L1 table is
the offset of an L2 table, which has one cluster; an entry of that says what a cluster is. A run is what many entries
together say of a contiguous range.

Tables are read in slices (tables.py), only where they are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from imgsum.errors import FormatError
from imgsum.source import ReadBytes
from imgsum.source.layers import COMPRESSED, DATA, UNALLOCATED, ZERO, Run, add_run, check_run, truncated
from imgsum.source.qcow2.header import Header
from imgsum.source.tables import SLICE, Table, TableCache, decode, progression

_OFFSET_MASK = 0x00FFFFFFFFFFFE00
_COPIED, _COMPRESSED_FLAG, _ZERO_FLAG = 1 << 63, 1 << 62, 1
_ALL_ALLOCATED = 0xFFFFFFFF  # of an extended entry's bitmap: the subclusters with data; above them those that are zero
_ALL_ZERO = _ALL_ALLOCATED << 32
_SANE = 1 << 55  # no file is as long; below it, thousands of clusters can be added without reaching the flags


class Mapping:
    """The runs of one image. Safe from any thread. Satisfies Runs."""

    def __init__(
        self,
        header: Header,
        read: ReadBytes,
        file_size: int,
        data_size: int,
        cache: TableCache,
        name: str,
        number: int = 0,
        backed: bool = True,
    ) -> None:
        """READ reads the image's file, of FILE_SIZE bytes. Its data is in a file of DATA_SIZE: the same, or external.

        Errors are about NAME. NUMBER tells the images that share CACHE apart. Not BACKED, subclusters that are not
        allocated are ZERO, so that however they alternate with those, a cluster is one run.
        """
        self._name = name
        self.size = header.size
        self._header = header
        self._backed = backed
        self._cluster_bits = header.cluster_bits
        self._cluster_size = header.cluster_size
        self._l2_shift = header.cluster_bits + header.l2_bits  # log2 of the content of an L2 table
        self._entry_size = 16 if header.extended_l2 else 8
        self._slice_bits = header.l2_bits  # log2 of the entries of a slice of an L2 table
        while self._entry_size << self._slice_bits > SLICE:
            self._slice_bits -= 1
        if header.extended_l2:
            self._slice_bits = min(self._slice_bits, 9)  # each entry can be 32 runs
        self._slice_shift = header.cluster_bits + self._slice_bits  # log2 of the content of such a slice
        self._alike = progression(0)
        self._contiguous = progression(self._cluster_size)
        self._read = read
        self._file_size = file_size
        self._data_size = data_size
        self._cache = cache
        self._number = number
        self._recent: tuple[int, Table] = (-1, (array("Q"), None))  # the slice that was used last, and its content

    def runs(self, start: int, end: int) -> Iterable[Run]:
        """See Runs. DATA is coalesced over contiguous clusters of one slice. Raises FormatError, TruncatedError."""
        if end <= self.size and start >> self._slice_shift == end - 1 >> self._slice_shift:
            return self._slice_runs(start, end)  # a chain asks for many short ranges: this costs no generator
        return self._walk(start, end)

    def l2_tables(self) -> Iterator[tuple[int, int]]:
        """For each L2 table that the content needs: where the content begins that it maps, and its offset."""
        at = 0
        while at < self.size:
            offset, end = self._l2_table(at, self.size)
            if offset:
                yield at, offset
            at = end

    def _walk(self, start: int, end: int) -> Iterator[Run]:
        """runs(), slice by slice, and over many L2 tables at once where there are none."""
        at, inside = start, min(end, self.size)
        while at < inside:
            l2_table, stop = self._l2_table(at, inside)
            if not l2_table:
                yield Run(at, stop - at, UNALLOCATED)
                at = stop
            while at < stop:
                slice_end = min(stop, (at >> self._slice_shift) + 1 << self._slice_shift)
                yield from self._slice_runs(at, slice_end)
                at = slice_end
        if at < end:
            yield Run(at, end - at, ZERO)

    def _l2_table(self, at: int, end: int) -> tuple[int, int]:
        """The offset of AT's L2 table, and where the content that it maps ends, at most END.

        0: there is none, nor for what follows up to that end.
        """
        shift = self._l2_shift
        index, last = at >> shift, (end - 1 >> shift) + 1
        if index >= self._header.l1_size:  # only a snapshot's table can be short
            return 0, end
        first = index // (SLICE // 8) * (SLICE // 8)
        last = min(last, first + SLICE // 8, self._header.l1_size)
        entries, _ = self._table(self._header.l1_offset + first * 8, SLICE, 8)
        if len(entries) < last - first:
            raise truncated(self._file_size, "in the L1 table", at, self._name)
        entry = entries[index - first]
        if not entry:
            same = self._alike.length(entries, index - first, last - first)
            return 0, min(end, index + same << shift)
        offset = entry & _OFFSET_MASK
        if offset % self._cluster_size:
            raise self._bad(
                f"L1 entry {index} is {entry:#x}: its L2 table is not at a multiple of the cluster size", at
            )
        return offset, min(end, index + 1 << shift)

    def _table(self, offset: int, length: int, entry_size: int) -> Table:
        """The slice of a table, of LENGTH bytes from OFFSET of the file; fewer where it ends."""
        key = (self._number, offset, length, entry_size)  # a broken image can have one table for L1 and L2
        return self._cache.get(key, lambda: decode(self._read(offset, length), entry_size))

    def _slice_runs(self, start: int, end: int) -> list[Run]:
        """The runs of START..END, which are inside the size, and in one slice of an L2 table."""
        bits, cluster_size = self._cluster_bits, self._cluster_size
        slice_start = start >> self._slice_shift << self._slice_shift
        recent, table = self._recent
        if recent != slice_start:
            l2_table, _ = self._l2_table(start, end)
            if not l2_table:
                return [Run(start, end - start, UNALLOCATED)]
            first = slice_start - (start >> self._l2_shift << self._l2_shift) >> bits  # entry of the L2 table
            offset = l2_table + first * self._entry_size
            table = self._table(offset, self._entry_size << self._slice_bits, self._entry_size)
            self._recent = slice_start, table  # one reference, so that no thread sees half of a change
        entries, bitmaps = table
        index, last = start - slice_start >> bits, (end - 1 - slice_start >> bits) + 1
        if len(entries) < last:
            raise truncated(self._file_size, "in the L2 table", start, self._name)
        runs: list[Run] = []
        at = slice_start + (index << bits)
        while index < last:
            entry, bitmap = entries[index], None if bitmaps is None else bitmaps[index]
            begin, stop = max(at, start), min(at + cluster_size, end)
            alike = 1
            if entry & _COMPRESSED_FLAG:
                runs.append(self._compressed(entry, at, begin, stop))
            elif (kind := self._kind(entry, bitmap, at)) is None:
                assert bitmap is not None
                self._add_subclusters(runs, entry & _OFFSET_MASK, bitmap, at, begin, stop)
            else:
                host = entry & _OFFSET_MASK
                step = cluster_size if host or kind == DATA else 0
                if index + 1 < last and entries[index + 1] == entry + step and host < _SANE:
                    until = last if bitmaps is None else index + self._alike.length(bitmaps, index, last)
                    alike = (self._contiguous if step else self._alike).length(entries, index, until)
                    stop = min(at + (alike << bits), end)
                if bitmap is None or kind == DATA:
                    add_run(runs, begin, stop, kind, host + begin - at)
                else:  # a run for each bitmap, so that who counts runs counts the work
                    runs.append(Run(begin, stop - begin, kind))
            index += alike
            at += alike << bits
        for run in runs:
            if run.kind >= DATA:
                check_run(run, self._data_size, self._name)
        return runs

    def _kind(self, entry: int, bitmap: int | None, at: int) -> int | None:
        """What the cluster of ENTRY, at AT of the content, is; None when its subclusters differ. In QEMU's order."""
        host = entry & _OFFSET_MASK
        if host % self._cluster_size:
            raise self._bad(f"L2 entry {entry:#x}: the cluster is not at a multiple of the cluster size", at)
        # An offset of 0 is one in an external data file, if the entry has the flag of what is allocated.
        external = self._header.has_data_file and bool(host or entry & _COPIED)
        plain_zero = bitmap is None and entry & _ZERO_FLAG and not host
        if external and host != at and not plain_zero:
            raise self._bad(f"L2 entry {entry:#x}: the external data is not where the content is", at)
        if bitmap is None:
            if entry & _ZERO_FLAG:
                if self._header.version == 2:
                    raise self._bad(f"L2 entry {entry:#x}: zero clusters need version 3", at)
                return ZERO
            return DATA if host or external else UNALLOCATED
        if bitmap & bitmap >> 32 & _ALL_ALLOCATED or (bitmap & _ALL_ALLOCATED and not (host or external)):
            raise self._bad(f"subcluster bitmap {bitmap:#018x} contradicts itself or its entry", at)
        if not self._backed and not bitmap & _ALL_ALLOCATED:
            return ZERO
        return {_ALL_ALLOCATED: DATA, _ALL_ZERO: ZERO, 0: UNALLOCATED}.get(bitmap)

    def _add_subclusters(self, runs: list[Run], host: int, bitmap: int, at: int, start: int, end: int) -> None:
        """Add START..END of the cluster at AT, whose 32 subclusters are not all alike."""
        bits = self._cluster_bits - 5
        if not self._backed:
            bitmap |= (~bitmap & _ALL_ALLOCATED) << 32
        while start < end:
            number = start - at >> bits
            kind = ZERO if bitmap >> 32 + number & 1 else DATA if bitmap >> number & 1 else UNALLOCATED
            stop = min(at + (number + 1 << bits), end)
            add_run(runs, start, stop, kind, host + start - at)
            start = stop

    def _bad(self, reason: str, at: int) -> FormatError:
        return FormatError(reason, name=self._name, offset=at)

    def _compressed(self, entry: int, at: int, start: int, end: int) -> Run:
        """START..END of the compressed cluster at AT (spec: `Compressed Clusters Descriptor`)."""
        if self._header.has_data_file:
            raise self._bad(f"L2 entry {entry:#x}: compressed, in an image with an external data file", at)
        size_shift = 62 - (self._cluster_bits - 8)
        host = entry & (1 << size_shift) - 1
        sectors = (entry >> size_shift & (1 << self._cluster_bits - 8) - 1) + 1
        return Run(start, end - start, COMPRESSED, host, sectors * 512 - host % 512)
