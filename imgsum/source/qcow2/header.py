"""qcow2's header, header extensions and snapshot table: bytes -> records, each field checked against its limit.

Pure parsing (spec: docs/interop/qcow2.txt, `Header`, `Header extensions`, `Snapshots`). The limits are those of QEMU's
driver. Every field is checked before it is used as the size of anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from imgsum.errors import FormatError, OpenError, TruncatedError
from imgsum.source import ReadBytes
from imgsum.units import KIB, MAX_SIZE, MIB

MAGIC = b"QFI\xfb"
DEFLATE, ZSTD = 0, 1
"""Compression types."""

_FIXED = struct.Struct(">4sIQIIQIIQQIIQ")  # 72 bytes: all of version 2's header
_FEATURES = struct.Struct(">QQQII")  # version 3 goes on with 32 bytes
_V2_LENGTH, _V3_LENGTH = 72, 104
_SNAPSHOT = struct.Struct(">QIHHIIQII")

_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED_L2 = (1 << bit for bit in range(5))
_BITMAPS, _DATA_FILE_RAW = 1 << 0, 1 << 1  # autoclear features

_EXT_END = 0
_EXT_BACKING_FORMAT = 0xE2792ACA
_EXT_FEATURE_NAMES = 0x6803F857
_EXT_DATA_FILE = 0x44415441
_EXT_BITMAPS = 0x23852875

_MAX_EXTENSIONS = 1024  # QEMU has no limit, and writes 4; a header of 2 MiB has room for 262144
_MAX_L1_BYTES = 32 * MIB
_MAX_REFCOUNT_TABLE_BYTES = 8 * MIB
_MAX_SNAPSHOTS = 65536
_MAX_SNAPSHOT_TABLE_BYTES = 64 * MIB
_MAX_SNAPSHOT_EXTRA = 1024
_MAX_BACKING_NAME = 1023
_MAX_BACKING_FORMAT = 15
_MAX_PATH = 4 * KIB


class Header(NamedTuple):
    """What reading needs to know of an image. Sizes and offsets in bytes."""

    version: int
    cluster_bits: int
    size: int
    """Of the content: the header's size rounded down to whole sectors of 512 bytes, as QEMU does."""
    crypt_method: int
    """0: not encrypted. Anything else is for QEMU to read."""
    l1_size: int
    """Entries of the L1 table, at least as many as `size` needs."""
    l1_offset: int
    refcount_table_offset: int
    refcount_table_clusters: int
    snapshots_offset: int
    snapshot_count: int
    backing_file: bytes | None
    backing_format: str | None
    data_file: bytes | None
    """The name of the external data file, if the image has one and records its name."""
    has_data_file: bool
    """The content is in an external data file, at the same offsets."""
    compression: int
    extended_l2: bool
    """L2 entries have 16 bytes, and clusters 32 subclusters."""
    corrupt: bool
    """The image is marked as corrupt. QEMU opens such images only for reading."""
    bitmaps: bytes | None = None
    """The bitmaps extension, if there is one: see bitmaps.py."""
    bitmaps_consistent: bool = False
    """The last writer supports bitmaps, so they are up to date."""

    @property
    def cluster_size(self) -> int:
        """Bytes of a cluster: 512 to 2 MiB."""
        return 1 << self.cluster_bits

    @property
    def l2_bits(self) -> int:
        """Log2 of the entries of an L2 table, which has one cluster."""
        return self.cluster_bits - (4 if self.extended_l2 else 3)

    @property
    def l1_needed(self) -> int:
        """How many L1 entries `size` needs."""
        return -(-self.size >> (self.cluster_bits + self.l2_bits))


class Snapshot(NamedTuple):
    """An entry of the snapshot table: another L1 table for the same clusters."""

    id: bytes
    name: bytes
    l1_offset: int
    l1_size: int
    disk_size: int | None
    """Bytes of the disk when the snapshot was taken; None when that is not recorded (version 2)."""


