"""Dirty bitmaps: with an index and a bitmap, the value is that of a full read, or it is an error."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import qcow2_build
from conftest import find_tool
from qcow2_images import raw_content, run
from reference import KIB, MIB, TIB, blkhash

from imgsum.engine.checksum import Checksum, Since, Task, checksum_tasks
from imgsum.errors import Error, FormatError, RefusedError, TruncatedError, UsageError
from imgsum.extent import Extent
from imgsum.hash.blkhash import construction
from imgsum.index.format import Index
from imgsum.source import Command, OpenOptions
from imgsum.source.qcow2 import bitmaps
from imgsum.source.qcow2.bitmaps import clean_extents, find_bitmap
from imgsum.source.qcow2.header import parse

if TYPE_CHECKING:
    from nbdservers import Servers

pytest_plugins = ["nbdservers"]

CLUSTER = 64 * KIB
SIZE = 8 * MIB


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def qemu() -> Callable[..., str]:
    """qemu(WORD, ...): run a command of QEMU's, in the test's directory."""
    find_tool("qemu-img")
    find_tool("qemu-io")
    return run


def io(*commands: str, image: str = "image") -> None:
    run("qemu-io", "-f", "qcow2", *(word for command in commands for word in ("-c", command)), image)


def value(image: str | Command, bitmap: str | None = None, *, sample: int = 0, **opened: object) -> Checksum:
    """The checksum of IMAGE, with "index" and BITMAP if that is given; else by a full read, which makes "index"."""
    options = OpenOptions(**opened)  # type: ignore[arg-type]
    task = Task(image, construction("blkhash", None, None), options)
    if bitmap is None:
        return _result(task._replace(index_path="index"))
    with Index.open("index") as old:
        return _result(task._replace(since=Since(old, bitmap=bitmap, sample=sample)))


def _result(task: Task) -> Checksum:
    (result,) = checksum_tasks([task], task.options)
    if isinstance(result, Error):
        raise result
    return result


def refusal(image: str, bitmap: str, kind: type[Error], **opened: object) -> str:
    with pytest.raises(kind) as caught:
        value(image, bitmap, **opened)
    return str(caught.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with "image", which has 4 MiB of data, "index" of it, and the bitmap "b" that begins there."""
    find_tool("qemu-img")
    find_tool("qemu-io")
    directory = tmp_path_factory.mktemp("made")
    with contextlib.chdir(directory):
        run("qemu-img", "create", "-q", "-f", "qcow2", "image", str(SIZE))
        io("write -P 1 0 4M")
        value("image")
        run("qemu-img", "bitmap", "--add", "image", "b")
    return directory


@pytest.fixture
def begun(made: Path) -> None:
    """A copy of that."""
    for name in ("image", "index"):
        Path(name).write_bytes((made / name).read_bytes())


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("begun")
def test_only_dirty_blocks_are_read() -> None:
    io("write -P 2 1M 64k", "write -P 3 2M 1", "discard 3M 256k")
    found = value("image", "b")
    assert found.hexdigest == blkhash(raw_content(Path("image")))
    assert found.stats.bytes_read == 2 * CLUSTER
    assert found.stats.reused_bytes == 4 * MIB - 2 * CLUSTER - 256 * KIB  # what is zero now costs nothing either way


@pytest.mark.usefixtures("begun")
def test_a_sample_of_what_is_reused_is_read() -> None:
    assert value("image", "b", sample=4).stats.bytes_read == 4 * CLUSTER


@pytest.mark.usefixtures("begun")
def test_what_changed_before_the_bitmap_began_is_found_by_the_sample(qemu: Callable[..., str]) -> None:
    qemu("qemu-img", "bitmap", "--remove", "image", "b")
    io("write -P 9 0 4M")
    qemu("qemu-img", "bitmap", "--add", "image", "b")
    with pytest.raises(Error, match="differs from the index"):
        value("image", "b", sample=1)


