"""NBD servers that fail, lie, stop or die: an error with the offset, and never a hang or a wrong checksum."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fakenbd
import pytest
import reference
from conftest import HANG, Imgsum, wait_until
from fakenbd import DONE, HOLE, ZERO, Client, FakeNbd
from reference import KIB, MIB

from imgsum import OpenOptions, checksum, compare
from imgsum.errors import Error, FormatError, OpenError, ReadError
from imgsum.source.nbd.connection import ALLOCATION, Connection

if TYPE_CHECKING:
    from nbdservers import Servers

pytest_plugins = ["nbdservers"]

CONTENT = reference.content("300k:R 1m:- 724k:R")
EXPECTED = reference.blkhash(CONTENT)
Answer = Callable[[Client, int, int, int], None]


def export(uri: str, **options: Any) -> str:
    return checksum(uri, options=OpenOptions(**{"io_timeout": HANG, **options})).hexdigest


# --- reads ----------------------------------------------------------------------------------------------------------


def test_read_errors_say_where(servers: Servers, imgsum: Imgsum) -> None:
    server = servers.nbdkit(
        "--filter=noextents", "--filter=error", "memory", "10M", "error-pread=EIO", "error-pread-rate=100%"
    )
    result = imgsum("checksum", server.uri)
    assert (result.status, result.text) == (2, "")
    assert result.errors == f"imgsum: {server.uri}: read: command failed: Input/output error at offset 0\n"


def test_one_bad_read_of_many(servers: Servers) -> None:
    server = servers.nbdkit(
        "eval",
        "get_size=echo 8388608",
        "thread_model=echo parallel",
        "pread=[ $4 != 5242880 ] || { echo EIO bad >&2; exit 1; }; head -c $3 /dev/zero",
    )
    with pytest.raises(ReadError, match="Input/output error at offset 5242880"):
        export(server.uri)


def wrong_cookie(client: Client, cookie: int, offset: int, length: int) -> None:
    client.data(cookie + 1000, offset, bytes(length))


def short_data(client: Client, cookie: int, offset: int, length: int) -> None:
    client.data(cookie, offset, bytes(length - 1))


def nothing(client: Client, cookie: int, offset: int, length: int) -> None:
    client.chunk(cookie, fakenbd.NONE)


def gap(client: Client, cookie: int, offset: int, length: int) -> None:
    client.data(cookie, offset, bytes(4096), flags=0)
    client.data(cookie, offset + 8192, bytes(length - 8192))


def overlap(client: Client, cookie: int, offset: int, length: int) -> None:
    """As many bytes as were asked for, and the last of them never."""
    client.data(cookie, offset, bytes(length // 2), flags=0)
    client.data(cookie, offset, bytes(length // 2))


def long_data(client: Client, cookie: int, offset: int, length: int) -> None:
    client.data(cookie, offset, bytes(length + 1))


def elsewhere(client: Client, cookie: int, offset: int, length: int) -> None:
    client.data(cookie, offset + length, bytes(length))


def long_hole(client: Client, cookie: int, offset: int, length: int) -> None:
    client.hole(cookie, offset, 1 << 31)


def bad_magic(client: Client, cookie: int, offset: int, length: int) -> None:
    client.send(b"\xff" * 64)


def wrong_kind(client: Client, cookie: int, offset: int, length: int) -> None:
    client.status(cookie, (length, ZERO))


def end_in_header(client: Client, cookie: int, offset: int, length: int) -> None:
    client.send(struct.pack(">IH", fakenbd.STRUCTURED_REPLY, DONE))
    client.connection.shutdown(socket.SHUT_RDWR)


def end_in_data(client: Client, cookie: int, offset: int, length: int) -> None:
    header = struct.pack(">IHHQIQ", fakenbd.STRUCTURED_REPLY, DONE, fakenbd.OFFSET_DATA, cookie, 8 + length, offset)
    client.send(header + bytes(length - 1))
    client.connection.shutdown(socket.SHUT_RDWR)


def end(client: Client, cookie: int, offset: int, length: int) -> None:
    client.connection.shutdown(socket.SHUT_RDWR)


def error_without_number(client: Client, cookie: int, offset: int, length: int) -> None:
    client.error(cookie, 0)


def data_then_error(client: Client, cookie: int, offset: int, length: int) -> None:
    client.data(cookie, offset, bytes(length), flags=0)
    client.error(cookie, 5, b"afterthought")


@pytest.mark.parametrize(
    "answer",
    [
        wrong_cookie, short_data, nothing, gap, overlap, long_data, elsewhere, long_hole, bad_magic, wrong_kind,
        end_in_header, end_in_data, end, error_without_number, data_then_error,
    ],
)  # fmt: skip
@pytest.mark.parametrize("multi_conn", [True, False])
def test_replies_to_a_read_that_are_wrong(short_path: Path, answer: Answer, multi_conn: bool) -> None:
    """The content is zeros, so that what was never written would give the right checksum of a wrong read."""
    with FakeNbd(short_path, bytes(2 * MIB), on_read=answer, multi_conn=multi_conn) as server:
        with pytest.raises(ReadError) as caught:
            export(server.uri)
        assert caught.value.offset is not None
        assert 0 <= caught.value.offset <= 2 * MIB


def test_the_offset_of_a_structured_error(short_path: Path) -> None:
    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        client.data(cookie, offset, CONTENT[offset : offset + 8192], flags=0)
        payload = struct.pack(">IHQ", 5, 0, offset + 8192)
        client.chunk(cookie, fakenbd.ERROR_OFFSET, payload)

    with FakeNbd(short_path, CONTENT, on_read=answer) as server, pytest.raises(ReadError) as caught:
        export(server.uri)
    assert caught.value.offset == 8192


def test_replies_in_many_pieces_in_any_order(short_path: Path) -> None:
    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        for at in reversed(range(offset, offset + length, 4096)):
            part = CONTENT[at : min(at + 4096, offset + length)]
            if any(part):
                client.data(cookie, at, part, flags=0)
            else:
                client.hole(cookie, at, len(part), flags=0)
        client.chunk(cookie, fakenbd.NONE)

    with FakeNbd(short_path, CONTENT, on_read=answer) as server:
        assert export(server.uri) == EXPECTED


def test_requests_that_wait_while_another_fails(short_path: Path) -> None:
    """On one connection, the one that leads fails: the others go on."""

    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        if offset == 0:
            client.error(cookie, 5, b"bad")
        else:
            client.data(cookie, offset, bytes(length))

    failing = FakeNbd(short_path, bytes(8 * MIB), on_read=answer, multi_conn=False)
    with failing as server, pytest.raises(ReadError) as caught:
        export(server.uri)
    assert caught.value.offset == 0


# --- extents --------------------------------------------------------------------------------------------------------


def sizes(*lengths: int) -> Answer:
    """Extents of these LENGTHS, all zero, whatever was asked."""

    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        client.status(cookie, *[(length, HOLE | ZERO) for length in lengths])

    return answer


def silence(client: Client, cookie: int, offset: int, length: int) -> None:
    client.chunk(cookie, fakenbd.NONE)


def refusal(client: Client, cookie: int, offset: int, length: int) -> None:
    client.error(cookie, 22, b"no")


def other_context(client: Client, cookie: int, offset: int, length: int) -> None:
    client.status(cookie, (length, ZERO), context=7)


@pytest.mark.parametrize(
    ("answer", "all_read"),
    [
        pytest.param(sizes(0), True, id="zero length"),
        pytest.param(sizes(0, 0, 0), True, id="zero lengths"),
        pytest.param(silence, True, id="silence"),
        pytest.param(refusal, True, id="refusal"),
        pytest.param(other_context, True, id="another context"),
        pytest.param(sizes(0, 4096, 0), False, id="zero lengths among others"),
        pytest.param(sizes(4096), False, id="short"),
        pytest.param(sizes((1 << 32) - 1), False, id="long"),
        pytest.param(sizes(MIB, MIB, MIB, MIB), False, id="past the end"),
    ],
)
def test_extents_within_the_protocols_liberties(short_path: Path, answer: Answer, all_read: bool) -> None:
    """Content of zeros, of which the server says so in odd ways, or does not."""
    content = bytes(256 * KIB)
    with FakeNbd(short_path, content, on_status=answer) as server:
        assert export(server.uri) == reference.blkhash(content)
        asked = [request for request in server.requests if request[0] == fakenbd.BLOCK_STATUS]
        assert sum(length for _, length in server.reads()) == (len(content) if all_read else 0)
        if all_read:
            assert len(asked) == 1


def test_extents_that_are_not_worth_asking_for(short_path: Path) -> None:
    """Of one byte each, so that there would be as many questions as bytes."""
    content = bytes(256 * KIB)
    with FakeNbd(short_path, content, on_status=sizes(1)) as server:
        assert export(server.uri) == reference.blkhash(content)
        assert len(server.requests) < 1100


@pytest.mark.parametrize("flags", [0, HOLE, 4, HOLE | 4])
def test_only_the_zero_flag_is_zero(short_path: Path, flags: int) -> None:
    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        client.status(cookie, (length, flags))

    with FakeNbd(short_path, CONTENT, on_status=answer) as server:
        assert export(server.uri) == EXPECTED


@pytest.mark.parametrize("step", [512, 1000, 4096, 65536, 100_000])
def test_extents_that_begin_and_end_inside_blocks(short_path: Path, step: int) -> None:
    """Zero where it is, in extents that have nothing to do with blocks, a few for each question."""

    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        extents, at = [], offset
        while at < len(CONTENT) and len(extents) < 50:
            end = min(at - at % step + step, len(CONTENT))
            extents.append((end - at, 0 if any(CONTENT[at:end]) else ZERO))
            at = end
        client.status(cookie, *extents)

    with FakeNbd(short_path, CONTENT, on_status=answer) as server:
        assert export(server.uri) == EXPECTED


def test_a_connection_that_breaks_while_extents_are_asked_for(short_path: Path) -> None:
    """That is no refusal: nothing may be made of it. A comparison says whose connection it was."""
    (short_path / "content").write_bytes(CONTENT)
    with FakeNbd(short_path, CONTENT, on_status=end) as server:
        with pytest.raises(ReadError):
            export(server.uri)
        with pytest.raises(ReadError) as caught:
            compare(short_path / "content", server.uri, options=OpenOptions(io_timeout=HANG))
        assert caught.value.name == server.uri


def test_extents_are_asked_for_within_the_block_size(short_path: Path) -> None:
    size = 3 * MIB + 512  # no multiple of the block
    content = reference.content(f"{size}:A")
    with FakeNbd(short_path, content, block_sizes=(4096, 4096, 65536)) as server:
        got = checksum(server.uri, offset=5000, length=MIB, options=OpenOptions(io_timeout=HANG))
        assert got.hexdigest == reference.blkhash(content[5000 : 5000 + MIB])
        assert export(server.uri) == reference.blkhash(content)
        assert all(offset % 4096 == 0 for _, offset, _ in server.requests)
        assert all((offset + length) % 4096 == 0 or offset + length == size for _, offset, length in server.requests)
        assert max(length for _, length in server.reads()) == 65536


@pytest.mark.parametrize("block_sizes", [(3, 4096, 65536), (1 << 20, 1 << 20, 1 << 25), (4096, 4096, 512)])
def test_block_sizes_that_make_no_sense(short_path: Path, block_sizes: tuple[int, int, int]) -> None:
    """Refused, or ignored as libnbd does with some of them: the checksum is right in any case."""
    with FakeNbd(short_path, CONTENT, block_sizes=block_sizes) as server:
        try:
            assert export(server.uri) == EXPECTED
        except (FormatError, OpenError):
            assert server.reads() == []


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent(short_path: Path) -> Any:
    """The URI of a listener that accepts and never speaks."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "silent"))
        listener.listen()
        yield f"nbd+unix:///?socket={short_path / 'silent'}"


