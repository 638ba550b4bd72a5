"""A small NBD server in Python, for replies that no real server sends. One thread for each connection.

It speaks the fixed newstyle handshake with structured replies and base:allocation (doc/proto.md of the NBD project).
What it answers to a read or a question for extents is up to the test: see FakeNbd.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

OPTION_MAGIC, OPTION_REPLY = 0x49484156454F5054, 0x0003E889045565A9
REQUEST_MAGIC, SIMPLE_REPLY, STRUCTURED_REPLY = 0x25609513, 0x67446698, 0x668E33EF
READ, DISCONNECT, BLOCK_STATUS = 0, 2, 7
DONE = 1
NONE, OFFSET_DATA, OFFSET_HOLE, STATUS, ERROR, ERROR_OFFSET = 0, 1, 2, 5, 0x8001, 0x8002
HOLE, ZERO = 1, 2


class Client:
    """A connection of the server: what a test answers with."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        with self._lock:
            self.connection.sendall(data)

    def chunk(self, cookie: int, kind: int, payload: bytes = b"", *, flags: int = DONE) -> None:
        self.send(struct.pack(">IHHQI", STRUCTURED_REPLY, flags, kind, cookie, len(payload)) + payload)

    def data(self, cookie: int, offset: int, data: bytes, *, flags: int = DONE) -> None:
        self.chunk(cookie, OFFSET_DATA, struct.pack(">Q", offset) + data, flags=flags)

    def hole(self, cookie: int, offset: int, length: int, *, flags: int = DONE) -> None:
        self.chunk(cookie, OFFSET_HOLE, struct.pack(">QI", offset, length), flags=flags)

    def error(self, cookie: int, number: int, words: bytes = b"", *, flags: int = DONE) -> None:
        self.chunk(cookie, ERROR, struct.pack(">IH", number, len(words)) + words, flags=flags)

    def status(self, cookie: int, *extents: tuple[int, int], context: int = 1, flags: int = DONE) -> None:
        pairs = b"".join(struct.pack(">II", *extent) for extent in extents)
        self.chunk(cookie, STATUS, struct.pack(">I", context) + pairs, flags=flags)


class FakeNbd:
    """A server of CONTENT at a Unix socket in DIRECTORY. Use as a context manager.

    on_read(client, cookie, offset, length) and on_status(client, cookie, offset, length) answer, or not; without
    them it answers correctly, and says of everything that it is data. on_option(connection, option) answers an option
    of the handshake and returns True, or False for the right answer; option 0 is the greeting.
    `requests` is what it was asked, in order.
    """

    def __init__(
        self,
        directory: Path,
        content: bytes,
        *,
        on_read: Callable[[Client, int, int, int], None] | None = None,
        on_status: Callable[[Client, int, int, int], None] | None = None,
        block_sizes: tuple[int, int, int] | None = None,
        multi_conn: bool = True,
        size: int | None = None,
        on_option: Callable[[socket.socket, int], bool] | None = None,
        tcp: bool = False,
    ) -> None:
        self.path = directory / "fake.sock"
        self.uri = f"nbd+unix:///?socket={self.path}"
        self._on_option = on_option
        self._tcp = tcp
        self.requests: list[tuple[int, int, int]] = []
        self.connections = 0
        self._content = content
        self._size = len(content) if size is None else size
        self._on_read = on_read or self.answer_read
        self._on_status = on_status or self.answer_status
        self._block_sizes = block_sizes
        self._flags = 1 | (1 << 8 if multi_conn else 0)
        self._listener = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def reads(self) -> list[tuple[int, int]]:
        """(offset, length) of each read that was asked for."""
        return [(offset, length) for kind, offset, length in self.requests if kind == READ]

    def answer_read(self, client: Client, cookie: int, offset: int, length: int) -> None:
        client.data(cookie, offset, self._content[offset : offset + length])

    def answer_status(self, client: Client, cookie: int, offset: int, length: int) -> None:
        client.status(cookie, (length, 0))

    def drop(self) -> None:
        """Close all connections."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        if self._tcp:
            self._listener.bind(("127.0.0.1", 0))
            self.uri = f"nbd://127.0.0.1:{self._listener.getsockname()[1]}/"
        else:
            self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._start(self._accept)
        return self

    def __exit__(self, *args: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(10)
        for connection in self._open:
            connection.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="fakenbd", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                self.connections += 1
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            if self._negotiate(connection):
                self._transmit(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _negotiate(self, connection: socket.socket) -> bool:
        if self._on_option is not None and self._on_option(connection, 0):
            return False
        connection.sendall(b"NBDMAGIC" + struct.pack(">QH", OPTION_MAGIC, 3))
        receive(connection, 4)
        while True:
            _, option, length = struct.unpack(">QII", receive(connection, 16))
            data = receive(connection, length)
            if self._on_option is not None and self._on_option(connection, option):
                continue

            def reply(kind: int, payload: bytes = b"", option: int = option) -> None:
                connection.sendall(struct.pack(">QIII", OPTION_REPLY, option, kind, len(payload)) + payload)

            if option == 8:  # structured replies
                reply(1)
            elif option == 10:  # set meta context
                if b"base:allocation" in data:
                    reply(4, struct.pack(">I", 1) + b"base:allocation")
                reply(1)
            elif option in (6, 7):  # info, go
                reply(3, struct.pack(">HQH", 0, self._size, self._flags))
                if self._block_sizes:
                    reply(3, struct.pack(">HIII", 3, *self._block_sizes))
                reply(1)
                if option == 7:
                    return True
            elif option == 2:  # abort
                reply(1)
                return False
            else:
                reply(0x80000001)

    def _transmit(self, connection: socket.socket) -> None:
        client = Client(connection)
        while True:
            magic, _, kind, cookie, offset, length = struct.unpack(">IHHQQI", receive(connection, 28))
            assert magic == REQUEST_MAGIC
            if kind == DISCONNECT:
                return
            self.requests.append((kind, offset, length))
            (self._on_read if kind == READ else self._on_status)(client, cookie, offset, length)


def receive(connection: socket.socket, length: int) -> bytes:
    """Exactly LENGTH bytes, or EOFError."""
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return data
