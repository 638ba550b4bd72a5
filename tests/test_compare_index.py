"""imgsum compare with an index: what differs, to the block; and maps of it for tools."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import reference
from conftest import Imgsum, find_tool
from reference import KIB, MIB

import imgsum as api
from imgsum.errors import ChangedError, Error, RefusedError, UsageError

BLOCK = 512


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def merged(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, length in blocks:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((start, length))
    return found


def expected_ranges(index: bytes, image: bytes, strict: bool = False) -> list[tuple[int, int]]:
    """The obvious way: blocks of the index's image, and what the other one has beyond it, in blocks from there."""
    size = len(index)
    cuts = [*range(0, size, BLOCK), *range(size, len(image), BLOCK), max(size, len(image))]
    padded = [data.ljust(max(size, len(image)), b"\0") for data in (index, image)]
    found = []
    for begin, end in itertools.pairwise(cuts):
        differs = padded[0][begin:end] != padded[1][begin:end]
        rest = min(size, len(image))
        counts = strict and end > rest  # what only one has differs
        start = max(begin, rest) if counts and not differs else begin
        if differs or counts:
            found.append((start, end - start))
    return merged(found)


def make(data: bytes, name: str) -> None:
    Path(name).write_bytes(data)
    if len(data) > 2 * BLOCK:  # holes where there are zeros
        subprocess.run([find_tool("fallocate"), "--dig-holes", name], check=True)
    api.checksum(name, block_size=BLOCK, index=f"{name}.index")


def pairs() -> list[tuple[bytes, bytes]]:
    rng = random.Random(7)
    found = []
    for number in range(40):
        size = rng.choice([0, 1, 511, 512, 5000, 20_000, 40_960])
        first = bytearray(b"".join(rng.choice([bytes(512), b"A" * 512, rng.randbytes(512)]) for _ in range(80))[:size])
        second = bytearray(first)
        for _ in range(rng.randrange(4)):
            if second:
                second[rng.randrange(len(second))] ^= rng.choice([0, 1])
        if number % 2:
            other = rng.choice([0, 100, 512, 4999, 5120, 30_000])
            second = second[:other].ljust(other, rng.choice([b"\0", b"B"]))
        if rng.randrange(2):
            first, second = second, first
        found.append((bytes(first), bytes(second)))
    return found


def test_an_index_and_an_image(here: Path) -> None:
    for first, second in pairs():
        make(first, "a")
        make(second, "b")
        for strict in (False, True):
            want = expected_ranges(first, second, strict)
            for one, other in (("a.index", "b"), ("b", "a.index")):
                found = api.compare(one, other, strict=strict)
                assert list(found.ranges) == want
                assert found.identical == (not want)
                sizes = len(first), len(second)
                assert found.sizes == (sizes if one == "a.index" else sizes[::-1])
            with open("b", "rb") as stream:
                assert list(api.compare("a.index", f"/dev/fd/{stream.fileno()}", strict=strict).ranges) == want


def test_two_indexes_never_say_what_they_can_not_know(here: Path) -> None:
    told = untold = 0
    seen = set()
    for first, second in pairs():
        make(first, "a")
        make(second, "b")
        shorter, longer = sorted((first, second), key=len)
        for strict in (False, True):
            try:
                found = api.compare("a.index", "b.index", strict=strict)
            except RefusedError as error:
                untold += 1
                # Rightly so: one ends within a block, and neither is all zeros there.
                seen.add(error.reason.partition("whether")[2])
                assert len(shorter) % BLOCK
                assert len(shorter) != len(longer)
                at = len(shorter) // BLOCK * BLOCK
                assert any(shorter[at:])
                assert any(longer[at : at + BLOCK])
                continue
            told += 1
            assert found.identical == (first == second or (not strict and not longer[len(shorter) :].strip(b"\0")
                                                           and longer[: len(shorter)] == shorter))  # fmt: skip
            if len(first) == len(second):
                assert list(found.ranges) == expected_ranges(first, second)
    assert told > 0
    assert untold > 0
    assert seen == {" that differs can't be told without an image"}


