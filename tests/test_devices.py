"""Block devices: their size, their sectors, and their errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from reference import KIB, MIB

from imgsum import OpenOptions, checksum, compare
from imgsum.errors import OpenError, ReadError

Loop = Callable[..., str]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("sector_size", [512, 4096])
@pytest.mark.parametrize("sectors", [1, 3, 17, 129, 1025])
def test_a_device_has_its_files_checksum(
    sectors: int, sector_size: int, direct: bool, image: Callable[..., Path], loop_device: Loop
) -> None:
    spec = f"{sectors * sector_size}:R"
    device = loop_device(image(spec), sector_size)
    result = checksum(device, options=OpenOptions(direct=direct))
    assert result.hexdigest == reference.blkhash(reference.content(spec))
    assert result.size == sectors * sector_size
    assert result.format == "raw"
    assert result.note is None
    assert result.stats.details == {"cache": "none" if direct else "writeback"}


@pytest.mark.parametrize("sector_size", [512, 4096])
@pytest.mark.parametrize(("offset", "length"), [(1, 100_000), (511, 4097), (512, 512), (4096, None), (99_999, 1)])
def test_unaligned_ranges(
    offset: int, length: int | None, sector_size: int, image: Callable[..., Path], loop_device: Loop
) -> None:
    device = loop_device(image("1m:R"), sector_size)
    content = reference.content("1m:R")[offset:]
    expected = reference.blkhash(content if length is None else content[:length])
    for direct in (False, True):
        options = OpenOptions(direct=direct, request_size=4 * KIB)
        assert checksum(device, offset=offset, length=length, options=options).hexdigest == expected


def test_the_prefix_that_an_image_was_written_to(image: Callable[..., Path], loop_device: Loop) -> None:
    device = loop_device(image("1m:R 1m:A"))
    assert checksum(device, length=MIB).hexdigest == checksum(image("1m:R")).hexdigest
    assert checksum(device).hexdigest != checksum(image("1m:R")).hexdigest


def test_a_link_to_a_device(image: Callable[..., Path], loop_device: Loop, tmp_path: Path) -> None:
    (tmp_path / "disk").symlink_to(loop_device(image("1m:R")))
    assert checksum(tmp_path / "disk").size == MIB


@pytest.mark.parametrize("direct", [False, True])
def test_a_device_that_fails_at_an_offset(
    direct: bool, image: Callable[..., Path], loop_device: Loop, tmp_path: Path
) -> None:
    """Where the file of a loop device was cut off, the device reports input/output errors."""
    backing = tmp_path / "backing"
    shutil.copy(image("2m:R", holes=False), backing)
    device = loop_device(backing)
    os.truncate(backing, MIB + 256 * KIB)
    with pytest.raises(ReadError, match="input/output error") as caught:
        checksum(device, options=OpenOptions(direct=direct, request_size=64 * KIB, format="raw"))
    assert caught.value.offset == MIB + 256 * KIB
    assert caught.value.name == device


def test_the_command_reads_devices(
    image: Callable[..., Path], loop_device: Loop, imgsum: Callable[..., object]
) -> None:
    device = loop_device(image("1m:R"), 4096)
    expected = reference.blkhash(reference.content("1m:R"))
    assert imgsum("checksum", "-T", "none", device) == (f"{expected}  {device}\n".encode(), b"", 0)


@pytest.fixture
def empty_device(loop_device: Loop, tmp_path: Path) -> str:
    """A block device of 0 bytes, as without a medium or when nothing is connected."""
    file = tmp_path / "nothing"
    file.touch()
    return loop_device(file)


@pytest.mark.parametrize(
    "options",
    [{}, {"format": "raw"}, {"format": "qcow2"}, {"format": "vmdk"}, {"direct": True}, {"extents": False}],
)
def test_a_device_of_no_bytes_is_an_error(options: dict[str, object], empty_device: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(empty_device)
    (tmp_path / "empty").touch()
    opened = OpenOptions(**options)  # type: ignore[arg-type]
    for name in (empty_device, tmp_path / "link"):
        with pytest.raises(OpenError, match="is a block device of 0 bytes"):
            checksum(name, options=opened)
        for pair in ((name, tmp_path / "empty"), (tmp_path / "empty", name)):
            with pytest.raises(OpenError, match="is a block device of 0 bytes"):
                compare(*pair, options=OpenOptions(direct=opened.direct))


def test_a_stream_from_a_device_of_no_bytes(
    empty_device: str, image: Callable[..., Path], loop_device: Loop, imgsum: Callable[..., object]
) -> None:
    with open(empty_device, "rb") as device:
        stdout, stderr, status = imgsum("checksum", stdin=device.fileno())
        assert (stdout, status) == (b"", 2)
        assert b"imgsum: -: is a block device of 0 bytes" in stderr
        with pytest.raises(OpenError, match="is a block device of 0 bytes"):
            checksum(f"/dev/fd/{device.fileno()}")
    with open(loop_device(image("1m:R")), "rb") as device:
        device.seek(4096)
        assert checksum(f"/dev/fd/{device.fileno()}").size == MIB - 4096


@pytest.mark.parametrize(("part", "reader"), [("backing", "native"), ("backing", "qemu"), ("data", "native")])
def test_a_part_of_an_image_that_is_a_device_of_no_bytes(
    part: str,
    reader: str,
    empty_device: str,
    tmp_path: Path,
    tool: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where QEMU, and so imgsum, looks for a data file
    path = tmp_path / "image.qcow2"
    if part == "backing":
        arguments = ["-b", "nothing", "-F", "raw"]
        (tmp_path / "nothing").touch(exist_ok=True)
    else:
        arguments = ["-o", "data_file=data"]
    command = [tool("qemu-img"), "create", "-q", "-f", "qcow2", *arguments, "image.qcow2", "1M"]
    subprocess.run(command, cwd=tmp_path, check=True)
    name = tmp_path / {"backing": "nothing", "data": "data"}[part]
    name.unlink()
    name.symlink_to(empty_device)
    with pytest.raises(OpenError, match="is a block device of 0 bytes"):
        checksum(path, options=OpenOptions(reader=reader))
