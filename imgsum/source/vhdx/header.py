"""VHDX: headers, region tables and metadata ([MS-VHDX] 2.2 to 2.6). Numbers are little-endian."""

from __future__ import annotations

import struct
from typing import NamedTuple

from imgsum.errors import FormatError, RefusedError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.source.vhdx.log import Log, Tables, crc32c, replay
from imgsum.units import KIB, MIB, TIB

_SECTION = MIB  # bytes for the headers and region tables, at the file's beginning
_HEADERS = (64 * KIB, 128 * KIB)
_HEADER = struct.Struct("<4sIQ16s16s16sHHIQ")
_HEADER_LENGTH = 4 * KIB  # that its checksum is of
_REGION_TABLES = (192 * KIB, 256 * KIB)
_TABLE_LENGTH = 64 * KIB
_MAX_ENTRIES = 2047
_MAX_SIZE = 64 * TIB
_MAX_LOCATOR = 64 * KIB
_HAS_PARENT = 2


def _guid(text: str) -> bytes:
    """How a file has the GUID that is written so: its first three numbers are little-endian."""
    raw = bytes.fromhex(text.replace("-", ""))
    return raw[3::-1] + raw[5:3:-1] + raw[7:5:-1] + raw[8:]


_BAT = _guid("2dc27766-f623-4200-9d64-115e9bfd4a08")
_METADATA = _guid("8b7ca206-4790-4b9a-b8fe-575f050f886e")

_PARAMETERS = _guid("caa16737-fa36-4d43-b3b6-33f0aa44e76b")
_DISK_SIZE = _guid("2fa54224-cd1b-4876-b211-5dbed83bf4b8")
_DISK_ID = _guid("beca12ab-b2e6-4523-93ef-c309e000c746")
_LOGICAL_SECTOR = _guid("8141bf1d-a96f-4709-ba47-f233a8faab5f")
_PHYSICAL_SECTOR = _guid("cda348c7-445d-4471-9cc9-e9885251c556")
_PARENT_LOCATOR = _guid("a8d35f2d-b30b-454d-abf7-d3d84834ab0c")
_ITEMS = (_PARAMETERS, _DISK_SIZE, _DISK_ID, _LOGICAL_SECTOR, _PHYSICAL_SECTOR)

_VHDX_PARENT = _guid("b04aefb7-d19e-4a81-b789-25b8e9445913")


class Parent(NamedTuple):
    """What a differencing VHDX says of its parent."""

    guids: tuple[bytes, ...]
    """Its parent's data_guid is one of them."""
    relative_path: str | None
    """As Windows writes paths."""
    other_path: str | None
    """An absolute one."""


class Header(NamedTuple):
    """What counts of a VHDX but its block allocation table (BAT). Places and lengths in bytes."""

    tables: Tables
    size: int
    """Bytes of content."""
    block_size: int
    sector_size: int
    """The logical one."""
    bat: int
    bat_entries: int
    reserved: tuple[tuple[int, int], ...]
    """(begin, end) of all that can't have content: headers, log, regions."""
    data_guid: bytes
    """Another one after each change of the content."""
    parent: Parent | None

    @property
    def chunk_ratio(self) -> int:
        """How many blocks one block of the sector bitmap, of 1 MiB, is for."""
        return (8 * MIB) * self.sector_size // self.block_size


