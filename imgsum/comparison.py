"""Two images -> where their content differs: the same pipeline as for checksums, with bytes in place of digests.

Read in the order in which a byte travels: the extents of both sides become pieces (comparison_pieces.py), a worker
reads both sides of a piece and compares them, Pair._maps() takes the pieces in content order, and differences.ranges()
makes ranges of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Self

from imgsum import differences
from imgsum.checksums import Watcher, buffers_in_flight
from imgsum.comparison_pieces import ComparisonJob, Piece, pieces_of_a_stream, pieces_of_two
from imgsum.content import Content, Image, image_name, open_content
from imgsum.differences import Range
from imgsum.errors import Error, UsageError
from imgsum.job import Stats
from imgsum.pipeline import WORKERS, Pipeline
from imgsum.source import OpenOptions, is_stream
from imgsum.source.stream import Stream
from imgsum.units import MIB

_LARGEST_PIECE = 4 * MIB  # of one side, so that two buffers for each worker, and maps, stay small


class Comparison(NamedTuple):
    """What compare() found. True only when the content is the same."""

    identical: bool
    ranges: tuple[Range, ...]
    """Where it differs: in order, merged, exact to the byte. Not all of them unless `complete`."""
    sizes: tuple[int | None, int | None]
    """Bytes of content; the rest of the longer one is compared with zeros. None: a stream not read to its end."""
    complete: bool = True
    """`ranges` is all of them; False: there are more than the limit, and what comes after was not compared."""

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
    ranges, at least 1, and say whether there are more; None lists all of them, however many there are. options: how
    the first image is opened and read; second_options: how the second is, where that differs. Raises an imgsum.Error
    when either can't be read.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, or None: {limit}")
    options = options or OpenOptions()
    with Pair(first, second, options, second_options or options, offset=offset, length=length) as pair:
        found = tuple(islice(pair.differences(strict=strict), None if limit is None else limit + 1))
        pair.check_unchanged()
        ranges = found[:limit]
        return Comparison(not found, ranges, pair.sizes, complete=len(found) == len(ranges))


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
        piece_size = min(options.request_size, _LARGEST_PIECE)
        self._job = ComparisonJob(piece_size, buffers_in_flight(WORKERS, 2 * piece_size, options))
        self._offset, self._length = offset, length
        self._done = self._bytes_read = self._requests = 0
        self._started = time.monotonic()
        self._sides: list[Content | Stream] = []
        self._running: Generator[tuple[int, bytes | int], None, None] | None = None
        try:
            self._sides.append(open_content(first, options, offset, length))
            self._sides.append(open_content(second, second_options, offset, length))
        except BaseException as error:
            if isinstance(error, Error):
                name = error.image = self.names[len(self._sides)]
                error.about(name)
            self.close()
            raise

    @property
    def formats(self) -> tuple[str, str]:
        """QEMU's names of both formats."""
        first, second = (side.format for side in self._sides)
        return first, second

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Bytes of content on each side, at most the length that was asked for; None: a stream that has not ended."""
        first, second = (self._size(side) for side in self._sides)
        return first, second

    def stats(self) -> Stats:
        """What it took so far, for both sides together."""
        first, second = self._sides
        return Stats(
            self._bytes_read,
            2 * self._done - self._bytes_read,
            self._job.extents,
            self._requests,
            time.monotonic() - self._started,
            {**first.facts(), **{f"second_{key}": value for key, value in second.facts().items()}},
        )

    def differences(self, *, strict: bool = False, watcher: Watcher | None = None) -> Iterator[Range]:
        """Every range that differs, in order and lazily. STRICT: the longer image's rest differs, whatever it is."""
        self._running = self._maps(strict, None, watcher)
        return differences.ranges(self._running)

    def first_difference(self, *, strict: bool = False, watcher: Watcher | None = None) -> int | None:
        """The offset of the first byte that differs, or None. Nothing after it is waited for."""
        self._running = self._maps(strict, 1, watcher)
        for offset, differs in self._running:
            return offset if isinstance(differs, int) else offset + differs.index(1)
        return None

    def check_unchanged(self) -> None:
        """Raise an imgsum.Error when either image changed meanwhile."""
        for side, name in zip(self._sides, self.names, strict=True):
            try:
                side.check_unchanged()
            except Error as error:
                error.image = name
                raise error.about(name) from error.__cause__

    def close(self) -> None:
        """End what runs, and close both. Closing twice is harmless.

        Some worker may still be stuck in a read, of a server that does not answer: closing the source ends that.
        """
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
        return side.position - self._offset if self._job.stream_ended else None

    def _maps(
        self, strict: bool, most: int | None, watcher: Watcher | None
    ) -> Generator[tuple[int, bytes | int], None, None]:
        """Maps of what differs, as differences.ranges() takes them, in content order; at most MOST of each piece."""
        self._job.strict, self._job.most = strict, most
        if watcher:
            known = [size for size in self.sizes if size is not None]
            watcher.begin(self.names[0], max(known) if len(known) == 2 else None)
        try:
            with Pipeline[Piece](self._job.workers) as pool:
                for piece in pool.run(self._pieces()):
                    if piece.error is not None:
                        raise piece.error
                    self._done += piece.length
                    self._bytes_read += piece.bytes_read
                    self._requests += piece.requests
                    yield from piece.maps()
                    if watcher:
                        watcher.advance(self._done)
        finally:
            if watcher:
                watcher.end()

    def _pieces(self) -> Iterator[Piece]:
        first, second = self._sides
        try:
            if isinstance(first, Content) and isinstance(second, Content):
                yield from pieces_of_two(self._job, first, second)
            elif isinstance(first, Stream) and isinstance(second, Content):
                yield from pieces_of_a_stream(self._job, first, second, self._length)
            elif isinstance(first, Content) and isinstance(second, Stream):
                yield from pieces_of_a_stream(self._job, second, first, self._length)
        except Exception as error:  # in content order, like a worker's
            last = Piece(0, 0)
            last.error = error
            yield last
