"""The header: every field at, and just beyond, its limit. What is read of it, and what is never looked at."""

from __future__ import annotations

import struct

import pytest
from qcow2_build import BACKING_FORMAT, DATA_FILE, FEATURE_NAMES, header

from imgsum.errors import FormatError, OpenError, TruncatedError
from imgsum.source.qcow2.header import Header, at_snapshot, find_snapshot, parse

CLUSTER = 1 << 16


def parsed(raw: bytes, size: int = 4 * CLUSTER) -> Header:
    raw = raw + bytes(max(0, size - len(raw)))
    return parse(lambda offset, length: raw[offset : offset + length])


def test_a_plain_header() -> None:
    got = parsed(header(size=10 << 20))
    assert (got.version, got.cluster_bits, got.cluster_size, got.size) == (3, 16, CLUSTER, 10 << 20)
    assert (got.l1_size, got.l1_offset, got.l1_needed) == (1, 3 * CLUSTER, 1)
    assert (got.backing_file, got.backing_format, got.has_data_file, got.compression) == (None, None, False, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": 0x514649FA}, "no magic"),
        ({"version": 1}, "version 1 is not known"),
        ({"version": 4}, "version 4 is not known"),
        ({"cluster_bits": 8}, "cluster_bits is 8: not 9 to 21"),
        ({"cluster_bits": 22}, "cluster_bits is 22: not 9 to 21"),
        ({"cluster_bits": 0xFFFFFFFF}, "cluster_bits is 4294967295"),
        ({"header_length": 103}, "header_length is 103"),
        ({"header_length": CLUSTER + 1}, "header_length is 65537"),
        ({"header_length": 0xFFFFFFFF}, "header_length is 4294967295"),
        ({"backing_file_offset": CLUSTER + 1}, "backing_file_offset is 65537"),
        ({"backing_file_offset": (1 << 64) - 1}, "backing_file_offset is 18446744073709551615"),
        ({"backing_file_offset": 1024, "backing_file_size": 1024}, "backing_file_size is 1024: more than 1023"),
        ({"backing_file_offset": CLUSTER - 8, "backing_file_size": 9}, "backing_file_size is 9: more than 8"),
        ({"crypt_method": 3}, "crypt_method is 3"),
        ({"l1_size": 0}, "l1_size is 0: less than 1"),
        ({"l1_size": 0x400001}, "l1_size is 4194305: more than 4194304"),
        ({"l1_size": 0xFFFFFFFF}, "l1_size is 4294967295"),
        ({"l1_table_offset": 0x7FFFFFFFFFFF0000, "l1_size": 0x400000}, "l1_table_offset is 9223372036854710272: too"),
        ({"l1_table_offset": 0x1234567890ABCDEF}, "l1_table_offset is 1311768467294899695: not a multiple"),
        ({"refcount_table_clusters": 0}, "refcount_table_clusters is 0"),
        ({"refcount_table_clusters": 129}, "refcount_table_clusters is 129: more than 128"),
        ({"refcount_table_clusters": 0xFFFFFFFF}, "refcount_table_clusters is 4294967295"),
        ({"refcount_table_offset": 512}, "refcount_table_offset is 512: not a multiple"),
        ({"refcount_order": 7}, "refcount_order is 7"),
        ({"nb_snapshots": 65537}, "nb_snapshots is 65537: more than 65536"),
        ({"nb_snapshots": 1, "snapshots_offset": 1}, "snapshots_offset is 1: not a multiple"),
        ({"incompatible_features": 0x20}, "incompatible_features is 0x20: feature 5 is not known"),
        ({"incompatible_features": 1 << 63}, "feature 63 is not known"),
        ({"incompatible_features": 0x10, "cluster_bits": 13}, "cluster_bits is 13: less than 14"),
        ({"incompatible_features": 0x8}, "compression_type is 0: at odds"),
        ({"autoclear_features": 2}, "autoclear_features is 2"),
        ({"size": (1 << 64) - 1}, "l1_size is 1: less than 34359738368"),
        ({"size": (512 << 20) + 1}, "l1_size is 1: less than 2"),
    ],
)  # fmt: skip
def test_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parsed(header(**fields))
    assert message in caught.value.reason


