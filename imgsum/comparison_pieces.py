"""The pieces of a comparison: what both sides' extents leave to be read, and the work of reading and comparing it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from queue import SimpleQueue

from imgsum import differences, pipeline
from imgsum.checksums import ZERO_PIECE
from imgsum.content import Content, skip_stream, stream_buffers
from imgsum.errors import Error, ReadError
from imgsum.extent import Extent, align, coalesce, cut, overlay
from imgsum.job import is_zero
from imgsum.pipeline import Worker
from imgsum.source.stream import Stream
from imgsum.units import KIB, MAX_SIZE, MIB

_ALIGNMENT = 64 * KIB  # of extents, so that both sides read whole pages and clusters
_STRETCH = 64 * MIB  # of data extents that are merged before they are laid over those of the other side


class ComparisonJob:
    """What the pieces of one comparison have in common, and how it goes."""

    __slots__ = ("extents", "most", "piece_size", "stream_ended", "strict", "workers")

    def __init__(self, piece_size: int, workers: int) -> None:
        self.piece_size = piece_size
        """The most bytes of one side in a piece."""
        self.workers = workers
        self.strict = False
        """What only the longer side has is different, whatever it is."""
        self.most: int | None = None
        """Maps that are wanted of one piece; None: all."""
        self.stream_ended = False
        self.extents = 0
        """Of both sides, as the sources tell them."""


def pieces_of_two(job: ComparisonJob, first: Content, second: Content) -> Iterator[Piece]:
    """The pieces of two images, in order. Zeros against zeros are never read."""
    end = max(first.end, second.end)
    for start, length, zeros in overlay(_extents(job, first, end), _extents(job, second, end)):
        if job.strict and start >= min(first.end, second.end):
            yield Piece(start, length, all_differ=True)
        else:
            sides = [None if zero else side for zero, side in zip(zeros, (first, second), strict=True)]
            yield from _reads(job, start, length, sides)


def pieces_of_a_stream(job: ComparisonJob, stream: Stream, other: Content, length: int | None) -> Iterator[Piece]:
    """The pieces of a stream and an image, or of LENGTH bytes of both.

    The stream is read here, into buffers that the workers give back: their number bounds what is in flight.
    """
    buffers = stream_buffers(job.workers, job.piece_size)
    skip_stream(stream, other.start, buffers)
    expected = cut(_extents(job, other, other.end), job.piece_size)
    if length is None:  # a longer stream goes on against zeros
        expected = chain(expected, cut([Extent(other.end, MAX_SIZE - other.end, True)], job.piece_size))
    for extent in expected:
        buffer = buffers.get()
        count = stream.fill(buffer[: extent.length])
        if job.strict and extent.start >= other.end and count:
            buffers.put(buffer)
            yield Piece(extent.start, count, all_differ=True)
        else:
            yield StreamPiece(job, extent.start, count, buffer, buffers, None if extent.zero else other)
        if count < extent.length:
            break
    else:
        job.stream_ended = True
        return
    if length is not None:
        left = other.end - extent.start - count
        raise ReadError(f"the stream ends {left} bytes early", name=stream.name, offset=stream.position)
    job.stream_ended = True
    begun = Extent(extent.start + count, extent.length - count, extent.zero)
    for rest in takewhile(lambda rest: rest.start < other.end, chain([begun], expected)):
        if job.strict:
            yield Piece(rest.start, rest.length, all_differ=True)
        else:
            yield from _reads(job, rest.start, rest.length, [None if rest.zero else other])


def _reads(job: ComparisonJob, start: int, length: int, sides: Sequence[Content | None]) -> Iterator[Piece]:
    if all(side is None for side in sides):  # zeros against zeros
        yield Piece(start, length)
        return
    for at in range(start, start + length, job.piece_size):
        yield ReadPiece(job, at, min(job.piece_size, start + length - at), sides)


class Piece(pipeline.Piece):
    """Some content of both, from `start` of the images. As such: what needs no reading."""

    __slots__ = ("_maps", "bytes_read", "length", "requests", "start")

    has_work = False

    def __init__(self, start: int, length: int, all_differ: bool = False) -> None:
        super().__init__()
        self.start = start
        self.length = length
        self._maps: Sequence[tuple[int, bytes | int]] = [(start, length)] if all_differ else ()
        self.bytes_read = self.requests = 0

    def read(self, side: Content, worker: Worker, buffer: memoryview) -> None:
        """Fill BUFFER with SIDE's content. Raises an imgsum.Error."""
        try:
            self.requests += side.read(worker, self.start, buffer)
        except Error as error:
            error.image = side.source.name
            raise error.about(side.source.name) from error.__cause__
        self.bytes_read += self.length

    def differ(self, first: memoryview, second: memoryview | None, most: int | None) -> None:
        """Keep maps, MOST of them at most, of where FIRST and SECOND (None: zeros) differ.

        They are deflated: where much differs they are as large as the data, and 32 pieces may wait for the head. It
        takes 0.1 ms for 64 KiB, a tenth of what listing their ranges takes.
        """
        if not (is_zero(first) if second is None else differences.equal(first, second)):
            found = islice(differences.maps(first, second), most)
            self._maps = [(self.start + at, zlib.compress(differs, 1)) for at, differs in found]

    def maps(self) -> Iterator[tuple[int, bytes | int]]:
        """Where the two differ, as differences.ranges() takes it."""
        for at, differs in self._maps:
            yield at, zlib.decompress(differs) if isinstance(differs, bytes) else differs


