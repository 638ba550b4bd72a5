"""L1 and L2 tables -> runs: where a range of the content is stored. Pure: a callable reads the tables.

A qcow2 image maps clusters of content by two levels of tables (spec: `Cluster mapping`). An L1 entry has the offset of
an L2 table, which takes one cluster. An L2 entry maps one cluster. A run is what one or more entries map contiguously.

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
_ALL = 0xFFFFFFFF  # subclusters, as a bitmap
_SANE = 1 << 55  # no file is as long; below it, thousands of clusters can be added without reaching the flags


class L2Entry(int):
    """An entry of an L2 table, without the bitmap of an extended one (spec: `L2 table entry`)."""

    __slots__ = ()

    def is_compressed(self) -> bool:
        """Whether it is a compressed cluster descriptor: see compressed()."""
        return bool(self & 1 << 62)

    def is_copied(self) -> bool:
        """Whether the refcount of the cluster is 1; in an image with an external data file, whether it is allocated."""
        return bool(self & 1 << 63)

    def is_zero(self) -> bool:
        """Whether the cluster reads as zeros, allocated or not."""
        return bool(self & 1)

    def host(self) -> int:
        """The offset of the cluster in the file; 0: it is not allocated."""
        return self & _OFFSET_MASK

    def compressed(self, cluster_bits: int) -> tuple[int, int]:
        """The offset and the maximum length, in bytes, of the compressed data (spec: `Compressed Clusters Descriptor`).

        From the lowest bit: the offset, 70 - CLUSTER_BITS bits; the number of 512-byte sectors after the first one, up
        to bit 61.
        """
        offset_bits = 70 - cluster_bits
        offset = self & ((1 << offset_bits) - 1)
        more_sectors = (self >> offset_bits) & ((1 << (cluster_bits - 8)) - 1)
        return offset, (more_sectors + 1) * 512 - offset % 512


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
        """READ reads the image's file, of FILE_SIZE bytes. DATA_SIZE is the size of the file with the data: see Header.

        NAME is for errors. NUMBER is the image's among those that share CACHE. BACKED: it has a backing file. Without
        one, subclusters that are not allocated are ZERO, so they form one run with zero subclusters beside them.
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
        self._recent: tuple[int, Table] = (-1, (array("Q"), None))  # the last slice: start of the content, and entries

    def runs(self, start: int, end: int) -> Iterable[Run]:
        """See Runs. DATA is coalesced over contiguous clusters of one slice. Raises FormatError, TruncatedError."""
        if end <= self.size and start >> self._slice_shift == end - 1 >> self._slice_shift:
            return self._slice_runs(start, end)  # without a generator: in a chain, most ranges are short
        return self._walk(start, end)

    def l2_tables(self) -> Iterator[tuple[int, int]]:
        """The L2 tables of the content, each as (start of the content that it maps, its offset in the file)."""
        at = 0
        while at < self.size:
            offset, end = self._l2_table(at, self.size)
            if offset:
                yield at, offset
            at = end

    def _walk(self, start: int, end: int) -> Iterator[Run]:
        """As runs(), for any range: slice by slice, and one run where many L2 tables are not allocated."""
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
        """The offset of AT's L2 table, and the end of the content that it maps, at most END.

        If the offset is 0, no L2 table is allocated from AT to that end.
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
        """The entries in LENGTH bytes from OFFSET of the file; fewer if the file ends before."""
        key = (self._number, offset, length, entry_size)  # a damaged image can use one table as L1 and L2
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
            entry, bitmap = L2Entry(entries[index]), None if bitmaps is None else bitmaps[index]
            begin, stop = max(at, start), min(at + cluster_size, end)
            alike = 1
            if entry.is_compressed():
                runs.append(self._compressed(entry, at, begin, stop))
            elif (kind := self._kind(entry, bitmap, at)) is None:
                assert bitmap is not None
                self._add_subclusters(runs, entry.host(), bitmap, at, begin, stop)
            else:
                host = entry.host()
                step = cluster_size if host or kind == DATA else 0
                if index + 1 < last and entries[index + 1] == entry + step and host < _SANE:
                    until = last if bitmaps is None else index + self._alike.length(bitmaps, index, last)
                    alike = (self._contiguous if step else self._alike).length(entries, index, until)
                    stop = min(at + (alike << bits), end)
                if bitmap is None or kind == DATA:
                    add_run(runs, begin, stop, kind, host + begin - at)
                else:  # a run for each bitmap, so that the number of runs is a measure of the work
                    runs.append(Run(begin, stop - begin, kind))
            index += alike
            at += alike << bits
        for run in runs:
            if run.kind >= DATA:
                check_run(run, self._data_size, self._name)
        return runs

    def _kind(self, entry: L2Entry, bitmap: int | None, at: int) -> int | None:
        """The kind of the cluster at AT of the content; None if its subclusters differ. Checks are in QEMU's order."""
        host = entry.host()
        if host % self._cluster_size:
            raise self._bad(f"L2 entry {entry:#x}: the cluster is not at a multiple of the cluster size", at)
        # In an external data file, 0 is the offset of the first cluster, if that is allocated.
        external = self._header.has_data_file and bool(host or entry.is_copied())
        zero = bitmap is None and entry.is_zero()
        if external and host != at and (host or not zero):
            raise self._bad(f"L2 entry {entry:#x}: the external data is not where the content is", at)
        if zero:
            if self._header.version == 2:
                raise self._bad(f"L2 entry {entry:#x}: zero clusters need version 3", at)
            return ZERO
        if bitmap is None:
            return DATA if host or external else UNALLOCATED
        allocated, zeros = bitmap & _ALL, bitmap >> 32
        if allocated & zeros or (allocated and not (host or external)):
            raise self._bad(f"subcluster bitmap {bitmap:#018x} contradicts itself or its entry", at)
        if zeros == _ALL or (not self._backed and not allocated):
            return ZERO
        if allocated == _ALL:
            return DATA
        return None if bitmap else UNALLOCATED

    def _add_subclusters(self, runs: list[Run], host: int, bitmap: int, at: int, start: int, end: int) -> None:
        """Add START..END of the cluster at AT of the content, whose 32 subclusters are of several kinds."""
        bits = self._cluster_bits - 5
        if not self._backed:
            bitmap |= (~bitmap & _ALL) << 32
        while start < end:
            number = start - at >> bits
            kind = ZERO if bitmap >> 32 + number & 1 else DATA if bitmap >> number & 1 else UNALLOCATED
            stop = min(at + (number + 1 << bits), end)
            add_run(runs, start, stop, kind, host + start - at)
            start = stop

    def _bad(self, reason: str, at: int) -> FormatError:
        return FormatError(reason, name=self._name, offset=at)

    def _compressed(self, entry: L2Entry, at: int, start: int, end: int) -> Run:
        """START..END of the compressed cluster at AT of the content."""
        if self._header.has_data_file:
            raise self._bad(f"L2 entry {entry:#x}: compressed, in an image with an external data file", at)
        return Run(start, end - start, COMPRESSED, *entry.compressed(self._cluster_bits))