@pytest.mark.usefixtures("begun")
def test_a_disk_that_shrank_and_grew_again(qemu: Callable[..., str]) -> None:
    """QEMU drops the bits of what is cut off, and what grows again is not dirty. The image says that it is zero."""
    qemu("qemu-img", "resize", "-q", "--shrink", "-f", "qcow2", "image", MIB)
    assert value("image", "b").hexdigest == blkhash(raw_content(Path("image")))
    qemu("qemu-img", "resize", "-q", "-f", "qcow2", "image", SIZE)
    assert value("image", "b").hexdigest == blkhash(raw_content(Path("image")))


def test_a_backing_file(qemu: Callable[..., str]) -> None:
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "base", SIZE)
    io("write -P 1 0 4M", image="base")
    qemu("qemu-img", "bitmap", "--add", "base", "below")
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "image")
    value("image")
    qemu("qemu-img", "bitmap", "--add", "image", "b")
    io("write -P 2 1M 64k", "write -z 2M 64k")
    found = value("image", "b")
    assert found.hexdigest == blkhash(raw_content(Path("image")))
    assert found.stats.bytes_read == CLUSTER
    assert "no bitmap 'below'" in refusal("image", "below", RefusedError)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(qemu: Callable[..., str], seed: int) -> None:
    chosen = random.Random(seed)
    size = chosen.choice([SIZE, SIZE - 512, 3 * MIB + 1536])
    options = chosen.choice(["cluster_size=64k", "cluster_size=4k", "extended_l2=on", "cluster_size=2M"])
    backing: list[str] = []
    if seed % 2:
        qemu("qemu-img", "create", "-q", "-f", "raw", "base", size)
        qemu("qemu-io", "-f", "raw", "-c", "write -P 7 512k 2M", "base")
        backing = ["-b", "base", "-F", "raw"]
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", options, *backing, "image", size)
    io(*_random_commands(chosen, size))
    value("image")
    for _ in range(chosen.randrange(3)):
        qemu("qemu-img", "bitmap", "--add", "image", f"another {chosen.random()}")
    granularity = chosen.choice([512, 4 * KIB, 64 * KIB, MIB])
    qemu("qemu-img", "bitmap", "--add", "-g", granularity, "image", "b")
    for step in range(3):
        if chosen.random() < 0.3 and not step:
            qemu("qemu-img", "snapshot", "-c", "s", "image")
        else:
            io(*_random_commands(chosen, size))
        if not backing and chosen.random() < 0.3:
            for new in (chosen.randrange(MIB, size, 128 * KIB), size):
                qemu("qemu-img", "resize", "-q", "--shrink", "-f", "qcow2", "image", new)
        assert value("image", "b").hexdigest == blkhash(raw_content(Path("image")))


def _random_commands(chosen: random.Random, size: int) -> Iterator[str]:
    for _ in range(chosen.randrange(1, 6)):
        length = chosen.choice([512, 4 * KIB, CLUSTER, 300 * KIB, MIB])
        start = chosen.randrange(0, size - length, 512)
        kind = chosen.choice([f"write -P {chosen.randrange(1, 255)}", "write -z", "write -z -u", "discard"])
        yield f"{kind} {start} {length}"


# --- what does not count ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("begun")
def test_no_such_bitmap(qemu: Callable[..., str]) -> None:
    assert refusal("image", "other", RefusedError).endswith("has no bitmap 'other' (`qemu-img info` lists them)")
    qemu("qemu-img", "bitmap", "--remove", "image", "b")
    refusal("image", "b", RefusedError)
    Path("raw").write_bytes(bytes(SIZE))
    assert "no dirty bitmaps" in refusal("raw", "b", RefusedError)
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", "compat=0.10", "image", SIZE)
    refusal("image", "b", RefusedError)


@pytest.mark.usefixtures("begun")
def test_a_bitmap_that_is_in_use(servers: Servers) -> None:
    """A running QEMU keeps the bits in memory. One that was killed never wrote them."""
    server = servers.qemu_nbd(Path("image"), image_format="qcow2", read_only=False)
    assert "in use" in refusal("image", "b", RefusedError, force_share=True)
    server.kill()
    assert "in use" in refusal("image", "b", RefusedError)


