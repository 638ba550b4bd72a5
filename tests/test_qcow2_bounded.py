"""Small qcow2 files that stand for much work: what --untrusted refuses, within 64 MiB, and what it must let through."""

from __future__ import annotations

import random
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import Imgsum, find_tool
from qcow2_build import COPIED, ZERO, compressed_entry, deflate, header
from qcow2_images import run
from reference import GIB, KIB, MIB, blkhash

import imgsum as api
from imgsum.source.qcow2.audit import _PART, _sorted

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMIT = 64 * MIB
EXTENDED_L2, ZSTD = 0x10, 0x08  # incompatible features
EMPTY_BLOCK = b"\0\0\0\xff\xff"  # of deflate: stored, of no bytes
ONES = b"\1" * (64 * KIB)
EMPTY_FRAME = zstd.compress(b"")


def tables(bits: int, words: Sequence[int], per_cluster: int = 1, incompatible: int = 0) -> bytes:
    """Header, refcount table, L1 and L2 tables of an image whose L2 entries, of PER_CLUSTER words, are WORDS."""
    size = 1 << bits
    count = -(-len(words) * 8 // size)  # L2 tables
    first = 2 + -(-count * 8 // size)
    l1 = struct.pack(f">{count}Q", *((first + number) * size | COPIED for number in range(count)))
    head = header(
        cluster_bits=bits,
        size=len(words) // per_cluster * size,
        l1_size=count,
        l1_table_offset=2 * size,
        refcount_table_offset=size,
        incompatible_features=incompatible,
        header_length=112,
        tail=bytes([incompatible & ZSTD != 0]).ljust(8, b"\0"),
    )
    l2 = struct.pack(f">{len(words)}Q", *words)
    return head.ljust(2 * size, b"\0") + l1.ljust((first - 2) * size, b"\0") + l2.ljust(count * size, b"\0")


def data_offset(bits: int, words: int) -> int:
    """Where tables() of so many words ends."""
    return len(tables(bits, [0] * words))


def streams(bits: int, stream: bytes, count: int, step: int | None = None, incompatible: int = 0) -> bytes:
    """COUNT clusters of STREAM, one after the other; or each STEP bytes after the last, and one STREAM for all."""
    at = data_offset(bits, count)
    if step is None:
        entries = [compressed_entry(at + number * len(stream), len(stream), bits) for number in range(count)]
        return tables(bits, entries, incompatible=incompatible) + stream * count
    end = at + count * step + len(stream)
    longest = (2 << bits) - 512
    entries = [
        compressed_entry(at + number * step, min(end - at - number * step, longest), bits) for number in range(count)
    ]
    return tables(bits, entries) + (EMPTY_BLOCK * count)[: count * step] + stream


def overlapping() -> bytes:
    return streams(16, deflate(ONES), 7000, step=5)


def in_one_sector() -> bytes:
    """Streams that begin 5 bytes apart, 60 of them in the sectors of one."""
    content = EMPTY_BLOCK * 60 + deflate(b"\1" * (64 * KIB))
    count = 20_000
    at = data_offset(16, count)
    starts = [at + number // 60 * len(content) + number % 60 * 5 for number in range(count)]
    ends = [at + (number // 60 + 1) * len(content) for number in range(count)]
    entries = [compressed_entry(start, end - start) for start, end in zip(starts, ends, strict=True)]
    return tables(16, entries) + content * (count // 60 + 1)


def alternating(zeros: Callable[[int], int]) -> bytes:
    words = [word for number in range(75_000) for word in (0, zeros(number) << 32)]
    return tables(16, words, 2, EXTENDED_L2)


def data_in_a_hole(extended: bool) -> tuple[bytes, int]:
    """Clusters (or subclusters) that are data and zeros by turns, with all data in a hole of the file."""
    bits, count = 14, 6000 if extended else 70_000
    at = data_offset(bits, count * (1 + extended))
    hosts = [at + (number << bits) | COPIED for number in range(count)]
    if extended:
        words = [word for host in hosts for word in (host, 0x55555555AAAAAAAA)]
    else:
        words = [host if number & 1 else ZERO for number, host in enumerate(hosts)]
    return tables(bits, words, 1 + extended, EXTENDED_L2 if extended else 0), at + (count << bits)


def tables_in_a_hole(bits: int) -> tuple[bytes, int]:
    """An L1 table that is full of L2 tables, all in a hole of the file."""
    size, count = 1 << bits, 70_000
    first = 2 + -(-count * 8 // size)
    head = header(
        cluster_bits=bits,
        size=count << bits + bits - 3,
        l1_size=count,
        l1_table_offset=2 * size,
        refcount_table_offset=size,
    )
    l1 = struct.pack(f">{count}Q", *((first + number) * size | COPIED for number in range(count)))
    return head.ljust(2 * size, b"\0") + l1, (first + count) * size


BOMBS: dict[str, tuple[Callable[[], bytes | tuple[bytes, int]], str]] = {
    "overlapping": (overlapping, "bytes of compressed data"),
    "in one sector": (in_one_sector, "bytes of decompressed data"),
    "deflate at its best": (lambda: streams(16, deflate(ONES), 20_000), "bytes of decompressed data"),
    "zstd at its best": (lambda: streams(16, zstd.compress(ONES), 20_000, None, ZSTD), "bytes of decompressed data"),
    "small clusters": (lambda: streams(9, deflate(ONES[:512]), 75_000), "L2 tables and pieces"),
    "frames": (lambda: streams(16, EMPTY_FRAME * 500 + zstd.compress(ONES), 90, None, ZSTD), "more than 1 zstd frames"),
    "bitmaps": (lambda: alternating(lambda number: 0x55555555 << (number & 1) & 0xFFFFFFFF), "L2 tables and pieces"),
    "data in a hole": (lambda: data_in_a_hole(extended=False), "L2 tables and pieces"),
    "subclusters in a hole": (lambda: data_in_a_hole(extended=True), "L2 tables and pieces"),
    "tables in a hole": (lambda: tables_in_a_hole(16), "bytes of tables"),
    "small tables in a hole": (lambda: tables_in_a_hole(9), "L2 tables and pieces"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_work_out_of_proportion(bomb: str, tmp_path: Path, imgsum: Imgsum) -> None:
    make, message = BOMBS[bomb]
    made = make()
    raw, size = made if isinstance(made, tuple) else (made, len(made))
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(size)
    options = ("-q", "--untrusted", "-f", "qcow2", "--max-size", "1000000t")
    result, peak = imgsum.peak_memory("checksum", *options, path)
    assert result.status == 2
    assert message in result.errors
    assert peak <= LIMIT


@pytest.mark.parametrize("options", [[], ["--request-size=2m"]], ids=" ".join)
@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_the_largest_clusters(compression: str, options: list[str], tmp_path: Path, imgsum: Imgsum) -> None:
    """Decompressed by all workers at once, from many pieces; zstd with the largest window."""
    content = (random.Random(1).randbytes(1400 * KIB) + b"text" * 256 * KIB)[: 2 * MIB]
    parameters = {zstd.CompressionParameter.window_log: 23, zstd.CompressionParameter.content_size_flag: 0}
    packer = zstd.ZstdCompressor(options=parameters)
    stream = deflate(content) if compression == "zlib" else packer.compress(content) + packer.flush()
    path = tmp_path / "image"
    path.write_bytes(streams(21, stream, 32, None, ZSTD if compression == "zstd" else 0))
    result, peak = imgsum.peak_memory("checksum", "-q", *options, path)
    assert result.text.split()[0] == blkhash(content * 32)
    assert peak <= LIMIT


def test_equal_bitmaps_are_taken_together(tmp_path: Path) -> None:
    """They are zeros all the same, so nothing is out of proportion."""
    path = tmp_path / "image"
    path.write_bytes(alternating(lambda number: 0x55555555))
    got = api.checksum(path, options=api.OpenOptions(format="qcow2", untrusted=True))
    (tmp_path / "zeros").touch()
    with (tmp_path / "zeros").open("r+b") as file:
        file.truncate(75_000 << 16)
    assert got.hexdigest == api.checksum(tmp_path / "zeros").hexdigest


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_constant_blocks_are_let_through(compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_tool("qemu-img")
    monkeypatch.chdir(tmp_path)
    content = b"".join(bytes([number % 250 + 1]) * 65536 for number in range(256))
    Path("raw").write_bytes(content)
    options = f"compression_type={compression}"
    run("qemu-img", "convert", "-c", "-W", "-m", "16", "-f", "raw", "-O", "qcow2", "-o", options, "raw", "image")
    got = api.checksum("image", options=api.OpenOptions(format="qcow2", untrusted=True))
    assert got.hexdigest == blkhash(content)


@pytest.mark.parametrize("options", ["", ",cluster_size=4k", ",cluster_size=2M", ",extended_l2=on"])
def test_preallocated_metadata_is_let_through(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables for gigabytes, and all data in a hole; in a copy, also what is zeros in the tables."""
    find_tool("qemu-img")
    monkeypatch.chdir(tmp_path)
    size = GIB if "4k" in options else 16 * GIB
    run("qemu-img", "create", "-q", "-f", "qcow2", "-o", f"preallocation=metadata{options}", "image", str(size))
    run("cp", "--sparse=always", "image", "copy")
    Path("zeros").touch()
    with open("zeros", "r+b") as file:
        file.truncate(size)
    want = api.checksum("zeros").hexdigest
    for name in ("image", "copy"):
        assert api.checksum(name, options=api.OpenOptions(format="qcow2", untrusted=True)).hexdigest == want


def test_offsets_are_sorted_by_parts() -> None:
    offsets = array("Q", random.Random(1).choices(range(1 << 40), k=3 * _PART + 7))
    assert list(_sorted(array("Q", offsets))) == sorted(offsets)
    assert list(_sorted(array("Q"))) == []
