"""Images that a running QEMU has open: its byte-range locks, set by a real qemu-nbd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from conftest import find_tool, wait_until_it_serves

from imgsum import OpenOptions, checksum
from imgsum.errors import RefusedError

SPEC = "300000:R 1m:- 212:A"
EXPECTED = reference.blkhash(reference.content(SPEC))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    reference.write(SPEC, path)
    return path


@contextlib.contextmanager
def qemu_nbd(image: Path, *options: str) -> Iterator[None]:
    """A qemu-nbd that holds IMAGE open, for writing unless told otherwise."""
    socket = image.with_suffix(".socket")
    command = [find_tool("qemu-nbd"), "--format=raw", "--persistent", f"--socket={socket}", *options, str(image)]
    with subprocess.Popen(command) as process:
        try:
            wait_until_it_serves(process, socket)
            yield
        finally:
            process.kill()  # SIGTERM is lost when it comes before qemu-nbd is in its main loop


def test_open_for_writing_is_refused(disk: Path) -> None:
    with qemu_nbd(disk):
        with pytest.raises(RefusedError, match="is in use: a running virtual machine") as caught:
            checksum(disk)
        assert caught.value.name == str(disk)
        assert checksum(disk, options=OpenOptions(force_share=True)).hexdigest == EXPECTED
    assert checksum(disk).hexdigest == EXPECTED


def test_a_stream_from_an_image_that_is_open_for_writing(disk: Path) -> None:
    with qemu_nbd(disk), disk.open("rb") as file:
        name = f"/dev/fd/{file.fileno()}"
        with pytest.raises(RefusedError, match="is in use: a running virtual machine"):
            checksum(name)
        assert checksum(name, options=OpenOptions(force_share=True)).hexdigest == EXPECTED


def test_open_for_reading_is_fine(disk: Path) -> None:
    with qemu_nbd(disk, "--read-only"):
        assert checksum(disk).hexdigest == EXPECTED


def test_by_another_name(disk: Path, tmp_path: Path) -> None:
    os.link(disk, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(disk)
    with qemu_nbd(disk):
        for name in ("hard", "soft"):
            with pytest.raises(RefusedError, match=name):
                checksum(tmp_path / name)


def test_the_other_images_are_still_done(disk: Path, image: Callable[..., Path], imgsum: Callable[..., object]) -> None:
    other = image("100:A")
    with qemu_nbd(disk):
        stdout, stderr, status = imgsum("checksum", "-q", disk, other)
        assert stdout.decode() == f"{reference.blkhash(b'A' * 100)}  {other}\n"
        assert stderr.decode().startswith(f"imgsum: {disk}: is in use")
        assert stderr.count(b"\n") == 1
        assert status == 2
        assert imgsum("checksum", "-qU", disk)[::2] == (f"{EXPECTED}  {disk}\n".encode(), 0)


def test_we_hold_no_lock_ourselves(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading must not keep a virtual machine from starting."""
    real_preadv = os.preadv
    codes = []

    def start_one(*args: object) -> int:
        if not codes:
            codes.append(0)
            with qemu_nbd(disk):
                codes.append(1)
        return real_preadv(*args)

    monkeypatch.setattr(os, "preadv", start_one)
    checksum(disk)
    assert codes == [0, 1]


def _lock(fd: int, byte: int, kind: int = fcntl.F_WRLCK) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))


@pytest.mark.parametrize(
    ("byte", "refused"), [(100, False), (101, True), (103, True), (200, True), (201, False), (203, False)]
)
@pytest.mark.parametrize("kind", [fcntl.F_RDLCK, fcntl.F_WRLCK])
def test_each_lock(byte: int, refused: bool, kind: int, disk: Path) -> None:
    """100 + n: n is used; 200 + n: n is not shared. 0 reads, 1 writes, 3 resizes."""
    with open(disk, "r+b") as other:
        _lock(other.fileno(), byte, kind)
        if refused:
            with pytest.raises(RefusedError, match="in use"):
                checksum(disk)
        else:
            assert checksum(disk).hexdigest == EXPECTED


def test_opened_for_writing_while_it_is_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv = os.preadv
    with open(disk, "r+b") as other:

        def lock_and_read(*args: object) -> int:
            _lock(other.fileno(), 101, fcntl.F_RDLCK)
            return real_preadv(*args)

        monkeypatch.setattr(os, "preadv", lock_and_read)
        with pytest.raises(RefusedError, match="in use"):
            checksum(disk, options=OpenOptions(format="raw"))


def test_where_there_are_no_such_locks(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fcntl = fcntl.fcntl

    def refuse(fd: int, command: int, *args: object) -> object:
        if command == fcntl.F_OFD_GETLK:
            raise OSError(22, "Invalid argument")
        return real_fcntl(fd, command, *args)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert checksum(disk).hexdigest == EXPECTED