@pytest.mark.parametrize(
    "fields",
    [
        {"cluster_bits": 9, "size": 0},
        {"cluster_bits": 21},
        {"incompatible_features": 0x10, "cluster_bits": 14},
        {"l1_size": 0x400000},
        {"l1_table_offset": 0},
        {"size": 0, "l1_size": 0, "l1_table_offset": 0},
        {"size": 512 << 20},
        {"refcount_table_clusters": 128},
        {"refcount_order": 6},
        {"nb_snapshots": 65536, "snapshots_offset": 0},
        {"incompatible_features": 0x3},  # dirty, corrupt: QEMU reads both
        {"compatible_features": (1 << 64) - 1},
        {"autoclear_features": 1},  # bitmaps, which no extension has
        {"autoclear_features": 1 << 63},
        {"header_length": 105, "tail": b"\0"},
        {"header_length": 112, "tail": bytes(8)},
        {"backing_file_offset": 1024, "backing_file_size": 0},
    ],
)
def test_accepted(fields: dict[str, int]) -> None:
    parsed(header(**fields))  # type: ignore[arg-type]


def test_the_size_is_rounded_down_to_sectors() -> None:
    assert parsed(header(size=1000)).size == 512


def test_version_2_has_no_features() -> None:
    # Where version 3 has features, version 2 has extensions: this one would be all features at once.
    got = parsed(header(version=2, extensions=[(0xFFFFFFFF, b"\xff" * 64), (BACKING_FORMAT, b"raw")], backing=b"base"))
    assert (got.backing_file, got.backing_format) == (b"base", "raw")


@pytest.mark.parametrize("length", [0, 4, 7, 8, 71, 72, 103])
def test_cut_off_in_the_header(length: int) -> None:
    raw = header()[:length]
    with pytest.raises(TruncatedError if length >= 4 else FormatError):
        parse(lambda offset, count: raw[offset : offset + count])


def test_compression_types() -> None:
    zstd = {"header_length": 112, "incompatible_features": 8}
    assert parsed(header(tail=b"\1" + bytes(7), **zstd)).compression == 1  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="compression_type is 2: not known"):
        parsed(header(tail=b"\2" + bytes(7), **zstd))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="compression_type is 1: at odds"):
        parsed(header(tail=b"\1" + bytes(7), header_length=112))


class TestExtensions:
    def test_names(self) -> None:
        got = parsed(
            header(
                incompatible_features=4,
                extensions=[(0x12345678, b"ignored"), (BACKING_FORMAT, b"qcow2"), (DATA_FILE, b"the data")],
                backing=b"/a/base",
            )
        )
        assert (got.backing_file, got.backing_format, got.data_file) == (b"/a/base", "qcow2", b"the data")

    def test_a_data_file_name_without_the_feature_means_nothing(self) -> None:
        got = parsed(header(extensions=[(DATA_FILE, b"/etc/passwd")]))
        assert (got.data_file, got.has_data_file) == (None, False)

    def test_what_follows_the_end_is_not_read(self) -> None:
        assert parsed(header(extensions=[(0, b""), (BACKING_FORMAT, b"x" * 99)])).backing_format is None

    def test_unknown_feature_has_the_image_s_name_for_it(self) -> None:
        names = bytes([1, 6]) + b"wrong".ljust(46, b"\0") + bytes([0, 6]) + b"time travel".ljust(46, b"\0")
        with pytest.raises(FormatError, match="feature 6 \\('time travel'\\) is not known"):
            parsed(header(incompatible_features=0x40, extensions=[(FEATURE_NAMES, names)]))

    def test_strings_end_at_a_nul(self) -> None:
        got = parsed(header(extensions=[(BACKING_FORMAT, b"raw\0junk")], backing=b"base\0junk"))
        assert (got.backing_file, got.backing_format) == (b"base", "raw")
        assert parsed(header(backing=b"\0junk")).backing_file is None

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (struct.pack(">II", 0x11111111, CLUSTER), "length of header extension 0x11111111 is 65536"),
            (struct.pack(">II", 0x11111111, 0x7FFFFFFF), "length of header extension 0x11111111 is 2147483647"),
            (struct.pack(">II", BACKING_FORMAT, 16) + bytes(16), "the length of the backing format's name is 16"),
            (struct.pack(">II", DATA_FILE, 5000) + b"x" * 5000, "the length of the data file's name is 5000"),
        ],
    )
    def test_lengths(self, raw: bytes, message: str) -> None:
        with pytest.raises(FormatError) as caught:
            parsed(header(tail=raw))
        assert message in caught.value.reason

    def test_cut_off(self) -> None:
        raw = header(tail=struct.pack(">II", 0x11111111, 5000))
        with pytest.raises(TruncatedError):
            parse(lambda offset, length: raw[offset : offset + length])


