"""Tables in memory: slices of them, a bounded cache, and runs of entries found in C.

A slice can have thousands of equal or consecutive entries. These are compared many at a time: the 16 million entries of
1 TiB take 0.2 s, and 3.75 s in a loop.
"""

from __future__ import annotations

import struct
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache

from imgsum.errors import TruncatedError
from imgsum.source import ReadBytes
from imgsum.units import KIB, MIB

SLICE = 32 * KIB
"""Bytes of a table that are read at once: 256 MiB of content with 64 KiB clusters. A chain needs one for each image."""

Table = tuple["array[int]", "array[int] | None"]
"""A slice of a table: its entries, and for extended L2 entries their bitmaps."""


def decode(raw: bytes, entry_size: int) -> Table:
    """Big-endian entries of ENTRY_SIZE bytes, 8 or 16, as integers. An incomplete entry at the end is dropped."""
    numbers = array("Q")
    numbers.frombytes(raw[: len(raw) // entry_size * entry_size])
    if sys.byteorder == "little":
        numbers.byteswap()
    return (numbers, None) if entry_size == 8 else (numbers[::2], numbers[1::2])


class TableCache:
    """The slices used last, up to a limit in bytes. All images of a chain share it. Safe from any thread."""

    def __init__(self, limit: int = 8 * MIB) -> None:
        self._limit = limit
        self._size = 0
        self.loaded = 0
        """Bytes of memory for all slices read so far, including those that were dropped since."""
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[int, ...], Table] = OrderedDict()

    def get(self, key: tuple[int, ...], load: Callable[[], Table]) -> Table:
        """The slice of KEY, which is unique among all images. LOAD() reads it if it is not cached."""
        with self._lock:
            table = self._tables.get(key)
            if table is not None:
                self._tables.move_to_end(key)
                return table
        table = load()  # not under the lock: that two threads read the same slice is rare, and harmless
        with self._lock:
            self.loaded += _cost(table)
            if key not in self._tables:
                self._size += _cost(table)
            self._tables[key] = table
            while self._size > self._limit and len(self._tables) > 1:
                self._size -= _cost(self._tables.popitem(last=False)[1])
        return table


def _cost(table: Table) -> int:
    """Bytes of memory that a slice takes in the cache: its numbers, and 512 bytes of overhead."""
    entries, bitmaps = table
    return 512 + 8 * (len(entries) + (0 if bitmaps is None else len(bitmaps)))


class Entries:
    """Tables with 32-bit or 64-bit entries in one file. Safe from any thread."""

    def __init__(self, read: ReadBytes, name: str, code: str, cache: TableCache, number: int = 0) -> None:
        """READ reads the file NAME. CODE is the struct format of an entry: `<I`, `>I` or `<Q`.

        NUMBER is the file's among those that share CACHE.
        """
        self._read = read
        self._name = name
        self._code = code
        self._size = struct.calcsize(code)
        self._count = SLICE // self._size  # entries of a slice
        self._cache = cache
        self._number = number

    def stretches(self, offset: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Entries FIRST..LAST of the table at OFFSET of the file, as (index, count, entry): COUNT equal entries.

        Reads a slice at a time. Raises TruncatedError if the file ends before entry LAST.
        """
        while first < last:
            start = first // self._count * self._count
            stop = min(last, start + self._count)
            entries = self._slice(offset + start * self._size)
            if len(entries) < stop - start:
                raise TruncatedError("truncated: the file ends in one of its tables", name=self._name)
            while first < stop:
                entry = entries[first - start]
                same = progression(0).length(entries, first - start, stop - start)
                yield first, same, entry
                first += same

    def _slice(self, offset: int) -> array[int]:
        return self._cache.get((self._number, offset, self._size), lambda: self._load(offset))[0]

    def _load(self, offset: int) -> Table:
        raw = self._read(offset, SLICE)
        count = len(raw) // self._size
        # Widening another array takes three times as long.
        return array("Q", struct.unpack_from(f"{self._code[0]}{count}{self._code[1]}", raw)), None


_SHORT = 32  # entries are compared one by one first: up to 1.5 us, and the big integers take 7


class Progression:
    """Finds runs of entries in which each is `step` more than the one before.

    The entries of a slice are compared as one big integer with a 64-bit digit for each: 3 ns for an entry, where
    comparing arrays takes 26 and a loop 50. The first entry is the lowest digit. With step 0x10000:

        entries              0x50000  0x60000  0x70000  0x90000
        expected             0x50000  0x60000  0x70000  0x80000
        entries ^ expected         0        0        0  0x10000

    The lowest bit that is set is bit 16 of digit 3, so the run has 3 entries.

    The expected digits are kept, as the next run mostly starts at another entry: adding the same number to every
    digit gives those. Safe from any thread: a change replaces one reference.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        count = SLICE // 8
        ramp = _digits(array("Q", range(0, count * step, step))) if step else 0
        self._last = (0, ramp)
        ones = _digits(array("Q", [1]) * count)
        self._of_all = lru_cache(maxsize=4)(ones.__mul__)

    def length(self, entries: array[int], index: int, last: int) -> int:
        """The length of the run that starts at entry INDEX, before LAST; at least 1.

        The caller guarantees entry + count * step < 2**64, so no digit carries into the next.
        """
        expected, stop, at = entries[index], min(last, index + _SHORT), index
        while at < stop and entries[at] == expected:
            at += 1
            expected += self._step
        if at < stop or at == last:
            return at - index
        count = last - index
        mask = (1 << (64 * count)) - 1
        differences = _digits(entries[index:last]) ^ (self._from(entries[index]) & mask)
        if not differences:
            return count
        lowest_bit = (differences & -differences).bit_length() - 1
        return lowest_bit // 64

    def _from(self, first: int) -> int:
        """The digits FIRST, FIRST + step, FIRST + 2 * step ..., one for each entry of a slice."""
        last, digits = self._last
        if first != last:
            digits += self._of_all(first - last)
            self._last = first, digits
        return digits


@lru_cache(maxsize=4)
def progression(step: int) -> Progression:
    """The Progression of STEP. There is one for all who ask."""
    return Progression(step)


def _digits(entries: array[int]) -> int:
    """ENTRIES as one integer of 64-bit digits, the first one lowest."""
    if sys.byteorder == "big":
        entries.byteswap()
    return int.from_bytes(entries.tobytes(), "little")
