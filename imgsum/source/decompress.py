"""Compressed raw images, as they are downloaded: disk.img.xz. Read once, from the beginning, like a stream.

The compressed bytes of a file or stream become pieces of content in a thread of its own, a few pieces ahead of whoever
takes them: _MEMBERS has a function for each format. An xz file of several blocks is decompressed by several threads.
"""

from __future__ import annotations

import os
import shlex
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from imgsum.errors import Error, FormatError, MissingError, RefusedError, TruncatedError
from imgsum.source import OpenOptions, detect
from imgsum.source.file import HostFile, cache_details
from imgsum.source.stream import Sequential, Stream
from imgsum.units import KIB, MIB

_STEP = 256 * KIB  # the most compressed bytes that a decompressor is given at once
_FIRST_STEP = 4 * KIB  # the first it is given: a member may be tiny, and what it leaves is a copy
_AHEAD = 4  # pieces of at most 1 MiB that wait to be taken
_PATIENCE = 0.3  # seconds between two looks for a signal, and what a thread gets to end
_MAX_GZIP_NAME = 64 * KIB
_MAX_INDEX = 64 * KIB  # bytes of an xz index: one of blocks of 24 MiB, for 200 GiB
_MAX_BLOCKS = 32 * KIB  # of all streams
_MAX_STEPS = 4 * KIB  # streams, and words of zeros between them

_UNPACK = {"bz2": "bzip2 -dk", "gz": "gzip -dk", "lz4": "lz4 -d", "lzma": "xz -dk", "xz": "xz -dk", "zst": "zstd -d"}