@pytest.mark.usefixtures("begun")
def test_a_bitmap_that_is_disabled(qemu: Callable[..., str]) -> None:
    qemu("qemu-img", "bitmap", "--disable", "image", "b")
    io("write -P 2 1M 64k")
    assert "is disabled" in refusal("image", "b", RefusedError)
    qemu("qemu-img", "bitmap", "--enable", "image", "b")


@pytest.mark.usefixtures("begun")
def test_a_snapshot_has_no_bitmap(qemu: Callable[..., str]) -> None:
    qemu("qemu-img", "snapshot", "-c", "s", "image")
    assert "snapshot" in refusal("image", "b", RefusedError, snapshot="s")


@pytest.mark.usefixtures("begun")
def test_an_image_of_another_reader(servers: Servers) -> None:
    assert "imgsum's own reader" in refusal("image", "b", RefusedError, reader="qemu")


def _patch(at: int, content: bytes) -> None:
    with open("image", "r+b") as file:
        file.seek(at)
        file.write(content)


def _places() -> tuple[int, int, int]:
    """Where the bitmaps extension's data, the bitmap directory and the table of its first bitmap are in "image"."""
    raw = Path("image").read_bytes()
    extension = raw.index(bytes.fromhex("2385287500000018")) + 8
    directory = struct.unpack_from(">Q", raw, extension + 16)[0]
    return extension, directory, struct.unpack_from(">Q", raw, directory)[0]


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("place", "at", "content", "kind", "reason"),
    [
        (None, 88, bytes(8), RefusedError, "inconsistent"),
        (0, -4, b"\0\0\0\x17", FormatError, "24 bytes"),
        (0, 0, b"\xff\xff\xff\xff", FormatError, "makes no sense"),
        (0, 0, b"\0\0\0\2", FormatError, "makes no sense"),
        (0, 4, b"\0\0\0\1", FormatError, "makes no sense"),
        (0, 8, b"\x7f" * 8, FormatError, "makes no sense"),
        (0, 8, struct.pack(">Q", 40), FormatError, "more than its 1 entries"),
        (0, 16, struct.pack(">Q", 512), FormatError, "can't be at byte 512"),
        (0, 16, bytes(8), FormatError, "can't be at byte 0"),
        (0, 16, struct.pack(">Q", 1 << 40), TruncatedError, "truncated"),
        (1, 0, struct.pack(">Q", 1 << 40), TruncatedError, "truncated"),
        (1, 0, struct.pack(">Q", 1234), FormatError, "can't be at byte 1234"),
        (1, 0, b"\xff" * 6 + b"\0\0", FormatError, "can't be at byte"),
        (1, 8, b"\0\0\0\2", RefusedError, f"not of an image of {SIZE} bytes"),
        (1, 8, b"\0\0\0\0", RefusedError, f"not of an image of {SIZE} bytes"),
        (1, 8, b"\xff\xff\xff\xff", RefusedError, f"not of an image of {SIZE} bytes"),
        (1, 15, b"\3", RefusedError, "in use"),
        (1, 15, b"\0", RefusedError, "disabled"),
        (1, 15, b"\x0a", RefusedError, "not known"),
        (1, 16, b"\2", RefusedError, "type 2"),
        (1, 17, b"\x08", FormatError, "granularity_bits 8"),
        (1, 17, b"\xff", FormatError, "granularity_bits 255"),
        (1, 18, b"\0\0", FormatError, "a name of 0 bytes"),
        (1, 18, b"\0\x10", FormatError, "beyond"),
        (1, 18, b"\xff\xff", FormatError, "a name of 65535 bytes"),
        (1, 20, b"\xff\xff\xff\xff", FormatError, "beyond"),
        (2, 0, b"\xff", FormatError, "reserved bits"),
        (2, 7, b"\2", FormatError, "reserved bits"),
        (2, 0, struct.pack(">Q", 0x50001), FormatError, "reserved bits"),
        (2, 0, struct.pack(">Q", 0x50200), FormatError, "can't be at byte"),
        (2, 0, struct.pack(">Q", 1 << 40), TruncatedError, "truncated"),
    ],
)  # fmt: skip
def test_damaged_bitmaps(place: int | None, at: int, content: bytes, kind: type[Error], reason: str) -> None:
    _patch((0 if place is None else _places()[place]) + at, content)
    assert reason in refusal("image", "b", kind)
    assert value("image").hexdigest == blkhash(bytes([1]) * (4 * MIB) + bytes(4 * MIB))