def test_what_is_read(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:R 8m:- 1m:A", here / "disk")
    api.checksum("disk", index="disk.index")
    os.rename("disk", "copy")
    record = json.loads(imgsum("compare", "--json", "--stats", "disk.index", "copy").stdout)
    assert record["identical"] is True
    assert record["block_size"] == 64 * KIB
    assert record["stats"]["bytes_read"] == 2 * MIB
    assert [image["format"] for image in record["images"]] == ["index", "raw"]
    os.unlink("copy")
    record = json.loads(imgsum("compare", "--json", "--stats", "disk.index", "disk.index").stdout)
    assert record["identical"] is True
    assert record["stats"]["bytes_read"] == 0


def test_what_is_printed(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:R", here / "disk")
    api.checksum("disk", index="disk.index")
    with open("disk", "r+b") as file:
        for at in (70_000, 140_000, 900_000):
            file.seek(at)
            file.write(b"other")
    assert imgsum("compare", "disk.index", "disk") == (
        b"images differ in the block of 65536 bytes at offset 65536\n", b"", 1,
    )  # fmt: skip
    listed = b"""\
differs: offset 65536, 131072 bytes
differs: offset 851968, 65536 bytes
images differ in 2 ranges, 196608 bytes
"""
    assert imgsum("compare", "--all", "disk", "disk.index") == (listed, b"", 1)
    assert imgsum("compare", "--length", "64k", "disk", "disk.index").status == 0
    assert imgsum("compare", "--offset", "192k", "--length", "128k", "disk.index", "disk").status == 0
    for words in (["--length", "100"], ["--offset", "100"], ["--length", "2m"]):
        assert imgsum("compare", *words, "disk.index", "disk").status == 2


def test_a_prefix(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:R 100:A", here / "disk")
    api.checksum("disk", index="disk.index")
    with open("disk", "ab") as device:
        device.write(b"x" * MIB)
    assert imgsum("compare", "-q", "disk.index", "disk").status == 1
    for words in ([], ["-s"]):
        assert imgsum("compare", "-q", "--prefix", *words, "disk.index", "disk").status == 0
    with open("disk", "rb") as stdin:
        assert imgsum("compare", "-q", "--prefix", "disk.index", "-", stdin=stdin).status == 0
    for operands in (("disk", "disk.index"), ("disk.index", "disk.index")):
        assert imgsum("compare", "--prefix", *operands).status == 2


def test_qcow2_and_blocks_larger_than_requests(here: Path) -> None:
    reference.write("9m:R 100:A", here / "disk")
    os.truncate("disk", 10 * MIB)
    subprocess.run([find_tool("qemu-img"), "convert", "-O", "qcow2", "-c", "disk", "copy"], check=True)
    api.checksum("disk", block_size=4 * MIB, index="disk.index")
    os.truncate("disk", 9 * MIB + 50)
    with api.Index.open("disk.index") as index:
        assert index.block_size == 4 * MIB
    assert api.compare("disk.index", "copy").identical
    assert list(api.compare("disk.index", "disk").ranges) == [(8 * MIB, 2 * MIB)]


def test_errors(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.write("1m:R", here / "disk")
    api.checksum("disk", index="a.index")
    api.checksum("disk", index="b.index", algorithm="sha1")
    api.checksum("disk", index="c.index", block_size=4096)
    for other in ("b.index", "c.index"):
        with pytest.raises(UsageError, match=r"a\.index is of sha256 over blocks of 65536 bytes, and"):
            api.compare("a.index", other)
    with pytest.raises(Error, match="no such file"):
        api.compare("a.index", "missing")
    whole = Path("a.index").read_bytes()
    Path("a.index").write_bytes(whole[:-1])
    with pytest.raises(Error, match="truncated"):
        api.compare("a.index", "disk")
    Path("a.index").write_bytes(whole)
    known = api.Index.check_unchanged

    def check_unchanged(self: api.Index) -> None:
        Path("a.index").touch()
        known(self)

    monkeypatch.setattr("imgsum.index.format.Index.check_unchanged", check_unchanged)
    with pytest.raises(ChangedError):
        api.compare("a.index", "disk")


def test_check_says_which_index_shows_where(here: Path, imgsum: Imgsum) -> None:
    os.mkdir("sub dir")
    reference.write("1m:R", here / "sub dir" / "disk")
    sums = imgsum("checksum", "--index", "sub dir/disk.index", "sub dir/disk").stdout
    (here / "SUMS").write_bytes(sums)
    reference.write("1m:A", here / "sub dir" / "disk")
    hint = "`imgsum compare {} 'sub dir/disk' --all` shows where"
    assert hint.format("'sub dir/disk.index'") in imgsum("check", "SUMS").errors
    os.rename("sub dir/disk.index", "disk.index")
    assert hint.format("disk.index") in imgsum("check", "SUMS").errors
    os.unlink("disk.index")
    assert "shows where" not in imgsum("check", "SUMS").errors


# --- maps -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(here: Path) -> bytes:
    """The content of `good file`, of which `bad` is a damaged copy, with `good.index`."""
    reference.write("1m:R 1m:- 1m:A", here / "good file")
    api.checksum("good file", index="good.index")
    data = bytearray((here / "good file").read_bytes())
    for at in (70_000, 1_500_000, 3 * MIB - 1):
        data[at] ^= 1
    (here / "bad").write_bytes(data)
    return (here / "good file").read_bytes()


def test_text_and_json(damaged: bytes, imgsum: Imgsum) -> None:
    text = b"65536 65536\n1441792 65536\n3080192 65536\n3 ranges, 196608 bytes\n"
    assert imgsum("compare", "--map", "text", "good.index", "bad") == (text, b"", 1)
    text = b"69632 512\n1499648 512\n3145216 512\n3 ranges, 1536 bytes\n"
    assert imgsum("compare", "--map", "text", "good file", "bad") == (text, b"", 1)
    text = b"0 3145728\n1 range, 3145728 bytes\n"
    assert imgsum("compare", "--map", "text", "--granularity", "1m", "good.index", "bad") == (text, b"", 1)
    lines = [json.loads(line) for line in imgsum("compare", "--map", "json", "good.index", "bad").stdout.splitlines()]
    found = [(line["start"], line["length"]) for line in lines[:-1]]
    assert found == [(65536, 65536), (1441792, 65536), (3080192, 65536)]
    assert lines[-1] == {"schema": 1, "ranges": 3, "bytes": 196608}
    assert imgsum("compare", "--map", "text", "bad", "bad") == (b"0 ranges, 0 bytes\n", b"", 0)


def test_a_map_for_ddrescue(damaged: bytes, imgsum: Imgsum) -> None:
    lines = imgsum("compare", "--map", "ddrescue", "good.index", "bad").text.splitlines()
    assert lines[-1] == "# 3 ranges, 196608 bytes"
    status, *blocks = [line.split() for line in lines if not line.startswith("#")]
    assert status == ["0x00000000", "?", "1"]
    at = 0
    for start, length, _ in blocks:  # they tile the whole, without a gap
        assert int(start, 16) == at
        at += int(length, 16)
    assert at == len(damaged)
    assert [int(start, 16) for start, _, kind in blocks if kind == "?"] == [65536, 1441792, 3080192]
    assert {kind for *_, kind in blocks} == {"?", "+"}


@pytest.mark.parametrize("words", [["good.index", "bad", "--from", "good file"], ["good file", "bad"]])
@pytest.mark.parametrize("size", [3 * MIB, 2 * MIB + 5, 4 * MIB + 5])
def test_dd_mends_a_copy(words: list[str], size: int, damaged: bytes, imgsum: Imgsum) -> None:
    with open("bad", "r+b") as file:
        file.truncate(size)
        file.seek(size - 100)
        file.write(b"x" * 100)
    result = imgsum("compare", "--map", "dd", *words)
    assert result.status == 1
    commands = result.text.splitlines()
    assert commands[-1].startswith(f"# {len(commands) - 1} ranges, ")
    subprocess.run(["sh", "-e"], input=result.stdout, check=True)
    assert Path("bad").read_bytes() == damaged.ljust(max(size, len(damaged)), b"\0")
    assert imgsum("compare", "-q", "good.index", "bad").status == 0


def test_names_are_quoted_for_the_shell(damaged: bytes, imgsum: Imgsum) -> None:
    os.rename("bad", "$(touch x) ' bad")
    subprocess.run(["sh"], input=imgsum("compare", "--map=dd", "good file", "$(touch x) ' bad").stdout, check=True)
    assert imgsum("compare", "-q", "good file", "$(touch x) ' bad").status == 0
    assert not os.path.exists("x")


@pytest.mark.parametrize(
    "words",
    [
        ["--map", "dd", "good.index", "bad"],
        ["--map", "dd", "good.index", "good.index", "--from", "good file"],
        ["--map", "dd", "good.index", "image.qcow2", "--from", "good file"],
        ["--map", "dd", "good.index", "bad", "--from", "image.qcow2"],
        ["--map", "dd", "image.qcow2", "bad"],
        ["--map", "text", "good.index", "bad", "--from", "good file"],
        ["--map", "text", "good.index", "-"],
        ["--map", "text", "--json", "good.index", "bad"],
        ["--map", "text", "-q", "good.index", "bad"],
        ["--map", "xml", "good.index", "bad"],
        ["--granularity", "4k", "good.index", "bad"],
        ["--granularity", "5", "--map", "text", "good.index", "bad"],
    ],
    ids=" ".join,
)
def test_nonsense(words: list[str], damaged: bytes, imgsum: Imgsum) -> None:
    subprocess.run([find_tool("qemu-img"), "create", "-q", "-f", "qcow2", "image.qcow2", "3m"], check=True)
    result = imgsum("compare", *words)
    assert (result.stdout, result.status) == (b"", 2)
    assert "internal" not in result.errors
