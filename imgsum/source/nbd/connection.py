"""One NBD connection, for one thread or for many that have their requests in flight together.

libnbd's own waiting calls hold the handle's lock while they wait, and no signal interrupts them. So nobody waits in
libnbd here: poll(2) waits for the socket, and then a call that never blocks moves the handle's state machine. A thread
that is alone on its connection does that itself. On a shared one it is done by a thread of the connection's own, the
pump, and the others sleep until their request is done. (Passing that duty on among them was no faster, and more code.)
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
"""Steps of libnbd's state machine in the handshake: 70 are usual, and a reply takes 3."""
_MAX_STATUS = 8 * MIB
"""Bytes of a reply about extents: what nbdkit sends at most. qemu-nbd sends 1 MiB."""
_MAX_STATUS_CHUNKS = 64
_MIN_CHUNK = 512
"""Bytes of a read per chunk, on average, below which the reply is a flood."""
_CHECK_EVERY = 0.05


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
        self._fd = self._polled_fd = -1  # libnbd's socket, and the one that poll(2) waits for
        self._inode = 0
        self._ready = False
        self._flooded = self._interrupted = False
        self._structured = self._encrypted = False
        self._questions = 0
        """Block status requests in flight."""
        self._largest_read = 0
        self._ends = 0
        """Chunks and requests that have ended: callbacks count them."""
        self._flow = 0
        """Bytes that came since the last of those, while there are questions."""
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

        def negotiate() -> None:
            try:
                self._negotiate(deadline, timeout)
            except BaseException as error:
                failure.append(error)
            done.set()

        # In a thread of its own: no signal interrupts the look-up of a host name.
        threading.Thread(target=negotiate, name="nbd-connect", daemon=True).start()
        while not done.wait(_CHECK_EVERY):
            # The grace lets the thread's own message, which says more, come first.
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

        The server may send any number of META_CONTEXT and INFO. libnbd takes all that come, in one call, and keeps
        the names of the contexts: 400 MiB in a second. So its steps are counted.
        """
        steps = 0

        def count_step() -> None:
            nonlocal steps
            steps += 1
            if steps > _MAX_STEPS:
                self._interrupt()

        # No frame keeps the handle: an error, which has frames, may live longer than the connection.
        libnbd.on_debug(self.handle, count_step)
        self._start(self.handle)
        self._ready = self.handle.aio_is_ready()  # libnbd went on as long as it need not wait: perhaps to the end
        while not self._ready:
            self._move(deadline, _not_ready(timeout))
        libnbd.end_debug(self.handle)
        self._structured = self.handle.get_structured_replies_negotiated()
        self._encrypted = self.handle.get_tls_negotiated()

    def _interrupt(self) -> None:
        """Have libnbd find its connection closed. Called by libnbd, with its lock held, while it reads a flood."""
        self._flooded = True
        if self._interrupted:
            return
        self._interrupted = True
        try:
            known = self._fd >= 0 and os.fstat(self._fd).st_ino == self._inode
        except OSError:
            known = False
        if (
            not known
        ):  # it floods in the very step in which libnbd has connected, and which descriptor that is, is unknown
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
                self._fail(libnbd.message(error))

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill BUFFER with the export's bytes from OFFSET, in one request. Raises ReadError with the offset.

            simple:       REPLY data
            structured:   DATA offset data | HOLE offset length | ERROR, in any number and order; the last is DONE

        libnbd keeps each chunk inside the request, and counts their bytes, but overlapping chunks leave gaps.
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
        """The server's extents from OFFSET on, as pairs of 32-bit numbers; it was ASKED about LENGTH bytes.

        None when it does not say: it answers with an error, or not about that context. Raises ReadError when the
        connection is broken.

            BLOCK_STATUS context (length flags)... | ERROR, in any number; the last is DONE

        The first one about the context counts.
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
            self._questions += asks
            self._finish()  # with TLS, what is read already may have been an answer
            # The pump may be waiting for something else, and not until this request's deadline.
            if self._shared and (timeout is not None or self.handle.aio_get_direction() & ~self._polled):
                os.eventfd_write(self._wake, 1)
        if self._shared:
            request.ready.acquire()
        else:
            while request.ready.locked():
                self._move(None, "")
        if asks:
            with self._lock:
                self._questions -= 1
        if request.error is not None:
            raise request.error

    def _move(self, deadline: float | None, late: str) -> None:
        """Wait for the socket, then take one step; fail for the reason LATE after DEADLINE. In one thread at a time."""
        with self._lock:
            if self._failure is not None:
                raise OpenError(self._failure)
            direction = self.handle.aio_get_direction()
            if not self._ready or self._fd < 0:
                # While a host's addresses are tried, the socket is another one every time.
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
            # Also when something came: a server may send a byte now and then, or what libnbd skips.
            if deadline is not None and time.monotonic() >= deadline and (self._requests or not self._ready):
                self._fail(late)
                raise OpenError(late)

    def _step(self, direction: int, events: int) -> None:
        """Let libnbd do what EVENTS of poll(2) make possible.

        Once the handshake is over it takes no more than the rest of one chunk, or with TLS of one record.
        """
        ends = self._ends
        queued = _queued(self._fd) if self._questions else 0
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
        # In the midst of a chunk libnbd has taken at least what was queued. (With TLS it has taken one record.)
        self._flow = self._flow + queued if self._questions and ends == self._ends and not self._encrypted else 0
        if self._flooded or self._flow > max(_MAX_STATUS, self._largest_read) + KIB:
            self._fail(_FLOOD)
            raise OpenError(_FLOOD)

    def _finish(self) -> None:
        """Wake those whose requests are done. Called with the lock held."""
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
        """From now on everything fails for REASON, and so do the requests in flight. Called with the lock held."""
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
