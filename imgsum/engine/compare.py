"""Two images -> where their content differs. Read top to bottom, as a byte travels.

_items() lays the extents of both sides over each other. _differences() loads both sides of an item and compares them,
in a worker. Pair._found() takes the results in content order, and mask.ranges() makes ranges of them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from imgsum.engine import mask
from imgsum.engine.content import (
    MAX_ZERO_PART,
    Content,
    Part,
    Progress,
    Stats,
    count_buffers,
    open_content,
)
from imgsum.engine.mask import Located, Range
from imgsum.engine.pool import Pool, Worker
from imgsum.errors import UsageError, naming
from imgsum.extent import Extent, align, coalesce, overlay
from imgsum.hash.blocks import is_zero
from imgsum.parameters import FLAG, LIMIT, require
from imgsum.source import Command, Image, OpenOptions, is_bmap, is_index, is_stream, options_with, path_or_command
from imgsum.units import KIB, MIB

_MAX_PART = 4 * MIB  # bytes of one side, so that two buffers for each worker, and the masks, stay small
_ALIGNMENT = 64 * KIB  # of extents, so that both sides read whole pages and clusters
_MAX_STRETCH = 64 * MIB  # of data extents that are merged before they are laid over those of the other side


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

    def __repr__(self) -> str:
        """The verdict, without the ranges."""
        if self.identical:
            return f"<Comparison identical, sizes {self.sizes}>"
        count = f"{len(self.ranges)}{'' if self.complete else ' or more'}"
        return f"<Comparison different in {count} ranges, sizes {self.sizes}>"


def compare(
    first: Image,
    second: Image,
    *,
    strict: bool = False,
    prefix: bool = False,
    format: str | None = None,  # noqa: A002  # as in -f
    second_format: str | None = None,
    offset: int | None = None,
    length: int | None = None,
    limit: int | None = 1000,
    options: OpenOptions | None = None,
    second_options: OpenOptions | None = None,
) -> Comparison:
    """Compare the content of two images, or LENGTH bytes of it from OFFSET.

    Either may be an index, which stands for its image: then ranges are of whole blocks. The first may be a bmap: then
    its ranges are compared with the second by their digests.
    A longer image whose rest is all zeros has the same content, unless STRICT. With PREFIX the second is compared as
    far as the first goes, and the rest of it is left. limit: stop after so many differing
    ranges, at least 1, and say whether there are more; None lists all of them, however many there are. format,
    second_format: the images'; None detects it. options: how the first image is opened and read; second_options: how
    the second is, None: the same. format, second_format, offset and length go before what is in there.
    Raises an imgsum.Error when either can't be read.
    """
    if limit is not None:
        require(LIMIT, limit=limit)
    require(FLAG, strict=strict, prefix=prefix)
    options = options_with(options)
    second_options = options if second_options is None else second_options
    opened = options_with(options, format=format, offset=offset, length=length)
    second_opened = options_with(second_options, format=second_format, offset=opened.offset, length=opened.length)
    images = path_or_command(first, "first"), path_or_command(second, "second")
    with open_pair(*images, opened, second_opened, prefix=prefix) as pair:
        found = tuple(islice(pair.differences(strict=strict), None if limit is None else limit + 1))
        pair.check_unchanged()
        ranges = found[:limit]
        return Comparison(not found, ranges, pair.sizes, complete=len(found) == len(ranges))


class AnyPair(Protocol):
    """Two operands that are compared once: images (Pair), or what stands for them. A context manager."""

    names: tuple[str, str]
    same_text: str
    sizes_count: bool
    """Whether what only the longer image has is looked at."""
    unit: int
    """Bytes: what differs is known of such blocks."""

    @property
    def formats(self) -> tuple[str, str]:
        """See Pair."""

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """See Pair."""

    def stats(self) -> Stats:
        """See Pair."""

    def differences(self, *, strict: bool = False, progress: Progress | None = None) -> Iterator[Range]:
        """See Pair."""

    def first_difference(self, *, strict: bool = False, progress: Progress | None = None) -> int | None:
        """See Pair."""

    def check_unchanged(self) -> None:
        """See Pair."""

    def __enter__(self) -> Self:
        """See Pair."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """See Pair."""


def open_pair(
    first: str | Command, second: str | Command, options: OpenOptions, second_options: OpenOptions, *, prefix: bool
) -> AnyPair:
    """Open two images, or what stands for them. PREFIX: see compare(). Raises an imgsum.Error."""
    if is_bmap(second, second_options):
        raise UsageError("is a bmap: it is the first that compare takes", name=str(second))
    if is_bmap(first, options):
        from imgsum.engine.compare_bmap import BmapPair

        if prefix:
            raise UsageError(
                "is a bmap, of which --prefix says nothing: only what it maps is compared", name=str(first)
            )
        return BmapPair(str(first), second, second_options)
    indexes = is_index(first, options), is_index(second, second_options)
    if any(indexes):
        from imgsum.engine.compare_index import IndexPair

        return IndexPair(first, second, options, second_options, are_indexes=indexes, prefix=prefix)
    return Pair(first, second, options, second_options, prefix=prefix)


class Pair:
    """Two open images that are compared once. Use as a context manager."""

    same_text = "images are identical"
    sizes_count = True
    unit = 1

    def __init__(
        self,
        first: str | Command,
        second: str | Command,
        options: OpenOptions,
        second_options: OpenOptions,
        *,
        prefix: bool = False,
    ) -> None:
        """Open both; one of them may be a stream. PREFIX: see compare(). Raises an imgsum.Error."""
        if prefix and options.length is not None:
            raise UsageError("--prefix takes the length of the first image, so there is no --length")
        self.prefix = prefix
        if all(isinstance(image, str) and is_stream(image) for image in (first, second)):
            raise UsageError("both images are streams: only one of them can be")
        self.names = str(first), str(second)
        self._done = self._bytes_read = self._requests = self._extents = 0
        self._started = time.monotonic()
        self._sides: list[Content] = []
        self._running: Generator[Located, None, None] | None = None
        try:
            for image, name, opened_by in zip((first, second), self.names, (options, second_options), strict=True):
                with naming(name):
                    self._sides.append(open_content(image, opened_by))
        except BaseException:
            self.close()
            raise
        self._part_size = min(_MAX_PART, *(side.part_size for side in self._sides))
        self._buffers = count_buffers(2 * self._part_size, options)

    @property
    def formats(self) -> tuple[str, str]:
        """QEMU's names of both formats."""
        first, second = self._sides
        return first.format, second.format

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Bytes of content on each side, at most the length that was asked for; None: a stream that has not ended."""
        first, second = (None if side.end is None else side.end - side.start for side in self._sides)
        return first, second

    def stats(self) -> Stats:
        """What it took so far, for both sides together."""
        first, second = self._sides
        return Stats(
            self._bytes_read,
            2 * self._done - self._bytes_read,
            self._extents,
            self._requests,
            time.monotonic() - self._started,
            {**first.details(), **{f"second_{key}": value for key, value in second.details().items()}},
        )

    def differences(self, *, strict: bool = False, progress: Progress | None = None) -> Iterator[Range]:
        """Every range that differs, in order and lazily. STRICT: the longer image's rest differs, whatever it is."""
        self._running = self._found(strict, None, progress)
        return mask.ranges(self._running)

    def first_difference(self, *, strict: bool = False, progress: Progress | None = None) -> int | None:
        """The offset of the first byte that differs, or None. Nothing after it is waited for."""
        self._running = self._found(strict, 1, progress)
        for offset, differs in self._running:
            if differs == 0:
                continue
            return offset if isinstance(differs, int) else offset + differs.index(1)
        return None

    def check_unchanged(self) -> None:
        """Raise an imgsum.Error when either image changed meanwhile."""
        for side, name in zip(self._sides, self.names, strict=True):
            with naming(name):
                side.check_unchanged()

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

    def _found(self, strict: bool, limit: int | None, progress: Progress | None) -> Generator[Located, None, None]:
        """What differs, as mask.ranges() takes it, in content order; at most LIMIT masks of each item."""
        if progress:
            known = [size for size in self.sizes if size is not None]
            progress.begin(self.names[0], max(known) if len(known) == 2 else None)

        def work(worker: Worker, item: _Item) -> list[Located]:
            return self._differences(worker, item, limit)

        try:
            with Pool(self._buffers) as pool:
                for done in pool.map(work, self._items(strict)):
                    item = done.item
                    if done.error is not None:
                        raise done.error
                    if item.error is not None:
                        raise item.error
                    for side, part in zip(self._sides, item.parts, strict=True):
                        if part is not None:
                            self._bytes_read += part.length
                            self._requests += side.requests(part)
                    self._done += item.length
                    if item.all_differ:
                        yield item.start, item.length
                    elif done.result:
                        yield from done.result
                    yield item.start + item.length, 0  # so that a range that ends before this is known at once
                    if progress:
                        progress.advance(self._done)
        finally:
            if progress:
                progress.end()

    def _items(self, strict: bool) -> Iterator[_Item]:
        try:
            yield from self._items_of_both(strict)
        except Exception as error:  # comes after the errors of the items before it
            yield _Item(0, 0, error=error)

    def _items_of_both(self, strict: bool) -> Iterator[_Item]:
        """The extents of both sides, laid over each other. Zeros against zeros are never read."""
        first, second = self._sides
        bound = first.bound if self.prefix else max(first.bound, second.bound)
        both = overlay(self._extents_of(0, bound), self._extents_of(1, bound))
        for extent_start, extent_length, zeros in both:
            start, end = extent_start, extent_start + extent_length
            while start < end:
                ended = [side.end is not None and start >= side.end for side in self._sides]
                if all(ended) or (self.prefix and ended[0]):  # the extents of a stream go on
                    return
                sides = [
                    None if is_zero_there or has_ended else side
                    for is_zero_there, has_ended, side in zip(zeros, ended, self._sides, strict=True)
                ]
                item = self._item(start, end - start, sides, all_differ=strict and any(ended), strict=strict)
                if item.length:
                    yield item
                start += item.length

    def _item(self, start: int, length: int, sides: list[Content | None], *, all_differ: bool, strict: bool) -> _Item:
        """At most LENGTH bytes from START of those SIDES that are not None, which stands for zeros.

        A stream is read here, and may end: then the item is shorter, down to nothing.
        """
        parts: list[Part | None] = [None, None]
        for index, side in enumerate(sides):
            if side is not None and side.end is None:
                with naming(self.names[index]):
                    part = side.part(start, min(length, self._part_size))
                if parts[0] is not None and part.length < length:  # both are streams, and the second ends first
                    part = _lengthen(part, parts[0], strict=strict)
                length = part.length
                if all_differ or not length:
                    side.release(part)
                else:
                    parts[index] = part
        if not all_differ and sides != [None, None]:
            length = min(length, self._part_size)
            parts = [
                part or (side.part(start, length) if side is not None and length else None)
                for part, side in zip(parts, sides, strict=True)
            ]
        return _Item(start, length, (parts[0], parts[1]), all_differ)

    def _extents_of(self, index: int, bound: int) -> Iterator[Extent]:
        """The extents of the side with that INDEX, aligned and merged, and then, up to BOUND, zeros."""
        content = self._sides[index]

        def counted() -> Iterator[Extent]:
            with naming(self.names[index]):
                for extent in content.extents(content.start, end):
                    self._extents += 1
                    yield extent

        end = min(content.bound, bound)
        aligned = align(counted(), _ALIGNMENT, content.start, end)
        yield from coalesce(aligned, _MAX_STRETCH, MAX_ZERO_PART)
        if bound > content.bound:
            yield Extent(content.bound, bound - content.bound, True)

    def _differences(self, worker: Worker, item: _Item, limit: int | None) -> list[Located]:
        """The masks of where both sides of ITEM differ, LIMIT of them at most."""
        loaded: list[memoryview] = []
        sides = [side for side in zip(self._sides, self.names, item.parts, strict=True) if side[2] is not None]
        try:
            for side, name, part in sides:
                assert part is not None
                with naming(name):
                    loaded.extend(side.load(part, worker, which=len(loaded)))
            first, second = loaded[0], loaded[1] if len(loaded) == 2 else None
            if is_zero(first) if second is None else mask.equal(first, second):
                return []
            return [(item.start + at, differs) for at, differs in islice(mask.masks(first, second), limit)]
        finally:
            for side, _, part in sides:
                assert part is not None
                side.release(part)


def _lengthen(part: Part, other: Part, *, strict: bool) -> Part:
    """PART of a stream that ended, as long as OTHER: by zeros, or, if STRICT, by bytes that all differ from OTHER's."""
    assert part.buffer is not None
    assert other.buffer is not None
    start, end = part.length, other.length
    rest = bytes(other.buffer[start:end]).translate(_INVERTED) if strict else bytes(end - start)
    part.buffer[start:end] = rest
    return part._replace(length=end)


_INVERTED = bytes(255 - byte for byte in range(256))


class _Item(NamedTuple):
    """`length` bytes of both sides, from `start`."""

    start: int
    length: int
    parts: tuple[Part | None, Part | None] = (None, None)
    """What is to be loaded and compared; None stands for zeros."""
    all_differ: bool = False
    """Only one side has this, and that counts."""
    error: Exception | None = None
    """Why nothing follows."""

    @property
    def has_work(self) -> bool:
        """See pool.Item."""
        return self.parts != (None, None)

    @property
    def weight(self) -> int:
        """See pool.Item. A mask may be as large as the data: at most 16 MiB of them wait behind a slow head."""
        return max(1, 2 * self.length // MIB) if self.has_work else 1
