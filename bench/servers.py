"""NBD servers for the time of a case."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.run import FailedError

CONNECTIONS = 16
READY = 10.0  # seconds


@contextlib.contextmanager
def qemu_nbd(image: Path, image_format: str, cache: str = "writeback") -> Iterator[str]:
    """The URI of IMAGE, exported by qemu-nbd."""
    with _serving() as path:
        argv = ["qemu-nbd", "--read-only", "--persistent", f"--shared={CONNECTIONS}", f"--cache={cache}"]
        with _running([*argv, "-f", image_format, f"--socket={path}", str(image)], path):
            yield f"nbd+unix:///?socket={path}"


@contextlib.contextmanager
def nbdkit(*plugin: str) -> Iterator[str]:
    """The URI of what an nbdkit PLUGIN exports."""
    with _serving() as path, _running(["nbdkit", "--foreground", "--readonly", f"--unix={path}", *plugin], path):
        yield f"nbd+unix:///?socket={path}"


@contextlib.contextmanager
def _serving() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="imgsum-bench-") as directory:
        yield Path(directory, "socket")


@contextlib.contextmanager
def _running(argv: list[str], path: Path) -> Iterator[None]:
    """ARGV while it listens on PATH. Raises FailedError."""
    log = path.with_name("log")  # they complain of clients that only look whether they listen
    try:
        with log.open("wb") as stderr:
            server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
    except FileNotFoundError:
        raise FailedError(f"{argv[0]} is not installed") from None
    try:
        deadline = time.monotonic() + READY
        while not _listening(path):
            if server.poll() is not None:
                raise FailedError(f"{argv[0]}: status {server.returncode}: {log.read_text().strip()}")
            if time.monotonic() > deadline:
                raise FailedError(f"{argv[0]} doesn't listen after {READY:g} s")
            time.sleep(0.01)
        yield
    finally:
        server.terminate()
        server.wait()


def _listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
