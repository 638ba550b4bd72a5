"""Signals, closed pipes and full disks: the process ends as it should, and leaves nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import HANG, Imgsum, Running
from reference import TIB

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """An image that takes minutes to read."""
    path = tmp_path / "endless.raw"
    path.touch()
    os.truncate(path, 8 * TIB)
    return path


def begin(imgsum: Imgsum, *args: object, **options: object) -> Running:
    """Start `imgsum checksum ARGS`, and wait until some content is complete."""
    reader, writer = os.pipe()
    running = imgsum.start("checksum", f"--progress-fd={writer}", *args, pass_fds=[writer], **options)
    os.close(writer)
    assert os.read(reader, 100).startswith(b"0/100\n")
    os.close(reader)
    return running


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize(
    "options", [["--no-extents"], ["--no-extents", "-T", "none"], ["--no-extents", "--json", "-p"]]
)
def test_a_signal_while_reading_ends_by_that_signal(
    number: int, options: list[str], endless: Path, imgsum: Imgsum
) -> None:
    running = begin(imgsum, *options, endless)
    running.signal(number)
    stdout, stderr, status = running.finish()
    assert status == -number
    assert stdout == b""
    if "-p" not in options:
        assert stderr == b""
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_waiting_for_a_stream(number: int, imgsum: Imgsum) -> None:
    reader, writer = os.pipe()
    running = imgsum.start("checksum", stdin=reader)
    os.close(reader)
    os.write(writer, b"A" * 100_000)  # more than the pipe holds: some was read
    time.sleep(0.1)
    running.signal(number)
    assert running.finish() == (b"", b"", -number)
    os.close(writer)


def test_a_signal_while_waiting_for_a_fifos_writer(tmp_path: Path, imgsum: Imgsum) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "small").write_bytes(b"A")
    running = imgsum.start("checksum", "-q", tmp_path / "fifo")
    _wait_until_asleep(running)
    running.signal(signal.SIGINT)
    assert running.finish() == (b"", b"", -signal.SIGINT)


def _wait_until_asleep(running: Running) -> None:
    """Until it sleeps and goes on sleeping, as in open() of a FIFO that nobody writes to."""
    asleep = 0
    for _ in range(int(HANG / 0.02)):
        state = Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        if asleep == 20:
            return
        time.sleep(0.02)
    pytest.fail("it does not wait")


STUCK = """
import os, time
def stuck(*args):
    os.write({fd}, b"0/100\\n")
    time.sleep(1000)
