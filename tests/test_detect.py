"""Formats that are not raw are named and never hashed as raw bytes, unless -f raw says so."""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import Imgsum, find_tool

from imgsum import OpenOptions, checksum
from imgsum.errors import Error, FormatError, MissingError, RefusedError
from imgsum.source.detect import detect, not_a_disk

HEADS = [
    (b"QFI\xfb\0\0\0\x01", "qcow"),
    (b"QFI\xfb\0\0\0\x02", "qcow2"),
    (b"QFI\xfb\0\0\0\x03", "qcow2"),
    (b"QFI\xfb\0\0\0\x04", "qcow2"),
    (b"QFI\xfb\xff\xff\xff\xff", "qcow2"),
    (b"COWD", "vmdk"),
    (b"KDMV", "vmdk"),
    (b"# Disk DescriptorFile\nversion=1\nCID=1\n", "vmdk"),
    (b"# Disk DescriptorFile\r\nversion=1\r\n", "vmdk"),
    (b"#\n# a\n \n\nversion=2\n", "vmdk"),
    (b"version=3\n", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vpc"),
    (bytes(0x40) + struct.pack("<I", 0xBEDA107F), "vdi"),
    (b"QED\0", "qed"),
    (b"WithoutFreeSpace\x02", "parallels"),
    (b"WithouFreSpacExt\x02", "parallels"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0", "cloop"),
]
TAILS = [(b"conectix", "vpc"), (b"koly", "dmg")]
RAW_HEADS = [
    b"",
    b"\0",
    b"QFI\xfb",
    b"QFI\xfb\0\0\0\0",
    b"QFI",
    b"\0QFI\xfb\0\0\0\x03",
    b"# Disk DescriptorFile\nversion=4\n",
    b"# Disk DescriptorFile\nversion=10\n",
    b"# version=1\n",
    b"x\nversion=1\n",
    b"version=1",
    b"LUKS\xba\xbe\0\x01",
    b"LUKS\xba\xbe\0\x02",
    b"EFI PART",
    b"QED\x01",
    b"vhdxfil",
    bytes(0x3F) + struct.pack("<I", 0xBEDA107F),
    b"#!/bin/sh\necho\n",
]


@pytest.mark.parametrize(("head", "name"), HEADS)
def test_heads(head: bytes, name: str) -> None:
    assert detect(head.ljust(512, b"\0"), bytes(512)) == name
    if not head.endswith(b"file=$0"):
        assert detect(head, head) == name  # a file of a few bytes


@pytest.mark.parametrize(("tail", "name"), TAILS)
def test_tails(tail: bytes, name: str) -> None:
    assert detect(bytes(512), tail.ljust(512, b"\0")) == name


@pytest.mark.parametrize("head", RAW_HEADS)
def test_raw(head: bytes) -> None:
    assert detect(head, head) == "raw"
    assert detect(head.ljust(512, b"\0"), bytes(512)) == "raw"


def test_an_iso_is_raw() -> None:
    assert detect(bytes(512), bytes(512)) == "raw"


def test_a_text_of_comments_takes_no_time() -> None:
    for head in (b"#\n" * 256, b"\n" * 512, b" \r\n" * 170, b"#" * 512, (b"# " * 100 + b"\n") * 2):
        assert detect(head[:512], b"") == "raw"


@pytest.mark.parametrize(("magic", "name"), HEADS + TAILS)
@pytest.mark.parametrize("size", [512, 65536 + 512, 3 << 20])
def test_never_the_containers_bytes(magic: bytes, name: str, size: int, tmp_path: Path) -> None:
    """A file with the magic and nothing else of its format: an error in any case, and raw only when asked."""
    path = tmp_path / "disk"
    content = magic.ljust(size, b"\0") if (magic, name) in HEADS else bytes(size - 512) + magic.ljust(512, b"\0")
    path.write_bytes(content)
    with pytest.raises(Error) as caught:
        checksum(path)
    assert caught.value.name == str(path)
    result = checksum(path, options=OpenOptions(format="raw"))
    assert (result.hexdigest, result.format) == (reference.blkhash(content), "raw")


NATIVE = ("qcow2", "vdi", "vhdx", "vmdk", "vpc")


@pytest.mark.parametrize(("magic", "name"), [pair for pair in HEADS + TAILS if pair[1] in NATIVE])
def test_what_only_begins_as_a_container_is_an_error(magic: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(4096 * ((magic, name) in TAILS)) + magic.ljust(512, b"\0"))
    with pytest.raises((FormatError, RefusedError)):
        checksum(path)


@pytest.mark.parametrize(("magic", "name"), [pair for pair in HEADS + TAILS if pair[1] not in NATIVE])
def test_without_qemu_nbd_the_format_and_the_package_are_named(
    magic: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(4096 * ((magic, name) in TAILS)) + magic.ljust(512, b"\0"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match=f"{name}.*qemu-utils"):
        checksum(path)


def test_raw_parses_no_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "disk"
    path.write_bytes(b"QFI\xfb\0\0\0\x03" + b"\xff" * 5000)
    monkeypatch.setattr("imgsum.source.detect.detect", lambda head, tail: pytest.fail("it was probed"))
    options = OpenOptions(format="raw")
    assert checksum(path, options=options).hexdigest == reference.blkhash(path.read_bytes())


@pytest.mark.parametrize("magic", [head for head, _ in HEADS])
def test_a_stream_that_begins_so_is_refused(magic: bytes, imgsum: Callable[..., object]) -> None:
    """Its content can't be had from a stream, and its bytes are not what was asked for."""
    content = magic.ljust(100_000, b"\0")
    stdout, stderr, status = imgsum("checksum", "-", stdin=content)
    assert (stdout, status) == (b"", 2)
    assert b"-f raw" in stderr
    stdout, stderr, status = imgsum("checksum", "-f", "raw", "-", stdin=content)
    assert (stdout, status) == (f"{reference.blkhash(content)}  -\n".encode(), 0)


@pytest.mark.parametrize("size", [512, 4096, 1 << 20, (1 << 20) + 512, 3 << 20])
def test_a_stream_that_ends_so_is_refused(size: int, imgsum: Callable[..., object]) -> None:
    """And one that has such a piece anywhere else is not, wherever the pieces that it is read in end."""
    for magic, name in TAILS:
        content = bytes(size - 512) + magic.ljust(512, b"\0")
        stdout, stderr, status = imgsum("checksum", stdin=content)
        assert (stdout, status) == (b"", 2)
        assert f"is a {name} image".encode() in stderr
        if size > 512:
            content += b"\0"
            assert imgsum("checksum", "-q", stdin=content) == (f"{reference.blkhash(content)}  -\n".encode(), b"", 0)


def test_a_stream_that_does_not_is_read(imgsum: Callable[..., object]) -> None:
    for content in (b"QFI", b"QFI\xfb", b"conecti", b"x" * 100_000, b"\0" * 600):
        assert imgsum("checksum", stdin=content)[::2] == (f"{reference.blkhash(content)}  -\n".encode(), 0)


@pytest.mark.parametrize("name", ["qcow2", "qcow", "vmdk", "vdi", "vhdx", "vpc", "qed", "parallels"])
def test_images_that_qemu_makes_are_recognized(name: str, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    subprocess.run([find_tool("qemu-img"), "create", "-q", "-f", name, str(path), "8M"], check=True)
    content = path.read_bytes()
    assert detect(content[:512], content[-512:]) == name


@pytest.mark.parametrize(
    ("name", "options"),
    [("vpc", "subformat=fixed"), ("vmdk", "subformat=monolithicFlat"), ("vmdk", "subformat=streamOptimized")],
)
def test_subformats_too(name: str, options: str, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    subprocess.run([find_tool("qemu-img"), "create", "-q", "-f", name, "-o", options, str(path), "8M"], check=True)
    content = path.read_bytes()
    assert detect(content[:512], content[-512:]) == name


# --- what holds a disk, and is none -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("gzip", "gz"), ("bzip2", "bz2"), ("xz", "xz")])
@pytest.mark.parametrize("spec", ["", "100k:R", "1m:-"])
@pytest.mark.parametrize("suffix", ["", ".raw", ".qcow2"])
def test_compressed_files_of_other_names_are_refused_with_what_works(
    name: str, kind: str, spec: str, suffix: str, tmp_path: Path, imgsum: Imgsum
) -> None:
    content = reference.content(spec)
    made = subprocess.run([find_tool(name), "-c"], input=content, check=True, capture_output=True).stdout
    file = f"a disk{suffix}"
    (tmp_path / file).write_bytes(made)
    pipe = f"{name} -dc 'a disk{suffix}' | imgsum checksum"
    ended = imgsum("checksum", file, cwd=tmp_path)
    told = f"is compressed: `{pipe}`, or -f raw.{kind}, reads what is in it (-f raw: the file's own bytes)"
    assert (ended.stdout, ended.errors, ended.status) == (b"", f"imgsum: {file}: {told}\n", 2)
    plain = subprocess.run(
        pipe.split(" |", maxsplit=1)[0], shell=True, cwd=tmp_path, check=True, capture_output=True
    ).stdout
    assert plain == content
    ended = imgsum("checksum", stdin=made)
    assert (ended.stdout, ended.status) == (b"", 2)
    assert f"imgsum: -: is compressed: `{name} -dc | imgsum checksum`" in ended.errors
    assert imgsum("compare", file, file, cwd=tmp_path).status == 2
    ended = imgsum("checksum", "-q", "-f", f"raw.{kind}", file, cwd=tmp_path)
    assert (ended.text, ended.status) == (f"{reference.blkhash(content)}  {file}\n", 0)
    ended = imgsum("checksum", "-q", "-f", "raw", file, cwd=tmp_path)
    assert (ended.text, ended.status) == (f"{reference.blkhash(made)}  {file}\n", 0)


LZMA_OF_A_STREAM = lzma.compress(b"content", lzma.FORMAT_ALONE)
LZMA_OF_KNOWN_SIZE = LZMA_OF_A_STREAM[:5] + struct.pack("<Q", 7) + LZMA_OF_A_STREAM[13:]


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"\x1f\x8b\x08\x08", "`gzip -dc"),
        (b"\x1f\x9d\x90", "`gzip -dc"),
        (bz2.compress(b"content"), "`bzip2 -dc"),
        (lzma.compress(b"content"), "`xz -dc"),
        (LZMA_OF_A_STREAM, "`xz --format=lzma -dc"),
        (LZMA_OF_KNOWN_SIZE, "`xz --format=lzma -dc"),
        (b"\x28\xb5\x2f\xfd\x04", "`zstd -dc"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0", "`zstd -dc"),
        (b"\x04\x22\x4d\x18\x64", "`lz4 -dc"),
        (b"\x02\x21\x4c\x18", "`lz4 -dc"),
        (b"PK\x03\x04\x14", "a zip archive"),
        (b"PK\x05\x06", "a zip archive"),
        (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
        (b"VMA\0", "a Proxmox backup"),
        (b"EVF\x09\x0d\x0a\xff\x00\x01", "an E01 image"),
        (b"EVF2\x0d\x0a\x81\x00", "an Ex01 image"),
        (struct.pack("<I", 0xED26FF3A), "an Android sparse image"),
        (b"sprs\0\0\0\3", "an Apple sparse image"),
        (b"shdw", "an Apple ASIF image"),
        (struct.pack("<Q", 0xCAFEBABE), "a VMware seSparse extent"),
        (b"box.ovf".ljust(257, b"\0") + b"ustar\0", "an OVA"),
        (b"BOX.OVF".ljust(257, b"\0") + b"ustar  \0", "an OVA"),
    ],
)
def test_what_is_no_disk_is_refused(head: bytes, told: str, tmp_path: Path, imgsum: Imgsum) -> None:
    path = tmp_path / "disk.img"
    content = head.ljust(4096, b"\0")
    path.write_bytes(content)
    with pytest.raises(RefusedError, match=re.escape(told)) as caught:
        checksum(path)
    assert "(-f raw: the file's own bytes)" in str(caught.value)
    assert checksum(path, options=OpenOptions(format="raw")).hexdigest == reference.blkhash(content)
    ended = imgsum("checksum", stdin=content)
    assert (ended.stdout, ended.status) == (b"", 2)
    assert told in ended.errors


def test_an_ova_of_tar(tmp_path: Path) -> None:
    (tmp_path / "box.ovf").write_text("<Envelope/>")
    (tmp_path / "box-disk1.vmdk").write_bytes(b"KDMV".ljust(512, b"\0"))
    for kind in ("gnu", "ustar"):
        path = tmp_path / f"{kind}.ova"
        subprocess.run(
            [find_tool("tar"), f"--format={kind}", "-cf", path, "box.ovf", "box-disk1.vmdk"], cwd=tmp_path, check=True
        )
        with pytest.raises(RefusedError, match="is an OVA"):
            checksum(path)


@pytest.mark.parametrize(
    "head",
    [
        b"\x1f\x8b", b"BZ0", b"BZhello", b"BZh91AY", b"PK\1\2", b"VMA", b"EVF", b"spr", b"\x5d\0\0",
        b"\x5d\0\0\1\2" + b"\xff" * 7,
        b"\x4f\x2a\x4d\x18", b"\xbe\xba\xfe\xca\1\0\0\0", b"\xfe\xed\xfa\xce", b"\x3a\xff\x26",
        b"disk.raw".ljust(257, b"\0") + b"ustar\0",
        b"\x33\xc0\x8e\xd0", b"\xeb\x63\x90", b"LUKS\xba\xbe",
    ],
)  # fmt: skip
def test_other_beginnings_are_a_disk(head: bytes, tmp_path: Path) -> None:
    assert not_a_disk(head.ljust(512, b"\1"), "disk") is None
    assert not_a_disk(head, "disk") is None


@pytest.mark.parametrize("name", ["disk.raw", "disk.RAW"])
@pytest.mark.parametrize("where", ["head", "tail"])
def test_a_container_under_a_raw_name_is_refused(name: str, where: str, tmp_path: Path) -> None:
    """A guest may have written it to its raw disk."""
    path = tmp_path / name
    if where == "head":
        subprocess.run([find_tool("qemu-img"), "create", "-q", "-f", "qcow2", path, "1M"], check=True)
    else:
        path.write_bytes(bytes(4096) + b"conectix".ljust(512, b"\0"))
    kind = "qcow2" if where == "head" else "vpc"
    with pytest.raises(
        RefusedError, match=f"named .raw, and begins or ends as {kind}: say which it is, with -f raw or -f"
    ):
        checksum(path)
    assert checksum(path, options=OpenOptions(format="raw")).hexdigest == reference.blkhash(path.read_bytes())
    if where == "head":
        assert checksum(path, options=OpenOptions(format="qcow2")).size == 1 << 20
    path.write_bytes(b"raw" * 1000)
    assert checksum(path).format == "raw"
