"""Progress: exact lines of a descriptor, plain lines for a log, and a bar on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import reference
from conftest import HANG, Imgsum

from imgsum.output.progress import Bar, Descriptor, Lines

MIB = 1 << 20


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestDescriptor:
    def written(self, images: int, *calls: tuple[object, ...]) -> str:
        text: list[str] = []
        watcher = Descriptor(text.append, images)
        for name, *args in calls:
            getattr(watcher, str(name))(*args)
        return "".join(text)

    def test_each_percent_once(self) -> None:
        text = self.written(1, ("begin", "a", 1000), *[("advance", done) for done in range(0, 1001, 5)], ("end",))
        assert text == "".join(f"{percent}/100\n" for percent in range(101))

    def test_images_count_the_same(self) -> None:
        calls = [("begin", "a", 10), ("advance", 5), ("advance", 10), ("end",), ("begin", "b", 1 << 40), ("end",)]
        assert self.written(2, *calls) == "0/100\n25/100\n50/100\n100/100\n"

    def test_empty_unknown_and_failed_images(self) -> None:
        assert self.written(1, ("begin", "a", 0), ("end",)) == "0/100\n100/100\n"
        assert self.written(1, ("begin", "-", None), ("advance", 5), ("end",)) == "0/100\n100/100\n"
        assert self.written(2, ("begin", "a", 10), ("end",), ("begin", "b", 10), ("end",)) == "0/100\n50/100\n100/100\n"

    def test_more_images_than_were_counted(self) -> None:
        calls = [("begin", "a", 10), ("end",), ("begin", "b", 10), ("advance", 5), ("end",)]
        assert self.written(1, *calls) == "0/100\n100/100\n"

    def test_ended_twice(self) -> None:
        assert self.written(1, ("begin", "a", 10), ("advance", 10), ("end",), ("end",)) == "0/100\n100/100\n"

    def test_a_huge_image_is_not_rounded_up(self) -> None:
        size = (1 << 63) - 1
        assert self.written(1, ("begin", "a", size), ("advance", size - 1)) == "0/100\n99/100\n"


class TestLines:
    def test_a_line_now_and_then_and_one_at_the_end(self) -> None:
        clock, text = Clock(), []
        lines = Lines(text.append, clock)
        lines.begin("disk\n1", 4 * MIB)
        for done in range(1, 5):
            lines.advance(done * MIB)
            clock.now += 6
        lines.end()
        lines.end()
        assert text == [
            "imgsum: disk\\n1: 75% (3.0 MiB of 4.0 MiB)\n",
            "imgsum: disk\\n1: 100% (4.0 MiB of 4.0 MiB)\n",
        ]

    def test_a_stream_and_an_image_that_fails(self) -> None:
        clock, text = Clock(), []
        lines = Lines(text.append, clock)
        lines.begin("-", None)
        clock.now += 11
        lines.advance(3 * MIB)
        lines.end()
        lines.begin("bad", 2 * MIB)
        lines.advance(MIB)
        lines.end()
        lines.begin("missing", None)
        lines.end()
        assert text == ["imgsum: -: 3.0 MiB done\n"] * 2


class TestBar:
    def drawn(
        self, columns: int, patience: float = 0.5, size: int | None = 4 * MIB, name: str = "disk.raw"
    ) -> list[str]:
        clock, text = Clock(), []
        bar = Bar(text.append, columns, patience, clock)
        bar.begin(name, size)
        for _ in range(20):
            clock.now += 0.05
            bar.advance(3 * MIB)
        bar.end()
        bar.end()
        return text

    def test_it_waits_then_draws_now_and_then_and_vanishes(self) -> None:
        text = self.drawn(80)
        assert 4 <= len(text) <= 8
        assert text[0].startswith("\rdisk.raw [")
        assert " 75%  " in text[0]
        assert text[0].endswith("\x1b[K")
        assert text[-1] == "\r\x1b[K"
        assert "\n" not in "".join(text)

    def test_to_the_letter(self) -> None:
        clock, text = Clock(), []
        bar = Bar(text.append, 80, 0.0, clock)
        bar.begin("disk.raw", 4 * MIB)
        clock.now += 60
        bar.advance(3 * MIB)
        assert text == [f"\rdisk.raw [{'#' * 30}{'.' * 10}]  75%  51.2 KiB/s  0:20 left\x1b[K"]
        bar.begin("-", None)
        clock.now += 1024
        bar.advance(MIB)
        assert text[1:] == ["\r-  1.0 MiB  1.0 KiB/s\x1b[K"]

    def test_a_short_job_draws_nothing(self) -> None:
        assert self.drawn(80, patience=60) == []

    def test_at_once(self) -> None:
        assert len(self.drawn(80, patience=0)) > len(self.drawn(80))

    def test_it_stays_on_one_line(self) -> None:
        for columns in (1, 2, 10, 20, 40, 80, 200):
            for size in (4 * MIB, None, 0, (1 << 63) - 1):
                for line in self.drawn(columns, size=size, name="x" * 100)[:-1]:
                    assert len(line.removeprefix("\r").removesuffix("\x1b[K")) < max(columns, 1)

    def test_a_name_can_not_draw(self) -> None:
        assert "\x1b[2J" not in "".join(self.drawn(80, name="\x1b[2J"))


# --- the command --------------------------------------------------------------------------------------------------


def test_progress_fd(image: Callable[..., Path], imgsum: Imgsum) -> None:
    path = image("1m:A 8m:- 1m:B")
    reader, writer = os.pipe()
    result = imgsum("checksum", f"--progress-fd={writer}", path, pass_fds=[writer])
    os.close(writer)
    with open(reader) as pipe:
        percents = [int(line.removesuffix("/100\n")) for line in pipe]
    assert percents[0] == 0
    assert percents[-1] == 100
    assert percents == sorted(set(percents))
    assert result == (f"{reference.blkhash(reference.content('1m:A 8m:- 1m:B'))}  {path}\n".encode(), b"", 0)


def test_progress_fd_that_nobody_reads(image: Callable[..., Path], imgsum: Imgsum) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = imgsum("checksum", f"--progress-fd={writer}", image("512:A"), pass_fds=[writer])
    os.close(writer)
    assert (result.stdout.split()[0].decode(), result.stderr, result.status) == (reference.blkhash(b"A" * 512), b"", 0)


def test_in_files_stdout_is_the_checksum_alone(image: Callable[..., Path], tmp_path: Path, imgsum: Imgsum) -> None:
    for spec in ("512:A", "", "4m:-"):
        path = image(spec)
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            assert imgsum("checksum", "--progress", path, stdout=out, stderr=err).status == 0
        line = f"{reference.blkhash(reference.content(spec))}  {path}\n"
        assert (tmp_path / "out").read_text() == line
        (told,) = (tmp_path / "err").read_text().splitlines()
        assert told.startswith(f"imgsum: {path}: 100% (")


def test_off_a_terminal_there_is_none(image: Callable[..., Path], imgsum: Imgsum) -> None:
    assert imgsum("checksum", image("64m:-")).stderr == b""


def on_terminal(*args: object) -> tuple[str, int]:
    """What the command writes to a terminal, and its status."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "imgsum", *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        text: list[bytes] = []

        def read() -> None:
            try:
                while data := os.read(ours, 65536):
                    text.append(data)
            except OSError:  # the other side has closed
                pass

        thread = threading.Thread(target=read)
        thread.start()
        status = process.wait(HANG)
        thread.join(HANG)
    os.close(ours)
    return b"".join(text).decode(), status


def test_on_a_terminal(image: Callable[..., Path]) -> None:
    path = image("1m:A 8m:- 1m:B")
    line = f"{reference.blkhash(reference.content('1m:A 8m:- 1m:B'))}  {path}\r\n"
    text, status = on_terminal("checksum", "-p", path)
    assert status == 0
    assert text.startswith("\r")
    assert "%" in text
    assert text.endswith(f"\r\x1b[K{line}")
    assert on_terminal("checksum", path) == (line, 0)  # too short for a bar
    assert on_terminal("checksum", "-q", path) == (line, 0)
    assert on_terminal("checksum", "--no-progress", path) == (line, 0)


def test_on_a_terminal_an_error_is_on_its_own_line(tmp_path: Path) -> None:
    text, status = on_terminal("checksum", "-p", tmp_path / "missing")
    assert text.split("\x1b[K")[-1] == f"imgsum: {tmp_path / 'missing'}: no such file or directory\r\n"
    assert status == 2
