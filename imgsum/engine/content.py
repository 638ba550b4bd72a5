"""The content that is read: a range of an open image, in parts that workers load. A stream is read the same way.

What is optional in a source, and its safe fallback, is here. For the rest of the engine all images look alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from imgsum.engine.pool import WORKERS, Worker, page_aligned
from imgsum.errors import OpenError, ReadError, RefusedError
from imgsum.extent import Extent, tile
from imgsum.source import Command, Evidence, OpenOptions, Reader, Source, open_source, same_evidence
from imgsum.source.stream import Sequential
from imgsum.units import GIB, MAX_SIZE, MIB

MAX_ZERO_PART = 4 * GIB
"""Bytes of the longest run of zeros in one item: 1 ms of the outer hash. Data behind a hole is fed meanwhile."""

_MAX_IN_FLIGHT = 16 * MIB
"""Bytes of all buffers, whatever --queue-size says. With the interpreter and a format's tables, that is 64 MiB."""


class Stats(NamedTuple):
    """What it took. Bytes, counts, seconds."""

    bytes_read: int
    zero_bytes: int
    """Not read, as they were known to be zero."""
    extents: int
    requests: int
    seconds: float
    details: dict[str, object]
    """What the source says of how it was read."""
    reused_bytes: int = 0
    """Not read, as an index says what they are."""


class Progress(Protocol):
    """Is told about completed content, by the thread that called."""

    def begin(self, name: str, size: int | None) -> None:
        """An image's content begins: SIZE bytes, None when that isn't known."""

    def advance(self, done: int) -> None:
        """The first DONE bytes of it are complete, zeros included."""

    def end(self) -> None:
        """The image is done, or failed, or nothing was begun."""


class Part(NamedTuple):
    """`length` bytes of an image's content from `start`."""

    start: int
    length: int
    buffer: memoryview | None = None
    """What was read already (a stream); None: to be read by the worker."""


class Content(Protocol):
    """The content of one open image, from `start`."""

    format: str
    start: int
    end: int | None
    """The offset after the last byte; None while a stream has not ended."""
    bound: int
    """Where extents() end: no content lies beyond this offset."""
    piece_size: int
    """Bytes of the largest piece that load() gives."""
    part_size: int
    """Bytes of the largest part: one piece, or a larger block."""
    note: str | None
    """What a user should know about a checksum of this content, or None."""

    def extents(self, start: int, end: int) -> Iterator[Extent]:
        """The extents of START..END, inside the range: lazily, in order, tiling it. A stream has them only once.

        Those of a stream may go beyond its end.
        """

    def part(self, start: int, length: int) -> Part:
        """What a worker needs to load LENGTH bytes from START; less than LENGTH only where a stream ends.

        Called by the feeding thread, in content order. Raises an imgsum.Error.
        """

    def load(self, part: Part, worker: Worker, which: int = 0) -> Iterator[memoryview]:
        """The bytes of PART, in order, in writable pieces; each is valid until the next. WHICH: the worker's buffer.

        Raises an imgsum.Error.
        """

    def requests(self, part: Part) -> int:
        """How many reads PART takes."""

    def release(self, part: Part) -> None:
        """Give back what PART holds. Called once, by a worker, also for a part that was not loaded."""

    def check_unchanged(self) -> None:
        """Raise ChangedError if the content may have changed since the image was opened."""

    def evidence(self) -> Evidence:
        """What tells this content from a later one; empty where nothing does."""

    def unchanged(self, image_format: str, evidence: Evidence, bitmap: str | None) -> Iterator[Extent]:
        """The extents of the range; `zero` stands for "certainly as in the image of that format and EVIDENCE".

        BITMAP: the name of a dirty bitmap that was begun when EVIDENCE was taken; it decides alone. Raises RefusedError
        when nothing is certain.
        """

    def details(self) -> dict[str, object]:
        """What --stats says of how the image was read."""

    def close(self) -> None:
        """Give back everything."""


def open_content(image: str | Command, options: OpenOptions, block_size: int = 1) -> Content:
    """Open IMAGE, and the range of it that OPTIONS ask for, to be taken in blocks of BLOCK_SIZE bytes.

    Raises an imgsum.Error.
    """
    source = open_source(image, options)
    try:
        if isinstance(source, Sequential):
            return _Streamed(source, options, block_size)
        return _Range(source, options, block_size)
    except BaseException:
        source.close()
        raise


