"""Two images -> where their content differs: the same pipeline as for checksums, with bytes in place of digests.

Read in the order in which a byte travels: Pair._pieces() walks the extents of both, _Piece.work() reads both sides
in one worker and compares them, Pair._maps() takes the pieces in content order.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice, takewhile
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

from imgsum import differences, pipeline
from imgsum.checksums import ZERO_PIECE, Watcher, is_zero
from imgsum.content import Content, Image, image_name, open_content, skip_stream
from imgsum.differences import Range
from imgsum.errors import Error, ReadError, UsageError
from imgsum.extent import Extent, align, coalesce, cut, overlay
from imgsum.pipeline import WORKERS, Pipeline, Worker, page_aligned
from imgsum.source import OpenOptions, is_stream
from imgsum.source.stream import Stream
from imgsum.units import KIB, MAX_SIZE, MIB

_LARGEST_PIECE = 4 * MIB  # of one side, so that two buffers for each worker, and maps, stay small
_ALIGNMENT = 64 * KIB  # of extents, so that both sides read whole pages and clusters
_STRETCH = 64 * MIB  # of data extents that are merged before they are laid over those of the other side


class Comparison(NamedTuple):
    """What compare() found. True only when the content is the same."""

    identical: bool
    ranges: tuple[Range, ...]
    """Where it differs: in order, merged, exact to the byte."""
    sizes: tuple[int | None, int | None]
    """Bytes of content; the rest of the longer one is compared with zeros. None: a stream not read to its end."""

    def __bool__(self) -> bool:
        return self.identical


def compare(
    first: Image,
    second: Image,
    *,
    strict: bool = False,
    offset: int = 0,
    length: int | None = None,
    limit: int | None = 1000,
    options: OpenOptions | None = None,
    second_options: OpenOptions | None = None,
) -> Comparison:
    """Compare the content of two images, or LENGTH bytes of it from OFFSET.

    A longer image whose rest is all zeros has the same content, unless STRICT. limit: stop after so many differing
    ranges; None lists all of them, however many there are. options: how the first image is opened and read;
    second_options: how the second is, where that differs. Raises an imgsum.Error when either can't be read.
    """
    options = options or OpenOptions()
    with Pair(first, second, options, second_options or options, offset=offset, length=length) as pair:
        ranges = tuple(islice(pair.differences(strict=strict), limit))
        pair.check_unchanged()
        return Comparison(not ranges, ranges, pair.sizes)


class Pair:
    """Two open images that are compared once. Use as a context manager."""

    def __init__(
        self,
        first: Image,
        second: Image,
        options: OpenOptions,
        second_options: OpenOptions,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> None:
        """Open both; one of them may be a stream. Raises an imgsum.Error."""
        if all(isinstance(image, (str, os.PathLike)) and is_stream(os.fspath(image)) for image in (first, second)):
            raise UsageError("both images are streams: only one of them can be")
        self.names = image_name(first), image_name(second)
        self.piece_size = min(options.request_size, _LARGEST_PIECE)
        self.stopped = False
        """Nobody wants more: what is left in the queue is not read."""
        self._workers = max(1, min(WORKERS, options.queue_size // (2 * self.piece_size)))
        self._offset, self._length = offset, length
        self._sides: list[Content | Stream] = []
        self._stream_ended = False
        self._running: Generator[tuple[int, bytes | int], None, None] | None = None
        try:
            self._sides.append(open_content(first, options, offset, length))
            self._sides.append(open_content(second, second_options, offset, length))
        except BaseException:
            self.close()
            raise

    @property
    def formats(self) -> tuple[str, str]:
        """QEMU's names of both formats."""
        first, second = (side.source.format if isinstance(side, Content) else side.format for side in self._sides)
        return first, second

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Bytes of content on each side, at most the length that was asked for; None: a stream that has not ended."""
        first, second = (self._size(side) for side in self._sides)
        return first, second

    def differences(self, *, strict: bool = False, watcher: Watcher | None = None) -> Iterator[Range]:
        """Every range that differs, in order and lazily. STRICT: the longer image's rest differs, whatever it is."""
        self._running = self._run(strict, None, watcher)
        return differences.ranges(self._running)

    def first_difference(self, *, strict: bool = False, watcher: Watcher | None = None) -> int | None:
        """The offset of the first byte that differs, or None. Nothing after it is waited for."""
        self._running = self._run(strict, 1, watcher)
        for offset, differs in self._running:
            return offset if isinstance(differs, int) else offset + differs.index(1)
        return None

    def check_unchanged(self) -> None:
        """Raise an imgsum.Error when either image changed meanwhile."""
        for side, name in zip(self._sides, self.names, strict=True):
            try:
                (side.source if isinstance(side, Content) else side).check_unchanged()
            except Error as error:
                raise error.about(name) from error.__cause__

    def close(self) -> None:
        """End what runs, and close both. Closing twice is harmless."""
        if self._running:
            self._running.close()
        while self._sides:
            self._sides.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _size(self, side: Content | Stream) -> int | None:
        if isinstance(side, Content):
            return side.length
        return side.position - self._offset if self._stream_ended else None

    def _run(
        self, strict: bool, most: int | None, watcher: Watcher | None
    ) -> Generator[tuple[int, bytes | int], None, None]:
        """Maps of what differs, as differences.ranges() takes them, in content order; at most MOST of each piece."""
        if watcher:
            known = [size for size in self.sizes if size is not None]
            watcher.begin(self.names[0], max(known) if len(known) == 2 else None)
        try:
            with Pipeline[_Piece](self._workers) as pool:
                for piece in pool.run(self._feed(strict, most)):
                    if piece.error is not None:
                        raise piece.error
                    for start, differs in piece.maps:
                        yield start, zlib.decompress(differs) if isinstance(differs, bytes) else differs
                    if watcher:
                        watcher.advance(piece.start + piece.length - self._offset)
        finally:
            self.stopped = True
            if watcher:
                watcher.end()

    def _feed(self, strict: bool, most: int | None) -> Iterator[_Piece]:
        first, second = self._sides
        try:
            if isinstance(first, Content) and isinstance(second, Content):
                yield from self._pieces(first, second, strict, most)
            elif isinstance(first, Stream) and isinstance(second, Content):
                yield from self._stream_pieces(first, second, strict, most)
            elif isinstance(first, Content) and isinstance(second, Stream):
                yield from self._stream_pieces(second, first, strict, most)
        except Exception as error:  # in content order, like a worker's
            last = _Piece(0, 0)
            last.error = error
            yield last

    def _pieces(self, first: Content, second: Content, strict: bool, most: int | None) -> Iterator[_Piece]:
        end = max(first.end, second.end)
        for start, length, zeros in overlay(_extents(first, end), _extents(second, end)):
            if strict and start >= min(first.end, second.end):
                yield _Piece(start, length, ((start, length),))
                continue
            sides = tuple(None if zero else side for zero, side in zip(zeros, (first, second), strict=True))
            yield from self._reads(start, length, sides, most)

    def _reads(self, start: int, length: int, sides: tuple[Content | None, ...], most: int | None) -> Iterator[_Piece]:
        if not any(sides):  # zeros against zeros
            yield _Piece(start, length)
            return
        for at in range(start, start + length, self.piece_size):
            if self.stopped:
                return
            yield _ReadPiece(self, at, min(self.piece_size, start + length - at), sides, most)

    def _stream_pieces(self, stream: Stream, other: Content, strict: bool, most: int | None) -> Iterator[_Piece]:
        """A stream is read here, into buffers that the workers give back: their number bounds what is in flight."""
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(self._workers):
            buffers.put(memoryview(page_aligned(self.piece_size)))
        skip_stream(stream, self._offset, buffers)
        expected = cut(_extents(other, other.end), self.piece_size)
        if self._length is None:  # a longer stream goes on against zeros
            expected = chain(expected, cut([Extent(other.end, MAX_SIZE - other.end, True)], self.piece_size))
        for start, length, zero in expected:
            if self.stopped:
                return
            buffer = buffers.get()
            count = stream.fill(buffer[:length])
            if strict and start >= other.end and count:
                buffers.put(buffer)
                yield _Piece(start, count, ((start, count),))
            else:
                yield _StreamPiece(self, start, count, buffer, buffers, None if zero else other, most)
            if count < length:
                break
        else:
            self._stream_ended = True
            return
        if self._length is not None:
            left = other.end - start - count
            raise ReadError(f"the stream ends {left} bytes early", name=stream.name, offset=stream.position)
        self._stream_ended = True
        rest = chain([Extent(start + count, length - count, zero)], expected)
        for extent in takewhile(lambda extent: extent.start < other.end, rest):
            yield from self._unmatched(extent, other, strict, most)

    def _unmatched(self, extent: Extent, side: Content, strict: bool, most: int | None) -> Iterator[_Piece]:
        """What only SIDE has, to be compared with zeros; or, STRICT, a difference whatever it is."""
        if strict:
            yield _Piece(extent.start, extent.length, ((extent.start, extent.length),))
        else:
            yield from self._reads(extent.start, extent.length, (None if extent.zero else side,), most)


