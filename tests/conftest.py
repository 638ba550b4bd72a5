"""What the tests share: tools, devices, images, and the command run as a process.

A tool or right that is missing skips a test on a developer's machine and fails it in CI (CI=true): see need().
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference

HANG = 60.0
"""Seconds after which a process is taken to hang. No test passes or fails by being faster than that."""


def need(condition: object, reason: str) -> None:
    """Skip the test for REASON unless CONDITION; fail it in CI, where nothing may be missing."""
    if condition:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def find_tool(name: str) -> str:
    """The path of the program NAME, also in the system's directories."""
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    need(path, f"{name} is not installed")
    assert path is not None
    return path


@pytest.fixture
def tool() -> Callable[[str], str]:
    """tool(NAME): the path of a program that the test needs."""
    return find_tool


@pytest.fixture
def root() -> None:
    """The test makes devices or mounts, or becomes somebody else."""
    need(os.geteuid() == 0, "needs root")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """image(SPEC, holes=True): the path of a raw image, made once and shared. Only to be read."""
    return _image_maker(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def image_in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """The same on a tmpfs, where gigabytes of a hole can be read without filling the page cache with zeros."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < reference.GIB:  # containers have 64 MiB
        yield _image_maker(tmp_path_factory.mktemp("images"))
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield _image_maker(Path(directory))


def _image_maker(directory: Path) -> Callable[..., Path]:
    made: dict[tuple[str, bool], Path] = {}

    def make(spec: str, *, holes: bool = True) -> Path:
        if (spec, holes) not in made:
            path = directory / f"{len(made)}.raw"
            reference.write(spec, path, holes=holes)
            made[spec, holes] = path
        return made[spec, holes]

    return make


@pytest.fixture
def loop_device(root: None) -> Iterator[Callable[..., str]]:
    """loop_device(FILE, sector_size=512): the path of a read-only block device of FILE, removed after the test."""
    losetup = find_tool("losetup")
    with contextlib.ExitStack() as cleanup:

        def attach(file: Path, sector_size: int = 512) -> str:
            made = subprocess.run(
                [losetup, "--find", "--show", "--read-only", "--sector-size", str(sector_size), str(file)],
                check=False,
                capture_output=True,
                text=True,
            )
            need(made.returncode == 0, f"loop devices don't work here: {made.stderr.strip()}")
            device = made.stdout.strip()
            cleanup.callback(subprocess.run, [losetup, "--detach", device], check=True)
            return device

        yield attach


@pytest.fixture
def mounted(root: None, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """mounted(TYPE): a directory where an empty file system (tmpfs, ramfs) is mounted until the test ends."""
    with contextlib.ExitStack() as cleanup:

        def mount(kind: str) -> Path:
            directory = tmp_path / f"mounted-{kind}"
            directory.mkdir()
            made = subprocess.run(
                [find_tool("mount"), "-t", kind, "-o", "mode=0777", kind, str(directory)],
                check=False,
                capture_output=True,
                text=True,
            )
            need(made.returncode == 0, f"{kind} can't be mounted here: {made.stderr.strip()}")
            cleanup.callback(_unmount, directory)
            return directory

        yield mount


def _unmount(directory: Path) -> None:
    command = [find_tool("umount"), str(directory)]
    for _ in range(20):  # something else on the machine may be looking at it: busy, status 32
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run([*command, "--lazy"], check=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that the command runs in."""
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Every thread, descriptor and child that the test's body made is gone when it ends."""
    before = _held()
    yield
    for _ in range(200):  # a thread may take a moment to end
        if _held() == before:
            break
        time.sleep(0.01)
    assert _held() == before


def _held() -> dict[str, Any]:
    return {
        "threads": {thread.name for thread in threading.enumerate() if not thread.name.startswith("execnet")},
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }


def wait_until(condition: Callable[[], object]) -> None:
    """Return when CONDITION is true."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_until_it_serves(process: subprocess.Popen[bytes], path: Path) -> None:
    """Return when PROCESS, a qemu-nbd, greets who connects to its socket at PATH.

    The socket alone says nothing: it is there before the image is opened and locked.
    """

    def greets() -> bool:
        assert process.poll() is None, "the server has ended"
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.settimeout(HANG)
            client.connect(os.fspath(path))
            return client.recv(8) == b"NBDMAGIC"
        return False

    wait_until(greets)


class Result(NamedTuple):
    """How a process ended, exactly. `status` is negative for a signal."""

    stdout: bytes
    stderr: bytes
    status: int

    @property
    def text(self) -> str:
        """stdout."""
        return os.fsdecode(self.stdout)

    @property
    def errors(self) -> str:
        """stderr."""
        return os.fsdecode(self.stderr)


class Running:
    """An imgsum process. finish() checks that it leaves nothing behind."""

    def __init__(self, command: list[str | bytes], directory: Path, **options: Any) -> None:
        self.directory = directory
        directory.mkdir()
        self._mark = f"IMGSUM_TEST_MARK={uuid.uuid4()}"
        env = {**os.environ, **options.pop("env", {}), "TMPDIR": str(directory), "XDG_RUNTIME_DIR": str(directory)}
        name, _, value = self._mark.partition("=")
        env[name] = value
        self.process = subprocess.Popen(
            command,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            env=env,
            start_new_session=True,
            **options,
        )

    def signal(self, number: int) -> None:
        """Send a signal to imgsum alone."""
        self.process.send_signal(number)

    def finish(self, given: bytes | None = None) -> Result:
        """Wait for its end; assert that no child, socket or file is left."""
        try:
            stdout, stderr = self.process.communicate(given, timeout=HANG)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
            pytest.fail(f"imgsum hangs; stdout {stdout!r}, stderr {stderr!r}")
        # A child that was told to end may take a moment, but must not need more than that.
        for _ in range(100):
            left = self.descendants()
            if not left:
                break
            time.sleep(0.05)
        assert not left, f"processes are left: {left}"
        assert os.listdir(self.directory) == [], "temporary files are left"
        return Result(stdout or b"", stderr or b"", self.process.returncode)

    def descendants(self) -> list[str]:
        """Other processes of its making that live, as `PID command`."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if int(pid) == self.process.pid:
                continue
            with contextlib.suppress(OSError):
                if self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{pid} {command}")
        return found

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


class Imgsum:
    """The command, as a process of its own. Arguments are str, bytes or paths; options are subprocess.Popen's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Running] = []
        self.command: list[str | bytes] = [sys.executable, "-m", "imgsum"]

    def __call__(self, *args: str | bytes | Path, stdin: bytes | int | None = None, **options: Any) -> Result:
        """Run it to its end. stdin: bytes, a descriptor, or None for /dev/null."""
        if isinstance(stdin, bytes):
            return self.start(*args, stdin=subprocess.PIPE, **options).finish(stdin)
        return self.start(*args, stdin=subprocess.DEVNULL if stdin is None else stdin, **options).finish()

    def start(self, *args: str | bytes | Path, **options: Any) -> Running:
        """Start it, for signals and the like; finish() ends the test of it."""
        words = [bytes(arg) if isinstance(arg, Path) else arg for arg in args]
        running = Running([*self.command, *words], self._directory / str(len(self._started)), **options)
        self._started.append(running)
        return running

    def peak_memory(self, *args: str | Path, **options: Any) -> tuple[Result, int]:
        """Run it; also the most bytes that were resident: VmHWM, which getrusage() would mix up with ours."""
        report = self._directory / f"memory-{len(self._started)}"
        wrapper = (
            "import atexit, re, runpy, sys\n"
            "def tell():\n"
            f"    with open({str(report)!r}, 'w') as f:\n"
            "        f.write(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
            "atexit.register(tell)\n"
            "runpy.run_module('imgsum', run_name='__main__', alter_sys=True)\n"
        )
        running = Running(
            [sys.executable, "-c", wrapper, *map(os.fspath, args)],
            self._directory / str(len(self._started)),
            **options,
        )
        self._started.append(running)
        result = running.finish()
        return result, int(report.read_text()) << 10

    def close(self) -> None:
        for running in self._started:
            running.kill()


@pytest.fixture
def imgsum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imgsum]:
    """imgsum(*args): run the command; a Result of its exact output. imgsum.start(), imgsum.peak_memory()."""
    runner = Imgsum(tmp_path_factory.mktemp("imgsum"))
    yield runner
    runner.close()


@pytest.fixture
def stdin_from() -> Iterator[Callable[[int], None]]:
    """stdin_from(FD): make FD this process's standard input until the test ends."""
    saved = os.dup(0)
    yield lambda fd: os.dup2(fd, 0) and None
    os.dup2(saved, 0)
    os.close(saved)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Put a fake in this for each name that is to be opened; an exception is raised instead."""
    sources: dict[str, object] = {}

    def open_source(name: str, options: object) -> object:
        source = sources[name]
        if isinstance(source, Exception):
            raise source
        return source

    monkeypatch.setattr("imgsum.engine.content.open_source", open_source)
    return sources


@contextlib.contextmanager
def writer(chunks: Iterator[bytes] | list[bytes], fd: int) -> Iterator[None]:
    """Write CHUNKS into the pipe FD from a thread, then close it. Ends early, quietly, when nobody reads any more."""

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as pipe:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[pipe.write(view) :]

    thread = threading.Thread(target=write, name="writer")
    thread.start()
    try:
        yield
    finally:
        thread.join(HANG)
        assert not thread.is_alive()


def wait_until_it_waits(pid: int) -> None:
    """Until the process has started its workers, and uses no time any more."""
    used, deadline = -1.0, time.monotonic() + HANG
    while time.monotonic() < deadline:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        now = int(fields[11]) + int(fields[12])
        if now == used and int(fields[17]) > 1:
            return
        used = now
        time.sleep(0.2)
    pytest.fail("it never came to rest")