def parse(read: ReadBytes) -> Header:
    """The header of the file that READ reads. Raises FormatError or TruncatedError: not qcow2, or not readable."""
    raw = read(0, _V3_LENGTH + 1)
    if not raw.startswith(MAGIC):
        raise FormatError("is not a qcow2 image: no magic at its start")
    _require(raw, 8, "the header")
    version = int.from_bytes(raw[4:8], "big")
    if version not in (2, 3):
        raise FormatError(f"qcow2 version {version} is not known (2 and 3 are; 1 is the format qcow)")
    _require(raw, _V2_LENGTH if version == 2 else _V3_LENGTH, "the header")
    (
        _, _, backing_offset, backing_length, cluster_bits, size, crypt_method, l1_size, l1_offset,
        refcount_offset, refcount_clusters, snapshot_count, snapshots_offset,
    ) = _FIXED.unpack_from(raw)  # fmt: skip
    incompatible = autoclear = 0
    refcount_order, header_length = 4, _V2_LENGTH  # version 2: extensions begin where version 3 has features
    if version == 3:
        incompatible, _, autoclear, refcount_order, header_length = _FEATURES.unpack_from(raw, _V2_LENGTH)

    _check("cluster_bits", cluster_bits, 9 <= cluster_bits <= 21, "not 9 to 21")
    cluster_size = 1 << cluster_bits
    if version == 3:
        valid = _V3_LENGTH <= header_length <= cluster_size
        _check("header_length", header_length, valid, f"not {_V3_LENGTH} to the cluster size, {cluster_size}")
    _check("backing_file_offset", backing_offset, backing_offset <= cluster_size, f"not in the first {cluster_size}")
    extensions = _extensions(read, header_length, backing_offset or cluster_size)
    _check_features(incompatible, extensions.feature_names)
    extended_l2 = bool(incompatible & _EXTENDED_L2)
    if extended_l2:
        _check("cluster_bits", cluster_bits, cluster_bits >= 14, "less than 14, which extended L2 entries need")
    _check("crypt_method", crypt_method, crypt_method <= 2, "not known")
    _check("refcount_order", refcount_order, refcount_order <= 6, "more than 6")
    _check("refcount_table_clusters", refcount_clusters, refcount_clusters > 0, "no table")
    for table in (
        _Table(
            "refcount_table_clusters", "refcount_table_offset", refcount_offset, refcount_clusters, cluster_size,
            _MAX_REFCOUNT_TABLE_BYTES,
        ),
        _Table(
            "nb_snapshots", "snapshots_offset", snapshots_offset, snapshot_count, _SNAPSHOT.size,
            _MAX_SNAPSHOTS * _SNAPSHOT.size,
        ),
        _Table("l1_size", "l1_table_offset", l1_offset, l1_size, 8, _MAX_L1_BYTES),
    ):  # fmt: skip
        _check_table(table, cluster_size)
    has_data_file = bool(incompatible & _DATA_FILE)
    raw_but_none = bool(autoclear & _DATA_FILE_RAW) and not has_data_file
    _check("autoclear_features", autoclear, not raw_but_none, "of an external data file, but there is none")

    header = Header(
        version=version,
        cluster_bits=cluster_bits,
        size=size // 512 * 512,
        crypt_method=crypt_method,
        l1_size=l1_size,
        l1_offset=l1_offset,
        refcount_table_offset=refcount_offset,
        refcount_table_clusters=refcount_clusters,
        snapshots_offset=snapshots_offset,
        snapshot_count=snapshot_count,
        backing_file=_backing_file(read, backing_offset, backing_length, cluster_size),
        backing_format=extensions.backing_format,
        data_file=extensions.data_file if has_data_file else None,
        has_data_file=has_data_file,
        compression=_compression(raw, header_length, incompatible),
        extended_l2=extended_l2,
        corrupt=bool(incompatible & _CORRUPT),
        bitmaps=extensions.bitmaps,
        bitmaps_consistent=bool(autoclear & _BITMAPS),
    )
    needed = -(-size >> (cluster_bits + header.l2_bits))  # of the size before rounding, as QEMU does
    _check("l1_size", l1_size, l1_size >= needed, f"less than {needed}, which a size of {size} needs")
    return header


def find_snapshot(read: ReadBytes, header: Header, wanted: bytes) -> Snapshot:
    """The snapshot whose ID, or else whose name, is WANTED. Raises OpenError where there is none, or FormatError."""
    named = None
    for snapshot in _snapshots(read, header):
        if snapshot.id == wanted:
            return snapshot
        if named is None and snapshot.name == wanted:
            named = snapshot
    if named is None:
        name = wanted.decode("utf-8", "surrogateescape")
        raise OpenError(f"has no snapshot '{name}' (`qemu-img snapshot -l` lists them)")
    return named


def at_snapshot(header: Header, snapshot: Snapshot) -> Header:
    """HEADER with the L1 table and the size of SNAPSHOT, as after `qemu-img snapshot -a`."""
    fields = "snapshot's l1_size", "snapshot's l1_table_offset"
    _check_table(_Table(*fields, snapshot.l1_offset, snapshot.l1_size, 8, _MAX_L1_BYTES), header.cluster_size)
    size = header.size if snapshot.disk_size is None else snapshot.disk_size // 512 * 512
    _check("snapshot's disk_size", size, size <= MAX_SIZE, "too large")
    return header._replace(l1_offset=snapshot.l1_offset, l1_size=snapshot.l1_size, size=size)


class _Table(NamedTuple):
    """A table that the header refers to, and its limit in bytes."""

    entries_field: str
    offset_field: str
    offset: int
    entries: int
    entry_size: int
    max_bytes: int


class _Extensions(NamedTuple):
    backing_format: str | None
    data_file: bytes | None
    feature_names: bytes
    bitmaps: bytes | None