class _Piece(pipeline.Piece):
    """Some content of both, from `start` of the images. As such: what needs no reading."""

    __slots__ = ("length", "maps", "start")

    has_work = False

    def __init__(self, start: int, length: int, maps: Sequence[tuple[int, bytes | int]] = ()) -> None:
        super().__init__()
        self.start = start
        self.length = length
        self.maps = maps
        """Where the two differ, as differences.ranges() takes it, but with maps deflated."""


class _ReadPiece(_Piece):
    """To be read from each of SIDES that isn't None, which stands for zeros, and compared."""

    __slots__ = ("most", "pair", "sides")

    has_work = True

    def __init__(
        self, pair: Pair, start: int, length: int, sides: tuple[Content | None, ...], most: int | None
    ) -> None:
        super().__init__(start, length)
        self.pair = pair
        self.sides = sides
        self.most = most

    def work(self, worker: Worker) -> None:
        if self.pair.stopped:
            return
        read: list[memoryview] = []
        for side in self.sides:
            if side is not None:
                buffer = worker.buffer(self.pair.piece_size, which=len(read))[: self.length]
                _read(side, worker, self.start, buffer)
                read.append(buffer)
        self.maps = _compare(self.start, read[0], read[1] if len(read) == 2 else None, self.most)


class _StreamPiece(_Piece):
    """Read from the stream by the feeder; to be compared with OTHER, or with zeros. The buffer is given back."""

    __slots__ = ("buffer", "buffers", "most", "other", "pair")

    has_work = True

    def __init__(
        self,
        pair: Pair,
        start: int,
        length: int,
        buffer: memoryview,
        buffers: SimpleQueue[memoryview],
        other: Content | None,
        most: int | None,
    ) -> None:
        super().__init__(start, length)
        self.pair = pair
        self.buffer = buffer
        self.buffers = buffers
        self.other = other
        self.most = most

    def work(self, worker: Worker) -> None:
        try:
            if self.pair.stopped or not self.length:
                return
            buffer = None
            if self.other is not None:
                buffer = worker.buffer(self.pair.piece_size)[: self.length]
                _read(self.other, worker, self.start, buffer)
            self.maps = _compare(self.start, self.buffer[: self.length], buffer, self.most)
        finally:
            self.buffers.put(self.buffer)


def _read(side: Content, worker: Worker, start: int, buffer: memoryview) -> None:
    try:
        side.read(worker, start, buffer)
    except Error as error:
        raise error.about(side.source.name) from error.__cause__


def _compare(
    start: int, first: memoryview, second: memoryview | None, most: int | None
) -> Sequence[tuple[int, bytes | int]]:
    """Maps of where FIRST and SECOND (None: zeros) differ, MOST of them at most, at offsets from START.

    They are deflated: where much differs they are as large as the data, and 32 pieces may wait for the head. It takes
    0.1 ms for 64 KiB, a tenth of what listing their ranges takes.
    """
    if is_zero(first) if second is None else differences.equal(first, second):
        return ()
    found = islice(differences.maps(first, second), most)
    return [(start + at, zlib.compress(differs, 1)) for at, differs in found]


def _extents(content: Content, end: int) -> Iterator[Extent]:
    """The extents of CONTENT, aligned and merged, and then, up to END, zeros."""
    aligned = align(content.extents(), _ALIGNMENT, content.start, content.end)
    yield from coalesce(aligned, _STRETCH, ZERO_PIECE)
    if end > content.end:
        yield Extent(content.end, end - content.end, True)
