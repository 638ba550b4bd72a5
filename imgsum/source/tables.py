"""Tables in memory: slices of them, a bounded cache, and runs of entries found in C.

A slice may have thousands of entries that say one thing: those are compared many at a time. The 16 million of 1 TiB
take 0.2 s so, and a loop over them takes 3.75 s.
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
    """Big-endian entries of ENTRY_SIZE bytes -> integers. What is less than an entry at the end is dropped."""
    words = array("Q")
    words.frombytes(raw[: len(raw) // entry_size * entry_size])
    if sys.byteorder == "little":
        words.byteswap()
    return (words, None) if entry_size == 8 else (words[::2], words[1::2])


class TableCache:
    """Slices of tables, at most so many bytes of them, shared by all images of a chain and safe from any thread."""

    def __init__(self, limit: int = 8 * MIB) -> None:
        self._limit = limit
        self._size = 0
        self.loaded = 0
        """Bytes of all slices that were ever read, as far as they take memory."""
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[int, ...], Table] = OrderedDict()

    def get(self, key: tuple[int, ...], load: Callable[[], Table]) -> Table:
        """The slice of KEY, which tells all slices of all images apart, from LOAD where it isn't known."""
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
    """Bytes that a slice takes in the cache, with what Python and the cache have for each."""
    entries, bitmaps = table
    return 512 + 8 * (len(entries) + (0 if bitmaps is None else len(bitmaps)))


class Entries:
    """Tables of the file NAME, with entries of one kind. Safe from any thread."""

    def __init__(self, read: ReadBytes, name: str, code: str, cache: TableCache, number: int = 0) -> None:
        """READ reads the file. An entry is of CODE: `<I`, `>I` or `<Q`. NUMBER tells files that share CACHE apart."""
        self._read = read
        self._name = name
        self._code = code
        self._size = struct.calcsize(code)
        self._count = SLICE // self._size  # entries of a slice
        self._cache = cache
        self._number = number

    def stretches(self, offset: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Entries FIRST..LAST of the table at OFFSET of the file: (index, count, entry), COUNT that are alike.

        Lazily, a slice at a time. Raises TruncatedError where the file ends in them.
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


_SHORT = 32  # entries; runs up to this are found one by one, which takes 1.5 us, where the rest takes 7


class Progression:
    """Runs of entries that are each `step` more than the one before.

    Many entries are compared as one integer that has them for its 64-bit digits: 3 ns for each, where making and
    comparing an array takes 26 and a loop 50. What is wanted mostly is what was wanted last plus a constant.
    Safe from any thread: each change is of one reference.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        count = SLICE // 8
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
def progression(step: int) -> Progression:
    """The Progression of STEP, which is shared."""
    return Progression(step)


def _digits(entries: array[int]) -> int:
    """ENTRIES, the first one lowest, as one integer."""
    if sys.byteorder == "big":
        entries.byteswap()
    return int.from_bytes(entries.tobytes(), "little")
