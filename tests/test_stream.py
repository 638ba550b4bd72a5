"""Streams: standard input, descriptors, FIFOs, from where they stand to their end."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from conftest import HANG, writer
from reference import KIB, MIB

from imgsum import OpenOptions, checksum
from imgsum.errors import ChangedError, OpenError, ReadError, UsageError

SPEC = "300k:R 200k:- 1m:A 100:0"
EXPECTED = reference.blkhash(reference.content(SPEC))


def piped(chunks: Iterator[bytes] | list[bytes], **options: object) -> str:
    """The checksum of what CHUNKS writes into a pipe."""
    reader, to_write = os.pipe()
    try:
        with writer(chunks, to_write):
            result = checksum(f"/dev/fd/{reader}", **options)
            os.close(reader)  # so that a writer with more to say ends
            reader = -1
            return result.hexdigest
    finally:
        if reader >= 0:
            os.close(reader)


def short_writes(content: bytes, most: int) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        step = random.randint(1, most)
        yield content[at : at + step]
        at += step


@pytest.mark.parametrize("most", [7, 4096, 65537, 200_000])
def test_short_writes(most: int) -> None:
    content = reference.content("20k:R 100:A" if most < 100 else SPEC)
    assert piped(short_writes(content, most)) == reference.blkhash(content)


def test_a_slow_writer() -> None:
    def slowly() -> Iterator[bytes]:
        for chunk in short_writes(reference.content(SPEC), 100_000):
            time.sleep(0.005)
            yield chunk

    assert piped(slowly()) == EXPECTED


def test_a_pipe_that_does_not_block() -> None:
    """As node, ssh and others leave behind for whoever shares their standard input."""
    reader, to_write = os.pipe()
    os.set_blocking(reader, False)

    def slowly() -> Iterator[bytes]:
        for chunk in short_writes(reference.content(SPEC), 100_000):
            time.sleep(0.002)
            yield chunk

    with writer(slowly(), to_write):
        assert checksum(f"/dev/fd/{reader}").hexdigest == EXPECTED
    os.close(reader)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 9 * MIB])
def test_sizes(size: int) -> None:
    content = reference.content(f"{size}:R")
    assert piped([content]) == reference.blkhash(content)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_from_where_it_stands(name: str, image: Callable[..., Path]) -> None:
    with open(image(SPEC), "rb", buffering=0) as file:
        file.seek(12345)
        assert checksum(name.format(file.fileno())).hexdigest == reference.blkhash(reference.content(SPEC)[12345:])
        assert file.tell() == reference.size(SPEC)


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0"])
def test_standard_input(name: str, image: Callable[..., Path], stdin_from: Callable[[int], None]) -> None:
    with open(image(SPEC), "rb", buffering=0) as file:
        file.seek(100)
        stdin_from(file.fileno())
        result = checksum(name)
    assert result.hexdigest == reference.blkhash(reference.content(SPEC)[100:])
    assert result.name == name
    os.fstat(0)  # it is still open


def test_standard_input_twice_is_empty_the_second_time(
    image: Callable[..., Path], imgsum: Callable[..., object]
) -> None:
    empty = reference.blkhash(b"")
    assert imgsum("checksum", "-", "-", stdin=reference.content(SPEC))[::2] == (
        f"{EXPECTED}  -\n{empty}  -\n".encode(),
        0,
    )


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (0, 1), (1, None), (100, 100_000), (65536, 65536), (MIB, 500_000)]
)
def test_ranges(offset: int, length: int | None) -> None:
    content = reference.content(SPEC)
    part = content[offset:] if length is None else content[offset : offset + length]
    chunks = list(short_writes(content, 300_000))
    assert piped(chunks, offset=offset, length=length) == reference.blkhash(part)


@pytest.mark.parametrize(("offset", "length"), [(MIB, None), (0, MIB), (99_999, 2), (100_001, 0)])
def test_ranges_that_are_not_there(offset: int, length: int | None) -> None:
    with pytest.raises(ReadError, match="ends") as caught:
        piped([reference.content("100000:R")], offset=offset, length=length)
    assert caught.value.offset == 100_000


@pytest.mark.parametrize(("offset", "length"), [(100_000, None), (0, 100_000), (100_000, 0)])
def test_ranges_that_end_where_it_ends(offset: int, length: int | None) -> None:
    content = reference.content("100000:R")
    part = content[offset:] if length is None else content[offset : offset + length]
    assert piped([content], offset=offset, length=length) == reference.blkhash(part)


@pytest.mark.parametrize("request_size", [4 * KIB, 32 * MIB])
@pytest.mark.parametrize("queue_size", [4 * KIB, 16 * MIB])
def test_request_and_queue_sizes(request_size: int, queue_size: int) -> None:
    options = OpenOptions(request_size=request_size, queue_size=queue_size)
    assert piped([reference.content(SPEC)], options=options) == EXPECTED


def test_a_format_that_needs_a_file() -> None:
    with pytest.raises(UsageError, match="can't be read as qcow2"):
        checksum("-", options=OpenOptions(format="qcow2"))


@pytest.mark.parametrize("name", ["/dev/fd/999", "/proc/self/fd/999", "/dev/fd/99999999999"])
def test_a_descriptor_that_is_not_open(name: str) -> None:
    with pytest.raises(OpenError) as caught:
        checksum(name)
    assert caught.value.name == name


def test_a_directory_as_a_stream(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OpenError, match="is a directory"):
            checksum(f"/dev/fd/{fd}")
    finally:
        os.close(fd)


def test_a_descriptor_only_for_writing(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, pytest.raises(ReadError, match="bad file descriptor at offset 0"):
        checksum(f"/dev/fd/{file.fileno()}")


def test_a_read_error_has_its_offset(monkeypatch: pytest.MonkeyPatch, image: Callable[..., Path]) -> None:
    real_readv = os.readv
    left = [300_000]

    def readv(fd: int, buffers: list[memoryview]) -> int:
        if not left[0]:
            raise OSError(5, "Input/output error")
        count = real_readv(fd, [buffers[0][: left[0]]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "readv", readv)
    with open(image(SPEC), "rb") as file, pytest.raises(ReadError, match="input/output error at offset 300000"):
        checksum(f"/dev/fd/{file.fileno()}")


def test_a_file_that_is_modified_while_it_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "disk.raw"
    reference.write(SPEC, path)
    os.utime(path, (1_600_000_000, 1_600_000_000))
    real_readv = os.readv

    def readv(fd: int, buffers: list[memoryview]) -> int:
        os.truncate(path, 100)
        return real_readv(fd, buffers)

    monkeypatch.setattr(os, "readv", readv)
    with open(path, "rb") as file, pytest.raises(ChangedError, match="modified"):
        checksum(f"/dev/fd/{file.fileno()}")


def test_what_is_in_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first piece is slow, no more than the buffers there are is taken from the pipe."""
    from imgsum.engine import checksum as engine

    taken = 0
    release = threading.Event()
    real = engine.block_digests
    slow: list[bool] = [True]

    def slowly(*args: object) -> bytes:
        if slow:
            slow.clear()
            release.wait(HANG)
        return real(*args)

    def chunks() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(64):
            taken += 1
            yield reference.content("1m:A")

    def watch() -> None:
        seen = -1
        while taken != seen:  # until it no longer grows
            seen = taken
            time.sleep(0.3)
        most.append(seen)
        release.set()

    most: list[int] = []
    monkeypatch.setattr(engine, "block_digests", slowly)
    thread = threading.Thread(target=watch)
    thread.start()
    assert piped(chunks()) == reference.blkhash(reference.chunks("64m:A"))
    thread.join(HANG)
    assert most[0] <= 40  # the pieces that may be ahead, and what the pipe and the writer hold


