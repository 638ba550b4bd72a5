"""VHD and VDI by imgsum's own reader: against QEMU, against images made by hand, damaged, cut, and without QEMU."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import find_tool
from fuzz_formats import cases, make
from reference import KIB, MIB, blkhash
from vhd_build import DYNAMIC, FIXED, Parent, checksummed, dynamic, footer, random_chain, relative, vdi

from imgsum import OpenOptions, checksum
from imgsum.errors import Error, FormatError, NotNativeError, RefusedError, UsageError
from imgsum.source import open_source

if TYPE_CHECKING:
    from conftest import Imgsum

FULL = b"\xff" * 512
EMPTY = bytes(512)
SIZE = 5 * MIB
BLOCKS = {0: (FULL, b"A" * 2 * MIB), 2: (EMPTY, b"C" * MIB)}
CONTENT = b"A" * 2 * MIB + bytes(2 * MIB) + b"C" * MIB


def sum_of(path: Path | str, **options: Any) -> str:
    return checksum(path, options=OpenOptions(**options)).hexdigest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(DATA, name="disk"): a file with it."""

    def make(data: bytes, name: str = "disk") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return make


@pytest.mark.parametrize(("name", "data"), [("vpc", dynamic(SIZE, BLOCKS)), ("vdi", vdi(SIZE, {}))])
def test_there_are_no_snapshots(write: Callable[..., Path], name: str, data: bytes) -> None:
    with pytest.raises(UsageError, match="a snapshot can be read by imgsum's own reader of qcow2 only"):
        sum_of(write(data), format=name, snapshot="first")


def test_native_means_without_qemu(write: Callable[..., Path]) -> None:
    with pytest.raises(NotNativeError, match="is a qed image, which takes QEMU to read"):
        sum_of(write(bytes(512)), format="qed", reader="native")


# --- random ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vpc", "vdi"])
@pytest.mark.parametrize("seed", range(5))
def test_random_images(name: str, seed: int, tmp_path: Path) -> None:
    """A small part of what `make fuzz` does."""
    find_tool("qemu-img")
    find_tool("qemu-io")
    directory = tmp_path / "cases"
    directory.mkdir()
    assert cases(name, seed, directory, 6, Counter()) == []


@pytest.mark.parametrize("name", ["vpc", "vdi"])
def test_what_qemu_reads_is_the_same(name: str, tmp_path: Path) -> None:
    """As the tables say what was refused for QEMU, so that now the reader does."""
    find_tool("qemu-nbd")
    path, story = make(name, random.Random(5), tmp_path)
    assert sum_of(path, reader="qemu") == sum_of(path, reader="native"), story


# --- VHD ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [511, 512])
@pytest.mark.parametrize("direct", [False, True])
def test_dynamic(write: Callable[..., Path], length: int, direct: bool) -> None:
    """The bitmap of a dynamic image does not count, as with QEMU: sectors that were never written are zeros."""
    disk = write(dynamic(SIZE, BLOCKS, order=[2, 0], length=length))
    got = checksum(disk, options=OpenOptions(direct=direct))
    assert (got.hexdigest, got.size, got.format) == (blkhash(CONTENT), SIZE, "vpc")


@pytest.mark.parametrize("length", [511, 512])
def test_fixed(write: Callable[..., Path], length: int) -> None:
    disk = write(CONTENT + footer(SIZE, FIXED, length=length))
    assert sum_of(disk, format="vpc") == blkhash(CONTENT)
    assert sum_of(disk, format="vpc", untrusted=True) == blkhash(CONTENT)


@pytest.mark.parametrize("name", ["vhd", "vpc"])
def test_the_names_of_the_format(write: Callable[..., Path], imgsum: Imgsum, name: str) -> None:
    result = imgsum("checksum", "--untrusted", "-f", name, write(dynamic(SIZE, BLOCKS)))
    assert (result.status, result.text.split()[0]) == (0, blkhash(CONTENT))