def _extensions(read: ReadBytes, start: int, end: int) -> _Extensions:
    """The header extensions in START..END of the file, at most one cluster. Unknown ones are ignored."""
    backing_format = data_file = bitmaps = None
    feature_names = b""
    raw = read(0, end)
    at, count = start, 0
    while at < end:
        count += 1
        _check("the number of header extensions", count, count <= _MAX_EXTENSIONS, "too many")
        _require(raw, min(at + 8, end), "a header extension")
        kind, length = int.from_bytes(raw[at : at + 4], "big"), int.from_bytes(raw[at + 4 : at + 8], "big")
        at += 8
        _check(
            f"the length of header extension {kind:#x}", length, length <= end - at, f"more than the {end - at} left"
        )
        if kind == _EXT_END:
            break
        _require(raw, at + length, "a header extension")
        if kind == _EXT_BACKING_FORMAT:
            _check("the length of the backing format's name", length, length <= _MAX_BACKING_FORMAT, "too long")
            backing_format = _c_string(raw[at : at + length]).decode("ascii", "backslashreplace")
        elif kind == _EXT_DATA_FILE:
            data_file = _c_string(raw[at : at + length])
            _check("the length of the data file's name", len(data_file), len(data_file) <= _MAX_PATH, "too long")
        elif kind == _EXT_FEATURE_NAMES:
            feature_names = raw[at : at + length]
        elif kind == _EXT_BITMAPS:
            bitmaps = raw[at : at + length]
        at += -(-length // 8) * 8
    return _Extensions(backing_format or None, data_file or None, feature_names, bitmaps)


def _check_features(incompatible: int, names: bytes) -> None:
    """Raise FormatError for unknown incompatible features, with the name that the image has for the first."""
    unknown = incompatible & ~(_DIRTY | _CORRUPT | _DATA_FILE | _COMPRESSION | _EXTENDED_L2)
    if not unknown:
        return
    bit = (unknown & -unknown).bit_length() - 1
    name = ""
    for at in range(0, len(names) - 47, 48):  # type (0: incompatible), bit, 46 bytes of name
        if names[at] == 0 and names[at + 1] == bit:
            name = f" ('{_c_string(names[at + 2 : at + 48]).decode('utf-8', 'backslashreplace')}')"
    raise FormatError(f"incompatible_features is {incompatible:#x}: feature {bit}{name} is not known")


def _compression(raw: bytes, header_length: int, incompatible: int) -> int:
    compression = DEFLATE
    if header_length > _V3_LENGTH:
        _require(raw, _V3_LENGTH + 1, "the header")
        compression = raw[_V3_LENGTH]
    _check("compression_type", compression, compression in (DEFLATE, ZSTD), "not known")
    flagged = bool(incompatible & _COMPRESSION)
    _check("compression_type", compression, flagged == (compression != DEFLATE), "at odds with incompatible_features")
    return compression


def _backing_file(read: ReadBytes, offset: int, length: int, cluster_size: int) -> bytes | None:
    if not offset:
        return None
    maximum = min(_MAX_BACKING_NAME, cluster_size - offset)
    _check("backing_file_size", length, length <= maximum, f"more than {maximum}")
    name = read(offset, length)
    if len(name) < length:
        raise TruncatedError(f"truncated: the file ends at byte {offset + len(name)}, in the backing file's name")
    return _c_string(name) or None


def _snapshots(read: ReadBytes, header: Header) -> Iterator[Snapshot]:
    start = at = header.snapshots_offset
    for index in range(header.snapshot_count):
        what = f"entry {index} of the snapshot table"
        fixed = read(at, _SNAPSHOT.size)
        _require(fixed, _SNAPSHOT.size, what)
        l1_offset, l1_size, id_length, name_length, _, _, _, _, extra_length = _SNAPSHOT.unpack(fixed)
        _check(f"the extra data of {what}", extra_length, extra_length <= _MAX_SNAPSHOT_EXTRA, "too long")
        at += _SNAPSHOT.size
        rest = read(at, extra_length + id_length + name_length)
        _require(rest, extra_length + id_length + name_length, what)
        extra, strings = rest[:extra_length], rest[extra_length:]
        yield Snapshot(
            id=_c_string(strings[:id_length]),
            name=_c_string(strings[id_length:]),
            l1_offset=l1_offset,
            l1_size=l1_size,
            disk_size=int.from_bytes(extra[8:16], "big") if extra_length >= 16 else None,
        )
        at += -(-len(rest) // 8) * 8
        _check("the size of the snapshot table", at - start, at - start <= _MAX_SNAPSHOT_TABLE_BYTES, "too large")


def _check_table(table: _Table, cluster_size: int) -> None:
    """Raise FormatError unless TABLE begins on a cluster boundary, is not too large, and ends below 2**63."""
    entries_field, offset_field, offset, entries, entry_size, max_bytes = table
    _check(entries_field, entries, entries * entry_size <= max_bytes, f"more than {max_bytes // entry_size}")
    _check(offset_field, offset, offset % cluster_size == 0, f"not a multiple of the cluster size, {cluster_size}")
    _check(offset_field, offset, offset + entries * entry_size <= MAX_SIZE, "too large")


def _check(field: str, value: int, valid: bool, problem: str) -> None:
    if not valid:
        raise FormatError(f"{field} is {value}: {problem}")


def _require(raw: bytes, length: int, what: str) -> None:
    if len(raw) < length:
        raise TruncatedError(f"truncated: the file ends in {what}")


def _c_string(raw: bytes) -> bytes:
    """RAW up to its first NUL, as QEMU reads it."""
    return raw.partition(b"\0")[0]
