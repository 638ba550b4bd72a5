"""VHDX images as sources: a chain of layers, the runs of each by its block allocation table ([MS-VHDX] 2.5)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

from imgsum.errors import FormatError, RefusedError, naming
from imgsum.source import OpenOptions, Source, refuse_larger
from imgsum.source.backing import open_beside
from imgsum.source.file import HostFile
from imgsum.source.layers import (
    DATA,
    MAX_LAYERS,
    UNALLOCATED,
    ZERO,
    LayeredSource,
    Run,
    Uncompressed,
    add_run,
    bound_work,
    check_run,
    truncated,
)
from imgsum.source.tables import SLICE, Table, TableCache, progression
from imgsum.source.vhdx.header import Header, Parent, parse

_NOT_PRESENT, _FULLY_PRESENT, _PARTIALLY_PRESENT = 0, 6, 7
_ZERO_STATES = (1, 2, 3, 5)  # undefined, zero, unmapped, and unmapped as it was before version 1.0
_SLICE_ENTRIES = SLICE // 8
_SANE = 1 << 62  # no file is as long
_WORD = (1 << 64) - 1


class _VhdxLayer(Uncompressed):
    """One VHDX of a chain. Satisfies Layer."""

    def __init__(self, file: HostFile, header: Header, cache: TableCache, number: int) -> None:
        """NUMBER tells the images that share CACHE apart."""
        self.files = [file]
        self.size = header.size
        self._file = file
        self.header = header
        self._cache = cache
        self._number = number
        self._block_bits = header.block_size.bit_length() - 1
        self._not_present = ZERO if header.parent is None else UNALLOCATED

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """See Runs. DATA is coalesced over contiguous blocks of one slice of the table."""
        at, inside = start, min(end, self.size)
        ratio, bits = self.header.chunk_ratio, self._block_bits
        while at < inside:
            block = at >> bits
            chunk = block // ratio
            blocks = min((inside - 1 >> bits) + 1, (chunk + 1) * ratio) - block
            # After the entries of each chunk comes the one of its sector bitmap.
            first, index = divmod(block + chunk, _SLICE_ENTRIES)
            entries = self._slice(first, at)
            last = min(index + blocks, _SLICE_ENTRIES)
            stop = min(block + last - index << bits, inside)
            yield from self._slice_runs(entries, index, last, at, stop)
            at = stop
        if at < end:
            yield Run(at, end - at, ZERO)

    def _slice(self, number: int, at: int) -> array[int]:
        """Entries of the table from NUMBER * _SLICE_ENTRIES on."""
        first = number * _SLICE_ENTRIES
        wanted = min(_SLICE_ENTRIES, self.header.bat_entries - first) * 8
        return self._words(self.header.bat + first * 8, wanted, "in the block allocation table", at)

    def _words(self, offset: int, length: int, where: str, at: int) -> array[int]:
        """LENGTH bytes from OFFSET of the file, as little-endian integers of 64 bits."""

        def load() -> Table:
            raw = self.header.tables.read(offset, length)
            if len(raw) < length:
                raise truncated(self._file.size, where, at, self._file.name)
            words = array("Q", raw)
            if sys.byteorder == "big":
                words.byteswap()
            return words, None

        return self._cache.get((self._number, offset, length), load)[0]

    def _slice_runs(self, entries: array[int], index: int, last: int, start: int, end: int) -> Iterator[Run]:
        """The runs of START..END, which ENTRIES have from INDEX to LAST."""
        block_size, at = self.header.block_size, start >> self._block_bits << self._block_bits
        while index < last:
            entry = entries[index]
            state, host, alike = entry & 7, entry >> 20 << 20, 1
            if entry < _SANE and state != _PARTIALLY_PRESENT:
                alike = progression(block_size if state == _FULLY_PRESENT else 0).length(entries, index, last)
            begin, stop = max(at, start), min(at + (alike << self._block_bits), end)
            if state == _FULLY_PRESENT:
                yield self._checked(Run(begin, stop - begin, DATA, host + begin - at))
            elif state == _PARTIALLY_PRESENT and self.header.parent is not None:
                yield from self._partial_runs(begin, stop, at, host)
            elif state == _NOT_PRESENT or state in _ZERO_STATES:
                yield Run(begin, stop - begin, ZERO if state else self._not_present)
            else:
                raise FormatError(f"is a VHDX with a block in state {state}", name=self._file.name, offset=begin)
            index += alike
            at += alike << self._block_bits

    def _checked(self, run: Run) -> Run:
        """RUN, of data, if it is in the file, and where no table is."""
        check_run(run, self._file.size, self._file.name)
        if any(run.host < end and begin < run.host + run.length for begin, end in self.header.reserved):
            raise FormatError("is a VHDX with data where its tables are", name=self._file.name, offset=run.start)
        if self.header.tables.is_changed(run.host, run.length):
            raise RefusedError(
                "is a VHDX whose log has data (`qemu-img check -r all COPY` replays it in a copy)",
                name=self._file.name,
                offset=run.start,
            )
        return run

    def _partial_runs(self, start: int, end: int, block_start: int, host: int) -> list[Run]:
        """START..END of the block at BLOCK_START, whose data is at HOST: a sector is there if its bit is set."""
        header, sector = self.header, self.header.sector_size
        chunk, block = divmod(block_start >> self._block_bits, header.chunk_ratio)
        first, index = divmod(chunk * (header.chunk_ratio + 1) + header.chunk_ratio, _SLICE_ENTRIES)
        entry = self._slice(first, start)[index]
        if entry & 7 != _FULLY_PRESENT:
            raise FormatError("is a VHDX that lacks a sector bitmap", name=self._file.name, offset=start)
        bitmap = (entry >> 20 << 20) + block * header.block_size // sector // 8
        runs: list[Run] = []
        at = start
        while at < end:
            number, skip = divmod((at - block_start) // sector, SLICE * 8)
            last = min(SLICE, header.block_size // sector // 8 - number * SLICE) // 8
            words = self._words(bitmap + number * SLICE, last * 8, "in a sector bitmap", at)
            base = block_start + number * SLICE * 8 * sector
            word, bit = divmod(skip, 64)
            while at < end and word < last:
                value = words[word] >> bit
                is_set = value & 1
                if not bit and words[word] in (0, _WORD):
                    length = 64 * progression(0).length(words, word, last)
                else:
                    other = ~value if is_set else value | 1 << 64 - bit  # its lowest set bit ends the run
                    length = min((other & -other).bit_length() - 1, 64 - bit)
                word, bit = divmod(word * 64 + bit + length, 64)
                stop = min(base + (word * 64 + bit) * sector, end)
                add_run(runs, at, stop, DATA if is_set else UNALLOCATED, host + at - block_start)
                at = stop
        for run in runs:
            if run.kind == DATA:
                self._checked(run)
        return runs


def open_image(file: HostFile, options: OpenOptions) -> Source:
    """The VHDX in FILE, with its parents. FILE is the source's from then on; after an error, the caller's.

    Raises an imgsum.Error.
    """
    cache = TableCache()
    files, layers = [file], [_VhdxLayer(file, _parse(file, None), cache, 0)]
    try:
        refuse_larger(layers[0].size, options)
        if options.untrusted:
            if layers[0].header.parent:
                raise RefusedError("has a parent, which --untrusted does not allow")
            bound_work(layers[0], cache)
        while parent := layers[-1].header.parent:
            if len(layers) == MAX_LAYERS:
                raise RefusedError(f"has more than {MAX_LAYERS - 1} parents")
            here = files[-1]
            with naming(here.name):
                files.append(open_beside(_name(parent), "parent", here, files, options))
            layers.append(_VhdxLayer(files[-1], _parse(files[-1], parent), cache, len(layers)))
        return LayeredSource("vhdx", layers, files)
    except BaseException:
        for other in files[1:]:
            other.close()
        raise


def _parse(file: HostFile, link: Parent | None) -> Header:
    """The header of FILE, which is what LINK says, if anything does."""
    with naming(file.name):
        header = parse(file.read_bytes, file.size)
        if link and header.data_guid not in link.guids:
            raise RefusedError("is not as it was when it became a parent: its GUID is another one")
    return header


def _name(parent: Parent) -> str:
    """The name of PARENT's file, in the same directory."""
    if parent.relative_path is None:
        raise RefusedError(f"has a parent, and does not record where it is from here: '{parent.other_path}'")
    return parent.relative_path.removeprefix(".\\").removeprefix("./")
