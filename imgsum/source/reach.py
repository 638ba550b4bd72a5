"""Whether an image's file has all that its tables refer to: QEMU takes what a file lacks for zeros, and says nothing.

For the formats that QEMU reads for us, and only as far as that takes: the data that lies last in the file. Layouts are
from QEMU's block/bochs.c, cloop.c, dmg.c, parallels.c, qcow.c and qed.h.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator
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


class _Last(NamedTuple):
    """The entry with the largest offset."""

    entry: int
    number: int
    """Its index in the table, or in all tables of the second level laid end to end."""


def check_reach(read: ReadBytes, size: int, format_name: str, allocated: int | None = None) -> None:
    """Raise TruncatedError if the file of SIZE bytes that READ reads lacks some of the content's data.

    What is read for that is in proportion to the ALLOCATED bytes of the file (None: all are): else RefusedError.
    """
    reach = _REACH.get(format_name)
    needed = reach(_bounded(read, size if allocated is None else allocated), size) if reach else 0
    if needed > size:
        raise TruncatedError(f"truncated or damaged: the file has {size} of at least {needed} bytes")


def _bounded(read: ReadBytes, allocated: int) -> ReadBytes:
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


def _header(read: ReadBytes, length: int) -> bytes:
    header = read(0, length)
    if len(header) < length:
        raise TruncatedError("truncated: the file ends in its header")
    return header


def _bochs(read: ReadBytes, size: int) -> int:
    header = _header(read, 512)
    version, start, entries, bitmap, extent = struct.unpack_from("<IIIII", header, 64)
    (content,) = struct.unpack_from("<Q", header, 84 if version == 0x10000 else 88)
    if not extent:
        return 0
    # Each extent's bitmap, which says what of it was ever written, lies before it.
    unit = 512 * (1 + (bitmap - 1 & 0xFFFFFFFF) // 512 + 1 + (extent - 1) // 512)
    last = _last_below(read, start, min(entries, -(-content // extent)), 0xFFFFFFFF)
    return int(start + 4 * entries + (last.entry + 1) * unit) if last else 0


def _cloop(read: ReadBytes, size: int) -> int:
    entries = int.from_bytes(_header(read, 136)[132:], "big") + 1
    for _ in _parts(read, 136, entries, "Q", "big"):
        pass  # raises what it raises
    table_end = 136 + 8 * entries
    return max(table_end, int.from_bytes(read(table_end - 8, 8), "big"))


def _qed(read: ReadBytes, size: int) -> int:
    header = _header(read, 64)
    cluster, table = struct.unpack_from("<II", header, 4)
    l1, content = struct.unpack_from("<QQ", header, 40)
    entries = table * cluster // 8
    if not entries:
        return 0
    clusters = -(-content // cluster)
    tables = _nonzero(read, l1, min(entries, -(-clusters // entries)), "Q")
    last = _last_of_tables(read, tables, entries, "Q", clusters)
    if last is None or last.entry < cluster:  # 1: a cluster of zeros
        return 0
    return last.entry + int(min(cluster, content - last.number * cluster))


def _qcow(read: ReadBytes, size: int) -> int:
    header = _header(read, 48)
    content, cluster_bits, l2_bits = struct.unpack_from(">QBB", header, 24)
    l1 = int.from_bytes(header[40:48], "big")
    if not (9 <= cluster_bits <= 16 and 6 <= l2_bits <= 13):
        return 0
    cluster, needed = 1 << cluster_bits, 0
    tables = _nonzero(read, l1, -(-content >> cluster_bits + l2_bits), "Q", "big")
    for table, offset in tables:
        for index, entry in _nonzero(read, offset, 1 << l2_bits, "Q", "big"):
            if entry >> 63:  # compressed: its length is above its offset
                offset_bits = 63 - cluster_bits
                end = (entry & (1 << offset_bits) - 1) + (entry >> offset_bits & cluster - 1)
            else:
                end = entry + min(cluster, content - ((table << l2_bits) + index) * cluster)
            needed = max(needed, end)
    return needed


def _parallels(read: ReadBytes, size: int) -> int:
    header = _header(read, 64)
    tracks, entries, sectors = struct.unpack_from("<IIQ", header, 28)
    if not tracks:
        return 0
    unit = tracks if header.startswith(b"WithouFreSpacExt") else 1
    last = _last(read, 64, min(entries, -(-sectors // tracks)), "I")
    return 0 if last is None else (last.entry * unit + int(min(tracks, sectors - last.number * tracks))) * 512


def _last_of_tables(
    read: ReadBytes, tables: Iterator[tuple[int, int]], entries: int, code: str, total: int
) -> _Last | None:
    """As _last(), over all TABLES, which have ENTRIES each, and TOTAL together, that count."""
    found: _Last | None = None
    for number, offset in tables:
        last = _last(read, offset, min(entries, total - number * entries), code)
        if last and (found is None or last.entry > found.entry):
            found = _Last(last.entry, number * entries + last.number)
    return found


def _last(read: ReadBytes, offset: int, entries: int, code: str) -> _Last | None:
    """The largest of a table's ENTRIES; None where all are 0."""
    found: _Last | None = None
    for first, part in _parts(read, offset, entries, code, "little"):
        largest = max(part)
        if largest and (found is None or largest > found.entry):
            found = _Last(largest, first + part.index(largest))
    return found


def _last_below(read: ReadBytes, offset: int, entries: int, limit: int) -> _Last | None:
    """The largest of a table's ENTRIES of 32 bits that is less than LIMIT; None where there is none.

    Raises FormatError when two of them must be the same: each stands for a block of the file.
    """
    found: _Last | None = None
    below = 0
    for first, part in _parts(read, offset, entries, "I", "little"):
        below += min(_PART // part.itemsize, entries - first)
        largest = max(part)
        if largest >= limit:
            below -= sum(part.count(entry) for entry in range(limit, 1 << 32))
            largest = max((entry for entry in part if entry < limit), default=-1)
        if largest >= 0 and (found is None or largest > found.entry):
            found = _Last(largest, first + part.index(largest))
    if found and below > found.entry + 1:
        raise FormatError("is damaged: several blocks of its content are in one place of its file")
    return found


def _nonzero(read: ReadBytes, offset: int, entries: int, code: str, order: str = "little") -> Iterator[tuple[int, int]]:
    """(index, entry) of a table, where the entry is not 0."""
    for first, part in _parts(read, offset, entries, code, order):
        if any(part):
            yield from ((index, entry) for index, entry in enumerate(part, first) if entry)


def _parts(read: ReadBytes, offset: int, entries: int, code: str, order: str) -> Iterator[tuple[int, array[int]]]:
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


_REACH: dict[str, Callable[[ReadBytes, int], int]] = {
    "bochs": _bochs,
    "cloop": _cloop,
    "parallels": _parallels,
    "qcow": _qcow,
    "qed": _qed,
}
