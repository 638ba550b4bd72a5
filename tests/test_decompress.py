"""Compressed images: what is in them, by files that the real tools made, whole, cut off and damaged."""

from __future__ import annotations

import bz2
import gzip
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import Imgsum, Result, find_tool, wait_until_it_waits
from reference import KIB, MIB

from imgsum import Error, FormatError, OpenOptions, RefusedError, checksum, compare
from imgsum.source import decompress

KINDS: dict[str, list[list[str]]] = {
    "xz": [
        ["xz", "-0", "-c"],
        ["xz", "-0", "-T2", "--block-size=512KiB", "-c"],
        ["xz", "-0", "-T1", "--block-size=512KiB", "--check=sha256", "-c"],
        ["xz", "-0", "--check=none", "--x86", "--lzma2", "-c"],
    ],
    "lzma": [["xz", "--format=lzma", "-0", "-c"]],
    "gz": [["gzip", "-1", "-c"], ["pigz", "-1", "-b128", "-p2", "-c"], ["pigz", "-1", "-i", "-p2", "-c"]],
    "bz2": [["bzip2", "-1", "-c"]],
    "zst": [["zstd", "-1", "-c"], ["zstd", "-1", "-T2", "--long=24", "-c"], ["pzstd", "-1", "-p2", "-c"]],
    "lz4": [["lz4", "-1", "-c"], ["lz4", "-c", "-B4", "-BD", "--content-size"], ["lz4", "-c", "--no-frame-crc"]],
}
TOOLS = [pytest.param(kind, words, id=" ".join(words)) for kind, all_words in KINDS.items() for words in all_words]
FIRST = [pytest.param(kind, words[0], id=kind) for kind, words in KINDS.items()]
NO_CHECKS = ("lzma",)  # of the content
CONTENT = reference.content("100k:A 600k:R 512k:- 500k:R 17:B")


def compress(words: list[str], content: bytes) -> bytes:
    tool, *options = words
    return subprocess.run([find_tool(tool), *options], input=content, check=True, capture_output=True).stdout


def value(path: Path, **options: object) -> str:
    return checksum(path, options=OpenOptions(**options)).hexdigest  # type: ignore[arg-type]