def parse(read: ReadBytes, file_size: int) -> Header:
    """What the file of FILE_SIZE bytes that READ reads says. Raises FormatError, TruncatedError, RefusedError."""
    if read(0, 8) != b"vhdxfile":
        raise FormatError("is not a VHDX image: it does not begin as one")
    if file_size < _SECTION:
        raise TruncatedError("truncated: the file ends in its headers")
    data_guid, log = _current_header(read)
    tables = replay(read, file_size, log)
    regions = _regions(read)
    reserved = [(0, _SECTION), (log.offset, log.offset + log.length)]
    for offset, length in regions.values():
        if any(offset < end and begin < offset + length for begin, end in reserved):
            raise FormatError("is a VHDX with regions that overlap")
        reserved.append((offset, offset + length))
    items = _metadata(tables, regions[_METADATA])
    block_size, flags = struct.unpack("<II", items[_PARAMETERS])
    (size,) = struct.unpack("<Q", items[_DISK_SIZE])
    (sector_size,) = struct.unpack("<I", items[_LOGICAL_SECTOR])
    if not MIB <= block_size <= 256 * MIB or block_size & block_size - 1 or sector_size not in (512, 4096):
        raise FormatError(f"is a VHDX with blocks of {block_size} bytes and sectors of {sector_size}, which can't be")
    if not size or size % sector_size or size > _MAX_SIZE:
        raise FormatError(f"is a VHDX of {size} bytes, which can't be with sectors of {sector_size}")
    bat, bat_length = regions[_BAT]
    header = Header(tables, size, block_size, sector_size, bat, 0, tuple(reserved), data_guid, None)
    blocks = -(-size // block_size)
    needed = blocks + (blocks - 1) // header.chunk_ratio  # the last chunk's sector bitmap comes after its blocks
    if flags & _HAS_PARENT:
        needed = -(-blocks // header.chunk_ratio) * (header.chunk_ratio + 1)
        header = header._replace(parent=_parent(items.get(_PARENT_LOCATOR)))
    elif _PARENT_LOCATOR in items:
        raise FormatError("is a VHDX that names a parent, and says that it has none")
    if needed * 8 > bat_length:
        raise FormatError(f"is a VHDX of {size} bytes whose block allocation table is too short")
    if bat + needed * 8 > file_size:
        raise TruncatedError("truncated: the file ends in its block allocation table")
    return header._replace(bat_entries=needed)


def _current_header(read: ReadBytes) -> tuple[bytes, Log]:
    """The data's GUID and the log, of the valid header with the larger sequence number."""
    valid = []
    for at in _HEADERS:
        raw = read(at, _HEADER_LENGTH)
        if len(raw) < _HEADER_LENGTH:
            raise TruncatedError("truncated: the file ends in its headers")
        signature, checksum, sequence, _, data_guid, log_guid, log_version, version, length, offset = (
            _HEADER.unpack_from(raw)
        )
        if signature == b"head" and version == 1 and crc32c(raw, 4) == checksum:
            valid.append((sequence, raw[8 : _HEADER.size], data_guid, Log(log_guid, log_version, offset, length)))
    if not valid:
        raise FormatError("is a VHDX without a valid header: both are damaged")
    # Disk2vhd writes the same header twice, with the same number.
    if len(valid) == 2 and valid[0][0] == valid[1][0] and valid[0][1] != valid[1][1]:
        raise FormatError("is a VHDX whose two headers disagree")
    return max(valid, key=lambda one: one[0])[2:]


def _regions(read: ReadBytes) -> dict[bytes, tuple[int, int]]:
    """(offset, length) of each region, by the table that is valid: both are the same, or one is damaged."""
    first, second = (read(at, _TABLE_LENGTH) for at in _REGION_TABLES)
    valid = [raw for raw in {first: 0, second: 0} if _is_region_table(raw)]
    if not valid:
        raise FormatError("is a VHDX without a valid region table: both are damaged")
    if len(valid) == 2:
        raise FormatError("is a VHDX whose two region tables disagree")
    regions: dict[bytes, tuple[int, int]] = {}
    (count,) = struct.unpack_from("<I", valid[0], 8)
    for at in range(16, 16 + 32 * min(count, _MAX_ENTRIES), 32):
        guid, offset, length, required = struct.unpack_from("<16sQII", valid[0], at)
        if guid in regions:
            raise FormatError("is a VHDX that has a region twice")
        if required & 1 and guid not in (_BAT, _METADATA):
            raise RefusedError("is a VHDX with a region that is required and not known")
        if offset % MIB or length % MIB or offset >> 63:
            raise FormatError("is a VHDX with a region that is not at a multiple of 1 MiB")
        regions[guid] = offset, length
    if count > _MAX_ENTRIES or not {_BAT, _METADATA} <= regions.keys():
        raise FormatError("is a VHDX whose region table lacks a region")
    return regions


def _is_region_table(raw: bytes) -> bool:
    if len(raw) < _TABLE_LENGTH:
        raise TruncatedError("truncated: the file ends in its region tables")
    return raw.startswith(b"regi") and crc32c(raw, 4) == int.from_bytes(raw[4:8], "little")


def _metadata(tables: Tables, region: tuple[int, int]) -> dict[bytes, bytes]:
    """The metadata items that are known."""
    begin, region_length = region
    raw = tables.read(begin, _TABLE_LENGTH)
    if len(raw) < _TABLE_LENGTH:
        raise TruncatedError("truncated: the file ends in its metadata")
    (count,) = struct.unpack_from("<H", raw, 10)
    if not raw.startswith(b"metadata") or count > _MAX_ENTRIES:
        raise FormatError("is a VHDX whose metadata is damaged")
    lengths = {_PARAMETERS: 8, _DISK_SIZE: 8, _DISK_ID: 16, _LOGICAL_SECTOR: 4, _PHYSICAL_SECTOR: 4}
    items: dict[bytes, bytes] = {}
    for at in range(32, 32 + 32 * count, 32):
        guid, offset, length, flags = struct.unpack_from("<16sIII", raw, at)
        if guid not in lengths and guid != _PARENT_LOCATOR:
            if flags & 4:
                raise RefusedError("is a VHDX with metadata that is required and not known")
            continue
        length = lengths.get(guid, length)
        if guid in items or offset < _TABLE_LENGTH or offset + length > region_length or length > _MAX_LOCATOR:
            raise FormatError("is a VHDX whose metadata is damaged")
        items[guid] = tables.read(begin + offset, length)
        if len(items[guid]) < length:
            raise TruncatedError("truncated: the file ends in its metadata")
    if not lengths.keys() <= items.keys():
        raise FormatError("is a VHDX whose metadata lacks an item")
    return items


def _parent(locator: bytes | None) -> Parent:
    """What the parent LOCATOR says: pairs of strings, UTF-16 ([MS-VHDX] 2.6.2.6)."""
    if locator is None or len(locator) < 20:
        raise RefusedError("is a differencing VHDX that does not name its parent (merge it with its parent first)")
    kind, _, count = struct.unpack_from("<16sHH", locator)
    if kind != _VHDX_PARENT:
        raise RefusedError("is a differencing VHDX whose parent is of an unknown kind")
    pairs = {}
    for at in range(20, min(20 + 12 * count, len(locator) - 11), 12):
        key_at, value_at, key_length, value_length = struct.unpack_from("<IIHH", locator, at)
        key, value = (
            locator[begin : begin + length].decode("utf-16-le", "surrogatepass" if length % 2 == 0 else "replace")
            for begin, length in ((key_at, key_length), (value_at, value_length))
        )
        pairs[key] = value
    guids = []
    for key in ("parent_linkage", "parent_linkage2"):
        try:
            guids.append(_guid(pairs.get(key, "").strip("{}")))
        except ValueError:
            raise FormatError("is a differencing VHDX whose parent has no valid GUID") from None
    if not any(guids):
        raise FormatError("is a differencing VHDX whose parent has no valid GUID")
    return Parent(
        tuple(guid for guid in guids if len(guid) == 16),
        pairs.get("relative_path"),
        pairs.get("absolute_win32_path") or pairs.get("volume_path"),
    )
