"""The index: its format, and that it is taken for one only where nobody else could have chosen that."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
from pathlib import Path

import pytest
import reference
from conftest import Imgsum
from hypothesis import given, settings
from hypothesis import strategies as st
from index_reader import read_index
from reference import GIB, KIB, MIB, TIB

import imgsum as api
from imgsum import Index
from imgsum.errors import Error, FormatError, OpenError, TruncatedError, UsageError
from imgsum.hash import blkhash
from imgsum.index.format import Writer

MIXED = "64k:A 300k:- 64k:0 128k:R 100:B"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(spec: str) -> bytes:
    return b"".join(reference.chunks(spec))


def digests(data: bytes, algorithm: str = "sha256", block_size: int = 64 * KIB) -> list[bytes]:
    new = reference.HASHES[algorithm]
    return [new(data[at : at + block_size]).digest() for at in range(0, len(data), block_size)]


# --- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("options", [{}, {"algorithm": "blake3", "block_size": 512}, {"algorithm": "xxh64"}])
def test_an_index_is_as_documented(holes: bool, options: dict[str, object], here: Path) -> None:
    reference.write(MIXED, here / "disk", holes=holes)
    data = content(MIXED)
    made = api.checksum("disk", index="disk.index", **options)  # type: ignore[arg-type]
    header, found = read_index((here / "disk.index").read_bytes())
    assert found == digests(data, made.algorithm, made.block_size)
    assert (header["size"], header["format"]) == (len(data), "raw")
    status = os.stat("disk")
    assert header["evidence"] == [
        {
            "path": "disk",
            "device": status.st_dev,
            "inode": status.st_ino,
            "size": len(data),
            "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns,
        }
    ]
    assert made.hexdigest == reference.blkhash(data, made.algorithm, made.block_size)
    with Index.open("disk.index") as index:
        assert (index.checksum, index.size, index.algorithm) == (made.hexdigest, len(data), made.algorithm)
        assert index.digests(0, len(data)) == b"".join(found)
        assert len(repr(index)) < 200
    assert sorted(os.listdir()) == ["disk", "disk.index"]


def records(index: Path) -> bytes:
    return index.read_bytes().partition(b"\n")[2]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 511, 512, 4096, 5000, 70_000]), st.sampled_from("-0AR")), max_size=12))
def test_holes_and_written_zeros_have_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, str]]
) -> None:
    directory = tmp_path_factory.mktemp("spec")
    spec = " ".join(f"{size}:{kind}" for size, kind in parts)
    found = set()
    for holes in (True, False):
        reference.write(spec, directory / "disk", holes=holes)
        made = api.checksum(directory / "disk", block_size=512, index=directory / "index")
        assert made.hexdigest == reference.blkhash(content(spec), "sha256", 512)
        # What follows the records depends on the header, which has the file's times.
        assert read_index((directory / "index").read_bytes())[1] == digests(content(spec), "sha256", 512)
        found.add(records(directory / "index")[:-32])
    assert len(found) == 1


def test_imageio_and_streams(here: Path) -> None:
    reference.write("5m:R 1m:-", here / "disk")
    whole = api.checksum("disk", construction="imageio", index="a.index")
    with Index.open("a.index") as index:
        assert index.checksum == whole.hexdigest
    reader, writer = os.pipe()
    os.write(writer, b"A" * 10_000)
    os.close(writer)
    streamed = api.checksum(f"/dev/fd/{reader}", index="b.index")
    os.close(reader)
    header, _ = read_index((here / "b.index").read_bytes())
    assert (header["size"], header["evidence"]) == (10_000, [])
    assert api.checksum("b.index").hexdigest == streamed.hexdigest == reference.blkhash(b"A" * 10_000)


def test_a_large_hole_takes_a_few_bytes(here: Path) -> None:
    with open("disk", "wb") as file:
        file.truncate(8 * TIB)
    with open("disk", "r+b") as file:
        for number in range(1000):
            os.pwrite(file.fileno(), b"A", number * 8 * MIB)
    api.checksum("disk", algorithm="xxh64", index="disk.index")
    assert os.path.getsize("disk.index") <= 1000 * (8 + 16) + 1000


def test_the_vector_of_the_documentation(here: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "index-format.md").read_text()
    vector = bytes.fromhex("".join(text.partition("```hex\n")[2].partition("```")[0].split()))
    construction = blkhash.construction("blkhash", "xxh64", 512)
    evidence: list[dict[str, object]] = [
        {"path": str(here / "disk.raw"), "device": 1, "inode": 2, "size": 1600, "mtime_ns": 3, "ctime_ns": 4}
    ]
    writer = Writer(str(here / "x.index"), construction, size=1600, image_format="raw", evidence=evidence)
    new = construction.algorithm.new
    writer.update(new(b"A" * 512).digest())
    writer.zero(2)
    writer.update(new(b"A" * 64).digest())
    checksum = writer.finish(1600)
    assert (here / "x.index").read_bytes() == vector
    data = b"A" * 512 + bytes(1024) + b"A" * 64
    assert read_index(vector)[1] == digests(data, "xxh64", 512)
    assert checksum == reference.blkhash(data, "xxh64", 512)


# --- what is read --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(here: Path) -> bytes:
    """An index of 4 blocks, in small.index."""
    reference.write("1k:A 1k:- 512:R 100:B", here / "small")
    api.checksum("small", algorithm="xxh64", block_size=1024, index="small.index")
    return (here / "small.index").read_bytes()


def refused(data: bytes) -> type[Error]:
    Path("bad.index").write_bytes(data)
    with pytest.raises(Error) as raised:
        api.checksum("bad.index")
    return raised.type


def test_an_index_that_is_cut_anywhere_is_an_error(small: bytes) -> None:
    for length in range(len(small)):
        refused(small[:length])
    assert refused(small[:-1]) is TruncatedError
    assert refused(small + b"\0") is FormatError


def test_an_index_that_is_edited_anywhere_is_an_error(small: bytes) -> None:
    rng = random.Random(1)
    for at in range(len(small)):
        refused(small[:at] + bytes([small[at] ^ 1 << rng.randrange(8)]) + small[at + 1 :])
        refused(small[:at] + small[at + 1 :])
        refused(small[:at] + bytes([rng.randrange(256)]) + small[at:])


def replaced(data: bytes, key: str, value: str) -> bytes:
    header = json.loads(data.partition(b"\n")[0])
    old = f'"{key}": {json.dumps(header[key])}'
    return data.replace(old.encode(), f'"{key}": {value}'.encode(), 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", "9" * 5000),
        ("size", "1e400"),
        ("size", "-1"),
        ("size", "true"),
        ("size", "NaN"),
        ("size", str(1 << 63)),
        ("block_size", "0"),
        ("block_size", "513"),
        ("block_size", str(1 << 62)),
        ("algorithm", '"shake_128"'),
        ("algorithm", "[" * 200_000),
        ("algorithm", "[" * 50_000 + "]" * 50_000),
        ("format", "7"),
        ("evidence", "{}"),
        ("evidence", "[1]"),
        ("evidence", '[{"path": ' * 100_000),
        ("evidence", '"' + "x" * 2_000_000 + '"'),
    ],
    ids=lambda text: text[:12],
)
def test_hostile_headers(small: bytes, key: str, value: str) -> None:
    assert issubclass(refused(replaced(small, key, value)), FormatError)


@pytest.mark.parametrize(
    "record",
    [
        struct.pack("<Q", (1 << 56) - 1),  # zeros
        struct.pack("<Q", 0),
        struct.pack("<Q", 1 << 56),
        struct.pack("<Q", 1 << 56 | 1025),
        struct.pack("<Q", 1 << 56 | (1 << 56) - 1),
        struct.pack("<Q", 2 << 56),
        struct.pack("<Q", 3 << 56),
        struct.pack("<Q", 3 << 56 | 1),
        struct.pack("<Q", 4 << 56),
        struct.pack("<Q", 255 << 56),
    ],
    ids=bytes.hex,
)
def test_hostile_records(small: bytes, record: bytes) -> None:
    line, newline, rest = small.partition(b"\n")
    for tail in (rest, b"", bytes(100_000)):
        assert issubclass(refused(line + newline + record + tail), FormatError)


def test_more_zeros_than_the_size_has_cost_no_time(small: bytes) -> None:
    data = replaced(small, "size", str((1 << 63) - 1))
    line, newline, _ = data.partition(b"\n")
    assert issubclass(refused(line + newline + struct.pack("<Q", 1 << 55)), FormatError)


def test_digests_of_a_range(small: bytes) -> None:
    data = content("1k:A 1k:- 512:R 100:B")
    known = digests(data, "xxh64", 1024)
    with Index.open("small.index") as index:
        for start in range(0, len(data), 100):
            for length in (0, 1, 1000, 1024, len(data) - start):
                if start + length <= len(data):
                    last = -(-(start + length) // 1024) if length else start // 1024
                    assert index.digests(start, length) == b"".join(known[start // 1024 : last])
        for start, length in ((-1, 1), (0, len(data) + 1), (0, -1)):
            with pytest.raises(UsageError):
                index.digests(start, length)


def test_not_a_file(here: Path, no_leak: None) -> None:
    os.mkfifo("fifo.index")
    os.mkdir("directory.index")
    for name in ("fifo.index", "directory.index", "missing.index"):
        with pytest.raises(OpenError):
            Index.open(name)


# --- in place of an image -------------------------------------------------------------------------------------------


def test_checksum_of_an_index(here: Path, imgsum: Imgsum) -> None:
    reference.write(MIXED, here / "disk")
    line = imgsum("checksum", "-q", "-a", "blake2b", "--index", "disk.index", "disk").text
    value = reference.blkhash(content(MIXED), "blake2b")
    assert line == f"{value}  disk\n"
    os.unlink("disk")
    assert imgsum("checksum", "disk.index") == (f"{value}  disk.index\n".encode(), b"", 0)
    record = json.loads(imgsum("checksum", "--json", "disk.index").stdout)
    assert record["format"] == "index"
    assert (record["algorithm"], record["size"], record["checksum"]) == ("blake2b", len(content(MIXED)), value)
    assert imgsum("checksum", "-a", "blake2b", "disk.index").status == 0
    for options in (["-a", "sha256"], ["-b", "4k"], ["--offset", "64k"], ["--length", "1"], ["--index", "x.index"]):
        result = imgsum("checksum", *options, "disk.index")
        assert (result.stdout, result.status) == (b"", 2)
    tagged = imgsum("checksum", "--tag", "disk.index").text
    assert imgsum("check", stdin=tagged.encode()) == (b"disk.index: OK\n", b"", 0)
    assert imgsum("check", "-a", "blake2b", stdin=line.replace("disk", "disk.index").encode()).status == 0
    other = f"{'0' * 64}  disk.index\n".encode()
    result = imgsum("check", stdin=other)
    assert result.stdout == b"disk.index: FAILED open or read\n"
    assert result.status == 2
    assert imgsum("check", "-a", "blake2b", stdin=b"0" * 128 + b"  disk.index\n").status == 1


def test_a_guest_can_not_choose_that_its_disk_is_an_index(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:A", here / "good")
    good = api.checksum("good", index="good.index").hexdigest
    forged = (here / "good.index").read_bytes().ljust(MIB, b"\0")  # on a disk that has any other content
    for name in ("disk.raw", "disk.img", "disk", "index"):
        (here / name).write_bytes(forged)
        result = imgsum("checksum", name)
        assert (result.stdout, result.status) == (b"", 2)
        assert "-f raw" in result.errors
        assert imgsum("checksum", "-f", "raw", name).text == f"{reference.blkhash(forged)}  {name}\n"
        for operands in ((name, "good"), ("good", name), (name, "good.index"), ("good.index", name)):
            assert imgsum("compare", *operands).status == 2
        assert imgsum("compare", "-F", "raw", "good.index", name).status == 1
    with open("disk", "rb") as stdin:
        assert imgsum("checksum", stdin=stdin).status == 2
    assert imgsum("check", stdin=f"{good}  disk\n".encode()).status == 2
    os.rename("disk", "disk.index")  # even so it is not whole
    assert imgsum("checksum", "disk.index").status == 2
    (here / "forged").write_bytes((here / "good.index").read_bytes())
    assert imgsum("checksum", "-f", "index", "forged").text == f"{good}  forged\n"


def test_what_is_named_like_an_index_and_is_none(here: Path, imgsum: Imgsum) -> None:
    reference.write("100k:A", here / "disk.index")
    result = imgsum("checksum", "disk.index")
    assert (result.stdout, result.status) == (b"", 2)
    assert imgsum("checksum", "-f", "raw", "disk.index").status == 0
    (here / "empty.index").touch()
    assert imgsum("checksum", "empty.index").status == 2


# --- writing it -----------------------------------------------------------------------------------------------------


def test_an_image_is_never_overwritten(here: Path, imgsum: Imgsum) -> None:
    reference.write("100k:A", here / "disk")
    before = (here / "disk").read_bytes()
    os.symlink("disk", "link")
    for path in ("disk", "link", "/dev/null", "."):
        result = imgsum("checksum", "--index", path, "disk")
        assert (result.stdout, result.status) == (b"", 2)
    assert (here / "disk").read_bytes() == before
    for _ in range(2):  # an index is replaced
        assert imgsum("checksum", "-q", "--index", "disk.index", "disk").status == 0
    assert sorted(os.listdir()) == ["disk", "disk.index", "link"]


def test_an_index_that_can_not_be_written(here: Path, imgsum: Imgsum) -> None:
    reference.write("100k:A", here / "disk")
    result = imgsum("checksum", "--index", "missing/disk.index", "disk")
    assert (result.stdout, result.status) == (b"", 2)
    assert "missing/disk.index: the index can't be written: no such file" in result.errors
    reference.write("4m:R", here / "disk")
    limit = 100 * KIB  # of any file, as a full disk would be
    result = imgsum(
        "checksum", "-b", "512", "--index", "disk.index", "disk",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert (result.stdout, result.status) == (b"", 2)
    assert "disk.index: the index can't be written: file too large" in result.errors
    assert os.listdir() == ["disk"]


@pytest.mark.parametrize(
    "words",
    [
        ["--index", "x.index", "disk", "disk"],
        ["--since", "x.index", "disk", "disk"],
        ["--index", "x.index", "--offset", "64k", "disk"],
        ["--since", "disk.index", "--length", "64k", "disk"],
        ["--since", "disk.index", "-a", "sha1", "disk"],
        ["--since", "disk.index", "-b", "4k", "disk"],
        ["--since", "disk.index", "--construction", "imageio", "disk"],
        ["--since", "disk.index", "-"],
        ["--since", "disk.index"],
        ["--since", "disk.index", "disk.index"],
        ["--since", "disk", "disk"],
        ["--since", "missing.index", "disk"],
        ["--bitmap", "b", "disk"],
        ["--sample", "5", "disk"],
        ["--since", "disk.index", "--sample", "-5", "disk"],
        ["--since", "disk.index", "--sample", "many", "disk"],
        ["--since", "disk.index", "--bitmap", "b", "disk"],
    ],
    ids=" ".join,
)
def test_nonsense(words: list[str], here: Path, imgsum: Imgsum) -> None:
    reference.write("100k:A", here / "disk")
    api.checksum("disk", index="disk.index")
    result = imgsum("checksum", *words, stdin=b"A" * 1000)
    assert (result.stdout, result.status) == (b"", 2)
    assert result.errors.count("\n") == 1
    assert sorted(os.listdir()) == ["disk", "disk.index"]


def test_memory_of_a_long_index(here: Path, imgsum: Imgsum) -> None:
    """10,000 extents, and as many records."""
    with open("disk", "wb") as file:
        for number in range(10_000):
            os.pwrite(file.fileno(), b"A", number * 8192)
        file.truncate(GIB)
    limit = 64 * MIB
    for words in (
        ["checksum", "-b", "4k", "-a", "xxh64", "--index", "disk.index", "disk"],
        ["checksum", "--since", "disk.index", "disk"],
        ["checksum", "disk.index"],
        ["compare", "disk.index", "disk"],
        ["compare", "disk.index", "disk.index"],
    ):
        result, peak = imgsum.peak_memory(*words)
        assert result.status == 0, result.errors
        assert peak <= limit


# --- interruption ---------------------------------------------------------------------------------------------------


def test_what_was_interrupted_goes_on(here: Path, imgsum: Imgsum) -> None:
    with open("disk", "wb") as file:
        file.write(os.urandom(16 * MIB))
        file.truncate(16 * GIB)
    whole = api.checksum("disk", algorithm="xxh64", block_size=4096)
    reader, writer = os.pipe()
    words = ["checksum", "-q", "-a", "xxh64", "-b", "4k", "--no-extents", "-T", "none", "--index", "disk.index", "disk"]
    running = imgsum.start(*words, f"--progress-fd={writer}", pass_fds=[writer])
    os.close(writer)
    with open(reader) as progress:
        while progress.readline() != "1/100\n":
            assert running.process.poll() is None
        running.signal(signal.SIGINT)
        assert running.finish() == (b"", b"", -signal.SIGINT)
    assert sorted(os.listdir()) == ["disk", "disk.index.partial"]
    assert imgsum("checksum", "-f", "index", "disk.index.partial").status == 2
    # -a and -b come from what is there.
    result = imgsum("checksum", "--json", "--stats", "--since=disk.index.partial", "--index=disk.index", "disk")
    record = json.loads(result.stdout)
    assert record["checksum"] == whole.hexdigest
    assert record["reused_bytes"] >= 160 * MIB
    assert record["stats"]["bytes_read"] == record["sampled_blocks"] * 4096 == 256 * 4096
    assert sorted(os.listdir()) == ["disk", "disk.index"]
    assert api.checksum("disk.index").hexdigest == whole.hexdigest


def test_a_failed_resume_keeps_what_was_there(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:R", here / "disk")
    api.checksum("disk", index="disk.index", block_size=4096)
    data = (here / "disk.index").read_bytes()
    partial = cut_at_a_checkpoint(data, 100)
    (here / "disk.index.partial").write_bytes(partial)
    os.unlink("disk.index")
    assert imgsum("checksum", "--since=disk.index.partial", "--index=disk.index", "-b", "64k", "disk").status == 2
    (here / "other").write_bytes((here / "disk").read_bytes())
    assert imgsum("checksum", "--since=disk.index.partial", "--index=disk.index", "other").status == 2
    assert (here / "disk.index.partial").read_bytes() == partial
    assert sorted(os.listdir()) == ["disk", "disk.index.partial", "other"]
    result = imgsum("checksum", "--json", "--sample=0", "--since=disk.index.partial", "--index=disk.index", "disk")
    record = json.loads(result.stdout)
    assert (record["reused_bytes"], record["sampled_blocks"]) == (100 * 4096, 0)
    assert record["checksum"] == reference.blkhash(content("1m:R"), "sha256", 4096)


def cut_at_a_checkpoint(index: bytes, count: int) -> bytes:
    """The INDEX of data blocks only as an interrupted run leaves it after COUNT blocks, fewer than a record has."""
    line, newline, rest = index.partition(b"\n")
    known = rest[8 : 8 + 32 * count]
    new = reference.HASHES["sha256"]
    checkpoint = struct.pack("<Q", 2 << 56) + new(known).digest() + new(line + newline).digest()
    return line + newline + struct.pack("<Q", 1 << 56 | count) + known + checkpoint