# --- through the command ------------------------------------------------------------------------------------------


def in_bash(script: str) -> subprocess.CompletedProcess[str]:
    command = f'imgsum() {{ {shlex.quote(sys.executable)} -m imgsum "$@"; }}; {script}'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=HANG, check=False)


def test_process_substitution(image: Callable[..., Path]) -> None:
    result = in_bash(f"imgsum checksum <(cat {image(SPEC)}) <(head -c 100 {image(SPEC)})")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [EXPECTED, reference.blkhash(reference.content(SPEC)[:100])]
    assert (result.stderr, result.returncode) == ("", 0)


def test_standard_input_is_the_default(image: Callable[..., Path]) -> None:
    result = in_bash(f"imgsum checksum < {image(SPEC)}")
    assert (result.stdout, result.stderr, result.returncode) == (f"{EXPECTED}  -\n", "", 0)


def test_dev_null_is_empty() -> None:
    result = in_bash("imgsum checksum --progress < /dev/null")
    assert result.stdout == f"{reference.blkhash(b'')}  -\n"
    assert result.returncode == 0


@pytest.mark.parametrize("more", ["", "a.raw"])
def test_closed_standard_input_is_an_error(more: str, here: Path) -> None:
    reference.write("100:A", here / "a.raw")
    result = in_bash(f"imgsum checksum -q {more} - <&-")
    assert result.stdout == (f"{reference.blkhash(b'A' * 100)}  a.raw\n" if more else "")
    assert "imgsum: -: bad file descriptor" in result.stderr
    assert result.returncode == 2


def test_a_descriptor_of_imgsums_own_is_not_an_image(tmp_path: Path, imgsum: Callable[..., object]) -> None:
    """The user's shell had no descriptor 3; that imgsum opens a file there must not make one."""
    reference.write("64m:A", tmp_path / "a.raw")
    fds = [f"/dev/fd/{fd}" for fd in range(3, 10)]
    stdout, stderr, status = imgsum("checksum", "-q", tmp_path / "a.raw", *fds)
    assert stdout.decode() == f"{reference.blkhash(reference.chunks('64m:A'))}  {tmp_path / 'a.raw'}\n"
    assert stderr.count(b"\n") == len(fds)
    assert status == 2


def test_no_more_is_read_than_is_wanted() -> None:
    """What follows in the stream may be for somebody else."""
    result = in_bash(f"head -c 2048 /dev/zero | ({sys.executable} -m imgsum checksum --length 100 -; wc -c)")
    assert result.stdout == f"{reference.blkhash(bytes(100))}  -\n{2048 - 100}\n"


def test_the_end_is_the_end() -> None:
    """On a terminal more can be typed after ^D."""
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-m", "imgsum", "checksum", "-q"], stdin=theirs, stdout=-1) as process:
        os.write(ours, b"abc\n")
        os.write(ours, b"\x04")
        assert process.communicate(timeout=HANG)[0].decode() == f"{reference.blkhash(b'abc' + bytes([10]))}  -\n"
    os.close(ours)
    os.close(theirs)