@pytest.fixture
def disk(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def make(kind: str, stored: bytes) -> Path:
        path = tmp_path / f"disk.img.{kind}"
        path.write_bytes(stored)
        return path

    return make


@pytest.mark.parametrize(("kind", "words"), TOOLS)
def test_what_is_in_it(kind: str, words: list[str], disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    path = disk(kind, compress(words, CONTENT))
    got = checksum(path)
    assert (got.hexdigest, got.size, got.format) == (reference.blkhash(CONTENT), len(CONTENT), f"raw.{kind}")
    with path.open("rb") as file:
        ended = imgsum("checksum", "-f", f"raw.{kind}", "-", stdin=file)
    assert (ended.text, ended.status) == (f"{reference.blkhash(CONTENT)}  -\n", 0)
    assert value(path, format="raw") == reference.blkhash(path.read_bytes())


@pytest.mark.parametrize(("kind", "words"), TOOLS)
@pytest.mark.parametrize("spec", ["", "1:A", "64k:R", "5m:-"])
def test_small_and_empty(kind: str, words: list[str], spec: str, disk: Callable[[str, bytes], Path]) -> None:
    content = reference.content(spec)
    assert value(disk(kind, compress(words, content))) == reference.blkhash(content)


@pytest.mark.parametrize(("kind", "words"), FIRST)
def test_random_content(kind: str, words: list[str], disk: Callable[[str, bytes], Path]) -> None:
    rng = random.Random(kind)
    spec = " ".join(f"{rng.randrange(1, 700)}{rng.choice(['', 'k'])}:{rng.choice('ABR-')}" for _ in range(12))
    content = reference.content(spec)
    path = disk(kind, compress(words, content))
    assert value(path) == reference.blkhash(content), spec
    at = rng.randrange(len(content))
    length = rng.randrange(len(content) - at)
    got = checksum(path, algorithm="xxh64", block_size=4096, offset=at, length=length)
    assert got.hexdigest == reference.blkhash(content[at : at + length], "xxh64", 4096), spec


@pytest.mark.parametrize(("kind", "words"), [mark for mark in TOOLS if mark.values[0] != "lzma"])
def test_several_members(kind: str, words: list[str], disk: Callable[[str, bytes], Path]) -> None:
    parts = [CONTENT, b"", CONTENT[:1000], CONTENT[5:]]
    path = disk(kind, b"".join(compress(words, part) for part in parts))
    assert value(path) == reference.blkhash(b"".join(parts))


def test_many_small_members(disk: Callable[[str, bytes], Path]) -> None:
    stored = gzip.compress(b"x" * 100)
    assert value(disk("gz", stored * 5000)) == reference.blkhash(b"x" * 500_000)


def test_a_gzip_header_with_everything(disk: Callable[[str, bytes], Path]) -> None:
    plain = gzip.compress(CONTENT, 1, mtime=0)
    header = b"\x1f\x8b\x08\x1e" + plain[4:10] + b"\x03\0abc" + b"a name\0" + b"a comment\0" + b"\1\2"
    assert value(disk("gz", header + plain[10:])) == reference.blkhash(CONTENT)


@pytest.mark.parametrize(("kind", "padding"), [("xz", 4), ("xz", 512), ("gz", 1), ("gz", 511)])
def test_zeros_after_it(kind: str, padding: int, disk: Callable[[str, bytes], Path]) -> None:
    stored = compress(KINDS[kind][0], CONTENT)
    assert value(disk(kind, stored + bytes(padding))) == reference.blkhash(CONTENT)
    if kind == "xz":
        assert value(disk(kind, stored + bytes(padding) + stored)) == reference.blkhash(CONTENT * 2)


@pytest.mark.parametrize(("kind", "words"), TOOLS)
@pytest.mark.parametrize("garbage", [b"\1", b"garbage" * 100, b"\0\0\0\1", b"\0\0\0"], ids=repr)
def test_something_else_after_it(
    kind: str, words: list[str], garbage: bytes, disk: Callable[[str, bytes], Path]
) -> None:
    if kind == "gz":
        garbage = garbage.strip(b"\0") or b"\x1f"
    stored = compress(words, CONTENT[-300_000:])
    with pytest.raises(FormatError, match=r"something else follows|damaged|ends early"):
        checksum(disk(kind, stored + garbage))


@pytest.mark.parametrize(("kind", "words"), TOOLS)
def test_cut_off_anywhere(kind: str, words: list[str], disk: Callable[[str, bytes], Path]) -> None:
    stored = compress(words, CONTENT[-700_000:])
    edges = [0, 1, 3, 4, 6, 9, 11, 12, 13, 20, 25]
    cuts = {*edges, *(len(stored) - edge for edge in edges if edge), *range(100, len(stored), len(stored) // 5)}
    members = []
    for cut in sorted(cuts):
        path = disk(kind, stored[:cut])
        try:
            members.append((cut, value(path)))
        except Error:
            continue
    # pigz -i and pzstd make several members, and what ends where one does is whole. No such place is among these.
    assert members == []


@pytest.mark.parametrize(("kind", "words"), [mark for mark in TOOLS if mark.values[0] not in NO_CHECKS])
def test_damaged_anywhere(kind: str, words: list[str], disk: Callable[[str, bytes], Path]) -> None:
    """One bit anywhere: an error, or the right value where it says nothing of the content (a time, say)."""
    if any(word in ("--check=none", "--no-frame-crc") for word in words):
        return
    content = CONTENT[-700_000:]
    stored = compress(words, content)
    rng = random.Random(" ".join(words))
    refused = 0
    for at in [*range(16), *(len(stored) - 1 - back for back in range(20)), *rng.choices(range(len(stored)), k=8)]:
        damaged = bytearray(stored)
        damaged[at] ^= 1 << rng.randrange(8)
        try:
            assert value(disk(kind, bytes(damaged))) == reference.blkhash(content), at
        except Error:
            refused += 1
    assert refused > 20


def test_where_it_is_cut_off(disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    stored = compress(["gzip", "-1", "-c"], CONTENT)
    path = disk("gz", stored[:-100_000])
    ended = imgsum("checksum", path)
    told = f"imgsum: {path}: the compressed data ends early, after {len(stored) - 100_000} bytes at offset "
    assert ended.errors.startswith(told)
    assert (ended.stdout, ended.status) == (b"", 2)


@pytest.mark.parametrize(("kind", "words"), FIRST)
def test_only_where_name_and_magic_agree(
    kind: str, words: list[str], tmp_path: Path, disk: Callable[[str, bytes], Path]
) -> None:
    stored = compress(words, CONTENT)
    for name in ("disk", "disk.raw", f"disk.{kind}.img"):
        path = tmp_path / name
        path.write_bytes(stored)
        with pytest.raises(RefusedError, match=rf"is compressed: .*, or -f raw\.{kind}, reads what is in it"):
            checksum(path)
        assert value(path, format=f"raw.{kind}") == reference.blkhash(CONTENT)
    for other in {*KINDS} - {kind}:
        with pytest.raises(FormatError, match=f"is named .{other}, and does not begin"):
            checksum(disk(other, stored))
    with pytest.raises(FormatError, match=f"is named .{kind}, and does not begin"):
        checksum(disk(kind, CONTENT))
    with pytest.raises(Error):
        checksum(disk(kind, CONTENT), options=OpenOptions(format=f"raw.{kind}"))
    upper = tmp_path / f"DISK.{kind.upper()}"
    upper.write_bytes(stored)
    assert value(upper) == reference.blkhash(CONTENT)


@pytest.mark.parametrize(("kind", "words"), FIRST)
def test_a_container_inside(kind: str, words: list[str], disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    unpack = {"bz2": "bzip2 -dk", "gz": "gzip -dk", "lz4": "lz4 -d", "zst": "zstd -d"}.get(kind, "xz -dk")
    for content, what in (
        (b"QFI\xfb\0\0\0\3".ljust(70_000, b"\1"), "a qcow2 image inside"),
        (b"\1" * 70_000 + b"conectix".ljust(512, b"\0"), "a vpc image inside"),
        (compress(["gzip", "-c"], b"content"), "something inside that is compressed"),
        (b"disk.raw".ljust(257, b"\0") + b"ustar\0" + bytes(9000), "a tar archive inside"),
    ):
        path = disk(kind, compress(words, content))
        ended = imgsum("checksum", path)
        assert (ended.stdout, ended.status) == (b"", 2)
        assert what in ended.errors
        assert f"`{unpack} {path}`" in ended.errors or "tar -xf" in ended.errors
        assert value(path, format=f"raw.{kind}") == reference.blkhash(content)


@pytest.mark.parametrize(("kind", "words"), FIRST)
def test_compare(kind: str, words: list[str], tmp_path: Path, disk: Callable[[str, bytes], Path]) -> None:
    path, plain = disk(kind, compress(words, CONTENT)), tmp_path / "disk.img"
    plain.write_bytes(CONTENT)
    assert compare(path, plain)
    assert compare(plain, path)
    changed = bytearray(CONTENT)
    changed[-3] ^= 1
    plain.write_bytes(changed)
    assert compare(path, plain).ranges == ((len(CONTENT) - 3, 1),)
    plain.write_bytes(b"x" + CONTENT[1:])  # found at once, and the rest is left
    assert compare(path, plain, limit=1).ranges == ((0, 1),)


@pytest.mark.parametrize("lengths", [(900_000, 900_000), (900_000, 400_001), (65_536, 900_000), (0, 70_000)])
@pytest.mark.parametrize("zeros", [False, True])
def test_compare_two_compressed_images(
    lengths: tuple[int, int], zeros: bool, disk: Callable[[str, bytes], Path]
) -> None:
    """One ends before the other: what that has more is a difference where it is not zeros, and with strict always."""
    data = reference.content("50k:R")
    content = (data if zeros else b"").ljust(900_000, b"\0" if zeros else b"x")
    first, second = (content[:length] for length in lengths)
    one, other = disk("gz", gzip.compress(first)), disk("bz2", bz2.compress(second))
    shorter, longer = sorted(lengths)
    more = () if shorter == longer else ((shorter, longer - shorter),)
    if zeros and shorter < len(data):
        more = ((shorter, len(data) - shorter),)
        assert compare(one, other).ranges[0].start == 0
    else:
        assert compare(one, other).ranges == (() if zeros else more)
    assert compare(one, other).sizes == lengths
    strict = compare(one, other, strict=True)
    assert (strict.ranges[-1:] and strict.ranges[-1].start + strict.ranges[-1].length) == (more and longer)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("which", ["files", "compressed", "both compressed", "stdin"])
def test_prefix(strict: bool, which: str, tmp_path: Path, disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    image, device = tmp_path / "image.raw", tmp_path / "device"
    image.write_bytes(CONTENT)
    device.write_bytes(CONTENT + b"what was there before")
    first = disk("gz", gzip.compress(CONTENT, 1)) if "compressed" in which else Path("-") if which == "stdin" else image
    second = disk("bz2", bz2.compress(device.read_bytes())) if which == "both compressed" else device
    options = ["--strict"] if strict else []

    def run(*more: str) -> Result:
        with image.open("rb") as file:
            return imgsum("compare", *options, *more, first, second, stdin=file)

    assert run().status == 1
    assert (run("--prefix").text, run("--prefix").status) == ("images are identical\n", 0)
    assert (run("--prefix", "--all").text, run("--prefix", "--offset=65537").status) == ("images are identical\n", 0)
    if which != "both compressed":
        device.write_bytes(CONTENT[:-1] + b"what was there before")
        ended = run("--prefix")
        assert (ended.text, ended.status) == (f"images differ at offset {len(CONTENT) - 1}\n", 1)
        device.write_bytes(CONTENT[:-5])  # the device is too small
        assert run("--prefix").status == 1
    assert "--length" in run("--prefix", "--length=1m").errors


def test_untrusted_takes_it_only_when_told(disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    path = disk("gz", compress(["gzip", "-c"], bytes(20 * MIB)))
    assert imgsum("checksum", "--untrusted", path).status == 2
    assert imgsum("checksum", "--untrusted", "-f", "raw.gz", path).status == 0
    ended = imgsum("checksum", "--untrusted", "-f", "raw.gz", "--max-size=10m", path)
    assert (ended.stdout, ended.status) == (b"", 2)
    assert "has more bytes of content than the 10485760 of --max-size" in ended.errors


@pytest.mark.parametrize(
    ("kind", "words"),
    [("xz", ["xz", "-1", "--lzma2=preset=0,dict=256MiB", "-c"]), ("zst", ["zstd", "-1", "--long=28", "-c"])],
)
def test_memory_is_limited(kind: str, words: list[str], disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    path = disk(kind, compress(words, CONTENT))
    ended = imgsum("checksum", "--max-memory=64m", path)
    assert (ended.stdout, ended.status) == (b"", 2)
    assert "takes more memory to decompress than --max-memory allows" in ended.errors
    assert imgsum("checksum", "--max-memory=1g", path).status == 0


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "lz4"])
def test_resident_memory(kind: str, disk: Callable[[str, bytes], Path], imgsum: Imgsum) -> None:
    content = reference.content("3m:R 60m:- 2m:R")
    result, peak = imgsum.peak_memory("checksum", disk(kind, compress(KINDS[kind][0], content)))
    assert result.text.split()[0] == reference.blkhash(content)
    assert peak <= 64 * MIB


def test_a_block_longer_than_its_index_says(disk: Callable[[str, bytes], Path]) -> None:
    """It would be held in memory before the check at its end."""
    path = disk("xz", b"")
    stored = compress(["xz", "-0", "-T1", "--block-size=4MiB", "-c"], bytes(12 * MIB))
    path.write_bytes(stored)
    file = decompress.HostFile(str(path), str(path), OpenOptions())
    blocks = decompress._find_blocks(file)
    assert blocks is not None
    assert [block.size for block in blocks] == [4 * MIB] * 3
    with pytest.raises(FormatError, match="longer than the index says"):
        list(decompress._xz_block(file, blocks[1]._replace(size=MIB), 64 * MIB))
    file.close()


def test_without_isal_and_without_threads(disk: Callable[[str, bytes], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    path = disk("gz", compress(["gzip", "-c"], CONTENT) * 2)
    monkeypatch.setattr(decompress, "_gzip_library", lambda: (None, zlib.crc32))
    assert value(path) == reference.blkhash(CONTENT * 2)

    def start(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    assert value(path) == reference.blkhash(CONTENT * 2)
    assert value(disk("xz", compress(KINDS["xz"][1], CONTENT))) == reference.blkhash(CONTENT)


def test_a_signal_while_it_waits_for_a_pipe(imgsum: Imgsum) -> None:
    reading, writing = os.pipe()
    try:
        running = imgsum.start("checksum", "-f", "raw.gz", "-", stdin=reading)
        os.write(writing, gzip.compress(bytes(KIB))[:15])
        wait_until_it_waits(running.process.pid)
        running.signal(signal.SIGTERM)
        assert running.finish().status == -signal.SIGTERM
    finally:
        os.close(reading)
        os.close(writing)
