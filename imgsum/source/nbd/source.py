"""NBD exports over libnbd: one connection for each worker where the server allows it, else one that all share.

The protocol: doc/proto.md of https://github.com/NetworkBlockDevice/nbd. libnbd is imported when a source is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import iter_unpack
from threading import Lock
from typing import Any, NamedTuple

from imgsum.errors import ChangedError, Error, FormatError, OpenError, ReadError, RefusedError, UsageError
from imgsum.extent import Extent
from imgsum.source import Evidence, OpenOptions
from imgsum.source.nbd.connection import ALLOCATION, DIRTY_BITMAP, Connection
from imgsum.units import GIB, KIB, MIB

MAX_CONNECTIONS = 8
"""One for each worker."""

_EXTRA_TIMEOUT = 2.0
"""Seconds to connect again: a server that accepts no more clients lets further ones wait, and does not refuse them."""

_MAX_REQUEST = 32 * MIB
"""The maximum size of a request, and the server's maximum if it has none. In bytes."""
_GOOD_REQUEST = 512 * KIB
"""The usual maximum of a request. For requests of 1 MiB qemu-nbd maps a new buffer each time: 3 GiB take it 1.5 s, with
requests of 512 KiB 0.8 s, and of 256 KiB 1.0 s."""

_ZERO = 2  # LIBNBD_STATE_ZERO. HOLE alone does not tell what the content is.

_FIRST_STATUS, _MAX_STATUS = 16 * MIB, GIB
"""Bytes covered by the first BLOCK_STATUS request, and the maximum for later ones. 8 TiB takes 8200 requests; the reply
about 1 GiB of alternating 4 KiB extents has 2 MiB."""
_FEW_REQUESTS, _WORTH_A_REQUEST = 1000, 64 * KIB
"""After 1000 requests, a reply must cover 64 KiB on average: reading less than that is as fast as asking about it."""
_MANY_EXTENTS = 16 * KIB
"""A reply with more extents halves the range of the next request; one with less than a quarter doubles it."""


class Limits(NamedTuple):
    """Sizes of requests, in bytes: they begin on a multiple of `minimum`, and end on one or at the end."""

    minimum: int
    maximum: int


def open_nbd(uri: str, options: OpenOptions) -> NbdSource:
    """Open the export that URI names; see nbd_connect_uri(3). Raises an imgsum.Error."""
    if options.format not in (None, "raw"):
        raise UsageError(f"an NBD export can't be read as {options.format}: its content is what the server makes of it")
    if "\0" in uri or any("\ud800" <= char <= "\udfff" for char in uri):
        raise OpenError("is not a valid URI: bytes that are not UTF-8 are written %XX")
    tls = uri.startswith("nbds")

    def start(handle: Any) -> None:
        if tls:
            from imgsum.source.nbd.tls import require

            require(handle, uri)
        handle.set_uri_allow_local_file(True)  # tls-psk-file, which the user names
        handle.aio_connect_uri(uri)

    return NbdSource(uri, start, options, tls=tls)


def not_a_uri(name: str) -> str:
    """The message for NAME, which begins with `nbd`, but is neither an NBD URI nor a file."""
    parts = name.split(":", 2)
    if name.startswith("nbd:unix:"):
        socket, _, export = parts[2].partition(":exportname=")
        return f"no such file; as an NBD export it is written nbd+unix:///{export}?socket={socket}"
    if name.startswith("nbd:") and len(parts) == 3 and not parts[1].startswith("/"):
        port, _, export = parts[2].partition(":exportname=")
        return f"no such file; as an NBD export it is written nbd://{parts[1]}:{port}/{export}"
    return "no such file, nor an NBD URI: those begin with nbd://, nbds://, nbd+unix:///, nbds+unix:/// or nbd+vsock://"