@pytest.mark.usefixtures("begun")
def test_extra_data(qemu: Callable[..., str]) -> None:
    """An entry with 8 bytes of extra data that nobody knows: it says itself whether the bitmap counts all the same."""
    io("write -P 2 1M 64k")
    extension, directory, _ = _places()
    entry = bytearray(Path("image").read_bytes()[directory : directory + 32])
    _patch(extension + 8, struct.pack(">Q", 40))
    entry[20:24] = b"\0\0\0\x08"
    _patch(directory, bytes(entry[:24]) + b"whatever" + bytes(entry[24:]))
    assert "not known" in refusal("image", "b", RefusedError)
    _patch(directory + 15, b"\6")
    assert value("image", "b").stats.bytes_read == CLUSTER


@pytest.mark.usefixtures("begun")
def test_a_name_that_is_there_twice() -> None:
    extension, directory, _ = _places()
    entry = Path("image").read_bytes()[directory : directory + 32]
    _patch(extension, struct.pack(">IIQ", 2, 0, 64))
    _patch(directory + 32, entry)
    assert "two bitmaps" in refusal("image", "b", FormatError)


# --- the bits --------------------------------------------------------------------------------------------------------


def _image(
    bits: bytes, granularity_bits: int, size: int, cluster_bits: int = 12, table: list[int] | None = None
) -> bytes:
    """An image of SIZE bytes with the bitmap "b" of those BITS."""
    cluster = 1 << cluster_bits
    count = max(1, -(-len(bits) // cluster))
    entries = [(16 + number) * cluster for number in range(count)] if table is None else table
    directory = struct.pack(">QIIBBHI", 8 * cluster, len(entries), 2, 1, granularity_bits, 1, 0) + b"b"
    return qcow2_build.image(
        [],
        {7: directory, 8: struct.pack(f">{len(entries)}Q", *entries), 16 + count - 1: b""}
        | {16 + number: bits[number * cluster : (number + 1) * cluster] for number in range(count)},
        cluster_bits=cluster_bits,
        size=size,
        extensions=[(0x23852875, struct.pack(">IIQQ", 1, 0, 32, 7 * cluster))],
        autoclear_features=1,
        l1_size=-(-size * 8 // (cluster * cluster)),
        l1=[0],
    )


def _clean(file: bytes) -> list[Extent]:
    def read(offset: int, length: int) -> bytes:
        return file[offset : offset + length]

    header = parse(read)
    return list(clean_extents(read, header, find_bitmap(read, header, b"b")))


@pytest.mark.parametrize("granularity_bits", [9, 12, 13, 14, 16, 20])
@pytest.mark.parametrize("seed", range(3))
def test_bits_are_as_the_specification_says(granularity_bits: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitmaps, "_PIECE", 100)
    chosen = random.Random(seed)
    count = chosen.randrange(1, 4000)
    size = (count << granularity_bits) - 512 * chosen.randrange(1 << granularity_bits - 9)
    bits = bytearray(-(-count // 8))
    for _ in range(chosen.randrange(1, 40)):
        start = chosen.randrange(count)
        for bit in range(start, min(count, start + chosen.choice([1, 2, 9, 300]))):
            bits[bit // 8] |= 1 << bit % 8
    extents = _clean(_image(bytes(bits), granularity_bits, size))
    at = 0
    for extent in extents:
        assert extent.start == at
        assert extent.length > 0
        at = extent.end
    assert at == size
    last = extents[0]
    for bit in range(count):  # a set bit is dirty; a clear one is clean, or dirty with its neighbours of one byte
        last = next((e for e in extents if e.start <= bit << granularity_bits < e.end), last)
        dirty = bits[bit // 8] >> bit % 8 & 1
        if granularity_bits <= 13:
            dirty = bits[bit // 8]
        assert last.zero == (not dirty), bit


def test_clusters_of_bits_that_are_not_stored() -> None:
    cluster_of_bits = 4096 * 8 * 512
    size = 3 * cluster_of_bits - 512
    found = _clean(_image(b"", 9, size, table=[0, 1, 0]))
    assert found == [
        Extent(0, cluster_of_bits, True),
        Extent(cluster_of_bits, cluster_of_bits, False),
        Extent(2 * cluster_of_bits, cluster_of_bits - 512, True),
    ]


def test_a_bitmap_that_is_too_large() -> None:
    with pytest.raises(RefusedError, match="QEMU allows"):
        _clean(_image(b"", 9, 4 * TIB, cluster_bits=21))


def test_a_large_bitmap_comes_in_pieces() -> None:
    """The bits of 2 TiB are 4 MiB; a reader that is asked for no more than a piece, and only when it is wanted."""
    asked: list[int] = []
    bits = b"\0" * (2 * MIB) + b"\1" + b"\0" * (2 * MIB - 1)
    file = _image(bits, 16, 2 * TIB, cluster_bits=16)

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return file[offset : offset + length]

    header = parse(read)
    extents = clean_extents(read, header, find_bitmap(read, header, b"b"))
    asked.clear()
    assert next(extents).zero
    assert len(asked) == 2  # a piece of the table, and one of the bits
    dirty = [extent for extent in extents if not extent.zero]
    assert dirty == [Extent((2 * MIB * 8) << 16, CLUSTER, False)]
    assert max(asked) <= CLUSTER


# --- NBD -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("read_only", [True, False])
def test_an_export_with_a_bitmap(servers: Servers, read_only: bool) -> None:
    io("write -P 2 1M 64k", "write -P 3 2M 1", "discard 3M 256k")
    server = servers.qemu_nbd(Path("image"), "-B", "b", image_format="qcow2", read_only=read_only)
    found = value(server.uri, "b")
    assert found.hexdigest == blkhash(raw_content(Path("image"))) if read_only else value(server.uri).hexdigest
    assert found.stats.bytes_read == 2 * CLUSTER
    assert found.stats.reused_bytes == 4 * MIB - 2 * CLUSTER - 256 * KIB
    context = "the NBD server does not offer the metadata context qemu:dirty-bitmap:other"
    assert context in refusal(server.uri, "other", RefusedError)
    assert value(server.uri, "b", extents=False).hexdigest == found.hexdigest
    for name in ("", "\0", "\udc80"):
        refusal(server.uri, name, UsageError)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_over_nbd(qemu: Callable[..., str], servers: Servers, seed: int) -> None:
    """Written through the server, and read from it while it runs: a pull backup."""
    chosen = random.Random(seed)
    server = servers.qemu_nbd(Path("image"), "-B", "b", image_format="qcow2", read_only=False)
    for _ in range(3):
        commands = [word for command in _random_commands(chosen, SIZE) for word in ("-c", command)]
        qemu("qemu-io", "-f", "raw", *commands, server.uri)
        found = value(server.uri, "b")
        Path("index").rename("kept")
        assert found.hexdigest == value(server.uri).hexdigest
        Path("kept").rename("index")


@pytest.mark.usefixtures("begun")
def test_a_command_with_a_bitmap(servers: Servers) -> None:
    io("write -P 2 1M 64k")
    found = value(Command("qemu-nbd", "-r", "-f", "qcow2", "-B", "b", "image"), "b")
    assert found.hexdigest == blkhash(raw_content(Path("image")))
    assert found.stats.bytes_read == CLUSTER


def test_a_server_without_bitmaps(servers: Servers) -> None:
    server = servers.nbdkit("pattern", "1M")
    value(server.uri)
    assert "qemu:dirty-bitmap:b" in refusal(server.uri, "b", RefusedError)
