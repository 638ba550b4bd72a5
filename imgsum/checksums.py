"""Images -> checksums: each image is cut into pieces, which go through the pipeline into its BlkHash.

Read in the order in which a byte travels: _feed() opens images and walks their extents, _DataPiece.work() reads and
hashes in a worker, checksum_images() takes the pieces in content order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import groupby
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from imgsum import blkhash
from imgsum.blkhash import BlkHash, Construction
from imgsum.content import Content, Image, image_name, open_content, skip_stream
from imgsum.errors import Error, MismatchError, ReadError
from imgsum.extent import Extent, align, coalesce
from imgsum.pipeline import WORKERS, Piece, Pipeline, Worker, page_aligned
from imgsum.source import OpenOptions, is_stream
from imgsum.source.stream import Stream
from imgsum.units import GIB, KIB, MIB

ZERO_PIECE = 4 * GIB
"""The most zeros in one piece: 1 ms of the outer hash, so that data behind a long hole is fed meanwhile."""

_MOST_IN_FLIGHT = 32 * MIB
"""The most that --queue-size gives: with the interpreter and a format's tables, the process stays within 64 MiB."""

_ZEROS = bytearray(64 * KIB)  # bytearray.startswith(memoryview) is memcmp; memoryview == bytes is 70 times slower


class Stats(NamedTuple):
    """What it took. Bytes, counts, seconds."""

    bytes_read: int
    zero_bytes: int
    """Not read, as they were known to be zero."""
    extents: int
    requests: int
    seconds: float
    facts: dict[str, object]
    """What the source says of how it was read."""


class Checksum(NamedTuple):
    """The checksum of an image's content."""

    hexdigest: str
    algorithm: str
    block_size: int
    size: int
    """Bytes of content that were hashed."""
    format: str
    name: str
    """The image, as it was given."""
    construction: str
    stats: Stats
    note: str | None
    """What a user should know about this value, or None."""


class Task(NamedTuple):
    """One image to be done, among others that may be done in other ways."""

    image: Image
    how: Construction
    size: int | None = None
    """What the content's size must be, if that is known: another one is an error, and nothing is read."""
    format: str | None = None
    """The same of the format."""
    error: Error | None = None
    """Why there is nothing to do. It takes its place among the results."""


class Watcher(Protocol):
    """Hears how far the work is, from the thread that called."""

    def begin(self, name: str, size: int | None) -> None:
        """An image's content begins: SIZE bytes, None when that isn't known."""

    def advance(self, done: int) -> None:
        """The first DONE bytes of it are complete, zeros included."""

    def end(self) -> None:
        """The image is done, or failed, or nothing was begun."""


def checksum(
    image: Image,
    *,
    algorithm: str | None = None,
    block_size: int | None = None,
    construction: str = "blkhash",
    offset: int = 0,
    length: int | None = None,
    options: OpenOptions | None = None,
) -> Checksum:
    """The checksum of IMAGE's content, or of LENGTH bytes of it from OFFSET.

    algorithm: a name that `imgsum algorithms` lists; None is sha256. block_size: bytes, a power of two; None is 64
    KiB. construction: `blkhash`, or `imageio` for the value that oVirt's imageio reports. options: how the image is
    opened and read. Raises an imgsum.Error when not every byte could be read: there is no partial checksum.
    """
    how = blkhash.construction(construction, algorithm, block_size)
    (result,) = checksum_images([image], how, options or OpenOptions(), offset=offset, length=length)
    if isinstance(result, Error):
        raise result
    return result


def checksum_images(
    images: Iterable[Image],
    how: Construction,
    options: OpenOptions,
    *,
    offset: int = 0,
    length: int | None = None,
    watcher: Watcher | None = None,
    workers: int = WORKERS,
) -> Generator[Checksum | Error, None, None]:
    """For each of IMAGES in turn its checksum, or the Error that says why there is none. One pool serves them all."""
    tasks = (Task(image, how) for image in images)
    return checksum_tasks(tasks, options, offset=offset, length=length, watcher=watcher, workers=workers)


def checksum_tasks(
    tasks: Iterable[Task],
    options: OpenOptions,
    *,
    offset: int = 0,
    length: int | None = None,
    watcher: Watcher | None = None,
    workers: int = WORKERS,
) -> Generator[Checksum | Error, None, None]:
    """As checksum_images(), for images that are each done in their own way.

    TASKS are asked for only as far ahead as needed. Neighbours share a pool while their pieces are of one size: the
    workers' buffers are of that size, and their number follows from it. Large buffers are either the workers' or a
    stream's, not both at a time.
    """

    def kind(task: Task) -> tuple[int, bool]:
        piece_size = max(options.request_size, task.how.block_size)
        return piece_size, piece_size > MIB and isinstance(task.image, (str, os.PathLike)) and is_stream(
            os.fspath(task.image)
        )

    for (piece_size, _), neighbours in groupby(tasks, kind):
        yield from _run_pool(neighbours, _buffers(workers, piece_size, options), options, offset, length, watcher)