def table(*entries: tuple[bytes, bytes, int, int, bytes]) -> bytes:
    """A snapshot table: (id, name, L1 offset, L1 size, extra data)."""
    raw = b""
    for id_, name, l1_offset, l1_size, extra in entries:
        raw += struct.pack(">QIHHIIQII", l1_offset, l1_size, len(id_), len(name), 0, 0, 0, 0, len(extra))
        raw += extra + id_ + name
        raw += bytes(-len(raw) % 8)
    return raw


OTHER = (b"2", b"b", 5 * CLUSTER, 1, b"")


class TestSnapshots:
    def find(self, raw: bytes, wanted: bytes, count: int) -> Header:
        file = header(nb_snapshots=count, snapshots_offset=CLUSTER).ljust(CLUSTER, b"\0") + raw

        def read(offset: int, length: int) -> bytes:
            return file[offset : offset + length]

        return at_snapshot(parse(read), find_snapshot(read, parse(read), wanted))

    def test_by_name_and_id(self) -> None:
        raw = table(
            (b"1", b"two", 5 * CLUSTER, 1, bytes(8) + (3 << 20).to_bytes(8, "big")),
            (b"2", b"1", 6 * CLUSTER, 1, b""),
            (b"two", b"x", 7 * CLUSTER, 9, bytes(24)),
        )
        assert self.find(raw, b"two", 3).l1_offset == 7 * CLUSTER  # an ID counts before any name
        first = self.find(raw, b"1", 3)
        assert (first.l1_offset, first.l1_size, first.size) == (5 * CLUSTER, 1, 3 << 20)
        assert self.find(raw, b"2", 3).size == 1 << 20  # no size is recorded: the active one
        with pytest.raises(OpenError, match="has no snapshot 'three'"):
            self.find(raw, b"three", 3)

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (table((b"1", b"a", 5 * CLUSTER + 1, 1, b""), OTHER), "snapshot's l1_table_offset"),
            (table((b"1", b"a", 5 * CLUSTER, 0x10000000, b""), OTHER), "snapshot's l1_size is 268435456"),
            (table((b"1", b"a", 5 * CLUSTER, 1, bytes(1025))), "extra data of entry 0 of the snapshot table is 1025"),
            (table((b"1", b"a", 5 * CLUSTER, 1, b"\xff" * 16), OTHER), "snapshot's disk_size"),
            (table((b"1", b"a", 5 * CLUSTER, 1, b""))[:50], "truncated: the file ends in entry 1"),
            (table((b"1", b"b", 5 * CLUSTER, 1, b""))[:-8], "truncated"),
        ],
    )
    def test_refused(self, raw: bytes, message: str) -> None:
        with pytest.raises(FormatError) as caught:
            self.find(raw, b"a", 2)
        assert message in caught.value.reason