def test_a_listener_that_never_speaks(silent: str) -> None:
    with pytest.raises(OpenError, match=r"was not ready within 0.1 seconds"):
        export(silent, connect_timeout=0.1)


def test_a_handshake_that_is_over_at_once(short_path: Path) -> None:
    """On a busy machine libnbd may get through all of it in the call that only begins to connect."""
    with FakeNbd(short_path, CONTENT) as server:
        connection = Connection(lambda handle: handle.connect_uri(server.uri), contexts=[ALLOCATION], io_timeout=HANG)
        connection.connect(HANG)
        buffer = bytearray(4096)
        connection.read(0, memoryview(buffer))
        assert buffer == CONTENT[:4096]
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_connecting(silent: str, imgsum: Imgsum, number: int) -> None:
    running = imgsum.start("checksum", silent)
    wait_until(lambda: connected(running.process.pid))
    running.signal(number)
    result = running.finish()
    assert (result.status, result.stdout, result.stderr) == (-number, b"", b"")


@pytest.mark.parametrize("multi_conn", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_server_does_not_answer(
    short_path: Path, imgsum: Imgsum, multi_conn: bool, number: int
) -> None:
    with FakeNbd(short_path, CONTENT, on_read=lambda *_: None, multi_conn=multi_conn) as server:
        running = imgsum.start("checksum", server.uri)
        wait_until(lambda: bool(server.reads()))
        running.signal(number)
        result = running.finish()
    assert (result.status, result.stdout, result.stderr) == (-number, b"", b"")


def test_a_signal_while_extents_are_not_answered(short_path: Path, imgsum: Imgsum) -> None:
    with FakeNbd(short_path, CONTENT, on_status=lambda *_: None) as server:
        running = imgsum.start("checksum", server.uri)
        wait_until(lambda: bool(server.requests))
        running.signal(signal.SIGINT)
        result = running.finish()
    assert (result.status, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("multi_conn", [True, False])
def test_a_server_that_stops_answering(short_path: Path, multi_conn: bool) -> None:
    late = pytest.raises(ReadError, match=r"did not answer within 0.2 seconds at offset 0")
    with FakeNbd(short_path, CONTENT, on_read=lambda *_: None, multi_conn=multi_conn) as server, late:
        export(server.uri, io_timeout=0.2)


def test_a_server_that_stops_answering_about_extents(short_path: Path) -> None:
    late = pytest.raises(ReadError, match=r"did not answer within 0.2 seconds")
    with FakeNbd(short_path, CONTENT, on_status=lambda *_: None) as server, late:
        export(server.uri, io_timeout=0.2)


@pytest.mark.parametrize("multi_conn", ["emulate", "disable"])
def test_a_server_that_is_killed(servers: Servers, imgsum: Imgsum, multi_conn: str) -> None:
    server = servers.nbdkit(
        "--filter=multi-conn",
        "--filter=delay",
        "--filter=noextents",
        "memory",
        "1G",
        "rdelay=1",
        f"multi-conn-mode={multi_conn}",
        log=True,
    )
    running = imgsum.start("checksum", server.uri)
    wait_until(lambda: server.log.exists() and bool(server.requests("Read")))
    server.kill()
    result = running.finish()
    assert (result.status, result.text) == (2, "")
    assert result.errors.startswith(f"imgsum: {server.uri}: ")
    assert result.errors.endswith(" at offset 0\n")
    assert result.errors.count("\n") == 1


def test_a_server_that_drops_all_connections(short_path: Path) -> None:
    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        if offset == 0:
            server.answer_read(client, cookie, offset, length)
        else:
            server.drop()

    with FakeNbd(short_path, CONTENT, on_read=answer) as server, pytest.raises(ReadError):
        export(server.uri, request_size=64 * KIB)


def test_random_delays_do_not_matter(short_path: Path) -> None:
    """Replies in any order, late ones from other threads."""

    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        def late() -> None:
            time.sleep((offset * 7919 % 13) / 2000)
            server.answer_read(client, cookie, offset, length)

        threads.append(threading.Thread(target=late))
        threads[-1].start()

    for multi_conn in (True, False):
        threads: list[threading.Thread] = []
        (short_path / "fake.sock").unlink(missing_ok=True)
        with FakeNbd(short_path, CONTENT, on_read=answer, multi_conn=multi_conn) as server:
            for _ in range(10):
                assert export(server.uri, request_size=16 * KIB) == EXPECTED
            for thread in threads:
                thread.join()


def test_nothing_is_left(short_path: Path, no_leak: None) -> None:
    with FakeNbd(short_path, CONTENT) as server:
        assert export(server.uri) == EXPECTED
    (short_path / "fake.sock").unlink()
    with FakeNbd(short_path, CONTENT, on_read=end) as server, pytest.raises(Error):
        export(server.uri)


def connected(pid: int) -> bool:
    """Whether the process PID has a connected Unix socket."""
    found = False
    with contextlib.suppress(OSError):  # what was there a moment ago is gone
        found = any(path.readlink().name.startswith("socket:") for path in Path(f"/proc/{pid}/fd").iterdir())
    return found


# --- before anything is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1])
def test_a_size_that_is_too_large(short_path: Path, imgsum: Imgsum, size: int) -> None:
    with FakeNbd(short_path, b"", size=size) as server:
        with pytest.raises(FormatError, match=f"its export has {size} bytes"):
            export(server.uri)
        result = imgsum("checksum", server.uri)
        assert (result.status, result.text) == (2, "")
        assert result.errors.startswith(f"imgsum: {server.uri}: the NBD server says that its export has {size} bytes,")
        assert result.errors.count("\n") == 1


@pytest.mark.parametrize("scheme", ["nbd", "nbds"])
@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("[::1/", "valid URI|unable to parse"),
        ("localhost/\udcff", "is not a valid URI: bytes that are not UTF-8 are written %XX"),
        ("localhost/\0", "is not a valid URI"),
    ],
)
def test_uris_that_are_none(scheme: str, rest: str, reason: str) -> None:
    with pytest.raises(OpenError, match=reason):
        export(f"{scheme}://{rest}")


