"""A bmap and an image -> which of the mapped ranges are not as the bmap says. Nothing else of the image counts.

A range has one digest, so one worker makes it, in steps; ranges are verified in parallel. Of a stream they are verified
one after the other, as it comes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from imgsum.engine.content import Content, Part, Progress, Stats, count_workers, open_content
from imgsum.engine.mask import Range
from imgsum.engine.pool import Pool, Worker
from imgsum.errors import RefusedError, UsageError, naming
from imgsum.index.bmap import Bmap, MappedRange
from imgsum.source import Command, OpenOptions


class BmapPair:
    """A bmap and an image that is verified by it, once. As compare.Pair, but for the unit, a range of the bmap."""

    same_text = "the mapped ranges are as the bmap says"
    sizes_count = False
    unit = 1

    def __init__(self, bmap: str, image: str | Command, options: OpenOptions) -> None:
        """Open both; OPTIONS are for the image. Raises an imgsum.Error."""
        if options.offset or options.length is not None:
            raise UsageError("a bmap is of a whole image: give no --offset or --length")
        self.names = bmap, str(image)
        self._options = options
        self._bytes_read = self._requests = self._ranges = 0
        self._started = time.monotonic()
        self._running: Generator[Range, None, None] | None = None
        self._content: Content | None = None
        self._bmap = Bmap(bmap)
        try:
            with naming(self.names[1]):
                self._content = content = open_content(image, options)
                if content.end is not None and content.end < self._bmap.image_size:
                    raise _too_short(content.end, self._bmap)
        except BaseException:
            self.close()
            raise

    @property
    def formats(self) -> tuple[str, str]:
        """`bmap`, and QEMU's name of the image's format."""
        assert self._content is not None
        return "bmap", self._content.format

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Bytes of the bmap's image, and of the image itself; None: a stream that has not ended."""
        assert self._content is not None
        return self._bmap.image_size, self._content.end

    def stats(self) -> Stats:
        """What it took so far."""
        assert self._content is not None
        seconds = time.monotonic() - self._started
        return Stats(self._bytes_read, 0, self._ranges, self._requests, seconds, self._content.details())

    def differences(self, *, strict: bool = False, progress: Progress | None = None) -> Iterator[Range]:
        """Every range of the bmap whose digest is another one, in order and lazily. STRICT makes no sense here."""
        if strict:
            raise UsageError("--strict is about the sizes of two images, and a bmap says nothing of what is not mapped")
        self._running = self._found(progress)
        return self._running

    def first_difference(self, *, strict: bool = False, progress: Progress | None = None) -> int | None:
        """The offset of the first such range, or None. Nothing after it is waited for."""
        for found in self.differences(strict=strict, progress=progress):
            return found.start
        return None

    def check_unchanged(self) -> None:
        """Raise an imgsum.Error when the bmap or the image changed meanwhile."""
        self._bmap.check_unchanged()
        assert self._content is not None
        with naming(self.names[1]):
            self._content.check_unchanged()

    def close(self) -> None:
        """End what runs, and close both. Closing twice is harmless."""
        if self._running is not None:
            self._running.close()
        if self._content is not None:
            self._content.close()
        self._bmap.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _found(self, progress: Progress | None) -> Generator[Range, None, None]:
        if progress:
            progress.begin(self.names[1], self._bmap.mapped_size)
        content = self._content
        assert content is not None
        verified = self._verified(content) if content.end is not None else self._verified_stream(content)
        done = 0
        try:
            for mapped, digest in verified:
                self._ranges += 1
                done += mapped.length
                if digest != mapped.digest:
                    yield Range(mapped.start, mapped.length)
                if progress:
                    progress.advance(done)
        finally:
            verified.close()
            if progress:
                progress.end()

    def _verified(self, content: Content) -> Generator[tuple[MappedRange, bytes], None, None]:
        """Each range of the bmap, and the digest that it has in CONTENT."""

        def digest(worker: Worker, item: _Item) -> bytes:
            hashed = self._bmap.new_hash()
            with naming(self.names[1]):
                _update(hashed, content, item.part, worker)
            return bytes(hashed.digest())

        items = (_Item(mapped, content.part(mapped.start, mapped.length)) for mapped in self._bmap.ranges())
        with Pool(count_workers(self._options)) as pool:
            for done in pool.map(digest, items):
                if done.error is not None:
                    raise done.error
                assert done.result is not None
                self._bytes_read += done.item.part.length
                self._requests += content.requests(done.item.part)
                yield done.item.mapped, done.result

    def _verified_stream(self, content: Content) -> Generator[tuple[MappedRange, bytes], None, None]:
        worker = Worker(0)
        at = 0
        for _ in content.extents(content.start, content.bound):  # it begins
            break

        def read(end: int, hashed: Any = None) -> None:
            nonlocal at
            while at < end:
                with naming(self.names[1]):
                    part = content.part(at, min(content.part_size, end - at))
                    if not part.length:
                        raise _too_short(at, self._bmap)
                    _update(hashed, content, part, worker)
                at += part.length
                self._bytes_read += part.length
                self._requests += content.requests(part)

        for mapped in self._bmap.ranges():
            read(mapped.start)
            hashed = self._bmap.new_hash()
            read(mapped.start + mapped.length, hashed)
            yield mapped, bytes(hashed.digest())
        read(self._bmap.image_size)


class _Item(NamedTuple):
    """A range of the bmap, to be loaded and hashed."""

    mapped: MappedRange
    part: Part

    @property
    def has_work(self) -> bool:
        """See pool.Item."""
        return True

    @property
    def weight(self) -> int:
        """See pool.Item."""
        return 1


def _update(hashed: Any, content: Content, part: Part, worker: Worker) -> None:
    """Add what is in PART to HASHED, or drop it where that is None."""
    try:
        for piece in content.load(part, worker):
            if hashed is not None:
                hashed.update(piece)
    finally:
        content.release(part)


def _too_short(size: int, bmap: Bmap) -> RefusedError:
    return RefusedError(f"has {size} bytes, fewer than the {bmap.image_size} of the bmap's image")
