"""Real NBD servers for tests: nbdkit and qemu-nbd, each at a Unix socket or a port of its own, ended with the test."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import find_tool, need, wait_until, wait_until_it_serves


class NbdServer:
    """A running server; `uri` is its default export, `log` the file that nbdkit's log filter writes."""

    def __init__(self, process: subprocess.Popen[bytes], uri: str, directory: Path) -> None:
        self.process = process
        self.uri = uri
        self.socket = directory / "sock"
        self.log = directory / "log"

    def requests(self, kind: str) -> list[tuple[int, int]]:
        """(offset, length) of each request of that KIND (Read, Extents) that the log filter wrote down."""
        found = re.findall(
            rf"connection=\d+ {kind} id=\d+ offset=(0x[0-9a-f]+) count=(0x[0-9a-f]+)", self.log.read_text()
        )
        return [(int(offset, 16), int(count, 16)) for offset, count in found]

    def connections(self) -> int:
        """How many connections the log filter saw."""
        return len(re.findall(r"connection=\d+ Connect ", self.log.read_text()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Servers:
    """Starts servers, and ends them."""

    def __init__(self) -> None:
        need(_has_libnbd(), "libnbd's Python module is not installed")
        self._started: list[NbdServer] = []
        self._directories: list[Path] = []

    def nbdkit(self, *args: str | Path, log: bool = False, tcp: bool = False) -> NbdServer:
        """nbdkit with these arguments. With LOG requests() tells what it was asked."""
        directory = self._directory()
        words = [find_tool("nbdkit"), "--foreground", "--exit-with-parent", "--pidfile", str(directory / "pid")]
        if tcp:
            port = _free_port()
            words += ["--port", str(port)]
            uri = f"nbd://localhost:{port}/"
        else:
            words += ["--unix", str(directory / "sock")]
            uri = f"nbd+unix:///?socket={directory / 'sock'}"
        if log:
            words += ["--filter=log"]
        words += map(str, args)
        if log:
            words += [f"logfile={directory / 'log'}"]
        server = self._start(words, uri, directory)
        # nbdkit writes it when it is ready. To connect would leave a connection in its log.
        wait_until(lambda: (directory / "pid").exists() or server.process.poll() is not None)
        assert server.process.poll() is None, (directory / "stderr").read_text()
        return server

    def qemu_nbd(self, image: Path, *args: str, image_format: str = "raw", read_only: bool = True) -> NbdServer:
        """A persistent qemu-nbd."""
        directory = self._directory()
        words = [find_tool("qemu-nbd"), "-t", "-f", image_format, "--shared=8", "-k", str(directory / "sock")]
        if read_only:
            words.append("-r")
        server = self._start([*words, *args, str(image)], f"nbd+unix:///?socket={directory / 'sock'}", directory)
        wait_until_it_serves(server.process, server.socket)
        return server

    def _start(self, words: list[str], uri: str, directory: Path) -> NbdServer:
        with open(directory / "stderr", "wb") as stderr:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        server = NbdServer(process, uri, directory)
        self._started.append(server)
        return server

    def _directory(self) -> Path:
        # Not below pytest's: a socket's path has 107 bytes at most.
        self._directories.append(Path(tempfile.mkdtemp(prefix="nbd-")))
        return self._directories[-1]

    def close(self) -> None:
        for server in self._started:
            server.kill()
        for directory in self._directories:
            shutil.rmtree(directory)


@pytest.fixture
def servers() -> Iterator[Servers]:
    """servers.nbdkit(...), servers.qemu_nbd(...)."""
    made = Servers()
    yield made
    made.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="nbd-") as directory:
        yield Path(directory)


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as listener:
        return int(listener.getsockname()[1])


def _has_libnbd() -> bool:
    try:
        import nbd
    except ImportError:
        return False
    return hasattr(nbd, "NBD")
