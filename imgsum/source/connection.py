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
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from imgsum.errors import FormatError, OpenError, ReadError, os_error_reason
from imgsum.source import libnbd
from imgsum.units import KIB, MIB

ALLOCATION = "base:allocation"
DIRTY_BITMAP = "qemu:dirty-bitmap:"
"""Metadata contexts; what follows the second is a bitmap's name."""
_READ, _WRITE = 1, 2  # LIBNBD_AIO_DIRECTION_*
_READ_ERROR = 3  # LIBNBD_READ_ERROR, a chunk's status

_FLOOD = "the NBD server sends more than was asked for"
_MAX_HANDSHAKE_SECONDS, _MAX_TLS_SECONDS = 0.03, 1.0
"""CPU time of a handshake once it has begun, without TLS and with it. An honest one takes 1 ms without. libnbd would
read a flood of replies for ever, and keeps the names of contexts: 400 MiB in a second."""
_MAX_HANDSHAKE_BYTES = MIB
_MAX_SURPLUS = 12 * MIB
"""Bytes that replies may have beside the data that was asked for. nbdkit's largest extents reply has 8 MiB."""
_MAX_STATUS_CHUNKS = 64
_MIN_CHUNK = 512
"""Bytes of a read per chunk, on average, below which the reply is a flood."""
CHECK_EVERY = 0.005
_TCP_BYTES_RECEIVED = 128  # the offset of tcpi_bytes_received, 64 bits, in struct tcp_info


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

    def __init__(self, start: Callable[[Any], None], *, contexts: Sequence[str], io_timeout: float | None) -> None:
        """START(handle) starts connecting, e.g. by its aio_connect_uri. Nothing is connected yet: see connect().

        CONTEXTS: what block_status() may be asked about.
        """
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
        for context in contexts:
            self.handle.add_meta_context(context)
        self._start = start
        self._io_timeout = io_timeout
        self._lock = threading.Lock()
        """Guards the handle and what follows. Never held while waiting."""
        self._requests: dict[int, _Request] = {}
        self._shared = False
        self._polled = 0  # the directions that poll(2) waits for
        self._ready = False
        self._socket: socket.socket | None = None
        """A duplicate of libnbd's socket, which can be shut down while libnbd reads a flood from it."""
        self._cut_reason: str | None = None
        self._budget = threading.Lock()
        """Guards _expected. Callbacks come with _lock held."""
        self._max_cpu = math.inf
        """Seconds of CPU time of the connecting thread."""
        self._expected = _MAX_HANDSHAKE_BYTES
        """Bytes that the server may have sent."""
        self._failure: str | None = None
        """Why nothing works any more, once that is so."""
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._polling = False

    def connect(self, timeout: float) -> None:
        """Connect and negotiate within TIMEOUT seconds, or raise OpenError."""
        deadline = time.monotonic() + timeout
        failure: list[BaseException] = []
        done = threading.Event()

        clocks: list[int] = []

        def negotiate() -> None:
            try:
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
                self._negotiate(deadline, timeout)
            except BaseException as error:
                failure.append(error)
            done.set()

        # In a thread of its own: no signal interrupts the look-up of a host name, nor libnbd while it reads a flood.
        threading.Thread(target=negotiate, name="nbd-connect", daemon=True).start()
        try:
            while not done.wait(CHECK_EVERY):
                self.check_flood()
                # The grace lets the thread's own message, which says more, come first.
                if time.monotonic() > deadline + 0.1:
                    self._cut(_not_ready(timeout))
                    if self._socket is None:
                        raise OpenError(f"the NBD server's address was not found within {timeout:g} seconds")
                    raise OpenError(_not_ready(timeout))
                with contextlib.suppress(OSError):  # the thread has just ended
                    if clocks and time.clock_gettime(clocks[0]) > self._max_cpu:
                        self._cut(_FLOOD)
        except BaseException:
            self._cut(_not_ready(timeout))
            raise
        if failure:
            if self._cut_reason is not None:
                raise OpenError(self._cut_reason) from None
            if isinstance(failure[0], self._nbd_error):
                raise OpenError(libnbd.words(failure[0])) from libnbd.cause(failure[0])
            raise failure[0]
        self._expected += _MAX_SURPLUS

    def _negotiate(self, deadline: float, timeout: float) -> None:
        self._start(self.handle)
        self._max_cpu = time.thread_time() + (_MAX_TLS_SECONDS if self.handle.get_tls() else _MAX_HANDSHAKE_SECONDS)
        self._ready = self.handle.aio_is_ready()  # libnbd went on as long as it need not wait: perhaps to the end
        if self._ready:
            self._keep_socket(self.handle.aio_get_fd())
        while not self._ready:
            self._move(deadline, _not_ready(timeout))

    def check_flood(self) -> None:
        """Shut the connection down if the server floods it, or answers late. Never waits; called every few ms."""
        reason = None
        with contextlib.suppress(OSError, AttributeError, ValueError):  # closed meanwhile, or not connected yet
            if self._socket is not None and self._socket.family in (socket.AF_INET, socket.AF_INET6):
                info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_RECEIVED + 8)
                received = int.from_bytes(info[_TCP_BYTES_RECEIVED:], sys.byteorder)
                if len(info) == _TCP_BYTES_RECEIVED + 8 and received > self._expected:
                    reason = _FLOOD
        if self._io_timeout is not None:
            # libnbd may be reading, and _move() not looking at the time. A copy: others change it meanwhile.
            deadlines = [r.deadline for r in list(self._requests.values()) if r.deadline is not None]
            if deadlines and time.monotonic() > min(deadlines) + 0.1:
                reason = f"the NBD server did not answer within {self._io_timeout:g} seconds"
        if reason is not None:
            self._cut(reason)

    def _cut(self, reason: str) -> None:
        """Shut the socket down, so that libnbd stops reading. Takes no lock: libnbd may be reading with it held."""
        if self._cut_reason is None:
            self._cut_reason = reason
        with contextlib.suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def _keep_socket(self, fd: int) -> None:
        """Have a duplicate of FD, libnbd's socket of the moment: while addresses are tried, it is another each time."""
        old, self._socket = self._socket, socket.socket(fileno=os.dup(fd))
        if old is not None:
            old.close()
        if self._cut_reason is not None:
            self._cut(self._cut_reason)

    def size(self) -> int:
        """Bytes of the export. Raises FormatError: the protocol has 64 bits for it, a file's offset has 63."""
        try:
            size = int(self.handle.get_size())
        except self._nbd_error:  # -1 in libnbd's signed number
            size = -1
        if size < 0:
            raise FormatError(
                f"the NBD server says that its export has {size % (1 << 64)} bytes,"
                " and no image can have more than 2^63-1"
            )
        return size

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
        most_chunks = 64 + len(buffer) // _MIN_CHUNK
        count = 0

        def chunk(data: memoryview, at: int, status: int, _error: object) -> int:
            nonlocal count
            count += 1
            if count > most_chunks:
                self._cut(_FLOOD)
            elif status == _READ_ERROR:
                failed_at.append(at)
            else:
                seen.append((at, len(data)))
            return 0

        target = self._from_buffer(buffer)
        with self._budget:
            self._expected += 2 * len(buffer) + KIB  # with the headers of its chunks
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

    def block_status(self, offset: int, length: int, asked: str = ALLOCATION) -> list[int] | None:
        """The server's extents from OFFSET on, as length, flags, length, flags ...; it was ASKED about LENGTH bytes.

        None when it does not say: it answers with an error, or not about that context. Raises ReadError when the
        connection is broken.
        """
        with self._budget:
            self._expected += 8 * KIB  # an error has at most 4 KiB of text
        answers: list[list[int]] = []
        count = 0

        def extents(context: str, at: int, entries: list[int], _error: object) -> int:
            nonlocal count
            count += 1
            with self._budget:  # 4 bytes a number, and as much again for headers and TLS
                self._expected += 8 * len(entries)
            if count > _MAX_STATUS_CHUNKS:
                self._cut(_FLOOD)
            elif context == asked and at == offset and not answers:
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
        if not self._lock.acquire(timeout=0.2):  # libnbd reads with the lock held, and a flood has no end
            self._cut("the NBD connection was closed")
            self._lock.acquire()
        try:
            if self._ready and self._failure is None and not self._requests:
                with contextlib.suppress(self._nbd_error):
                    self.handle.aio_disconnect(0)
            self._fail("the NBD connection was closed")
            self.handle = None
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if self._polling:
                os.eventfd_write(self._wake, 1)
            elif self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        finally:
            self._lock.release()

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
            if not self._ready:
                self._keep_socket(fd)
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
            reason = self._cut_reason or libnbd.words(error)
            self._fail(reason)
            raise OpenError(reason) from libnbd.cause(error)
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
            reason = self._cut_reason or reason
            self._fail(reason)
            os.eventfd_write(self._wake, 1)
            raise OpenError(reason)

    def _fail(self, reason: str) -> None:
        """From now on everything fails for REASON, and so do the requests in flight. Called with the lock held."""
        if self._failure is not None:
            return
        self._failure = reason = self._cut_reason or reason
        for request in self._requests.values():
            request.error = OpenError(reason)
            request.ready.release()
        self._requests.clear()


def _not_ready(timeout: float) -> str:
    return f"the NBD server was not ready within {timeout:g} seconds"