@pytest.mark.parametrize("block", [4 * KIB, 512 * KIB, 8 * MIB])
def test_block_sizes(write: Callable[..., Path], block: int) -> None:
    content = random.Random(block).randbytes(block)
    disk = write(dynamic(3 * block, {1: (b"\xff" * (block // 4096 or 1), content)}, block=block))
    assert sum_of(disk, format="vpc", untrusted=True) == blkhash(bytes(block) + content + bytes(block))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:512] + data[512:1024].replace(b"cxsparse", b"cxsparsf") + data[1024:], "without a header"),
        (lambda data: edited(data, 512 + 32, ">I", 3 * MIB), "blocks of 3145728 bytes"),
        (lambda data: edited(data, 512 + 32, ">I", 2048), "blocks of 2048 bytes"),
        (lambda data: edited(data, 512 + 28, ">I", 2), "says its size twice, and differently"),
        (lambda data: edited(data, 512 + 28, ">I", 0x40000001), "more than there can be"),
        (lambda data: data[:600] + b"x" + data[601:], "header is damaged: its checksum is wrong"),
        (lambda data: bytes(512) + data[512:], "copy of the VHD's footer is not where the file begins"),
        (lambda data: data[:-512], "truncated: the VHD's footer is not where the file ends"),
        (lambda data: edited(edited(data, 5632, ">I", 20), 5640, ">I", 1 << 20), "truncated: the file ends at byte"),
        (lambda data: edited(edited(data, 5632, ">I", 20), 5636, ">I", 20), "several blocks of its content are in one"),
    ],
)
def test_damaged_vhds(write: Callable[..., Path], change: Callable[[bytes], bytes], reason: str) -> None:
    disk = write(change(dynamic(SIZE, BLOCKS)))
    with pytest.raises(FormatError, match=reason):
        sum_of(disk, format="vpc")
    with pytest.raises(FormatError, match=reason):
        sum_of(disk, format="vpc", reader="qemu")


def edited(data: bytes, at: int, code: str, value: int) -> bytes:
    """DATA with another number AT a place, and the header's checksum that goes with it."""
    changed = bytearray(data)
    struct.pack_into(code, changed, at, value)
    changed[512:1536] = checksummed(changed[512:1536], 36)
    return bytes(changed)


@pytest.mark.parametrize(("size", "kind"), [(0, DYNAMIC), (0, FIXED), (512, DYNAMIC), (2041 << 30, FIXED)])
def test_sizes(write: Callable[..., Path], size: int, kind: int) -> None:
    small = size if size < MIB else 0
    disk = write(dynamic(size, {}, entries=1) if kind == DYNAMIC else bytes(small) + footer(size, FIXED))
    if size == small:
        assert sum_of(disk, format="vpc") == blkhash(bytes(size))
    else:
        with pytest.raises(RefusedError, match=f"{size} bytes, and {2040 << 30} are the most"):
            sum_of(disk, format="vpc")


# --- differencing ---------------------------------------------------------------------------------------------------

BITS = bytes([0b10100000]) + bytes(511)  # sectors 0 and 2
CHILD = {0: (BITS, b"x" * 512 + b"-" * 512 + b"y" * 512), 1: (FULL, b"B" * 2 * MIB)}
MERGED = b"x" * 512 + b"A" * 512 + b"y" * 512 + b"A" * (2 * MIB - 1536) + b"B" * 2 * MIB + b"C" * MIB


def child(parent: Parent, **options: Any) -> bytes:
    return dynamic(SIZE, CHILD, parent=parent, **options)


def utf16(path: str) -> bytes:
    return path.encode("utf-16-le")


@pytest.mark.parametrize(
    ("where", "parent"),
    [
        ("base.vhd", Parent(locators=[relative(".\\base.vhd")])),
        ("base.vhd", Parent(locators=[(b"W2ku", utf16("C:\\Disks\\base.vhd\0"))])),
        ("base.vhd", Parent(locators=[relative("gone\\none.vhd"), (b"W2ku", utf16("C:\\base.vhd"))])),
        ("base.vhd", Parent(locators=[(b"MacX", b"file:///Users/me/base.vhd")])),
        ("base.vhd", Parent(name="D:\\base.vhd")),
        ("sub/base.vhd", Parent(locators=[relative("sub\\base.vhd")])),
        ("../base.vhd", Parent(locators=[relative("..\\base.vhd")])),
        ("Größe 😀.vhd", Parent(locators=[relative(".\\Größe 😀.vhd")])),
    ],
)
@pytest.mark.parametrize("kind", [DYNAMIC, FIXED])
def test_differencing(tmp_path: Path, imgsum: Imgsum, where: str, parent: Parent, kind: int) -> None:
    """From another directory than that of the image."""
    directory = tmp_path / "images"
    (directory / "sub").mkdir(parents=True)
    whole = CONTENT + footer(SIZE, FIXED, unique_id=b"p" * 16)
    (directory / where).write_bytes(whole if kind == FIXED else dynamic(SIZE, BLOCKS, unique_id=b"p" * 16))
    (directory / "child.vhd").write_bytes(child(parent))
    result = imgsum("checksum", "-q", "images/child.vhd", cwd=tmp_path)
    assert (result.status, result.text.split()[0]) == (0, blkhash(MERGED))


@pytest.mark.parametrize(
    ("parent", "reason"),
    [
        (Parent(), "its parent is not beside it: its name is not recorded"),
        (Parent(locators=[relative("gone.vhd")]), "its parent is not beside it: 'gone.vhd'"),
        (Parent(locators=[relative("\\base.vhd\\..\\gone.vhd")]), "its parent is not beside it: its name"),
        (Parent(locators=[relative("other.vhd")]), "'.*other.vhd' is another image: its unique ID"),
        (Parent(unique_id=b"u" * 16, locators=[relative("disk")]), "chain of parents is a loop"),
        (Parent(locators=[relative("raw")]), "is not a VHD image"),
        (Parent(locators=[relative("cut.vhd")]), "truncated"),
    ],
)
def test_parents_that_are_not_there(write: Callable[..., Path], parent: Parent, reason: str) -> None:
    write(dynamic(SIZE, BLOCKS, unique_id=b"o" * 16), "other.vhd")
    write(b"raw" * 1000, "raw")
    write(dynamic(SIZE, BLOCKS, unique_id=b"p" * 16)[:-512], "cut.vhd")
    disk = write(child(parent))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Error, match=reason) as caught:
        sum_of(disk)
    assert str(caught.value).startswith(str(disk))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_who_does_not_read_parents(write: Callable[..., Path]) -> None:
    write(dynamic(SIZE, BLOCKS, unique_id=b"p" * 16), "base.vhd")
    disk = write(child(Parent(locators=[relative("base.vhd")])))
    with pytest.raises(RefusedError, match="refers to a parent, which --untrusted does not allow"):
        sum_of(disk, format="vpc", untrusted=True)
    with pytest.raises(RefusedError, match="of which QEMU does not read the parent"):
        sum_of(disk, reader="qemu")