def count_workers(options: OpenOptions) -> int:
    """How many workers may read at a time, one request each. Their buffers are of at least 1 MiB."""
    fit = _MAX_IN_FLIGHT // max(options.request_size, MIB)
    return max(1, min(WORKERS, options.queue_size // options.request_size, fit))


def count_buffers(size: int, options: OpenOptions) -> int:
    """How many buffers of SIZE bytes may be in flight: at least one, at most one for each worker."""
    return max(1, min(WORKERS, min(options.queue_size, _MAX_IN_FLIGHT) // size))


class _Range:
    """A range of a source, read by the workers. Satisfies Content."""

    def __init__(self, source: Source, options: OpenOptions, block_size: int) -> None:
        self.format = source.format
        self.check_unchanged = source.check_unchanged
        self.details = source.details
        self.start = options.offset
        self.bound = source.size if options.length is None else options.offset + options.length
        self.end: int | None = self.bound
        if not self.start <= self.bound <= source.size:
            length = max(0, self.bound - self.start)
            raise OpenError(f"has {source.size} bytes, so there is no range of {length} from {self.start}")
        self.note = _note_of_size(source) if self.bound - self.start == source.size else None
        self.piece_size = max(options.request_size, min(block_size, MIB))  # a larger block is hashed as it is read
        self.part_size = max(self.piece_size, block_size)
        self._source = source
        self._options = options
        self._readers: dict[int, Reader] = {}  # by the worker's index

    def extents(self, start: int, end: int) -> Iterator[Extent]:
        answer = self._source.extents(start, end - start) if self._options.extents else iter(())
        return tile(answer, start, end)

    def part(self, start: int, length: int) -> Part:
        return Part(start, length)

    def load(self, part: Part, worker: Worker, which: int = 0) -> Iterator[memoryview]:
        reader = self._readers.get(worker.index)
        if reader is None:
            reader = self._readers[worker.index] = self._source.reader()
        end = part.start + part.length
        for start in range(part.start, end, self.piece_size):
            buffer = worker.buffer(min(self.piece_size, part.length), which)[: end - start]
            reader.read(start, buffer)
            yield buffer

    def requests(self, part: Part) -> int:
        return -(-part.length // self._options.request_size)

    def release(self, part: Part) -> None:
        pass

    def evidence(self) -> Evidence:
        found: Evidence = getattr(self._source, "evidence", list)()
        return found

    def unchanged(self, image_format: str, evidence: Evidence, bitmap: str | None) -> Iterator[Extent]:
        if bitmap is not None:
            clean = getattr(self._source, "clean", None)
            if clean is None:
                raise RefusedError("has no dirty bitmaps that are read here: a qcow2 image or an NBD export has")
            return tile(clean(bitmap), self.start, self.bound)
        if image_format == self.format and same_evidence(evidence, self.evidence()):
            return iter([Extent(self.start, self.bound - self.start, True)])
        unchanged = getattr(self._source, "unchanged", None)
        found = None if unchanged is None else unchanged(image_format, evidence)
        if found is None and any("block_device" in record for record in self.evidence()):
            raise RefusedError("is on a block device, and no time says when that was written to: read it all")
        if found is None:
            raise RefusedError(
                "is not the image of the index, nor one on top of it: nothing is certain, so read it all"
            )
        return tile(found, self.start, self.bound)

    def close(self) -> None:
        for reader in list(self._readers.values()):
            reader.close()
        self._source.close()


def _note_of_size(source: Source) -> str | None:
    if note := getattr(source, "note", None):  # of a VHD, whose size is said twice
        return str(note)
    rest = source.size % 512
    if not rest or source.format != "raw":
        return None
    return (
        f"the size, {source.size} bytes, is not a multiple of 512: QEMU adds {512 - rest} zeros to such an"
        " image, so an NBD export or a converted copy of it has another checksum"
    )


class _Streamed:
    """A stream, read by the feeding thread into buffers that workers give back. Satisfies Content.

    The number of buffers bounds what is in flight.
    """

    def __init__(self, stream: Sequential, options: OpenOptions, block_size: int) -> None:
        self.format = stream.format
        self.check_unchanged = stream.check_unchanged
        self.details = stream.details
        self.close = stream.close
        self.start = options.offset
        self.end: int | None = None
        self.note: str | None = None
        self._stream = stream
        self.bound = MAX_SIZE if options.length is None else options.offset + options.length
        self._length_is_given = options.length is not None
        stream.wanted = self.bound if self._length_is_given else None
        self.part_size = self.piece_size = max(min(options.request_size, MIB), block_size)
        self._count = count_buffers(self.part_size, options)
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()

    def extents(self, start: int, end: int) -> Iterator[Extent]:
        for _ in range(self._count):
            self._buffers.put(memoryview(page_aligned(self.part_size)))
        self._skip(self.start)
        if end > start:
            yield Extent(start, end - start, False)
        else:
            self.end = end

    def part(self, start: int, length: int) -> Part:
        buffer = self._buffers.get()
        count = self._stream.fill(buffer[:length])
        if count < length:
            if self._length_is_given:
                raise ReadError(f"the stream ends {self.bound - start - count} bytes early", offset=start + count)
            self.end = start + count
        elif start + count == self.bound:
            self.end = self.bound
        return Part(start, count, buffer)

    def _skip(self, count: int) -> None:
        """Read and drop COUNT bytes: a stream can't be positioned."""
        buffer = self._buffers.get()
        while count:
            filled = self._stream.fill(buffer[:count])
            if filled == 0:
                raise ReadError("the stream ends before the range begins", offset=self._stream.position)
            count -= filled
        self._buffers.put(buffer)

    def load(self, part: Part, worker: Worker, which: int = 0) -> Iterator[memoryview]:
        assert part.buffer is not None
        if part.length:
            yield part.buffer[: part.length]

    def requests(self, part: Part) -> int:
        return min(part.length, 1)

    def evidence(self) -> Evidence:
        return []

    def unchanged(self, image_format: str, evidence: Evidence, bitmap: str | None) -> Iterator[Extent]:
        raise RefusedError("is a stream: all of it must be read")

    def release(self, part: Part) -> None:
        assert part.buffer is not None
        self._buffers.put(part.buffer)
