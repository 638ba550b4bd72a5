"""VHDX's log: changes to tables that were written to the log, and perhaps not to their places ([MS-VHDX] 2.3).

They are replayed in memory: who reads a table through Tables reads what it is after them. The file stays as it is.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.units import MIB

PAGE = 4096
"""Bytes of a sector of the log, and of each change."""

_MAX_LOG = 8 * MIB  # bytes; writers use 1 MiB. A checksum of that takes 60 ms
_MAX_PAGES = 1 << 14  # that are changed
_ZERO_PAGE = bytes(PAGE)
_ENTRY = struct.Struct("<4sIIIQII16sQQ")
_DESCRIPTOR = struct.Struct("<4s4s8sQQ")
_ADVICE = "`qemu-img check -r all COPY` replays it in a copy"
_CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, its lowest bit first


class Log(NamedTuple):
    """What the current header says of the log. Place and length in bytes."""

    guid: bytes
    """Zeros: there is nothing in it."""
    version: int
    offset: int
    length: int


class _Entry(NamedTuple):
    """A valid entry of the log: a header, descriptors, and a sector for each descriptor of data."""

    at: int
    """Where it begins, in bytes of the log."""
    end: int
    """Where the next one begins: the log is a ring."""
    number: int
    tail: int
    """Where the first entry begins that must be replayed with this one."""
    descriptors: int
    flushed: int
    """Bytes that the file has at least."""
    raw: bytes


class Tables:
    """The file with the changes of its log, for tables. Safe from any thread."""

    def __init__(self, read: ReadBytes, pages: dict[int, bytes]) -> None:
        """READ reads the file. PAGES are the changes: {offset in the file: PAGE bytes}."""
        self._read = read
        self._pages = pages
        self._offsets = sorted(pages)

    def read(self, offset: int, length: int) -> bytes:
        """See ReadBytes."""
        raw = self._read(offset, length)
        if not self.is_changed(offset, length):
            return raw
        changed = bytearray(raw)
        for at in range(offset // PAGE * PAGE, offset + len(raw), PAGE):
            page = self._pages.get(at)
            if page is not None:
                begin, end = max(at, offset), min(at + PAGE, offset + len(raw))
                changed[begin - offset : end - offset] = page[begin - at : end - at]
        return bytes(changed)

    def is_changed(self, offset: int, length: int) -> bool:
        """Whether the log changes any of LENGTH bytes from OFFSET of the file."""
        index = bisect_left(self._offsets, offset - PAGE + 1)
        return index < len(self._offsets) and self._offsets[index] < offset + length


def replay(read: ReadBytes, file_size: int, log: Log) -> Tables:
    """The file of FILE_SIZE bytes that READ reads, with the changes of LOG.

    Raises FormatError, TruncatedError, and RefusedError where the log is too large.
    """
    if log.version or log.offset < MIB or log.offset % MIB or log.length % MIB:
        raise FormatError("is a VHDX whose header says of its log what can't be")
    pages: dict[int, bytes] = {}
    if any(log.guid) and log.length:
        if log.length > _MAX_LOG:
            raise RefusedError(f"is a VHDX with changes in a log of {log.length} bytes ({_ADVICE})")
        raw = read(log.offset, log.length)
        if len(raw) < log.length:
            raise TruncatedError("truncated: the file ends in its log")
        for entry in _newest(_entries(raw, log.guid)):
            if entry.flushed > file_size:
                raise TruncatedError(f"truncated: the file has {file_size} bytes, and its log is of {entry.flushed}")
            pages.update(_changes(entry))
            if len(pages) > _MAX_PAGES:
                raise RefusedError(f"is a VHDX with many changes in its log ({_ADVICE})")
    return Tables(read, pages)


def _entries(log: bytes, guid: bytes) -> list[_Entry]:
    """The valid entries in LOG. One that was not written to its end is none: its checksum is wrong."""
    ring = log + log
    entries = []
    left = 2 * len(log)  # bytes that may be checked: no writer's entries overlap, but for what is left of old ones
    for at in range(0, len(log), PAGE):
        if not log.startswith(b"loge", at):
            continue
        _, checksum, length, tail, number, descriptors, _, its_guid, flushed, _ = _ENTRY.unpack_from(log, at)
        if its_guid != guid or not number or not 0 < length <= len(log) or length % PAGE:
            continue
        left -= length
        if left < 0:
            raise RefusedError(f"is a VHDX with a log that is not understood ({_ADVICE})")
        raw = ring[at : at + length]
        if crc32c(raw, 4) == checksum and _ENTRY.size + descriptors * _DESCRIPTOR.size <= length:
            end = (at + length) % len(log)
            entries.append(_Entry(at, end, number, tail, descriptors, flushed, raw))
    return entries


def _newest(entries: list[_Entry]) -> list[_Entry]:
    """The entry with the largest number, after those that come directly before it.

    It says which of those is the first that counts. QEMU writes nonsense there, and replays all: that is no harm.
    """
    before = {(entry.number, entry.end): entry for entry in entries}
    entry: _Entry | None = max(entries, key=lambda entry: entry.number, default=None)
    chain: list[_Entry] = []
    while entry is not None:
        chain.insert(0, entry)
        if entry.at == chain[-1].tail:
            break
        entry = before.get((entry.number - 1, entry.at))
    return chain


def _changes(entry: _Entry) -> Iterator[tuple[int, bytes]]:
    """(offset in the file, PAGE bytes) of ENTRY, in order. Raises FormatError, RefusedError."""
    sector = -(-(_ENTRY.size + entry.descriptors * _DESCRIPTOR.size) // PAGE) * PAGE
    for index in range(entry.descriptors):
        at = _ENTRY.size + index * _DESCRIPTOR.size
        signature, trailing, leading, offset, number = _DESCRIPTOR.unpack_from(entry.raw, at)
        good = number == entry.number and offset % PAGE == 0
        if good and signature == b"zero":
            length = int.from_bytes(leading, "little")
            if length > _MAX_PAGES * PAGE:
                raise RefusedError(f"is a VHDX with many changes in its log ({_ADVICE})")
            good = length % PAGE == 0
            yield from ((offset + done, _ZERO_PAGE) for done in range(0, length, PAGE))
        elif good and signature == b"desc":
            data = entry.raw[sector : sector + PAGE]
            sector += PAGE
            good = data[:4] == b"data" and data[4:8] + data[-4:] == struct.pack(
                "<II", number >> 32, number & 0xFFFFFFFF
            )
            yield offset, leading + data[8:-4] + trailing
        else:
            good = False
        if not good:
            raise FormatError("is a VHDX whose log is damaged")


def crc32c(raw: bytes, checksum_at: int) -> int:
    """The CRC-32C of RAW, with zeros for the checksum's 4 bytes in it. 60 ns a byte."""
    table = _crc_table()
    crc = 0xFFFFFFFF
    for byte in raw[:checksum_at] + bytes(4) + raw[checksum_at + 4 :]:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return table