def test_no_descriptor_is_left(servers: Servers) -> None:
    uri = servers.nbdkit("memory", "1M").uri
    assert export(uri) == reference.blkhash(bytes(MIB))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull, "rb"))
        with pytest.raises(OpenError, match="too many open files"):
            export(uri)
    assert export(uri) == reference.blkhash(bytes(MIB))


# --- floods ---------------------------------------------------------------------------------------------------------


def option_reply(option: int, kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">QIII", fakenbd.OPTION_REPLY, option, kind, len(payload)) + payload


def flood(connection: socket.socket, message: bytes) -> None:
    """Send MESSAGE for ever."""
    many = message * max(1, 256 * KIB // len(message))
    while True:
        connection.sendall(many)


def drip(connection: socket.socket, message: bytes) -> None:
    """Send MESSAGE, which is never complete, a byte at a time."""
    for byte in message:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


INFORMATION = struct.pack(">HQH", 0, MIB, 0x101)
CONTEXT = struct.pack(">I", 1) + b"base:allocation"
HANDSHAKE_FLOODS: dict[str, tuple[int, int, Callable[[socket.socket, bytes], None], bytes]] = {
    # the option that is answered, and with what
    "information": (7, 3, flood, INFORMATION),
    "unknown information": (7, 3, flood, struct.pack(">H", 999) + bytes(2000)),
    "large information": (7, 3, flood, struct.pack(">H", 999) + bytes(2 * MIB)),
    "names": (7, 3, flood, struct.pack(">H", 1) + b"x" * 4000),
    "descriptions": (7, 3, flood, struct.pack(">H", 2) + b"x" * 4000),
    "contexts": (10, 4, flood, CONTEXT),
    "long contexts": (10, 4, flood, struct.pack(">I", 1) + b"x" * 4000),
    "names that are not UTF-8": (10, 4, flood, struct.pack(">I", 1) + b"\xff" * 40),
    "error text": (7, 0x80000006, drip, b"x" * 4000),
    "error text that is not UTF-8": (7, 0x80000006, socket.socket.sendall, b"\xff" * 40),
    "drip": (7, 3, drip, b"x" * 4000),
    "unknown replies": (7, 77, flood, b"x"),
    "silence after a shutdown": (8, 0x80000007, socket.socket.sendall, b""),
}


@pytest.fixture(params=HANDSHAKE_FLOODS)
def handshake(request: pytest.FixtureRequest) -> Callable[[socket.socket, int], bool]:
    flooded, kind, send, payload = HANDSHAKE_FLOODS[request.param]

    def answer(connection: socket.socket, option: int) -> bool:
        if option != flooded:
            return request.param.startswith("silence") and option > flooded
        send(connection, option_reply(option, kind, payload))
        return True

    return answer


def test_a_flood_in_the_handshake(
    short_path: Path, imgsum: Imgsum, handshake: Callable[[socket.socket, int], bool]
) -> None:
    with FakeNbd(short_path, CONTENT, on_option=handshake) as server:
        result, peak = imgsum.peak_memory("checksum", "--connect-timeout", "0.6", server.uri)
    assert (result.status, result.text) == (2, "")
    assert result.errors.startswith(f"imgsum: {server.uri}: ")
    assert peak < 64 * MIB


def unasked(connection: socket.socket, option: int) -> bool:
    """A reply to an option that nobody sent."""
    if option == 0:
        return False
    connection.sendall(option_reply(99, 1))
    return True


def old_style(connection: socket.socket, option: int) -> bool:
    """The handshake of before 2011, and more than that."""
    flood(connection, b"NBDMAGIC" + struct.pack(">QQI124x", 0x00420281861253, MIB, 1))
    return True


@pytest.mark.parametrize("answer", [unasked, old_style])
def test_other_handshakes(short_path: Path, imgsum: Imgsum, answer: Callable[[socket.socket, int], bool]) -> None:
    with FakeNbd(short_path, CONTENT, on_option=answer) as server:
        result, peak = imgsum.peak_memory("checksum", "--connect-timeout", "0.6", "--io-timeout", "0.6", server.uri)
    assert (result.status, result.text) == (2, "")
    assert result.errors.count("\n") == 1
    assert peak < 64 * MIB


def test_a_flood_on_all_connections_but_the_first(short_path: Path) -> None:
    """They are not used."""

    def answer(connection: socket.socket, option: int) -> bool:
        if option == 7 and server.connections > 1:
            flood(connection, option_reply(option, 3, INFORMATION))
        return False

    with FakeNbd(short_path, CONTENT, on_option=answer) as server:
        assert export(server.uri, request_size=16 * KIB) == EXPECTED
        assert server.connections > 1


def test_a_flood_before_the_socket_is_known(short_path: Path) -> None:
    """As if libnbd got as far as that in the call that only begins to connect."""

    def answer(connection: socket.socket, option: int) -> bool:
        if option == 7:
            flood(connection, option_reply(option, 3, INFORMATION))
        return False

    with FakeNbd(short_path, CONTENT, on_option=answer) as server:
        connection = Connection(lambda handle: handle.connect_uri(server.uri), contexts=[ALLOCATION], io_timeout=HANG)
        with pytest.raises(OpenError):
            connection.connect(0.5)
        connection.close()


@pytest.mark.parametrize("phase", [0, 8, 10, 7])
def test_a_signal_in_a_handshake(short_path: Path, imgsum: Imgsum, phase: int) -> None:
    """At the greeting, or at an option: the answer comes byte by byte, and never ends."""
    begun = threading.Event()

    def answer(connection: socket.socket, option: int) -> bool:
        if option != phase:
            return False
        begun.set()
        drip(connection, b"NBDMAGIC" + bytes(4000) if option == 0 else option_reply(option, 3, bytes(4000)))
        return True

    with FakeNbd(short_path, CONTENT, on_option=answer) as server:
        running = imgsum.start("checksum", server.uri)
        assert begun.wait(HANG)
        running.signal(signal.SIGINT)
        result = running.finish()
    assert (result.status, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


def test_a_server_that_can_not_read(short_path: Path) -> None:
    def refuse(client: Client, cookie: int, offset: int, length: int) -> None:
        client.error(cookie, 95)

    with (
        FakeNbd(short_path, CONTENT, on_read=refuse) as server,
        pytest.raises(ReadError, match="says that it can't read"),
    ):
        export(server.uri)


def endless_bytes(client: Client, cookie: int, offset: int, length: int) -> None:
    payload = struct.pack(">Q", offset) + b"x"
    flood(client.connection, struct.pack(">IHHQI", fakenbd.STRUCTURED_REPLY, 0, 1, cookie, 9) + payload)


def endless_errors(client: Client, cookie: int, offset: int, length: int) -> None:
    payload = struct.pack(">IH", 5, 1000) + b"x" * 1000
    flood(client.connection, struct.pack(">IHHQI", fakenbd.STRUCTURED_REPLY, 0, 0x8001, cookie, len(payload)) + payload)


def endless_extents(client: Client, cookie: int, offset: int, length: int) -> None:
    payload = struct.pack(">III", 1, 512, 0)
    flood(client.connection, struct.pack(">IHHQI", fakenbd.STRUCTURED_REPLY, 0, 5, cookie, len(payload)) + payload)


def slow_data(client: Client, cookie: int, offset: int, length: int) -> None:
    drip(client.connection, struct.pack(">IHHQIQ", fakenbd.STRUCTURED_REPLY, 1, 1, cookie, 8 + length, offset))
    drip(client.connection, bytes(4000))


def extents_of_512_bytes(size: int) -> Answer:
    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        client.chunk(cookie, fakenbd.STATUS, struct.pack(">I", 1) + struct.pack(">II", 512, 0) * (size // 8))

    answer.__name__ = f"extents_{size >> 20}m"
    return answer


huge_extents, larger_extents = extents_of_512_bytes(63 * MIB), extents_of_512_bytes(9 * MIB)


@pytest.mark.parametrize(("multi_conn", "tcp"), [(True, True), (False, False)])
@pytest.mark.parametrize("answer", [endless_bytes, endless_errors, slow_data])
def test_a_flood_of_replies_to_a_read(
    short_path: Path, imgsum: Imgsum, answer: Answer, multi_conn: bool, tcp: bool
) -> None:
    with FakeNbd(short_path, CONTENT, on_read=answer, multi_conn=multi_conn, tcp=tcp) as server:
        result, peak = imgsum.peak_memory("checksum", "--io-timeout", "0.6", server.uri)
    assert (result.status, result.text) == (2, "")
    assert peak < 64 * MIB


@pytest.mark.parametrize(
    ("answer", "tcp"),
    [(endless_extents, False), (huge_extents, True), (huge_extents, False), (larger_extents, False), (slow_data, True)],
)
def test_a_flood_of_replies_about_extents(short_path: Path, imgsum: Imgsum, answer: Answer, tcp: bool) -> None:
    with FakeNbd(short_path, CONTENT, on_status=answer, tcp=tcp) as server:
        result, peak = imgsum.peak_memory("checksum", "--io-timeout", "0.6", server.uri)
    assert (result.status, result.text) == (2, "")
    assert peak < 64 * MIB


def test_a_reply_with_many_extents_is_no_flood(short_path: Path, imgsum: Imgsum) -> None:
    """4 MiB; nbdkit sends up to 8."""

    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        pairs = struct.pack(">II", 16, ZERO | HOLE) * (length // 16)
        client.chunk(cookie, fakenbd.STATUS, struct.pack(">I", 1) + pairs)

    with FakeNbd(short_path, bytes(8 * MIB), on_status=answer) as server:
        result, peak = imgsum.peak_memory("checksum", "-q", server.uri)
    assert result.text.split() == [reference.blkhash(bytes(8 * MIB)), server.uri]
    assert peak < 64 * MIB


def test_a_context_whose_name_is_not_utf_8(short_path: Path, imgsum: Imgsum) -> None:
    """libnbd's Python binding prints an exception for that."""

    def contexts(connection: socket.socket, option: int) -> bool:
        if option != 10:
            return False
        other = struct.pack(">I", 7) + b"\xff"
        connection.sendall(option_reply(10, 4, CONTEXT) + option_reply(10, 4, other) + option_reply(10, 1))
        return True

    def answer(client: Client, cookie: int, offset: int, length: int) -> None:
        client.status(cookie, (length, ZERO), context=7, flags=0)
        client.status(cookie, (length, 0))

    with FakeNbd(short_path, CONTENT, on_option=contexts, on_status=answer) as server:
        result = imgsum("checksum", "-q", server.uri)
    assert (result.status, result.text, result.errors) == (0, f"{EXPECTED}  {server.uri}\n", "")


@pytest.mark.parametrize("answer", [endless_errors, slow_data])
def test_a_signal_during_a_flood(short_path: Path, imgsum: Imgsum, answer: Answer) -> None:
    begun = threading.Event()

    def answer_and_say(client: Client, cookie: int, offset: int, length: int) -> None:
        begun.set()
        answer(client, cookie, offset, length)

    with FakeNbd(short_path, CONTENT, on_status=answer_and_say) as server:
        running = imgsum.start("checksum", server.uri)
        assert begun.wait(HANG)
        running.signal(signal.SIGINT)
        assert running.finish().status == -signal.SIGINT