def _buffers(workers: int, piece_size: int, options: OpenOptions) -> int:
    """How many buffers of PIECE_SIZE may be in flight: at least one, at most one for each of WORKERS."""
    return max(1, min(workers, min(options.queue_size, _MOST_IN_FLIGHT) // piece_size))


def _run_pool(
    tasks: Iterable[Task],
    workers: int,
    options: OpenOptions,
    offset: int,
    length: int | None,
    watcher: Watcher | None,
) -> Iterator[Checksum | Error]:
    current: _Job | None = None
    jobs: list[_Job] = []  # what is open, in order
    try:
        with Pipeline[_Piece](workers) as pipeline:
            for piece in pipeline.run(_feed(tasks, jobs, options, offset, length)):
                job = piece.job
                if watcher and job is not current:
                    current = job
                    watcher.begin(job.name, job.size)
                if job.error is None:
                    job.error = piece.error
                if isinstance(piece, _EndPiece):
                    if watcher:
                        watcher.end()
                    jobs.remove(job)
                    yield job.finish()
                elif job.error is None:
                    piece.take()
                    if watcher:
                        watcher.advance(job.done)
    finally:
        for job in jobs:
            job.close()


def _feed(
    tasks: Iterable[Task],
    jobs: list[_Job],
    options: OpenOptions,
    offset: int,
    length: int | None,
) -> Iterator[_Piece]:
    """The pieces of all images, in order: an image is opened while those before it are still being hashed."""
    for task in tasks:
        job = _Job(image_name(task.image), task.how, options)
        jobs.append(job)
        end = _EndPiece(job)
        try:
            if task.error is not None:
                raise task.error
            job.content = open_content(task.image, options, offset, length)
            _check_expected(task, job.content)
            if isinstance(job.content, Stream):
                yield from _stream_pieces(job, job.content, offset, length)
            else:
                job.size = job.content.length
                yield from _pieces(job, job.content)
        except Exception as error:  # in content order, like a worker's
            end.error = error
        yield end


def _check_expected(task: Task, content: Content | Stream) -> None:
    found = content.source.format if isinstance(content, Content) else content.format
    if task.format is not None and found != task.format:
        raise MismatchError(f"the format is {found}, and the sum is of {task.format}")
    if isinstance(content, Content) and task.size is not None and content.length != task.size:
        hint = f" (--length {task.size} reads no more of it)" if content.length > task.size else ""
        raise MismatchError(f"has {content.length} bytes, and the sum is of {task.size} bytes{hint}")


def _pieces(job: _Job, content: Content) -> Iterator[_Piece]:
    block_size = job.how.block_size
    aligned = align(job.count(content.extents()), block_size, content.start, content.end)
    for extent in coalesce(aligned, job.piece_size, ZERO_PIECE):
        if job.error is not None:
            return
        if extent.zero:
            yield _ZeroPiece(job, extent.length)
        else:
            yield _DataPiece(job, content, extent.start, extent.length)


def _stream_pieces(job: _Job, stream: Stream, skip: int, length: int | None) -> Iterator[_Piece]:
    """A stream is read here, into buffers that the workers give back: their number bounds what is in flight."""
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(_buffers(WORKERS, job.piece_size, job.options)):
        buffers.put(memoryview(page_aligned(job.piece_size)))
    skip_stream(stream, skip, buffers)
    left = length
    while left != 0 and job.error is None:
        buffer = buffers.get()
        want = buffer if left is None else buffer[:left]
        count = stream.fill(want)
        if count:
            yield _StreamPiece(job, buffer, count, buffers)
        if left is not None:
            left -= count
        if count < len(want):
            if left:
                raise ReadError(f"the stream ends {left} bytes early", offset=stream.position)
            return


class _Job:
    """One image: what is open, and what is known so far. Belongs to the thread that feeds and takes."""

    def __init__(self, name: str, how: Construction, options: OpenOptions) -> None:
        self.name = name
        self.how = how
        self.options = options
        self.piece_size = max(options.request_size, how.block_size)
        self.content: Content | Stream | None = None
        self.size: int | None = None
        self.hash = BlkHash(how)
        self.done = 0
        self.error: BaseException | None = None
        """The first in content order. Once it is set, workers skip what is left of this image."""
        self.bytes_read = self.zero_bytes = self.extents = self.requests = 0
        self._started = time.monotonic()

    def count(self, extents: Iterable[Extent]) -> Iterator[Extent]:
        """EXTENTS, counted."""
        for extent in extents:
            self.extents += 1
            yield extent

    def finish(self) -> Checksum | Error:
        """Close the image. Its checksum, if every byte was read and none changed meanwhile."""
        content = self.content
        opened = content.source if isinstance(content, Content) else content
        try:
            if self.error is None and opened is not None:
                opened.check_unchanged()
        except Error as error:
            self.error = error
        facts = opened.facts() if opened is not None else {}
        self.close()
        if isinstance(self.error, Error):
            self.error.image = self.name
            return self.error.about(self.name)
        if self.error is not None:
            raise self.error
        assert opened is not None
        return Checksum(
            hexdigest=self.hash.finish(self.done),
            algorithm=self.how.algorithm.name,
            block_size=self.how.block_size,
            size=self.done,
            format=opened.format,
            name=self.name,
            construction=self.how.name,
            stats=Stats(
                self.bytes_read,
                self.zero_bytes,
                self.extents,
                self.requests,
                time.monotonic() - self._started,
                facts,
            ),
            note=self._note(),
        )

    def _note(self) -> str | None:
        content, rest = self.content, self.done % 512
        if not rest or not isinstance(content, Content):
            return None
        if content.source.format == "raw" and self.done == content.source.size:  # a range has no export
            return (
                f"the size, {self.done} bytes, is not a multiple of 512: QEMU adds {512 - rest} zeros to such an"
                " image, so an NBD export or a converted copy of it has another checksum"
            )
        return None

    def close(self) -> None:
        """Give back what is open."""
        if self.content is not None:
            self.content.close()


class _Piece(Piece):
    """Some of an image's content, and then its digests."""

    __slots__ = ("digests", "job", "length", "requests")

    def __init__(self, job: _Job, length: int) -> None:
        super().__init__()
        self.job = job
        self.length = length
        self.digests = b""
        self.requests = 0

    def take(self) -> None:
        """In content order, when the work is done: into the job's hash."""
        job = self.job
        job.hash.update(self.digests)
        job.done += self.length
        job.bytes_read += self.length
        job.requests += self.requests


class _DataPiece(_Piece):
    """Whole blocks, to be read and hashed."""

    __slots__ = ("content", "start")

    def __init__(self, job: _Job, content: Content, start: int, length: int) -> None:
        super().__init__(job, length)
        self.content = content
        self.start = start

    def work(self, worker: Worker) -> None:
        job = self.job
        if job.error is None:
            buffer = worker.buffer(job.piece_size)[: self.length]
            self.requests = self.content.read(worker, self.start, buffer)
            self.digests = block_digests(buffer, job.how, job.hash.zero_digest)


class _StreamPiece(_Piece):
    """Whole blocks that the feeder has read, to be hashed. The buffer is given back to it."""

    __slots__ = ("buffer", "buffers")

    def __init__(self, job: _Job, buffer: memoryview, length: int, buffers: SimpleQueue[memoryview]) -> None:
        super().__init__(job, length)
        self.buffer = buffer
        self.buffers = buffers
        self.requests = 1

    def work(self, worker: Worker) -> None:
        try:
            self.digests = block_digests(self.buffer[: self.length], self.job.how, self.job.hash.zero_digest)
        finally:
            self.buffers.put(self.buffer)


class _ZeroPiece(_Piece):
    """Blocks that are certainly zero: only a count."""

    __slots__ = ()
    has_work = False

    def take(self) -> None:
        job = self.job
        blocks, rest = divmod(self.length, job.how.block_size)
        job.hash.zero(blocks)
        if rest:  # the last block of the content
            job.hash.update(blkhash.zero_digest(job.how.algorithm, rest))
        job.done += self.length
        job.zero_bytes += self.length


class _EndPiece(_Piece):
    """Nothing is left of this image."""

    __slots__ = ()
    has_work = False

    def __init__(self, job: _Job) -> None:
        super().__init__(job, 0)


def block_digests(content: memoryview, how: Construction, zero_digest: bytes) -> bytes:
    """The digests of CONTENT's blocks, laid end to end. A whole block of zeros has ZERO_DIGEST, without hashing."""
    block_size, new = how.block_size, how.algorithm.new
    digests = []
    for at in range(0, len(content), block_size):
        block = content[at : at + block_size]
        if len(block) == block_size and is_zero(block):
            digests.append(zero_digest)
        else:
            digests.append(new(block).digest())
    return b"".join(digests)


def is_zero(content: memoryview) -> bool:
    """Whether CONTENT is all zeros. For data it costs the comparison of its first byte."""
    step = len(_ZEROS)
    if len(content) <= step:
        return _ZEROS.startswith(content)
    return all(_ZEROS.startswith(content[at : at + step]) for at in range(0, len(content), step))
