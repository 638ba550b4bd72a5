"""DMG (UDIF): the trailer, and the tables of chunks that it refers to. Source: QEMU's block/dmg.c."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError
from imgsum.source import ReadBytes
from imgsum.source.qemu.formats.links import Links
from imgsum.units import MIB

_TABLES_LIMIT = 16 * MIB  # QEMU's for the property list: some 300,000 chunks
_WHITE = b" \t\r\n"
_STEP = 64 * 1024  # characters of base64 that are decoded at a time, without white space: a multiple of 4

_CHUNK = struct.Struct(">IIQQQQ")
_CHUNKS_AT = 204  # in a block table
_RAW = 1
_KNOWN = (0, _RAW, 2, 0x80000005, 0x80000006, 0x80000007)  # zeros, raw, ignored, zlib, bzip2, lzfse
_COMMENT, _END = 0x7FFFFFFE, 0xFFFFFFFF
_OTHER = {0x80000004: "ADC", 0x80000008: "lzma"}

_CONVERT = "convert it on a Mac first: hdiutil convert IMAGE -format UDZO -o NEW"


class Trailer(NamedTuple):
    """The last 512 bytes. Offsets and lengths in bytes."""

    at: int
    """Where it begins."""
    data: int
    fork: int
    fork_length: int
    xml: int
    xml_length: int
    sectors: int
    """Of content."""


def read_trailer(read: ReadBytes, size: int) -> Trailer:
    """The trailer of the file of SIZE bytes. Raises FormatError."""
    # QEMU looks for it in more than the last sector, and takes a part of one.
    start = max(0, size - 1023)
    raw = read(start, 1023)
    found = raw.find(b"koly")
    if found < 0:
        raise FormatError("is not a dmg image: it has no trailer")
    raw = raw[found : found + 512]
    if len(raw) < 512:
        raise FormatError("is a dmg image whose trailer is not whole")
    (data,) = struct.unpack_from(">Q", raw, 0x18)
    fork, fork_length = struct.unpack_from(">QQ", raw, 0x28)
    xml, xml_length = struct.unpack_from(">QQ", raw, 0xD8)
    (sectors,) = struct.unpack_from(">Q", raw, 0x1EC)
    return Trailer(start + found, data, fork, fork_length, xml, xml_length, sectors)


def inspect(read: ReadBytes, size: int) -> Links:
    """See formats.FORMATS."""
    trailer = read_trailer(read, size)
    check_chunks(read, trailer)
    return Links(size=trailer.sectors * 512)


def check_chunks(read: ReadBytes, trailer: Trailer) -> None:
    """Raise FormatError unless the chunks make up TRAILER's sectors; RefusedError for chunks that QEMU can't read."""
    end = 0
    for first, table in _block_tables(read, trailer):
        for kind, _, start, count, offset, length in _CHUNK.iter_unpack(table):
            if kind in _OTHER:
                raise RefusedError(f"is a dmg with {_OTHER[kind]} chunks, which QEMU can't read: {_CONVERT}")
            if kind not in _KNOWN:
                if kind in (_COMMENT, _END):
                    continue
                raise RefusedError(f"is a dmg with chunks of a kind that QEMU can't read: {kind:#x}")
            if first + start != end:
                raise FormatError(f"is a dmg whose chunks leave a gap or overlap at sector {end}")
            end += count
            if kind == _RAW and length != count * 512:
                raise FormatError(f"is a dmg with a raw chunk of {count} sectors, for which {length} bytes are stored")
            if kind not in (0, 2) and trailer.data + offset + length > trailer.at:
                raise FormatError("is a dmg with a chunk that lies outside its file")
    if end != trailer.sectors:
        raise FormatError(
            f"is a dmg that says its size twice, and differently: {trailer.sectors} sectors in its trailer and {end} in"
            " its tables"
        )


def _block_tables(read: ReadBytes, trailer: Trailer) -> Iterator[tuple[int, bytes]]:
    """Each block table, as its first sector and its chunks, whole entries of 40 bytes."""
    blobs = _from_resource_fork(read, trailer) if trailer.fork_length else _from_property_list(read, trailer)
    for blob in blobs:
        # QEMU takes nothing else for a block table.
        if blob.startswith(b"mish") and len(blob) >= 244:
            (first,) = struct.unpack_from(">Q", blob, 8)
            yield first, blob[_CHUNKS_AT : len(blob) - (len(blob) - _CHUNKS_AT) % _CHUNK.size]


def _from_resource_fork(read: ReadBytes, trailer: Trailer) -> Iterator[bytes]:
    start, length = struct.unpack(">I4xI", read(trailer.fork, 12).ljust(12, b"\0"))
    _refuse_large(length)
    at = trailer.fork + start
    end = at + length
    while at < end:
        count = int.from_bytes(read(at, 4), "big")
        if not 0 < count <= end - at:
            raise FormatError("is a dmg whose resource fork is damaged")
        yield read(at + 4, count)
        at += 4 + count


def _from_property_list(read: ReadBytes, trailer: Trailer) -> Iterator[bytes]:
    _refuse_large(trailer.xml_length)
    text = read(trailer.xml, trailer.xml_length)
    at = text.find(b"<data>")
    while at >= 0:
        end = text.find(b"</data>", at)
        if end < 0:
            raise FormatError("is a dmg whose property list is damaged")
        yield _base64(text, at + len(b"<data>"), end)
        at = text.find(b"<data>", end)


def _base64(text: bytes, at: int, end: int) -> bytes:
    """What TEXT has between AT and END, decoded a part at a time: of a table of 16 MiB there is no second copy."""
    decoded, rest = bytearray(), b""
    try:
        for start in range(at, end, _STEP):
            part = rest + text[start : min(start + _STEP, end)].translate(None, _WHITE)
            whole = len(part) // 4 * 4
            decoded += binascii.a2b_base64(part[:whole])
            rest = part[whole:]
        decoded += binascii.a2b_base64(rest)
    except binascii.Error as error:
        raise FormatError(f"is a dmg whose property list is damaged: {error}") from error
    return bytes(decoded)


def _refuse_large(length: int) -> None:
    if length > _TABLES_LIMIT:
        raise RefusedError(f"is a dmg with {length} bytes of tables, more than the {_TABLES_LIMIT} that are read")
