"""Images -> checksums: each image is cut into pieces, which go through the pipeline into its BlkHash.

Read in the order in which a byte travels: _feed() opens images and walks their extents, DataPiece.work() (job.py) reads
and hashes in a worker, _run_pool() takes the pieces in content order.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, Protocol

from imgsum import blkhash
from imgsum.blkhash import Construction
from imgsum.content import Content, Image, image_name, open_content, skip_stream, stream_buffers
from imgsum.errors import Error, MismatchError, ReadError
from imgsum.extent import align, coalesce
from imgsum.job import Checksum, DataPiece, EndPiece, Job, Piece, StreamPiece, ZeroPiece
from imgsum.pipeline import WORKERS, Pipeline
from imgsum.source import OpenOptions, is_stream
from imgsum.source.stream import Stream
from imgsum.units import GIB, MIB

ZERO_PIECE = 4 * GIB
"""The most zeros in one piece: 1 ms of the outer hash, so that data behind a long hole is fed meanwhile."""

_MOST_IN_FLIGHT = 32 * MIB
"""The most that --queue-size gives: with the interpreter and a format's tables, the process stays within 64 MiB."""


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
        yield from _run_pool(
            neighbours, buffers_in_flight(workers, piece_size, options), options, offset, length, watcher
        )


def buffers_in_flight(workers: int, piece_size: int, options: OpenOptions) -> int:
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
    current: Job | None = None
    jobs: list[Job] = []  # what is open, in order
    try:
        with Pipeline[Piece](workers) as pipeline:
            for piece in pipeline.run(_feed(tasks, jobs, options, offset, length)):
                job = piece.job
                if watcher and job is not current:
                    current = job
                    watcher.begin(job.name, job.size)
                if job.error is None:
                    job.error = piece.error
                if isinstance(piece, EndPiece):
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
    jobs: list[Job],
    options: OpenOptions,
    offset: int,
    length: int | None,
) -> Iterator[Piece]:
    """The pieces of all images, in order: an image is opened while those before it are still being hashed."""
    for task in tasks:
        job = Job(image_name(task.image), task.how, options)
        jobs.append(job)
        end = EndPiece(job)
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
    if task.format is not None and content.format != task.format:
        raise MismatchError(f"the format is {content.format}, and the sum is of {task.format}")
    if isinstance(content, Content) and task.size is not None and content.length != task.size:
        hint = f" (--length {task.size} reads no more of it)" if content.length > task.size else ""
        raise MismatchError(f"has {content.length} bytes, and the sum is of {task.size} bytes{hint}")


def _pieces(job: Job, content: Content) -> Iterator[Piece]:
    block_size = job.how.block_size
    aligned = align(job.count(content.extents()), block_size, content.start, content.end)
    for extent in coalesce(aligned, job.piece_size, ZERO_PIECE):
        if job.error is not None:
            return
        if extent.zero:
            yield ZeroPiece(job, extent.length)
        else:
            yield DataPiece(job, content, extent.start, extent.length)


def _stream_pieces(job: Job, stream: Stream, skip: int, length: int | None) -> Iterator[Piece]:
    """A stream is read here, into buffers that the workers give back: their number bounds what is in flight."""
    buffers = stream_buffers(buffers_in_flight(WORKERS, job.piece_size, job.options), job.piece_size)
    skip_stream(stream, skip, buffers)
    left = length
    while left != 0 and job.error is None:
        buffer = buffers.get()
        want = buffer if left is None else buffer[:left]
        count = stream.fill(want)
        if count:
            yield StreamPiece(job, buffer, count, buffers)
        if left is not None:
            left -= count
        if count < len(want):
            if left:
                raise ReadError(f"the stream ends {left} bytes early", offset=stream.position)
            return
