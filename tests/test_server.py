"""[ COMMAND ARG... ] sources: a server that is started by socket activation, and is gone in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import reference
from conftest import find_tool, need, wait_until
from reference import MIB

from imgsum import Command, OpenOptions, checksum
from imgsum.errors import OpenError, ReadError, UsageError
from imgsum.source.qemu.server import _spawn

if TYPE_CHECKING:
    from conftest import Imgsum, Running
    from nbdservers import Servers

pytest_plugins = ["nbdservers"]

SPEC = "1m:R 3m:- 70k:R 1m:0 100k:A"
EXPECTED = reference.blkhash(reference.content(SPEC))

Image = Callable[..., Path]


@pytest.fixture(autouse=True)
def _libnbd(servers: Servers) -> None:
    """These tests need it, like those with servers."""


def test_nbdkit(image: Image, imgsum: Imgsum) -> None:
    find_tool("nbdkit")
    words = ["nbdkit", "-r", "file", str(image(SPEC))]
    assert checksum(Command(*words)).hexdigest == EXPECTED
    result = imgsum("checksum", "[", *words, "]")
    assert (result.text, result.errors, result.status) == (f"{EXPECTED}  [ {' '.join(words)} ]\n", "", 0)


@pytest.mark.parametrize("shared", [[], ["-e", "8"], ["-e", "2"], ["-t"]])
def test_qemu_nbd(image: Image, shared: list[str]) -> None:
    find_tool("qemu-nbd")
    assert checksum(Command("qemu-nbd", "-r", "-f", "raw", *shared, str(image("4m:R")))).hexdigest == reference.blkhash(
        reference.content("4m:R")
    )


def test_a_shell_that_becomes_the_server(image: Image) -> None:
    nbdkit = find_tool("nbdkit")
    assert checksum(Command("sh", "-c", f"exec '{nbdkit}' file '{image(SPEC)}'")).hexdigest == EXPECTED


def test_a_server_that_says_a_lot(image: Image) -> None:
    """More than a pipe holds, and nobody reads it."""
    words = ["nbdkit", "-v", "file", str(image("8m:R"))]
    got = checksum(Command(*words), options=OpenOptions(request_size=4096))
    assert got.hexdigest == reference.blkhash(reference.content("8m:R"))


def test_standard_output_is_not_the_servers(image: Image, imgsum: Imgsum) -> None:
    nbdkit = find_tool("nbdkit")
    script = f"echo to stdout; cat; exec '{nbdkit}' file '{image(SPEC)}'"
    result = imgsum("checksum", "[", "sh", "-c", script, "]", stdin=b"not for the server")
    assert result.text == f"{EXPECTED}  [ sh -c {script} ]\n"
    assert (result.errors, result.status) == ("", 0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["/nonexistent/server"], "/nonexistent/server: command not found"),
        (["no-such-server"], "no-such-server: command not found"),
        (["false"], "false: ended without serving anything"),
        (["sh", "-c", "echo first >&2; echo 'sh: last' >&2; exit 3"], "sh: first; last"),
        (["nbdkit", "nosuch"], "nbdkit: error: cannot open plugin 'nosuch'"),
        (["cat", "/nonexistent"], "cat: /nonexistent: "),
    ],
)
def test_commands_that_fail(imgsum: Imgsum, words: list[str], reason: str) -> None:
    result = imgsum("checksum", "[", *words, "]")
    assert (result.status, result.text) == (2, "")
    assert result.errors.startswith(f"imgsum: [ {' '.join(words)} ]: {reason}")
    assert result.errors.count("\n") == 1


def test_a_command_that_does_not_serve() -> None:
    with pytest.raises(OpenError, match=r"was not ready within 0.2 seconds"):
        checksum(Command("sleep", "1000"), options=OpenOptions(connect_timeout=0.2))


def test_a_server_whose_reads_fail(no_leak: None) -> None:
    words = ["nbdkit", "--filter=error", "--filter=noextents", "memory", "4M", "error-pread-rate=100%"]
    with pytest.raises(ReadError, match=r"Input/output error .*nbdkit: .*injecting EIO error into pread") as caught:
        checksum(Command(*words))
    assert caught.value.offset == 0


def test_no_command() -> None:
    for words in ([], [""]):
        with pytest.raises(UsageError):
            checksum(Command(*words))
    with pytest.raises(UsageError):
        checksum(Command("nbdkit", "null"), options=OpenOptions(format="qcow2"))


SLOW = ["nbdkit", "--filter=delay", "--filter=noextents", "memory", "1G", "rdelay=1"]
IN_A_SHELL = ["sh", "-c", "trap '' TERM; nbdkit -f null & exec " + " ".join(SLOW)]


@pytest.mark.parametrize("words", [SLOW, IN_A_SHELL])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_ends_with_us(imgsum: Imgsum, words: list[str], number: int) -> None:
    """With what it has started itself. finish() asserts that no process, socket or directory is left."""
    running = imgsum.start("checksum", "[", *words, "]")
    wait_until(lambda: serving(running))
    running.signal(number)
    result = running.finish()
    assert (result.status, result.stdout, result.stderr) == (-number, b"", b"")


def test_the_server_is_killed(imgsum: Imgsum) -> None:
    running = imgsum.start("checksum", "[", *SLOW, "]")
    wait_until(lambda: serving(running))
    os.kill(serving(running), signal.SIGKILL)
    result = running.finish()
    assert (result.status, result.text) == (2, "")
    assert result.errors.startswith(f"imgsum: [ {' '.join(SLOW)} ]: ")
    assert result.errors.endswith("at offset 0\n")


def test_many_servers_one_after_the_other(image: Image, imgsum: Imgsum, no_leak: None) -> None:
    words = ["[", "nbdkit", "file", str(image(SPEC)), "]"]
    result = imgsum("checksum", *words * 10)
    assert result.text.count(EXPECTED) == 10
    for _ in range(10):
        assert checksum(Command(*words[1:-1])).size == reference.size(SPEC) <= 6 * MIB


def test_descriptors_do_not_take_each_others_numbers(tmp_path: Path) -> None:
    """Whatever numbers are in use here, among them those where the server's descriptors go."""
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> int:
            (tmp_path / name).touch()
            fd = os.open(tmp_path / name, os.O_RDWR)
            stack.callback(os.close, fd)
            return fd

        null, out = opened("null"), opened("out")
        images = {number: opened(str(number)) for number in (5, 6, 7, 69)}
        for number, fd in images.items():
            os.write(fd, f"{number}\n".encode())
        while (last := os.dup(null)) < 61:  # the first copies from 32 on would be at 62 ... 71
            stack.callback(os.close, last)
        stack.callback(os.close, last)
        script = "; ".join(f"cat /proc/self/fd/{number}" for number in images)
        places = {0: null, 1: out, 2: out, 3: null, 4: null, 69: images[69], **images}
        pid = _spawn(["/bin/sh", "-c", script], places)
        assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "out").read_text() == "5\n6\n7\n69\n"


