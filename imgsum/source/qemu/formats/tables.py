"""Tables of the formats that QEMU reads: how far into the file they refer, and no more work than the file is worth."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.units import KIB, MIB

_PART = 64 * KIB  # bytes of a table that are read at a time
_ZEROS = bytes(_PART)
_ZERO_PART = {code: array(code, [0]) for code in "IQ"}

_ZERO_BYTES = 256 * MIB
"""The most of tables that may be zeros, as those of a thin image are, and may lie in holes: 0.2 s."""
_MORE_THAN_ALLOCATED = 64 * MIB
"""What is read of other tables may be more by that than what the file has on the disk: some file systems compress."""
_LEAST = 2 * KIB  # what a read costs at least


class Entry(NamedTuple):
    """The entry with the largest offset."""

    entry: int
    number: int
    """Its index in the table, or in all tables of the second level laid end to end."""


def bounded_read(read: ReadBytes, allocated: int) -> ReadBytes:
    """READ, until more of it is used than tables of a file with so many ALLOCATED bytes can need."""
    zeros_left, others_left = _ZERO_BYTES, allocated + _MORE_THAN_ALLOCATED

    def bounded(offset: int, length: int) -> bytes:
        nonlocal zeros_left, others_left
        raw = read(offset, length)
        if raw == _ZEROS[: len(raw)]:
            zeros_left -= max(_LEAST, len(raw))
        else:
            others_left -= max(_LEAST, len(raw))
        if min(zeros_left, others_left) < 0:
            raise RefusedError("has tables that are larger than such a file can need")
        return raw

    return bounded


def header_of(read: ReadBytes, length: int) -> bytes:
    """The first LENGTH bytes. Raises TruncatedError."""
    header = read(0, length)
    if len(header) < length:
        raise TruncatedError("truncated: the file ends in its header")
    return header


def largest_of_tables(
    read: ReadBytes, tables: Iterator[tuple[int, int]], entries: int, code: str, total: int
) -> Entry | None:
    """As largest(), over all TABLES, which have ENTRIES each, and TOTAL together, that count."""
    found: Entry | None = None
    for number, offset in tables:
        last = largest(read, offset, min(entries, total - number * entries), code)
        if last and (found is None or last.entry > found.entry):
            found = Entry(last.entry, number * entries + last.number)
    return found


def largest(read: ReadBytes, offset: int, entries: int, code: str) -> Entry | None:
    """The largest of a table's ENTRIES; None where all are 0."""
    found: Entry | None = None
    for first, part in parts(read, offset, entries, code, "little"):
        largest = max(part)
        if largest and (found is None or largest > found.entry):
            found = Entry(largest, first + part.index(largest))
    return found


def last_below(read: ReadBytes, offset: int, entries: int, limit: int) -> Entry | None:
    """The largest of a table's ENTRIES of 32 bits that is less than LIMIT; None where there is none.

    Raises FormatError when two of them must be the same: each stands for a block of the file.
    """
    found: Entry | None = None
    below = 0
    for first, part in parts(read, offset, entries, "I", "little"):
        below += min(_PART // part.itemsize, entries - first)
        largest = max(part)
        if largest >= limit:
            below -= sum(part.count(entry) for entry in range(limit, 1 << 32))
            largest = max((entry for entry in part if entry < limit), default=-1)
        if largest >= 0 and (found is None or largest > found.entry):
            found = Entry(largest, first + part.index(largest))
    if found and below > found.entry + 1:
        raise FormatError("is damaged: several blocks of its content are in one place of its file")
    return found


def nonzero(read: ReadBytes, offset: int, entries: int, code: str, order: str = "little") -> Iterator[tuple[int, int]]:
    """(index, entry) of a table, where the entry is not 0."""
    for first, part in parts(read, offset, entries, code, order):
        if any(part):
            yield from ((index, entry) for index, entry in enumerate(part, first) if entry)


def parts(read: ReadBytes, offset: int, entries: int, code: str, order: str) -> Iterator[tuple[int, array[int]]]:
    """A table in parts, each with the index of its first entry. Raises TruncatedError.

    A part of zeros has only one entry.
    """
    done = 0
    while done < entries:
        part = array(code)
        count = min(_PART // part.itemsize, entries - done)
        raw = read(offset + done * part.itemsize, count * part.itemsize)
        if len(raw) < count * part.itemsize:
            raise TruncatedError("truncated: the file ends in a table of its own")
        if raw == _ZEROS[: len(raw)]:
            yield done, _ZERO_PART[code]
            done += count
            continue
        part.frombytes(raw)
        if order != sys.byteorder:
            part.byteswap()
        yield done, part
        done += count


def refuse_part_of_a_sector(content: int) -> None:
    """Raise RefusedError for CONTENT bytes that are not whole sectors."""
    if content % 512:
        raise RefusedError(f"has {content} bytes of content, and QEMU would leave out the last {content % 512}")