class ReadPiece(Piece):
    """To be read from each of SIDES that isn't None, which stands for zeros, and compared."""

    __slots__ = ("job", "sides")

    has_work = True

    def __init__(self, job: ComparisonJob, start: int, length: int, sides: Sequence[Content | None]) -> None:
        super().__init__(start, length)
        self.job = job
        self.sides = sides

    def work(self, worker: Worker) -> None:
        """See pipeline.Piece."""
        read: list[memoryview] = []
        for side in self.sides:
            if side is not None:
                buffer = worker.buffer(self.job.piece_size, which=len(read))[: self.length]
                self.read(side, worker, buffer)
                read.append(buffer)
        self.differ(read[0], read[1] if len(read) == 2 else None, self.job.most)


class StreamPiece(Piece):
    """Read from the stream by the feeder; to be compared with OTHER, or with zeros. The buffer is given back."""

    __slots__ = ("buffer", "buffers", "job", "other")

    has_work = True

    def __init__(
        self,
        job: ComparisonJob,
        start: int,
        length: int,
        buffer: memoryview,
        buffers: SimpleQueue[memoryview],
        other: Content | None,
    ) -> None:
        super().__init__(start, length)
        self.job = job
        self.buffer = buffer
        self.buffers = buffers
        self.other = other
        self.bytes_read, self.requests = length, min(length, 1)

    def work(self, worker: Worker) -> None:
        """See pipeline.Piece."""
        try:
            if not self.length:
                return
            buffer = None
            if self.other is not None:
                buffer = worker.buffer(self.job.piece_size)[: self.length]
                self.read(self.other, worker, buffer)
            self.differ(self.buffer[: self.length], buffer, self.job.most)
        finally:
            self.buffers.put(self.buffer)


def _extents(job: ComparisonJob, content: Content, end: int) -> Iterator[Extent]:
    """The extents of CONTENT, aligned and merged, and then, up to END, zeros."""

    def counted() -> Iterator[Extent]:
        for extent in content.extents():
            job.extents += 1
            yield extent

    aligned = align(counted(), _ALIGNMENT, content.start, content.end)
    yield from coalesce(aligned, _STRETCH, ZERO_PIECE)
    if end > content.end:
        yield Extent(content.end, end - content.end, True)