def serving(running: Running) -> int:
    """The process ID of its nbdkit, once workers have connected to it; or 0."""
    for line in running.descendants():
        pid, _, command = line.partition(" ")
        if "delay" in command and "/bin/sh" not in command:
            with contextlib.suppress(OSError):  # what was there a moment ago is gone
                targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
                if sum(target.startswith("socket:") for target in targets) >= 4:
                    return int(pid)
    return 0


# --- where processes, memory or directories are not as usual --------------------------------------------------------


def test_sigchld_is_ignored(image: Image, imgsum: Imgsum) -> None:
    """By who started us, as some supervisors do: the kernel then reaps our children before we can."""
    words = ["[", "nbdkit", "file", str(image(SPEC)), "]"]
    # finish() asserts that no process is left.
    imgsum.command = ["sh", "-c", "trap '' CHLD; exec \"$@\"", "sh", *imgsum.command]
    result = imgsum("checksum", "-q", *words, "[", "false", "]", str(image("1m:A")))
    assert [line.split()[0] for line in result.text.splitlines()] == [EXPECTED, reference.blkhash(b"A" * MIB)]
    assert "false: ended without serving anything" in result.errors


def test_no_zombie_is_left_to_pid_1(image: Image) -> None:
    """In a container PID 1 often reaps nothing."""
    code = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'imgsum', 'checksum', '-q', *sys.argv[1:]], check=True)\n"
        "print([pid for pid in os.listdir('/proc') if pid.isdigit()])"
    )
    words = ["[", "nbdkit", "file", str(image(SPEC)), "]"]
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    made = subprocess.run([*unshare, sys.executable, "-c", code, *words], check=False, capture_output=True, text=True)
    need("unshare" not in made.stderr, f"no name space for processes is to be had: {made.stderr}")
    assert made.stdout.splitlines()[-1] == "['1']", made.stderr
    assert EXPECTED in made.stdout


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libnbd.so.0: failed to map segment from shared object"),
        ImportError("libnbd.so.0: cannot allocate memory in static TLS block"),
        MemoryError(),
    ],
)
def test_a_lack_of_memory_is_not_a_lack_of_libnbd(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Finder:
        def find_spec(self, name: str, *_rest: object) -> None:
            if name == "nbd":
                raise error

    monkeypatch.delitem(sys.modules, "nbd")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(OpenError, match=r"^nbd://localhost/: memory is short: libnbd's Python module can't be loaded"):
        checksum("nbd://localhost/")


def test_nowhere_to_write(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_args: object, **_options: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", none)
    with pytest.raises(OpenError, match=r"no directory can be written to .*TMPDIR=DIRECTORY"):
        checksum(Command("nbdkit", "file", str(image(SPEC))))
