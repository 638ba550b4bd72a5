"""One NBD connection, for one thread or for many that have their requests in flight together.

libnbd's own waiting calls hold the handle's lock while they wait, and no signal interrupts them. So nobody waits in
libnbd here: poll(2) waits for the socket, and then a call that never blocks moves the handle's state machine. A thread
that is alone on its connection does that itself. On a shared one it is done by a thread of the connection's own, the
pump, and the others sleep until their request is done. (Passing that duty on among them was no faster, and more code.)
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from imgsum.errors import FormatError, OpenError, ReadError, os_error_reason
from imgsum.source import libnbd

ALLOCATION = "base:allocation"
_READ, _WRITE = 1, 2  # LIBNBD_AIO_DIRECTION_*
_READ_ERROR = 3  # LIBNBD_READ_ERROR, a chunk's status


class _Request:
    """One command in flight, and the thread that waits for it."""

    __slots__ = ("deadline", "error", "hold", "ready")

    def __init__(self, deadline: float | None, hold: object) -> None:
        self.deadline = deadline
        self.hold = hold
        """What libnbd writes to: must live as long as the command."""
        self.error: Exception | None = None
        self.ready = threading.Lock()
        """Held until the request is done."""
        self.ready.acquire()


class Connection:
    """A connection to one export, from the handshake on. Every method may be called from any thread.

    Only after share() may several threads have requests in flight.
    """

    def __init__(self, start: Callable[[Any], None], *, ask_extents: bool, io_timeout: float | None) -> None:
        """START(handle) starts connecting, e.g. by its aio_connect_uri. Nothing is connected yet: see connect()."""
        nbd = libnbd.load()
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise OpenError(os_error_reason(error)) from error
        self.handle: Any = nbd.NBD()
        self._from_buffer = nbd.Buffer.from_buffer
        self._nbd_error: type[Exception] = nbd.Error
        # A minimum block size that doesn't divide the export's size leaves a tail, which libnbd would not ask for.
        self.handle.set_strict_mode(self.handle.get_strict_mode() & ~nbd.STRICT_ALIGN)
        self.handle.set_pread_initialize(False)  # read() itself sees to it that all of the buffer was written
        if ask_extents:
            self.handle.add_meta_context(ALLOCATION)
        self._start = start
        self._io_timeout = io_timeout
        self._lock = threading.Lock()
        """Guards the handle and what follows. Never held while waiting."""
        self._requests: dict[int, _Request] = {}
        self._shared = False
        self._polled = 0  # the directions that poll(2) waits for
        self._ready = False
        self._failure: str | None = None
        """Why nothing works any more, once that is so."""
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._polling = False

    def connect(self, timeout: float) -> None:
        """Connect and negotiate within TIMEOUT seconds, or raise OpenError."""
        deadline = time.monotonic() + timeout
        try:
            self._begin(deadline, timeout)
            self._ready = self.handle.aio_is_ready()  # libnbd went on as long as it need not wait: perhaps to the end
            while not self._ready:
                self._move(deadline, f"the NBD server was not ready within {timeout:g} seconds")
        except self._nbd_error as error:
            raise OpenError(libnbd.words(error)) from libnbd.cause(error)

    def size(self) -> int:
        """Bytes of the export. Raises FormatError: the protocol has 64 bits for it, a file's offset has 63."""
        try:
            size = int(self.handle.get_size())
        except self._nbd_error:  # -1 in libnbd's signed number
            size = -1
        if size < 0:
            raise FormatError(f"the NBD server's size makes no sense: {size % (1 << 64)} bytes")
        return size

    def _begin(self, deadline: float, timeout: float) -> None:
        """Call START in a thread of its own: it may look up a host name, which no signal interrupts."""
        failure: list[Exception] = []
        begun = threading.Event()

        def begin(handle: Any) -> None:
            try:
                self._start(handle)
            except Exception as error:
                failure.append(error)
            begun.set()

        threading.Thread(target=begin, args=(self.handle,), name="nbd-connect", daemon=True).start()
        if not begun.wait(max(0.0, deadline - time.monotonic())):
            raise OpenError(f"the NBD server's address was not found within {timeout:g} seconds")
        if failure:
            raise failure[0]

    def share(self) -> None:
        """From now on, several threads may have requests in flight. To be called once, when none are."""
        self._shared = True
        threading.Thread(target=self._pump, name="nbd-pump", daemon=True).start()

    def _pump(self) -> None:
        """Move the state machine until the connection ends.

        libnbd calls back from here, then, and never from the main thread. It prints and forgets what is raised in a
        callback: there, that could be the exception of a signal.
        """
        try:
            while True:
                self._move(None, "")
        except Exception as error:  # whatever it is, nobody may be left waiting; mostly the connection ended
            with self._lock:
                self._fail(libnbd.words(error))

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill BUFFER with the export's bytes from OFFSET, in one request. Raises ReadError with the offset."""
        seen: list[tuple[int, int]] = []
        failed_at: list[int] = []

        def chunk(data: memoryview, at: int, status: int, _error: object) -> int:
            if status == _READ_ERROR:
                failed_at.append(at)
            else:
                seen.append((at, len(data)))
            return 0

        target = self._from_buffer(buffer)
        try:
            self._perform(lambda: self.handle.aio_pread_structured(target, offset, chunk), target)
        except self._nbd_error as error:
            raise ReadError(libnbd.words(error), offset=min(failed_at, default=offset)) from libnbd.cause(error)
        except OpenError as error:
            raise ReadError(error.reason, offset=offset) from error
        # libnbd keeps each chunk inside the request, but does not look for one that is missing.
        end = offset
        for at, length in sorted(seen):
            if at != end:
                break
            end += length
        if end != offset + len(buffer):
            raise ReadError("the NBD server's reply does not cover what was asked for", offset=end)

    def block_status(self, offset: int, length: int) -> list[int] | None:
        """The server's extents from OFFSET on, as length, flags, length, flags ...; it was asked about LENGTH bytes.

        None when it does not say: it answers with an error, or not about base:allocation. Raises ReadError when the
        connection is broken.
        """
        answers: list[list[int]] = []

        def extents(context: str, at: int, entries: list[int], _error: object) -> int:
            if context == ALLOCATION and at == offset:
                answers.append(entries)
            return 0

        try:
            self._perform(lambda: self.handle.aio_block_status(length, offset, extents), None)
        except self._nbd_error:
            return None
        except OpenError as error:
            raise ReadError(error.reason, offset=offset) from error
        return answers[0] if answers else None

    def close(self) -> None:
        """Disconnect. Requests in flight fail at once, in their threads. Closing twice is harmless."""
        with self._lock:
            if self._ready and self._failure is None and not self._requests:
                with contextlib.suppress(self._nbd_error):
                    self.handle.aio_disconnect(0)
            self._fail("the NBD connection was closed")
            self.handle = None
            if self._polling:
                os.eventfd_write(self._wake, 1)
            elif self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _perform(self, issue: Callable[[], int], hold: object) -> None:
        """ISSUE a command and wait until it is done. Raises nbd.Error if it failed, OpenError without a connection."""
        timeout = self._io_timeout
        request = _Request(None if timeout is None else time.monotonic() + timeout, hold)
        with self._lock:
            if self._failure is not None:
                raise OpenError(self._failure)
            try:
                cookie = issue()
            except self._nbd_error as error:
                self._check_alive(libnbd.words(error))
                raise
            self._requests[cookie] = request
            self._finish()  # with TLS, what is read already may have been an answer
            # The pump may be waiting for something else, and not until this request's deadline.
            if self._shared and (timeout is not None or self.handle.aio_get_direction() & ~self._polled):
                os.eventfd_write(self._wake, 1)
        if self._shared:
            request.ready.acquire()
        else:
            while request.ready.locked():
                self._move(None, "")
        if request.error is not None:
            raise request.error

    def _move(self, deadline: float | None, late: str) -> None:
        """Wait for the socket, then take one step; fail for the reason LATE after DEADLINE. In one thread at a time."""
        with self._lock:
            if self._failure is not None:
                raise OpenError(self._failure)
            fd, direction = self.handle.aio_get_fd(), self.handle.aio_get_direction()
            self._polled = direction
            if deadline is None and self._io_timeout is not None:
                deadline = min((r.deadline for r in self._requests.values() if r.deadline is not None), default=None)
                late = f"the NBD server did not answer within {self._io_timeout:g} seconds"
            # Registered each time: while a host's addresses are tried, the socket is another one every time.
            events = (select.POLLIN if direction & _READ else 0) | (select.POLLOUT if direction & _WRITE else 0)
            self._poll.register(fd, events)
            self._polling = True
        wait = None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
        try:
            ready = dict(self._poll.poll(wait))
        finally:
            self._poll.unregister(fd)
            with self._lock:
                self._polling = False
                if self.handle is None:  # closed meanwhile
                    os.close(self._wake)
                    self._wake = -1
        with self._lock:
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._failure is not None:
                raise OpenError(self._failure)
            if fd in ready:
                self._step(direction, ready[fd])
            elif deadline is not None and time.monotonic() >= deadline:
                self._fail(late)
                raise OpenError(late)

    def _step(self, direction: int, events: int) -> None:
        """Let libnbd do what EVENTS of poll(2) make possible."""
        try:
            if direction & _READ and events & ~select.POLLOUT:
                self.handle.aio_notify_read()
            elif direction & _WRITE:
                self.handle.aio_notify_write()
        except self._nbd_error as error:
            self._fail(libnbd.words(error))
            raise OpenError(libnbd.words(error)) from libnbd.cause(error)
        self._check_alive("the NBD server closed the connection")
        if not self._ready:
            self._ready = self.handle.aio_is_ready()
        self._finish()

    def _finish(self) -> None:
        """Wake those whose requests are done. Called with the lock held."""
        while self._requests and (cookie := self.handle.aio_peek_command_completed()):
            request = self._requests.pop(cookie)
            try:
                self.handle.aio_command_completed(cookie)
            except self._nbd_error as error:
                request.error = libnbd.cause(error)
            request.ready.release()

    def _check_alive(self, reason: str) -> None:
        """Fail for REASON if libnbd has given the connection up."""
        if self.handle.aio_is_dead() or self.handle.aio_is_closed():
            self._fail(reason)
            os.eventfd_write(self._wake, 1)
            raise OpenError(reason)

    def _fail(self, reason: str) -> None:
        """From now on everything fails for REASON, and so do the requests in flight. Called with the lock held."""
        if self._failure is not None:
            return
        self._failure = reason
        for request in self._requests.values():
            request.error = OpenError(reason)
            request.ready.release()
        self._requests.clear()