os.preadv = stuck
import imgsum.source.detect
imgsum.source.detect.HEAD_SIZE = 0
"""


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_workers_that_are_stuck_in_a_read_do_not_matter(signals: list[int], endless: Path, imgsum: Imgsum) -> None:
    """As on a dead NFS server, where no worker ever returns."""
    reader, writer = os.pipe()
    imgsum.command = [sys.executable, "-c", STUCK.format(fd=writer) + "import imgsum.cli\nimgsum.cli.main()"]
    running = imgsum.start("checksum", "-f", "raw", "--no-extents", endless, pass_fds=[writer])
    os.close(writer)
    assert os.read(reader, 6) == b"0/100\n"
    for number in signals:
        running.signal(number)
    assert running.finish() == (b"", b"", -signals[-1])
    os.close(reader)


def test_a_second_signal_ends_at_once(endless: Path, imgsum: Imgsum) -> None:
    running = begin(imgsum, "--no-extents", endless)
    running.signal(signal.SIGINT)
    running.signal(signal.SIGINT)
    assert running.finish() == (b"", b"", -signal.SIGINT)


@pytest.mark.parametrize("number", ENDING)
def test_ignored_signals_stay_ignored(number: int, image: Callable[..., Path], imgsum: Imgsum) -> None:
    """As under nohup, or in the background of a script."""
    reader, writer = os.pipe()
    running = imgsum.start("checksum", stdin=reader, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    os.close(reader)
    os.write(writer, b"A" * 100_000)
    time.sleep(0.1)
    running.signal(number)
    os.write(writer, b"A" * 100_000)
    os.close(writer)
    assert running.finish() == (f"{reference.blkhash(b'A' * 200_000)}  -\n".encode(), b"", 0)


def test_stop_continue_and_window_changes_do_not_matter(imgsum: Imgsum) -> None:
    reader, writer = os.pipe()
    running = imgsum.start("checksum", stdin=reader)
    os.close(reader)
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGWINCH, signal.SIGSTOP, signal.SIGCONT):
        os.write(writer, b"A" * 10_000)  # which the pipe holds while the process is stopped
        running.signal(number)
        time.sleep(0.02)
    os.close(writer)
    assert running.finish() == (f"{reference.blkhash(b'A' * 50_000)}  -\n".encode(), b"", 0)


def test_kill_leaves_nothing(endless: Path, imgsum: Imgsum) -> None:
    running = begin(imgsum, "--no-extents", endless)
    running.signal(signal.SIGKILL)
    assert running.finish().status == -signal.SIGKILL


def test_images_done_before_a_signal_are_printed(endless: Path, image: Callable[..., Path], imgsum: Imgsum) -> None:
    small = image("100:A")
    running = imgsum.start("checksum", "-q", "--no-extents", small, endless)
    assert running.process.stdout is not None
    line = running.process.stdout.readline()
    assert line == f"{reference.blkhash(b'A' * 100)}  {small}\n".encode()
    running.signal(signal.SIGTERM)
    assert running.finish() == (b"", b"", -signal.SIGTERM)


# --- a file that shrinks, for real --------------------------------------------------------------------------------


def test_shrinking_while_it_is_read(endless: Path, imgsum: Imgsum) -> None:
    running = begin(imgsum, "--no-extents", "--json", endless)
    os.truncate(endless, 0)
    stdout, stderr, status = running.finish()
    assert status == 2
    assert b"checksum" not in stdout
    assert b"became shorter while it was read at offset" in stderr
    assert stderr.count(b"\n") == 1


# --- where the output goes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["checksum", "{image}"],
        ["checksum", "--json", "{image}"],
        ["algorithms"],
        ["--version"],
        ["--help"],
        ["checksum", "--help"],
    ],
)
def test_a_full_disk_for_the_output(args: list[str], image: Callable[..., Path], imgsum: Imgsum) -> None:
    args = [arg.format(image=image("512:A")) for arg in args]
    with open("/dev/full", "wb") as full:
        _, stderr, status = imgsum(*args, stdout=full)
    assert (stderr, status) == (b"imgsum: standard output: no space left on device\n", 2)


@pytest.mark.parametrize("args", [["checksum", "{image}"], ["algorithms"], ["--version"], ["checksum", "--help"]])
def test_a_closed_output(args: list[str], image: Callable[..., Path], imgsum: Imgsum) -> None:
    args = [arg.format(image=image("512:A")) for arg in args]
    stdout, stderr, status = imgsum(*args, stdout=None, preexec_fn=lambda: os.close(1))
    assert (stdout, stderr, status) == (b"", b"imgsum: standard output: bad file descriptor\n", 2)


@pytest.mark.parametrize("args", [["checksum", "{image}", "{image}"], ["algorithms"], ["--help"]])
def test_a_reader_that_has_gone(args: list[str], image: Callable[..., Path], imgsum: Imgsum) -> None:
    args = [arg.format(image=image("512:A")) for arg in args]
    reader, writer = os.pipe()
    os.close(reader)
    _, stderr, status = imgsum(*args, stdout=writer)
    os.close(writer)
    assert (stderr, status) == (b"", -signal.SIGPIPE)


def test_messages_that_can_not_be_written(tmp_path: Path, image: Callable[..., Path], imgsum: Imgsum) -> None:
    small = image("100:A")
    with open("/dev/full", "wb") as full:
        stdout, _, status = imgsum("checksum", "-p", tmp_path / "missing", small, stderr=full)
    assert (stdout, status) == (f"{reference.blkhash(b'A' * 100)}  {small}\n".encode(), 2)
    with open("/dev/full", "wb") as full:
        stdout, _, status = imgsum("checksum", "-p", "--stats", small, stderr=full)
    assert (stdout, status) == (f"{reference.blkhash(b'A' * 100)}  {small}\n".encode(), 0)
    stdout, _, status = imgsum("checksum", "-p", small, stderr=None, preexec_fn=lambda: os.close(2))
    assert (stdout, status) == (f"{reference.blkhash(b'A' * 100)}  {small}\n".encode(), 0)


def test_a_blocked_sigpipe_is_no_difference(image: Callable[..., Path], imgsum: Imgsum) -> None:
    """Status 1 would say that the content differs."""
    reader, writer = os.pipe()
    os.close(reader)
    running = imgsum.start(
        "checksum",
        image("100:A"),
        stdout=writer,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE]),
    )
    os.close(writer)
    assert running.finish().status == -signal.SIGPIPE


EARLY = """
import os, signal, sys
class Finder:
    left = int(sys.argv.pop(1))
    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if self.left == 0:
            os.write(1, b"sent ")
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
import imgsum.cli
imgsum.cli.main()
"""


@pytest.mark.parametrize("number", [4, 5, 8, 15, 30, 45, 60])
def test_an_interrupt_while_modules_are_imported(number: int, tmp_path: Path, imgsum: Imgsum) -> None:
    (tmp_path / "disk.raw").write_bytes(b"A" * 512)
    imgsum.command = [sys.executable, "-c", EARLY, str(number)]
    running = imgsum.start("checksum", "-q", tmp_path / "disk.raw")
    assert running.finish() == (b"sent ", b"", -signal.SIGINT)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_{}, ({}, {}))
import imgsum.cli
imgsum.cli.main()
"""


