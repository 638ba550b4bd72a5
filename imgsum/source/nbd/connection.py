"""One NBD connection, for one thread or for many that have their requests in flight together.

libnbd's blocking calls hold the handle's lock while they wait, and signals don't interrupt them. So this module waits
with poll(2) for the socket, and then moves the handle's state machine by a call that never blocks. A thread that has a
connection to itself does that. A shared connection has a thread for it, the pump, and the others sleep until their
request is done. (Letting the waiting threads take turns was no faster, and more code.)
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from imgsum.errors import FormatError, OpenError, ReadError, os_error_reason
from imgsum.source.nbd import libnbd
from imgsum.units import KIB, MIB

ALLOCATION = "base:allocation"
DIRTY_BITMAP = "qemu:dirty-bitmap:"
"""Metadata contexts; what follows the second is a bitmap's name."""
_READ, _WRITE = 1, 2  # LIBNBD_AIO_DIRECTION_*
_READ_ERROR = 3  # LIBNBD_READ_ERROR, a chunk's status

_FLOOD = "the NBD server sends more than was asked for"
_MAX_STEPS = 2000
"""Maximum steps of libnbd's state machine in the handshake. 70 are usual; each reply takes 3."""
_MAX_STATUS = 8 * MIB
"""Maximum bytes of a BLOCK_STATUS chunk. nbdkit sends up to 8 MiB, qemu-nbd up to 1 MiB."""
_MAX_STATUS_CHUNKS = 64
_MIN_CHUNK = 512
"""Average bytes of a chunk of a read. If chunks are smaller, the reply is a flood."""
_CHECK_EVERY = 0.05


class _Request:
    """A command in flight. One thread waits for it."""

    __slots__ = ("deadline", "error", "hold", "ready")

    def __init__(self, deadline: float | None, hold: object) -> None:
        self.deadline = deadline
        self.hold = hold
        """The buffer or callback, which must live as long as the command."""
        self.error: Exception | None = None
        self.ready = threading.Lock()
        """Held until the request is done."""
        self.ready.acquire()


