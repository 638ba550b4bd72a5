"""One image on its way to a Checksum: what is open, what is known so far, and the pieces that its content is cut into.

A piece's work() is done by any worker; take() puts what came of it into the job's hash, in content order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from imgsum import blkhash, pipeline
from imgsum.blkhash import BlkHash, Construction
from imgsum.content import Content
from imgsum.errors import Error, ReadError
from imgsum.extent import Extent
from imgsum.pipeline import Worker
from imgsum.source import OpenOptions
from imgsum.source.stream import Stream
from imgsum.units import KIB

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


class Job:
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
        try:
            if self.error is None and content is not None:
                content.check_unchanged()
        except Error as error:
            self.error = error
        facts = content.facts() if content is not None else {}
        self.close()
        if self.error is None and self.size not in (None, self.done):
            self.error = ReadError(f"only {self.done} of {self.size} bytes were read")  # a bug, and no checksum
        if self.error is not None:
            return self._failure(self.error)
        assert content is not None
        return Checksum(
            hexdigest=self.hash.finish(self.done),
            algorithm=self.how.algorithm.name,
            block_size=self.how.block_size,
            size=self.done,
            format=content.format,
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

    def _failure(self, error: BaseException) -> Error:
        """ERROR, as one about this image. What nobody foresaw is a bug, but not a reason to leave the others undone."""
        if not isinstance(error, Error):
            unforeseen = Error(f"internal error: {error!r} (IMGSUM_DEBUG=1 shows where; please report it)")
            unforeseen.__cause__ = error
            error = unforeseen
        error.image = self.name
        return error.about(self.name)

    def _note(self) -> str | None:
        content, rest = self.content, self.done % 512
        if not rest or not isinstance(content, Content):
            return None
        if content.format == "raw" and self.done == content.source.size:  # a range has no export
            return (
                f"the size, {self.done} bytes, is not a multiple of 512: QEMU adds {512 - rest} zeros to such an"
                " image, so an NBD export or a converted copy of it has another checksum"
            )
        return None

    def close(self) -> None:
        """Give back what is open."""
        if self.content is not None:
            self.content.close()


class Piece(pipeline.Piece):
    """Some of an image's content, and then its digests."""

    __slots__ = ("digests", "job", "length", "requests")

    def __init__(self, job: Job, length: int) -> None:
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


class DataPiece(Piece):
    """Whole blocks, to be read and hashed."""

    __slots__ = ("content", "start")

    def __init__(self, job: Job, content: Content, start: int, length: int) -> None:
        super().__init__(job, length)
        self.content = content
        self.start = start

    def work(self, worker: Worker) -> None:
        """See pipeline.Piece."""
        job = self.job
        if job.error is None:
            buffer = worker.buffer(job.piece_size)[: self.length]
            self.requests = self.content.read(worker, self.start, buffer)
            self.digests = block_digests(buffer, job.how, job.hash.zero_digest)


class StreamPiece(Piece):
    """Whole blocks that the feeder has read, to be hashed. The buffer is given back to it."""

    __slots__ = ("buffer", "buffers")

    def __init__(self, job: Job, buffer: memoryview, length: int, buffers: SimpleQueue[memoryview]) -> None:
        super().__init__(job, length)
        self.buffer = buffer
        self.buffers = buffers
        self.requests = 1

    def work(self, worker: Worker) -> None:
        """See pipeline.Piece."""
        try:
            self.digests = block_digests(self.buffer[: self.length], self.job.how, self.job.hash.zero_digest)
        finally:
            self.buffers.put(self.buffer)


class ZeroPiece(Piece):
    """Blocks that are certainly zero: only a count."""

    __slots__ = ()
    has_work = False

    def take(self) -> None:
        """See Piece."""
        job = self.job
        blocks, rest = divmod(self.length, job.how.block_size)
        job.hash.zero(blocks)
        if rest:  # the last block of the content
            job.hash.update(blkhash.zero_digest(job.how.algorithm, rest))
        job.done += self.length
        job.zero_bytes += self.length


class EndPiece(Piece):
    """Nothing is left of this image. Until this is taken its files are open, or its server runs."""

    __slots__ = ()
    has_work = False
    weight = 8  # so that at most 4 images wait behind a slow one

    def __init__(self, job: Job) -> None:
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
