"""Formats that are not raw are named and never hashed as raw bytes, unless -f raw says so."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import find_tool

from imgsum import OpenOptions, checksum
from imgsum.errors import Error, MissingError
from imgsum.source.probe import detect

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


@pytest.mark.parametrize(("magic", "name"), [pair for pair in HEADS if pair[1] != "qcow2"] + TAILS)
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
    monkeypatch.setattr("imgsum.source.probe.detect", lambda head, tail: pytest.fail("it was probed"))
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