class NbdSource:
    """An NBD export. Satisfies Source."""

    def __init__(self, name: str, start: Callable[[Any], None], options: OpenOptions, *, tls: bool = False) -> None:
        """Connect. START(handle) starts connecting; TLS: it must be encrypted. Raises an imgsum.Error."""
        self.name = name
        self.format = "raw"
        self._start = start
        self._options = options
        self._tls = tls
        self._lock = Lock()
        """Guards what follows."""
        self._connections: list[Connection] = []
        self._closed = False
        self._readers = 0
        try:
            contexts = [ALLOCATION] if options.extents else []
            if options.bitmap is not None:
                contexts.append(_dirty_bitmap(options.bitmap))
            self._first = self._connect(options.connect_timeout, contexts)
            handle = self._first.handle
            self.size = self._first.size()
            self._limits = _limits(handle, options.request_size)
            self._contexts = {context for context in contexts if handle.can_meta_context(context)}
            """The metadata contexts that the server supports, and did not fail for."""
            multi_conn = handle.can_multi_conn()
            self._details: dict[str, object] = {
                "nbd_multi_conn": multi_conn,
                "nbd_structured_replies": handle.get_structured_replies_negotiated(),
                "nbd_tls": handle.get_tls_negotiated(),
                "nbd_extents": ALLOCATION in self._contexts,
            }
        except BaseException:
            self.close()
            raise
        count = min(MAX_CONNECTIONS, options.connections or MAX_CONNECTIONS) if multi_conn else 1
        self._slots = [_Slot() for _ in range(count)]
        self._slots[0].connection = self._first
        self._first.share()  # block status requests and at least one worker use it at the same time

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        """See Source."""
        return self._statuses(start, start + length, ALLOCATION)

    def clean(self, bitmap: str) -> Iterator[Extent]:
        """See Source. BITMAP is that of the options, as the server must be asked for it when it is connected to."""
        context = _dirty_bitmap(bitmap)
        if context not in self._contexts:
            raise RefusedError(f"the NBD server does not offer the metadata context {context}")
        return self._statuses(0, self.size, context)

    def _statuses(self, start: int, end: int, context: str) -> Iterator[Extent]:
        """The server's extents of START..END in CONTEXT. `zero` is zero, or not dirty.

        If a request fails, or the extents are so short that reading is faster, no more requests are sent: the rest is
        data, or dirty.
        """
        at, stretch, requests = start, _FIRST_STATUS, 0
        while at < end:
            requests += 1
            begun, count = at, 0
            for extent in self._block_status(at, min(end, at + stretch), context):
                yield extent
                at, count = extent.end, count + 1
            if at == begun or (requests > _FEW_REQUESTS and at - start < requests * _WORTH_A_REQUEST):
                self._contexts.discard(context)
                if at < end:
                    yield Extent(at, end - at, False)
                return
            if count > _MANY_EXTENTS:
                stretch = max(MIB, stretch // 2)
            elif count < _MANY_EXTENTS // 4:
                stretch = min(_MAX_STATUS, stretch * 2)

    def _block_status(self, start: int, end: int, context: str) -> Iterator[Extent]:
        """The server's extents from START on: up to END, or fewer; none if the request fails."""
        if context not in self._contexts:
            return
        minimum = self._limits.minimum
        at = start - start % minimum
        length = min(-(-(end - at) // minimum) * minimum, self.size - at)
        try:
            pairs = self._first.block_status(at, length, context) or b""
        except ReadError as error:
            self.explain(error)
            raise
        for count, flags in iter_unpack("=II", pairs):
            # The protocol allows the last extent to be longer than the request, and extents of length 0. Only what is
            # inside START..END counts.
            extent_end = min(at + count, end)
            if extent_end > max(at, start):
                zero = bool(flags & _ZERO) if context == ALLOCATION else not flags
                yield Extent(max(at, start), extent_end - max(at, start), zero)
            at += count
            if at >= end:
                return

    def reader(self) -> NbdReader:
        """See Source. Opens another connection for the worker, or shares one."""
        with self._lock:
            slot = self._slots[self._readers % len(self._slots)]
            self._readers += 1
        with slot.lock:
            if slot.connection is None:
                slot.connection = self._connect_again()
                if len(self._slots) < MAX_CONNECTIONS and slot.connection is not self._first:
                    slot.connection.share()
        return NbdReader(slot.connection, self._limits, self.size, self.explain)

    def explain(self, error: Error) -> None:
        """Add to ERROR what is known about the server: nothing, unless we started it."""

    def _connect_again(self) -> Connection:
        """Another connection, or the first one if the server does not accept more."""
        try:
            connection = self._connect(min(_EXTRA_TIMEOUT, self._options.connect_timeout))
        except OpenError:
            return self._first
        if connection.size() != self.size:
            raise ChangedError("the NBD export's size changed while it was read")
        return connection

    def _connect(self, timeout: float, contexts: Sequence[str] = ()) -> Connection:
        connection = Connection(self._start, contexts=contexts, io_timeout=self._options.io_timeout)
        with self._lock:
            if self._closed:
                raise OpenError("the NBD source was closed")
            self._connections.append(connection)
        try:
            connection.connect(timeout)
            if self._tls and not connection.handle.get_tls_negotiated():
                raise OpenError("the NBD server does not encrypt, and nbds requires it")
        except BaseException:
            connection.close()
            with self._lock:
                self._connections.remove(connection)
            raise
        return connection

    def check_unchanged(self) -> None:
        """See Source. NBD has no way to tell."""

    def evidence(self) -> Evidence:
        """See Source. Certain of nothing."""
        return [{"nbd_size": self.size}]

    def details(self) -> dict[str, object]:
        """See Source."""
        return {"nbd_connections": len(self._connections), **self._details}

    def close(self) -> None:
        """See Source. Reads in flight fail at once."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()


def _dirty_bitmap(name: str) -> str:
    """The metadata context of the dirty bitmap NAME. Raises UsageError."""
    if not name or "\0" in name or any("\ud800" <= char <= "\udfff" for char in name):
        raise UsageError("the name of a dirty bitmap is UTF-8, and not empty")
    return DIRTY_BITMAP + name


class _Slot:
    """A place for a connection, opened by the first worker that uses it."""

    __slots__ = ("connection", "lock")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.lock = Lock()


class NbdReader:
    """Reads an export for one worker, in requests that keep the server's limits. Satisfies Reader."""

    def __init__(self, connection: Connection, limits: Limits, size: int, explain: Callable[[ReadError], None]) -> None:
        self._connection = connection
        self._explain = explain
        self._limits = limits
        self._size = size

    def read(self, offset: int, buffer: memoryview) -> None:
        """See Reader."""
        minimum, maximum = self._limits
        at, end = offset, offset + len(buffer)
        while at < end:
            skip = at % minimum
            count = min(end - at, maximum)
            if at + count < self._size:
                count -= count % minimum
            if skip == 0 and count:
                self._read(at, buffer[at - offset : at - offset + count])
            else:  # part of a block: read all of it into another buffer
                block = bytearray(min(minimum, self._size - (at - skip)))
                self._read(at - skip, memoryview(block))
                count = min(end - at, len(block) - skip)
                buffer[at - offset : at - offset + count] = block[skip : skip + count]
            at += count

    def _read(self, offset: int, buffer: memoryview) -> None:
        try:
            self._connection.read(offset, buffer)
        except ReadError as error:
            self._explain(error)
            raise

    def close(self) -> None:
        """See Reader. The source closes the connection."""


def _limits(handle: Any, request_size: int) -> Limits:
    """The limits of requests: the server's block sizes or the protocol's defaults, and ours. Raises FormatError."""
    minimum, preferred, maximum = (handle.get_block_size(which) for which in (0, 1, 2))  # LIBNBD_SIZE_*
    minimum = minimum or 1
    maximum = min(maximum or _MAX_REQUEST, _MAX_REQUEST)
    if minimum & (minimum - 1) or minimum > 64 * KIB or maximum < minimum:
        raise FormatError(f"the NBD server's block sizes make no sense: minimum {minimum}, maximum {maximum}")
    # A server that prefers larger requests gets them, as far as the reads go.
    maximum = min(maximum, request_size if request_size > MIB else max(_GOOD_REQUEST, min(preferred, request_size)))
    return Limits(minimum, maximum - maximum % minimum)