class Connection:
    """A connection to one export, from the handshake on. Every method may be called from any thread.

    Only after share() may several threads have requests in flight.
    """

    def __init__(self, start: Callable[[Any], None], *, contexts: Sequence[str], io_timeout: float | None) -> None:
        """START(handle) starts connecting, e.g. by aio_connect_uri(); connect() calls it.

        CONTEXTS: the metadata contexts for block_status(). IO_TIMEOUT: seconds, or None.
        """
        nbd = libnbd.load()
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise OpenError(os_error_reason(error)) from error
        self.handle: Any = nbd.NBD()
        self._from_buffer = nbd.Buffer.from_buffer
        self._nbd_error: type[Exception] = nbd.Error
        # With STRICT_ALIGN, libnbd refuses to read the end of an export whose size is no multiple of the block size.
        self.handle.set_strict_mode(self.handle.get_strict_mode() & ~nbd.STRICT_ALIGN)
        self.handle.set_pread_initialize(False)  # read() checks that the reply fills the buffer
        for context in contexts:
            self.handle.add_meta_context(context)
        self._start = start
        self._io_timeout = io_timeout
        self._lock = threading.Lock()
        """Guards the handle and what follows. Never held while waiting."""
        self._requests: dict[int, _Request] = {}
        self._shared = False
        self._polled = 0  # the directions that poll(2) waits for
        self._fd = self._polled_fd = -1  # libnbd's socket, and the one that poll(2) waits for
        self._inode = 0
        self._ready = False
        self._flooded = self._interrupted = False
        self._structured = self._encrypted = False
        self._status_requests = 0
        """Block status requests in flight."""
        self._largest_read = 0
        self._ends = 0
        """Chunks and requests that are complete."""
        self._flow = 0
        """Bytes received since then, while block status requests are in flight."""
        self._failure: str | None = None
        """Why the connection can't be used any more, or None."""
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._polling = False

    def connect(self, timeout: float) -> None:
        """Connect and negotiate within TIMEOUT seconds, or raise OpenError."""
        deadline = time.monotonic() + timeout
        failure: list[BaseException] = []
        done = threading.Event()

        def negotiate() -> None:
            try:
                self._negotiate(deadline, timeout)
            except BaseException as error:
                failure.append(error)
            done.set()

        # In a thread of its own: no signal interrupts the look-up of a host name.
        threading.Thread(target=negotiate, name="nbd-connect", daemon=True).start()
        while not done.wait(_CHECK_EVERY):
            # Wait a little longer for the thread's own error, which says more.
            if time.monotonic() > deadline + 0.2:
                if self._fd < 0:
                    raise OpenError(f"the NBD server's address was not found within {timeout:g} seconds")
                raise OpenError(_not_ready(timeout))
        if failure:
            if isinstance(failure[0], self._nbd_error):
                raise OpenError(libnbd.message(failure[0])) from libnbd.cause(failure[0])
            raise failure[0]

    def _negotiate(self, deadline: float, timeout: float) -> None:
        """Connect, and take what the server says in the handshake.

            server: NBDMAGIC IHAVEOPT flags        us: STRUCTURED_REPLY
            server: ACK                            us: SET_META_CONTEXT base:allocation
            server: META_CONTEXT, ACK              us: GO
            server: INFO export, [INFO ...], ACK

        The server may send any number of META_CONTEXT and INFO. libnbd reads all of them in one call, and keeps the
        names of the contexts: 400 MiB in a second. So the steps of its state machine are limited.
        """
        steps = 0

        def count_step() -> None:
            nonlocal steps
            steps += 1
            if steps > _MAX_STEPS:
                self._interrupt()

        # Don't keep the handle in a local variable: an error's traceback would keep it, and the connection, open.
        libnbd.on_debug(self.handle, count_step)
        self._start(self.handle)
        self._ready = self.handle.aio_is_ready()  # the handshake may be over already, if nothing had to wait
        while not self._ready:
            self._move(deadline, _not_ready(timeout))
        libnbd.end_debug(self.handle)
        self._structured = self.handle.get_structured_replies_negotiated()
        self._encrypted = self.handle.get_tls_negotiated()

    def _interrupt(self) -> None:
        """Make libnbd see a closed connection. Called from libnbd, with its lock held, while it reads a flood."""
        self._flooded = True
        if self._interrupted:
            return
        self._interrupted = True
        try:
            known = self._fd >= 0 and os.fstat(self._fd).st_ino == self._inode
        except OSError:
            known = False
        if not known:
            # The flood comes in the step in which libnbd connects, before its descriptor is known. Block this thread:
            # connect() times out.
            threading.Event().wait()
        ours, closed = socket.socketpair()
        closed.close()
        os.dup2(ours.fileno(), self._fd, inheritable=False)
        ours.close()

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
        """Allow several threads to have requests in flight. Call it once, when there are none."""
        self._shared = True
        threading.Thread(target=self._pump, name="nbd-pump", daemon=True).start()

    def _pump(self) -> None:
        """Move the state machine until the connection ends.

        libnbd swallows exceptions raised in callbacks. Signals raise in the main thread, so callbacks must not run
        there.
        """
        try:
            while True:
                self._move(None, "")
        except Exception as error:  # whatever it is, wake all who wait; usually the connection ended
            with self._lock:
                self._fail(libnbd.message(error))

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill BUFFER with the export's bytes from OFFSET, in one request. Raises ReadError with the offset.

            simple:       REPLY data
            structured:   DATA offset data | HOLE offset length | ERROR, in any number and order; the last is DONE

        libnbd checks that each chunk is inside the request, and the sum of their lengths. Chunks that overlap can still
        leave gaps.
        """
        seen: list[tuple[int, int]] = []
        failed_at: list[int] = []
        max_chunks = 64 + len(buffer) // _MIN_CHUNK

        def chunk(data: memoryview, at: int, status: int, _error: object) -> int:
            self._ends += 1
            if len(seen) + len(failed_at) >= max_chunks:
                self._flooded = True
            elif status == _READ_ERROR:
                failed_at.append(at)
            else:
                seen.append((at, len(data)))
            return 0

        target = self._from_buffer(buffer)
        self._largest_read = max(self._largest_read, len(buffer))
        try:
            if self._structured:
                self._perform(lambda: self.handle.aio_pread_structured(target, offset, chunk), target)
            else:
                self._perform(lambda: self.handle.aio_pread(target, offset), target)
                return
        except self._nbd_error as error:
            raise ReadError(libnbd.message(error), offset=min(failed_at, default=offset)) from libnbd.cause(error)
        except OpenError as error:
            raise ReadError(error.reason, offset=offset) from error
        end = offset
        for at, length in sorted(seen):
            if at != end:
                break
            end += length
        if end != offset + len(buffer):
            raise ReadError("the NBD server's reply does not cover what was asked for", offset=end)

    def block_status(self, offset: int, length: int, asked: str = ALLOCATION) -> bytes | None:
        """The server's extents from OFFSET, as pairs of 32-bit numbers: length and flags. LENGTH: bytes of the request.

        None if the reply is an error, or has nothing about the context ASKED for. Raises ReadError if the connection is
        broken.

            BLOCK_STATUS context (length flags)... | ERROR, in any number; the last is DONE

        The first chunk of the context counts.
        """
        answers: list[bytes] = []
        count = 0

        def extents(context: bytes, at: int, pairs: bytes | None) -> None:
            nonlocal count
            count += 1
            self._ends += 1
            if count > _MAX_STATUS_CHUNKS or pairs is None:
                self._flooded = True
            elif context == asked.encode() and at == offset and not answers:
                answers.append(pairs)

        callback = libnbd.extents_callback(extents, _MAX_STATUS)
        try:
            self._perform(lambda: libnbd.aio_block_status(self.handle, length, offset, callback), callback, asks=True)
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

    def _perform(self, issue: Callable[[], int], hold: object, *, asks: bool = False) -> None:
        """ISSUE a command and wait until it is done. Raises nbd.Error if it failed, OpenError without a connection."""
        timeout = self._io_timeout
        request = _Request(None if timeout is None else time.monotonic() + timeout, hold)
        with self._lock:
            if self._failure is not None:
                raise OpenError(self._failure)
            try:
                cookie = issue()
            except self._nbd_error as error:
                self._check_alive(libnbd.message(error))
                raise
            self._requests[cookie] = request
            self._status_requests += asks
            self._finish()  # with TLS, libnbd may have the reply already
            # The pump may wait for other events, and longer than until this request's deadline.
            if self._shared and (timeout is not None or self.handle.aio_get_direction() & ~self._polled):
                os.eventfd_write(self._wake, 1)
        if self._shared:
            request.ready.acquire()
        else:
            while request.ready.locked():
                self._move(None, "")
        if asks:
            with self._lock:
                self._status_requests -= 1
        if request.error is not None:
            raise request.error

    def _move(self, deadline: float | None, late: str) -> None:
        """Wait for the socket, then take one step. After DEADLINE, fail for the reason LATE. One thread at a time."""
        with self._lock:
            if self._failure is not None:
                raise OpenError(self._failure)
            direction = self.handle.aio_get_direction()
            if not self._ready or self._fd < 0:
                # libnbd tries the addresses of a host one by one, each with a new socket.
                self._fd = self.handle.aio_get_fd()
                self._inode = os.fstat(self._fd).st_ino
            if self._fd != self._polled_fd or direction != self._polled:
                if self._polled_fd >= 0:
                    self._poll.unregister(self._polled_fd)
                self._polled_fd, self._polled = self._fd, direction
                events = (select.POLLIN if direction & _READ else 0) | (select.POLLOUT if direction & _WRITE else 0)
                self._poll.register(self._fd, events)
            if deadline is None and self._io_timeout is not None:
                deadline = min((r.deadline for r in self._requests.values() if r.deadline is not None), default=None)
                late = f"the NBD server did not answer within {self._io_timeout:g} seconds"
            self._polling = True
        wait = None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
        ready: list[tuple[int, int]] = []
        try:
            ready = self._poll.poll(wait)
        finally:
            with self._lock:
                self._polling = False
                if self.handle is None:  # closed meanwhile
                    os.close(self._wake)
                    self._wake = -1
        with self._lock:
            if self._failure is not None:
                raise OpenError(self._failure)
            for fd, events in ready:
                if fd == self._fd:
                    self._step(direction, events)
                else:
                    os.eventfd_read(fd)
            # Also after an event: a server may send single bytes, or data that libnbd skips.
            if deadline is not None and time.monotonic() >= deadline and (self._requests or not self._ready):
                self._fail(late)
                raise OpenError(late)

    def _step(self, direction: int, events: int) -> None:
        """Let libnbd handle EVENTS of poll(2).

        After the handshake, it reads at most to the end of one chunk; with TLS, of one record.
        """
        ends = self._ends
        queued = _queued(self._fd) if self._status_requests else 0
        try:
            if direction & _READ and events & ~select.POLLOUT:
                self.handle.aio_notify_read()
            elif direction & _WRITE:
                self.handle.aio_notify_write()
        except self._nbd_error as error:
            reason = _FLOOD if self._flooded else libnbd.message(error)
            self._fail(reason)
            raise OpenError(reason) from libnbd.cause(error)
        self._check_alive("the NBD server closed the connection")
        if not self._ready:
            self._ready = self.handle.aio_is_ready()
        self._finish()
        # If no chunk ended, libnbd has read at least the bytes that were queued. (With TLS, it has read one record.)
        self._flow = self._flow + queued if self._status_requests and ends == self._ends and not self._encrypted else 0
        if self._flooded or self._flow > max(_MAX_STATUS, self._largest_read) + KIB:
            self._fail(_FLOOD)
            raise OpenError(_FLOOD)

    def _finish(self) -> None:
        """Wake the threads whose requests are done. Called with the lock held."""
        while self._requests and (cookie := self.handle.aio_peek_command_completed()):
            request = self._requests.pop(cookie)
            self._ends += 1
            try:
                self.handle.aio_command_completed(cookie)
            except self._nbd_error as error:
                request.error = libnbd.cause(error)
            request.ready.release()

    def _check_alive(self, reason: str) -> None:
        """Fail for REASON if libnbd has given the connection up."""
        if self.handle.aio_is_dead() or self.handle.aio_is_closed():
            reason = _FLOOD if self._flooded else reason
            self._fail(reason)
            os.eventfd_write(self._wake, 1)
            raise OpenError(reason)

    def _fail(self, reason: str) -> None:
        """Fail all requests in flight, and all later calls, for REASON. Called with the lock held."""
        if self._failure is not None:
            return
        self._failure = reason = _FLOOD if self._flooded else reason
        for request in self._requests.values():
            request.error = OpenError(reason)
            request.ready.release()
        self._requests.clear()


def _not_ready(timeout: float) -> str:
    return f"the NBD server was not ready within {timeout:g} seconds"


def _queued(fd: int) -> int:
    """Bytes that wait in the socket FD to be read; 0 where the kernel doesn't say (vsock)."""
    number = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.FIONREAD, number)
    return int.from_bytes(number, sys.byteorder)
