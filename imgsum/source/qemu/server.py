"""A private NBD server: a child process that only this process can connect to, and that ends with it.

It gets its listening socket by systemd's socket activation (sd_listen_fds(3)): qemu-nbd, nbdkit and others know that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from imgsum.errors import OpenError, os_error_reason

T = TypeVar("T")

_LISTEN_FD = 3  # where the convention wants the socket

# `exec` keeps the shell's process ID, so that LISTEN_PID is the server's.
_SERVER = """
LISTEN_PID=$$ LISTEN_FDS=1
export LISTEN_PID LISTEN_FDS
exec "$@"
"""
# The guard reads from a pipe that we hold open and never write to. When we end, even by SIGKILL, its read returns, and
# it kills its process group: itself, the server, and the server's children. (PR_SET_PDEATHSIG would need code between
# fork and exec, which is not safe with threads, and would not end the server's children.)
# Guard and server are our children, and we reap them: PID 1 of a container often does not.
_GUARD = "trap '' INT TERM HUP; read -r _; kill -s KILL 0"
_GRACE = 0.5  # seconds for a server to end by itself before it is killed


class Server:
    """A running server of the given command. Its connections are made by connect()."""

    def __init__(self, command: Sequence[str], *, keep: Mapping[int, int] | None = None) -> None:
        """Start COMMAND. KEEP: descriptors that it also gets, as {its number: ours}. Raises OpenError."""
        self.program = os.path.basename(command[0])
        """What messages call it."""
        self._pid = self._group = 0
        self._said = b""
        path = shutil.which(command[0])
        if path is None:
            raise OpenError(f"{command[0]}: command not found")
        self._path = path
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as ours:
            try:
                listener, self._address = _uninterrupted(_listen)
                ours.callback(os.close, listener)
                undo.callback(os.close, self._address)
                watched, self._alive = os.pipe()
                ours.callback(os.close, watched)
                undo.callback(os.close, self._alive)
                self._messages, messages = os.pipe()
                ours.callback(os.close, messages)
                undo.callback(os.close, self._messages)
                # The pipe is read only for an error message. It is non-blocking, so that a server that writes more than
                # the 64 KiB that fit does not wait: the rest is lost.
                os.set_blocking(messages, False)
                os.set_blocking(self._messages, False)
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                ours.callback(os.close, null)
                self._group = _spawn(["/bin/sh", "-c", _GUARD], {0: watched, 1: null, 2: null})
                undo.callback(self._end)
                places = {0: null, 1: null, 2: messages, _LISTEN_FD: listener, **(keep or {})}
                server = ["/bin/sh", "-c", _SERVER, "sh", self._path, *command[1:]]
                self._pid = _spawn(server, places, self._group)
            except OSError as error:
                raise OpenError(f"{command[0]}: {os_error_reason(error)}") from error
            undo.pop_all()

    def connect(self, handle: Any) -> None:
        """Let libnbd's HANDLE begin to connect."""
        # The path in /proc works after the socket's own path was removed, and is never too long.
        handle.aio_connect_unix(f"/proc/self/fd/{self._address}")

    def last_message(self) -> str:
        """The last three lines that the server wrote to stderr, as one line; empty if there are none."""
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self._messages, 64 * 1024)
        prefix = re.compile(rf"(?:{re.escape(self._path)}|{re.escape(self.program)}): ")
        lines = [prefix.sub("", line, count=1).strip() for line in os.fsdecode(self._said).splitlines()]
        return "; ".join([line for line in lines if line][-3:])

    def ended(self, within: float = 0.0) -> bool:
        """Whether the server has ended, or does so WITHIN that many seconds."""
        deadline = time.monotonic() + within
        while _runs(self._pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """End the server and all that it has started. Returns when it is gone; closing twice is harmless."""
        if not self._group:
            return
        # The guard ignores SIGTERM, and is reaped after SIGKILL: until then no other process can get the group's ID.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGTERM)
        self.ended(within=_GRACE)
        self._end()
        for fd in (self._alive, self._messages, self._address):
            os.close(fd)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        for pid in filter(None, (self._pid, self._group)):
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel has reaped it
                os.waitpid(pid, 0)
        self._pid = self._group = 0


def _runs(pid: int) -> bool:
    """Whether our child PID still runs. Does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # SIGCHLD is ignored, as our parent set it: the kernel has reaped the child
        return False


def _listen() -> tuple[int, int]:
    """A listening socket that only we can connect to, and a descriptor (O_PATH) of its address.

    Its path, in a private directory, is removed before this returns. So no other process finds it, and nothing is left
    behind when we are killed later.
    """
    try:
        directory = tempfile.mkdtemp(prefix="imgsum-")
    except OSError as error:
        raise OpenError(
            "no directory can be written to for the server's socket (TMPDIR=DIRECTORY in the environment names one):"
            f" {os_error_reason(error)}"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.rmdir, directory)
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, place)
        path = f"/proc/self/fd/{place}/socket"  # a socket's path has 107 bytes at most; this one always fits
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        stack.callback(os.unlink, path)
        listener.listen(16)
        address = os.open(path, os.O_PATH | os.O_CLOEXEC)
        return listener.detach(), address


def _uninterrupted(function: Callable[[], T]) -> T:
    """Call FUNCTION in another thread, and return or raise the same.

    Signals raise in the main thread only, so they can't interrupt FUNCTION. (In the main thread, 1 of 150 runs that
    were interrupted at random left a directory behind.)
    """
    outcomes: SimpleQueue[T | Exception] = SimpleQueue()

    def run() -> None:
        try:
            outcomes.put(function())
        except Exception as error:
            outcomes.put(error)

    thread = Thread(target=run, name="uninterrupted", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are to be had
        return function()
    try:
        outcome = outcomes.get()
    except BaseException:
        thread.join()
        raise
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _spawn(command: list[str], places: Mapping[int, int], group: int = 0) -> int:
    """Start COMMAND in the process GROUP (0: a new one), with only the descriptors PLACES: {its number: ours}."""
    # First duplicate every descriptor above all target numbers, so that no dup2() overwrites one that is still needed.
    beyond = max(places) + 1
    with contextlib.ExitStack() as stack:
        actions = []
        for number, fd in places.items():
            source = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond)
            stack.callback(os.close, source)
            actions.append((os.POSIX_SPAWN_DUP2, source, number))
        return os.posix_spawn(
            command[0],
            command,
            os.environ,
            file_actions=actions,
            setpgroup=group,
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
        )