def test_a_parent_that_changes(write: Callable[..., Path]) -> None:
    base = write(dynamic(SIZE, BLOCKS, unique_id=b"p" * 16), "base.vhd")
    source = open_source(str(write(child(Parent(locators=[relative("base.vhd")])))), OpenOptions())
    with base.open("ab") as file:
        file.write(b"x")
    with pytest.raises(Error, match=r"base\.vhd.*changed"):
        source.check_unchanged()
    source.close()


@pytest.mark.parametrize("seed", range(12))
def test_chains(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path, content = random_chain(rng, tmp_path)
    assert sum_of(path, request_size=rng.choice((4 * KIB, MIB)), direct=rng.random() < 0.5) == blkhash(content)


# --- VDI ------------------------------------------------------------------------------------------------------------

VDI_BLOCKS = {0: b"A" * MIB, 3: b"D" * 1000, 4: b"E" * MIB}
VDI_SIZE = 4 * MIB + 1536
VDI_CONTENT = b"A" * MIB + bytes(2 * MIB) + (b"D" * 1000).ljust(MIB, b"\0") + b"E" * 1536


def test_vdi(write: Callable[..., Path]) -> None:
    """Blocks in any order, and discarded ones."""
    disk = write(vdi(VDI_SIZE, VDI_BLOCKS, order=[4, 0, 3], discarded=[1]))
    got = checksum(disk)
    assert (got.hexdigest, got.size, got.format) == (blkhash(VDI_CONTENT), VDI_SIZE, "vdi")
    assert sum_of(disk, format="vdi", untrusted=True) == got.hexdigest


def test_a_vdi_of_part_of_a_sector(write: Callable[..., Path]) -> None:
    """VBoxManage has written such, and QEMU reads the whole sector."""
    disk = write(vdi(VDI_SIZE - 200, VDI_BLOCKS))
    assert sum_of(disk) == blkhash(VDI_CONTENT)


@pytest.mark.parametrize(
    ("at", "code", "value", "reason"),
    [
        (0x40, "<I", 0, "is not a vdi image"),
        (0x44, "<I", 0x10000, "a VDI of version 1.0"),
        (0x4C, "<I", 3, "an undo VDI"),
        (0x4C, "<I", 4, "is a differencing VDI"),
        (0x4C, "<I", 9, "of type 9"),
        (0x154, "<I", 513, "its table at byte 513"),
        (0x158, "<I", 1000, "its data at byte 1000"),
        (0x168, "<I", 4096, "sectors of 4096 bytes"),
        (0x170, "<Q", 6 * MIB, "says its size twice"),
        (0x178, "<I", 2 * MIB, "blocks of 2097152 bytes"),
        (0x17C, "<I", 512, "and 512 more for each"),
        (0x180, "<I", 4, "says its size twice"),
        (0x1A8, "<I", 1, "is a differencing VDI"),
        (0x1B8, "<I", 1, "is a differencing VDI"),
        (0x200, "<I", 9999, "truncated: the file ends at byte"),
        (0x204, "<Q", 0, "several blocks of its content are in one place"),
    ],
)
@pytest.mark.parametrize("reader", ["native", "qemu"])
def test_damaged_vdis(write: Callable[..., Path], at: int, code: str, value: int, reason: str, reader: str) -> None:
    data = bytearray(vdi(VDI_SIZE, VDI_BLOCKS))
    struct.pack_into(code, data, at, value)
    with pytest.raises(Error, match=reason):
        sum_of(write(data), format="vdi", reader=reader)


# --- cut, bounded, and without QEMU ---------------------------------------------------------------------------------

WHOLE = {
    "vpc": (dynamic(SIZE, BLOCKS, order=[2, 0]), CONTENT),
    "vpc-fixed": (CONTENT + footer(SIZE, FIXED), CONTENT),
    "vdi": (vdi(VDI_SIZE, VDI_BLOCKS, order=[0, 4, 3]), VDI_CONTENT),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_cut_at_every_edge(write: Callable[..., Path], kind: str) -> None:
    data, content = WHOLE[kind]
    edges = {0, 8, 0x180, 511, 512, 1024, 1536, 5632, 5636, 6144, 6656, 1024 + MIB, 1024 + 2 * MIB, len(data) - 512}
    for end in sorted({at + more for at in edges for more in (-1, 0, 1)}, reverse=True):
        if 0 <= end < len(data):
            disk = write(data[:end])
            with pytest.raises(Error):
                sum_of(disk, format=kind[:3])
    assert sum_of(write(data), format=kind[:3]) == blkhash(content)


@pytest.mark.parametrize("kind", WHOLE)
def test_without_qemu_and_libnbd(write: Callable[..., Path], imgsum: Imgsum, tmp_path: Path, kind: str) -> None:
    data, content = WHOLE[kind]
    (tmp_path / "nbd.py").write_text("raise ImportError")
    env = {"PATH": str(tmp_path / "nothing"), "PYTHONPATH": str(tmp_path)}
    result = imgsum("checksum", "-q", write(data, "disk"), env=env)
    assert (result.status, result.errors, result.text.split()[0]) == (0, "", blkhash(content))


def one_place(kind: str) -> bytes:
    """2 TiB whose blocks are in turn in two places of a file of a few MiB."""
    if kind == "vpc":
        size, entries, table_at, order, places = 2000 << 30, 1000 << 10, 5632, ">", (8192, 16384)
        data = bytearray(dynamic(size, {}))
    else:
        size, entries, table_at, order, places = 2000 << 30, 2000 << 10, 512, "<", (0, 1)
        data = bytearray(vdi(size, {}))
    struct.pack_into(f"{order}{entries}I", data, table_at, *places * (entries // 2))
    tail = data[-512:] if kind == "vpc" else b""
    return bytes(data) + b"x" * 16 * MIB + tail


@pytest.mark.parametrize("kind", ["vpc", "vdi"])
def test_untrusted_work_is_bounded(write: Callable[..., Path], kind: str) -> None:
    disk = write(one_place(kind))
    with pytest.raises(RefusedError, match="bytes of data in all, too many for its size with --untrusted"):
        sum_of(disk, format=kind, untrusted=True, max_size=1 << 50)


@pytest.mark.parametrize("kind", ["vpc", "vdi"])
def test_memory(write: Callable[..., Path], imgsum: Imgsum, kind: str) -> None:
    """2000 GiB with an allocated block now and then: a table of 4 MiB and more."""
    size = 2000 << 30
    number = 1000 << 10 if kind == "vpc" else 2000 << 10
    kept = range(0, number, number // 8)
    if kind == "vpc":
        data = dynamic(size, dict.fromkeys(kept, (FULL, b"A" * 2 * MIB)))
    else:
        data = vdi(size, dict.fromkeys(kept, b"A" * MIB))
    result, peak = imgsum.peak_memory("checksum", "-a", "xxh64", "-b", "32m", write(data))
    assert result.status == 0
    assert peak <= 64 * MIB
