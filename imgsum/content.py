"""What is to be read of an open image: the range, its extents, and a reader for each worker.

What is optional in a source, and the safe fallback, is here: for all that reads, all sources look alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from imgsum.errors import OpenError, ReadError
from imgsum.extent import Extent, tile
from imgsum.pipeline import Worker, page_aligned
from imgsum.source import OpenOptions, Reader, Source, command_name, open_source
from imgsum.source.stream import Stream

Image = str | os.PathLike[str] | Sequence[str]
"""A path, `-` for standard input, an NBD URI, or the words of a command that serves NBD."""


def image_name(image: Image) -> str:
    """What messages and checksum lines call IMAGE."""
    if isinstance(image, (str, os.PathLike)):
        return os.fspath(image)
    return command_name(image)


class Content:
    """`length` bytes of a source from `start`. Owns the source: closing this closes it."""

    def __init__(self, source: Source, options: OpenOptions, start: int = 0, length: int | None = None) -> None:
        """LENGTH None: to the end. Raises OpenError when the source has no such range."""
        self.source = source
        self.format = source.format
        self.facts = source.facts
        self.check_unchanged = source.check_unchanged
        self.start = start
        self.length = source.size - start if length is None else length
        self.end = start + self.length
        if start > source.size or self.end > source.size:
            raise OpenError(f"has {source.size} bytes, so there is no range of {max(0, self.length)} from {start}")
        self._options = options
        self._readers: dict[int, Reader] = {}  # by the worker's index

    def extents(self) -> Iterator[Extent]:
        """Lazily, exactly tiling the range; only what the source is certain of is zero."""
        answer = self.source.extents(self.start, self.length) if self._options.extents else iter(())
        return tile(answer, self.start, self.end)

    def read(self, worker: Worker, offset: int, buffer: memoryview) -> int:
        """Fill BUFFER from OFFSET of the source, with WORKER's own reader, in requests of at most the request size.

        Returns how many. Raises an imgsum.Error.
        """
        reader = self._readers.get(worker.index)
        if reader is None:
            reader = self._readers[worker.index] = self.source.reader()
        request = self._options.request_size
        if len(buffer) <= request:
            reader.read(offset, buffer)
            return 1
        for at in range(0, len(buffer), request):
            reader.read(offset + at, buffer[at : at + request])
        return -(-len(buffer) // request)

    def close(self) -> None:
        """Close the readers, then the source."""
        for reader in list(self._readers.values()):
            reader.close()
        self.source.close()


def open_content(image: Image, options: OpenOptions, start: int = 0, length: int | None = None) -> Content | Stream:
    """Open IMAGE, and the range of it that is to be read. A stream has no range: it is skipped by reading.

    Raises an imgsum.Error.
    """
    source = open_source(os.fspath(image) if isinstance(image, os.PathLike) else image, options)
    if isinstance(source, Stream):
        source.wanted = None if length is None else start + length
        return source
    try:
        return Content(source, options, start, length)
    except BaseException:
        source.close()
        raise


def stream_buffers(count: int, size: int) -> SimpleQueue[memoryview]:
    """COUNT buffers of SIZE bytes, for what is read from a stream: whoever has used one puts it back."""
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(count):
        buffers.put(memoryview(page_aligned(size)))
    return buffers


def skip_stream(stream: Stream, count: int, buffers: SimpleQueue[memoryview]) -> None:
    """Read COUNT bytes of STREAM, into one of BUFFERS, to be at the range that was asked for. Raises ReadError."""
    buffer = buffers.get()
    while count:
        filled = stream.fill(buffer[:count])
        if filled == 0:
            raise ReadError(
                "the stream ends before the range that was asked for", name=stream.name, offset=stream.position
            )
        count -= filled
    buffers.put(buffer)