@pytest.mark.parametrize("descriptors", [4, 5, 6])
def test_hardly_any_descriptors(descriptors: int, tmp_path: Path, imgsum: Imgsum) -> None:
    (tmp_path / "disk.raw").write_bytes(b"A" * 512)
    # The modules are found by the first import of all, which takes two descriptors.
    imgsum.command = [sys.executable, "-c", "import imgsum" + LIMITED.format("NOFILE", descriptors, descriptors)]
    result = imgsum("checksum", "-q", tmp_path / "disk.raw", tmp_path / "missing", close_fds=True)
    assert result.status == 2
    assert "Traceback" not in result.errors
    assert result.text in ("", f"{reference.blkhash(b'A' * 512)}  {tmp_path / 'disk.raw'}\n")
    assert all(line.startswith("imgsum: ") for line in result.errors.splitlines())
    assert 1 <= result.errors.count("\n") <= 2


def test_no_descriptor_at_all(tmp_path: Path, imgsum: Imgsum) -> None:
    imgsum.command = [sys.executable, "-c", "import imgsum.cli" + LIMITED.format("NOFILE", 3, 3)]
    result = imgsum("checksum", "-q", tmp_path / "disk.raw")
    assert (result.text, result.status) == ("", 2)
    assert result.errors == "imgsum: too many open files: the limit is too low (ulimit -n)\n"


@pytest.mark.parametrize("mebibytes", [40, 60, 80])
def test_a_small_address_space(mebibytes: int, tmp_path: Path, imgsum: Imgsum) -> None:
    names = [tmp_path / name for name in ("a", "b", "c")]
    for path in names:
        path.write_bytes(b"A" * 5_000_000)
    limit = mebibytes << 20
    imgsum.command = [sys.executable, "-c", LIMITED.format("AS", limit, limit)]
    result = imgsum("checksum", "-q", *names)
    right = reference.blkhash(b"A" * 5_000_000)
    sums, errors = result.text.splitlines(), result.errors.splitlines()
    assert len(sums) + len(errors) == 3
    assert all(line.startswith(right) for line in sums)
    assert all(line.startswith("imgsum: ") and "internal error" not in line for line in errors)
    assert result.status == (2 if errors else 0)


def test_hardly_any_threads(tmp_path: Path, imgsum: Imgsum) -> None:
    """Where no thread can be started, the caller's does all the work."""
    (tmp_path / "a").write_bytes(b"A" * 5_000_000)
    for possible in (0, 1, 3):
        code = (
            "import threading, imgsum.cli\n"
            f"start, left = threading.Thread.start, [{possible}]\n"
            "def limited(self):\n"
            "    left[0] -= 1\n"
            '    if left[0] < 0: raise RuntimeError("can\'t start new thread")\n'
            "    start(self)\n"
            "threading.Thread.start = limited\n"
            "imgsum.cli.main()\n"
        )
        imgsum.command = [sys.executable, "-c", code]
        result = imgsum("checksum", "-q", tmp_path / "a")
        assert result.text == f"{reference.blkhash(b'A' * 5_000_000)}  {tmp_path / 'a'}\n", result.errors
        assert (result.errors, result.status) == ("", 0)