class Decompressed(Sequential):
    """The content of a compressed file, from its beginning to its end."""

    def __init__(self, file: HostFile | Stream, options: OpenOptions, compression: str, *, given: bool) -> None:
        """Read what is in FILE, as detect.COMPRESSIONS call it. GIVEN: -f says so, and that its content is raw.

        FILE is left to the caller when this raises MissingError.
        """
        super().__init__(file.name, options, detect_containers=not given)
        self.format = f"raw.{compression}"
        self._compression = compression
        self._file = file
        self._pieces: _Pieces | None = None
        self._rest = memoryview(b"")  # of the last piece
        self._ended = False
        self._max_memory = options.max_memory
        _MEMBERS[compression].prepare()

    def _read(self, buffer: memoryview) -> int:
        if self._pieces is None:  # threads begin when the content is wanted
            self._pieces = self._start()
        done = 0
        while done < len(buffer) and not self._ended:
            if not self._rest:
                try:
                    piece = self._pieces.take()
                except Error as error:
                    error.offset = self.position + done
                    raise
                self._ended = piece is None
                self._rest = memoryview(piece or b"")
            count = min(len(buffer) - done, len(self._rest))
            buffer[done : done + count] = self._rest[:count]
            self._rest = self._rest[count:]
            done += count
        return done

    def _start(self) -> _Pieces:
        file, blocks = self._file, None
        if self._compression == "xz" and isinstance(file, HostFile) and (blocks := _find_blocks(file)):
            threads = _count_threads(blocks, self._max_memory)
            if threads > 1:
                return _Pieces((_xz_block(file, block, self._max_memory // threads) for block in blocks), threads, None)
        data = _Input(_reader(file))
        return _Pieces(iter([_MEMBERS[self._compression].decode(data, self._max_memory)]), 1, _AHEAD)

    def _refuse_container(self, name: str) -> None:
        if name != "raw":
            raise RefusedError(f"has a {name} image inside, {self._unpack_first()} reads that as raw", name=self.name)

    def _refuse_head(self, head: bytes) -> None:
        reason = detect.not_a_disk(head, "-")
        if reason is not None:
            what = reason.partition(":")[0].removeprefix("is ")
            raise RefusedError(f"has something inside that is {what}, {self._unpack_first()} reads that as raw")
        if head[257:262] == b"ustar":
            advice = f"unpack it first (tar -xf), or -f {self.format} reads that as raw"
            raise RefusedError(f"has a tar archive inside, not a disk: {advice}")

    def _unpack_first(self) -> str:
        command = f"{_UNPACK[self._compression]} {shlex.quote(self.name)}"
        return f"which can't be read from a stream: unpack it first (`{command}`), or -f {self.format}"

    def check_unchanged(self) -> None:
        """As a Source's."""
        self._file.check_unchanged()

    def details(self) -> dict[str, object]:
        """As a Source's."""
        return cache_details(self._file) if isinstance(self._file, HostFile) else {}

    def close(self) -> None:
        """End the threads, and close the file."""
        if isinstance(self._file, Stream):
            self._file.stop()
        if self._pieces is None or self._pieces.stop() or isinstance(self._file, HostFile):
            self._file.close()  # a stream's descriptor stays open while a thread waits for it


class _Ahead:
    """PIECES, made in a thread of its own, at most LIMIT of them ahead of whoever takes them; None: all there are."""

    def __init__(self, pieces: Iterator[bytes], limit: int | None) -> None:
        self._pieces = pieces
        self._made: SimpleQueue[bytes | BaseException | None] = SimpleQueue()
        self._room = None if limit is None else threading.Semaphore(limit)
        self._stopped = False
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # a limit on processes: then whoever takes makes
            self._thread = None

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for piece in self._pieces:
                if self._room is not None:
                    self._room.acquire()
                if self._stopped:
                    return
                self._made.put(piece)
        except BaseException as error:  # whoever waits must hear of it
            last = error
        self._made.put(last)

    def take(self) -> bytes | None:
        """The next piece; None after the last. Raises what making it raised."""
        if self._thread is None:
            return next(self._pieces, None)
        while True:
            try:
                piece = self._made.get(timeout=_PATIENCE)  # so that a signal is not waited for
                break
            except Empty:
                pass
        if isinstance(piece, BaseException):
            raise piece
        if self._room is not None:
            self._room.release()
        return piece

    def stop(self) -> None:
        """Make no more."""
        self._stopped = True
        if self._room is not None:
            self._room.release()

    def has_ended(self) -> bool:
        """Whether the thread has ended, which it does soon after stop()."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        return self._thread is None or not self._thread.is_alive()


class _Pieces:
    """What JOBS give, in order, while so many of them run. LIMIT: the pieces that each may be ahead."""

    def __init__(self, jobs: Iterator[Iterator[bytes]], count: int, limit: int | None) -> None:
        self._jobs = jobs
        self._count = count
        self._limit = limit
        self._running: deque[_Ahead] = deque()
        self._start_more()

    def _start_more(self) -> None:
        while len(self._running) < self._count and (job := next(self._jobs, None)) is not None:
            self._running.append(_Ahead(job, self._limit))

    def take(self) -> bytes | None:
        """The next piece; None after the last."""
        while self._running:
            piece = self._running[0].take()
            if piece is not None:
                return piece
            self._running.popleft()
            self._start_more()
        return None

    def stop(self) -> bool:
        """End all. Whether all threads have ended."""
        for job in self._running:
            job.stop()
        return all(job.has_ended() for job in self._running)


class _Input:
    """Compressed bytes, in order."""

    def __init__(self, read: Callable[[int], bytes], position: int = 0) -> None:
        """READ(position): the bytes from there, none at the end."""
        self._read = read
        self._bytes = b""
        self._at = 0
        self._end = position

    @property
    def position(self) -> int:
        """The offset in the file of the next byte."""
        return self._end - len(self._bytes) + self._at

    def next(self, limit: int) -> bytes:
        """At most LIMIT bytes; none at the end."""
        if self._at == len(self._bytes):
            self._bytes, self._at = self._read(self._end), 0
            self._end += len(self._bytes)
        piece = self._bytes[self._at : self._at + limit]
        self._at += len(piece)
        return piece

    def back(self, count: int) -> None:
        """Give back the last COUNT bytes that next() gave."""
        self._at -= count

    def peek(self, count: int) -> bytes:
        """The next COUNT bytes, or fewer at the end, which stay."""
        while len(self._bytes) - self._at < count:
            more = self._read(self._end)
            if not more:
                break
            self._bytes, self._at = self._bytes[self._at :] + more, 0
            self._end += len(more)
        return self._bytes[self._at : self._at + count]

    def take(self, count: int) -> bytes:
        """The next COUNT bytes. Raises TruncatedError."""
        piece = self.peek(count)
        if len(piece) < count:
            raise _ends_early(self._end)
        self._at += count
        return piece

    def skip(self, count: int) -> None:
        """Pass over COUNT bytes. Raises TruncatedError."""
        while count:
            piece = self.next(min(count, _STEP))
            if not piece:
                raise _ends_early(self._end)
            count -= len(piece)

    def skip_zeros(self) -> int:
        """Pass over zeros; how many there were."""
        count = 0
        while piece := self.next(_STEP):
            rest = piece.lstrip(b"\0")
            count += len(piece) - len(rest)
            if rest:
                self.back(len(rest))
                break
        return count


def _reader(file: HostFile | Stream) -> Callable[[int], bytes]:
    if isinstance(file, HostFile):
        return lambda position: file.read_bytes(position, _STEP)

    def read(position: int) -> bytes:
        buffer = bytearray(_STEP)
        return bytes(buffer[: file.fill(memoryview(buffer))])

    return read


def _ends_early(position: int) -> Error:
    return TruncatedError(f"the compressed data ends early, after {position} bytes")


def _damaged(what: str, position: int) -> Error:
    return FormatError(f"the compressed data is damaged, before byte {position} of it: {what}")


def _garbage(position: int) -> Error:
    return FormatError(f"the compressed data ends at byte {position}, and something else follows")


class _Decompressor(Protocol):
    """What the libraries' decompressors of one member have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes | None: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _decode(decompressor: _Decompressor, data: _Input) -> Iterator[bytes]:
    """What one member of DATA gives, in pieces of at most 1 MiB."""
    limit = _FIRST_STEP
    while not decompressor.eof:
        piece = b""
        if decompressor.needs_input:
            piece = data.next(limit)
            limit = min(2 * limit, _STEP)
            if not piece:
                raise _ends_early(data.position)
        try:
            output = decompressor.decompress(piece, MIB)
        except Exception as problem:  # each library has its own
            text = str(problem) or type(problem).__name__
            if "memory" in text.lower():
                raise RefusedError("takes more memory to decompress than --max-memory allows") from problem
            raise _damaged(text, data.position) from problem
        if output:
            yield output
    data.back(len(decompressor.unused_data or b""))


def _gzip(data: _Input, max_memory: int) -> Iterator[bytes]:
    """RFC 1952. Zeros may follow, as gzip has it."""
    crc32 = _gzip_library()[1]
    while True:
        _skip_gzip_header(data)
        crc = size = 0
        for piece in _decode(_inflate(), data):
            crc, size = crc32(piece, crc), size + len(piece)
            yield piece
        trailer = data.take(8)
        if trailer != crc.to_bytes(4, "little") + (size % 2**32).to_bytes(4, "little"):
            raise _damaged("the check at the end does not match", data.position)
        data.skip_zeros()
        if not data.peek(1):
            return
        if data.peek(2) != b"\x1f\x8b":
            raise _garbage(data.position)


def _skip_gzip_header(data: _Input) -> None:
    head = data.take(10)
    flags = head[3]
    if not head.startswith(b"\x1f\x8b\x08") or flags & 0xE0:
        raise _damaged("not a gzip header", data.position)
    if flags & 4:
        data.skip(int.from_bytes(data.take(2), "little"))
    for flag in (8, 16):  # the file's name, and a comment
        if flags & flag:
            for _ in range(_MAX_GZIP_NAME):
                if data.take(1) == b"\0":
                    break
            else:
                raise _damaged("a name without an end", data.position)
    if flags & 2:
        data.skip(2)


def _gzip_library() -> tuple[Any, Callable[[bytes, int], int]]:
    """ISA-L's, which is several times as fast, or the standard library's; and its crc32."""
    try:
        from isal import igzip_lib, isal_zlib
    except ImportError:
        return None, zlib.crc32
    return igzip_lib, isal_zlib.crc32


def _inflate() -> _Decompressor:
    igzip = _gzip_library()[0]
    if igzip is None:
        return _Inflate()
    decompressor: _Decompressor = igzip.IgzipDecompressor(flag=igzip.DECOMP_DEFLATE, hist_bits=15)
    return decompressor


class _Inflate:
    """zlib's, as a _Decompressor."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(-15)
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """See _Decompressor."""
        output = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self.needs_input = not self._stream.unconsumed_tail and len(output) < max_length
        return output

    @property
    def eof(self) -> bool:
        """See _Decompressor."""
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        """See _Decompressor."""
        return self._stream.unused_data


def _bzip2(data: _Input, max_memory: int) -> Iterator[bytes]:
    import bz2

    while True:
        yield from _decode(bz2.BZ2Decompressor(), data)
        if not data.peek(1):
            return
        if data.peek(3) != b"BZh":
            raise _garbage(data.position)


def _lzma(data: _Input, max_memory: int) -> Iterator[bytes]:
    """Xz's older format: one member, and nothing after it."""
    import lzma

    yield from _decode(lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=max_memory), data)
    if data.peek(1):
        raise _garbage(data.position)


def _xz(data: _Input, max_memory: int) -> Iterator[bytes]:
    """Streams, between and after which there may be zeros, a multiple of 4 bytes."""
    import lzma

    while True:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=max_memory)
        yield from _decode(decompressor, data)
        if not lzma.is_check_supported(decompressor.check):
            raise RefusedError(f"has an integrity check that liblzma can't verify here ({decompressor.check})")
        if data.skip_zeros() % 4:
            raise _garbage(data.position)
        if not data.peek(1):
            return
        if data.peek(6) != _XZ_MAGIC:
            raise _garbage(data.position)


def _zstd(data: _Input, max_memory: int) -> Iterator[bytes]:
    from imgsum.source.compressed import import_zstd

    zstd = import_zstd()
    options = {zstd.DecompressionParameter.window_log_max: min(31, max(10, max_memory.bit_length() - 1))}
    return _frames(data, b"\x28\xb5\x2f\xfd", lambda: zstd.ZstdDecompressor(options=options))


def _lz4(data: _Input, max_memory: int) -> Iterator[bytes]:
    return _frames(data, b"\x04\x22\x4d\x18", _import_lz4().LZ4FrameDecompressor)


def _frames(data: _Input, magic: bytes, new: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Frames of zstd or lz4, and skippable ones, which both have."""
    found = complete = False
    while head := data.peek(4):
        if head == magic:
            found = complete = True
            yield from _decode(new(), data)
        elif head[1:] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:
            size = int.from_bytes(data.take(8)[4:], "little")
            data.skip(size)
            complete = not (head[0] == 0x50 and size == 4)  # pzstd's: the size of the frame that follows
        elif len(head) < 4 and magic.startswith(head):
            raise _ends_early(data.position + len(head))
        else:
            raise _garbage(data.position)
    if not (found and complete):
        raise _ends_early(data.position)


def _import_lz4() -> Any:
    try:
        import lz4.frame
    except ImportError as error:
        raise MissingError("is compressed with lz4: install lz4 (`pip install lz4`, or python3-lz4)") from error
    return lz4.frame


def _prepare_zstd() -> None:
    from imgsum.source.compressed import import_zstd

    import_zstd()


class _Members(NamedTuple):
    """How a format is read."""

    decode: Callable[[_Input, int], Iterator[bytes]]
    """decode(data, max_memory): the content, in pieces of at most 1 MiB. Raises an imgsum.Error."""
    prepare: Callable[[], object] = int
    """Raises MissingError where a library is not installed."""


_MEMBERS = {
    "bz2": _Members(_bzip2),
    "gz": _Members(_gzip),
    "lz4": _Members(_lz4, _import_lz4),
    "lzma": _Members(_lzma),
    "xz": _Members(_xz),
    "zst": _Members(_zstd, _prepare_zstd),
}


# --- blocks of xz, which several threads decompress -------------------------------------------------------------------

_XZ_MAGIC, _XZ_END = b"\xfd7zXZ\0", b"YZ"
_XZ_EDGE = 12  # bytes of a stream's header, and of its footer


class _Block(NamedTuple):
    """A block of an xz file, with its stream's header. Offset and sizes in bytes."""

    offset: int
    stored: int
    """Without padding to a multiple of 4."""
    size: int
    """Of the content."""
    header: bytes


def _find_blocks(file: HostFile) -> list[_Block] | None:
    """All blocks of FILE, in order, as its indexes have them; None where those are too large, or not right.

    Whatever is wrong is found, and said, by _xz(). The streams are walked from the last to the first.
    """
    found: list[_Block] = []
    end = file.size
    steps = 0
    while end:
        steps += 1
        if steps > _MAX_STEPS or len(found) > _MAX_BLOCKS:
            return None
        footer = file.read_bytes(max(0, end - _XZ_EDGE), _XZ_EDGE)
        if footer[8:] == b"\0\0\0\0" and end % 4 == 0 and end > _XZ_EDGE:
            end -= 4
            continue
        index_size = 4 * (int.from_bytes(footer[4:8], "little") + 1)
        index_start = end - _XZ_EDGE - index_size
        if footer[10:] != _XZ_END or not _has_crc(footer[4:10], footer[:4]) or index_start < _XZ_EDGE:
            return None
        records = _parse_index(file.read_bytes(index_start, index_size)) if index_size <= _MAX_INDEX else None
        if records is None:
            return None
        start = index_start - sum(-(-stored // 4) * 4 for stored, _ in records)
        header = file.read_bytes(max(0, start - _XZ_EDGE), _XZ_EDGE)
        if start < _XZ_EDGE or header[:6] != _XZ_MAGIC or header[6:8] != footer[8:10]:
            return None
        blocks = []
        for stored, size in records:
            blocks.append(_Block(start, stored, size, header))
            start += -(-stored // 4) * 4
        found[:0] = blocks
        end = blocks[0].offset - _XZ_EDGE if blocks else start - _XZ_EDGE
    return found


def _parse_index(index: bytes) -> list[tuple[int, int]] | None:
    """(stored, size) of each block; None where INDEX is not right."""
    if index[0] or not _has_crc(index[:-4], index[-4:]):
        return None
    at = 1

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = index[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value

    try:
        records = [(number(), number()) for _ in range(number())]
    except IndexError:
        return None
    padding = index[at:-4]
    return records if len(padding) < 4 and not any(padding) and all(stored for stored, _ in records) else None


def _has_crc(data: bytes, crc: bytes) -> bool:
    return zlib.crc32(data).to_bytes(4, "little") == crc


def _count_threads(blocks: list[_Block], max_memory: int) -> int:
    """How many blocks to decompress at a time. Each may be held whole, beside a dictionary of no more than that."""
    if len(blocks) < 2 or sum(block.size for block in blocks) < _STEP * len(blocks):
        return 1
    largest = max(block.size for block in blocks)
    return min(len(os.sched_getaffinity(0)), len(blocks), max_memory // (2 * largest + MIB))


def _xz_block(file: HostFile, block: _Block, max_memory: int) -> Iterator[bytes]:
    """The content of one block: with an index and a footer of its own, it is an xz stream of its own."""
    records = b"\0\1" + _number(block.stored) + _number(block.size)
    index = records.ljust(-(-len(records) // 4) * 4, b"\0")
    index += zlib.crc32(index).to_bytes(4, "little")
    footer = (len(index) // 4 - 1).to_bytes(4, "little") + block.header[6:8]
    tail = index + zlib.crc32(footer).to_bytes(4, "little") + footer + _XZ_END
    end = block.offset + -(-block.stored // 4) * 4

    def read(position: int) -> bytes:
        if position < block.offset:
            return block.header
        if position < end:
            return file.read_bytes(position, min(_STEP, end - position))
        return tail if position == end else b""

    rest = block.size
    for piece in _xz(_Input(read, block.offset - _XZ_EDGE), max_memory):
        rest -= len(piece)
        if rest < 0:  # all of it would be held
            raise _damaged("a block is longer than the index says", end)
        yield piece


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
