"""An index and an image, or two indexes -> the blocks that differ. Read top to bottom, as a byte travels.

_items() lays the blocks of the index over the extents of the image. _digests() loads and hashes an item, in a worker.
_of_image() compares the results, in content order, with the digests of the index. Two indexes need no worker.

What only one side has counts as zeros on the other: so a block of which one side has only a part is padded with zeros
before it is hashed, or compared with the digest of zeros. Between two indexes that can't always be done: an error.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from itertools import chain
from types import TracebackType
from typing import NamedTuple, Self

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
from imgsum.errors import OpenError, RefusedError, UsageError, naming
from imgsum.extent import Extent, align, coalesce
from imgsum.hash.blkhash import zero_digest
from imgsum.hash.blocks import block_digests, digest_of_block
from imgsum.index.format import Blocks, Index
from imgsum.source import Command, OpenOptions
from imgsum.units import KIB

_ZEROS = memoryview(bytes(64 * KIB))


class IndexPair:
    """An index and an image, in any order, or two indexes, that are compared once. Used as Pair is."""

    same_text = "images are identical"
    sizes_count = True

    def __init__(
        self,
        first: str | Command,
        second: str | Command,
        options: OpenOptions,
        second_options: OpenOptions,
        *,
        are_indexes: tuple[bool, bool],
        prefix: bool = False,
    ) -> None:
        """Open and verify what ARE_INDEXES says, and open the image. PREFIX: see compare(). Raises an imgsum.Error."""
        if prefix and options.length is not None:
            raise UsageError("--prefix takes the length of the first image, so there is no --length")
        if prefix and are_indexes != (True, False):
            raise UsageError("with --prefix an index is compared with an image, in that order: its blocks are not cut")
        self._prefix = prefix
        self.names = str(first), str(second)
        self._started = time.monotonic()
        self._done = self._bytes_read = self._requests = self._extents = 0
        self._indexes: list[Index] = []
        self._image: Content | None = None
        self._running: Generator[Located, None, None] | None = None
        self._image_name = ""
        self._index_is_first = are_indexes[0]
        try:
            for name, opened_by, is_index in zip(self.names, (options, second_options), are_indexes, strict=True):
                if is_index:
                    self._indexes.append(Index(name, max_size=opened_by.max_size))
            index = self._indexes[0]
            self.unit = index.block_size
            """Bytes of a block: what is found is true of whole blocks."""
            self._start, self._ends = options.offset, [self._end_of(index, options) for index in self._indexes]
            if len(self._indexes) == 2:
                self._refuse_other_construction(index, self._indexes[1])
            else:
                image, opened_by = (second, second_options) if are_indexes[0] else (first, options)
                self._image_name = str(image)
                with naming(self._image_name):
                    self._image = open_content(image, opened_by, index.block_size)
                self._buffers = count_buffers(self._image.part_size, opened_by)
        except BaseException:
            self.close()
            raise

    def _end_of(self, index: Index, options: OpenOptions) -> int:
        """Where the range that OPTIONS ask for ends in INDEX, which can be asked for whole blocks only."""
        end = index.size if options.length is None else options.offset + options.length
        if not options.offset <= end <= index.size:
            length = max(0, end - options.offset)
            raise OpenError(
                f"has {index.size} bytes, so there is no range of {length} from {options.offset}", name=index.path
            )
        if options.offset % index.block_size or (end % index.block_size and end != index.size):
            raise UsageError(
                f"the index has whole blocks of {index.block_size} bytes: --offset and --length must be multiples of"
                " that, or end where its content ends",
                name=index.path,
            )
        return end

    @staticmethod
    def _refuse_other_construction(one: Index, other: Index) -> None:
        if one.construction != other.construction:
            raise UsageError(
                f"{one.path} is of {one.algorithm} over blocks of {one.block_size} bytes, and {other.path} of"
                f" {other.algorithm} over {other.block_size}: only an image can be compared with both"
            )

    @property
    def formats(self) -> tuple[str, str]:
        """QEMU's name of the image's format, and `index`."""
        image = "index" if self._image is None else self._image.format
        return ("index", image) if self._index_is_first else (image, "index")

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """See Pair."""
        known = self._ends[0] - self._start
        if self._image is None:
            return known, self._ends[1] - self._start
        found = None if self._image.end is None else self._image.end - self._image.start
        return (known, found) if self._index_is_first else (found, known)

    def stats(self) -> Stats:
        """What it took so far. Of the image alone."""
        details = {} if self._image is None else self._image.details()
        seconds = time.monotonic() - self._started
        zeros = 0 if self._image is None else self._done - self._bytes_read
        return Stats(self._bytes_read, zeros, self._extents, self._requests, seconds, details)

    def differences(self, *, strict: bool = False, progress: Progress | None = None) -> Iterator[Range]:
        """Every range of blocks that differ, in order and lazily. See Pair."""
        self._running = self._found(strict, progress)
        return mask.ranges(self._running)

    def first_difference(self, *, strict: bool = False, progress: Progress | None = None) -> int | None:
        """The offset of the first block that differs, or None."""
        self._running = self._found(strict, progress)
        return next((offset for offset, length in self._running if length), None)

    def check_unchanged(self) -> None:
        """See Pair."""
        if self._image is not None:
            with naming(self._image_name):
                self._image.check_unchanged()
        for index in self._indexes:
            index.check_unchanged()

    def close(self) -> None:
        """See Pair."""
        if self._running:
            self._running.close()
        image, self._image = self._image, None
        if image is not None:
            image.close()
        for index in self._indexes:
            index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _found(self, strict: bool, progress: Progress | None) -> Generator[Located, None, None]:
        """What differs, as mask.ranges() takes it, in content order."""
        if progress:
            sizes = [size for size in self.sizes if size is not None]
            progress.begin(self.names[0], max(sizes) if len(sizes) == 2 else None)
        try:
            if self._image is None:
                yield from self._of_indexes(strict, progress)
            else:
                yield from self._of_image(self._image, strict, progress)
        finally:
            if progress:
                progress.end()

    def _of_image(self, image: Content, strict: bool, progress: Progress | None) -> Generator[Located, None, None]:
        index, end = self._indexes[0], self._ends[0]
        known = _Cursor(index, self._start)
        differs_to = self._start
        with Pool(self._buffers) as pool:
            for done in pool.map(lambda worker, item: self._digests(image, worker, item), self._items(image, strict)):
                item = done.item
                with naming(self._image_name):
                    if error := done.error or item.error:
                        raise error
                if item.part is not None:
                    self._bytes_read += item.part.length
                    self._requests += image.requests(item.part)
                self._done += item.length
                if item.all_differ:
                    yield item.start, item.length
                else:
                    cursor = known if item.start < end else None
                    for at, length in self._differing(item.start, item.length, done.result, cursor):
                        yield at, length
                        differs_to = at + length
                yield item.start + item.length, 0  # so that a range that ends before this is known at once
                if progress:
                    progress.advance(self._done)
        if image.end is not None and image.end < end:  # zeros stand for what the image has not
            yield from self._rest(known, end, max(image.end, differs_to) if strict else None)

    def _items(self, image: Content, strict: bool) -> Iterator[_Item]:
        try:
            yield from self._items_of_image(image, strict)
        except Exception as error:  # comes after the errors of the items before it
            yield _Item(0, 0, error=error)

    def _items_of_image(self, image: Content, strict: bool) -> Iterator[_Item]:
        """The image in the index's blocks, and what it has beyond the index's end, in blocks from there on."""
        end, is_stream = self._ends[0], image.end is None
        if is_stream:
            for _ in image.extents(image.start, image.bound):
                pass  # there is one, and from now on it can be read
        for first, last in ((image.start, min(image.bound, end)), (end, image.bound)):
            is_rest = first == end
            if last <= first or (is_rest and self._prefix):
                continue
            if is_rest and strict and not is_stream:
                yield _Item(first, last - first, all_differ=True)
                return
            extents = iter([Extent(first, last - first, False)]) if is_stream else image.extents(first, last)
            aligned = align(self._count(extents), self.unit, first, last)
            for start, length, zero in coalesce(aligned, image.part_size, MAX_ZERO_PART):
                part = None if zero else image.part(start, length)
                stop = start + (length if part is None else part.length)
                has_ended = image.end is not None and stop >= image.end
                if has_ended and not is_rest:  # of a block that the image has a part of, the rest is zeros
                    stop = min(start + -(-(stop - start) // self.unit) * self.unit, end)
                if stop > start:
                    yield _Item(start, stop - start, part, all_differ=is_rest and strict)
                elif part is not None:
                    image.release(part)
                if has_ended:
                    return

    def _count(self, extents: Iterator[Extent]) -> Iterator[Extent]:
        for extent in extents:
            self._extents += 1
            yield extent

    def _digests(self, image: Content, worker: Worker, item: _Item) -> bytes:
        """The digests of ITEM's blocks, laid end to end."""
        part, construction = item.part, self._indexes[0].construction
        zero = self._indexes[0].zero_digest
        assert part is not None
        try:
            padding = item.length - part.length
            pieces = image.load(part, worker)
            if self.unit > image.piece_size:
                return digest_of_block(chain(pieces, _zeros(padding)), construction, zero)
            digests = []
            for piece in pieces:
                whole = len(piece) - len(piece) % self.unit if padding else len(piece)
                if whole:
                    digests.append(block_digests(piece[:whole], construction, zero))
                if whole < len(piece):
                    digests.append(digest_of_block(chain([piece[whole:]], _zeros(padding)), construction, zero))
            return b"".join(digests)
        finally:
            image.release(part)

    def _of_indexes(self, strict: bool, progress: Progress | None) -> Generator[Located, None, None]:
        """Two indexes. Where they end at different offsets, zeros stand for what one of them has not."""
        short, long = sorted(range(2), key=lambda which: self._ends[which])
        one, other = (_Cursor(self._indexes[which], self._start) for which in (short, long))
        end, last = self._ends[short], self._ends[long]
        at = differs_to = self._start
        common = end if end == last else end - (end - self._start) % self.unit
        while at < common:
            number = min(one.ready(), other.ready(), -(-(common - at) // self.unit))
            length = min(number * self.unit, common - at)
            yield from self._blocks(at, length, one.take(number), other.take(number))
            at += length
            yield at, 0
            self._done = at - self._start
            if progress:
                progress.advance(self._done)
        if at < end:
            length = min(self.unit, last - at)
            if self._cut_block_differs(at, end - at, one.take(1), length, other.take(1)):
                yield at, length
                differs_to = at + length
        if end < last:
            yield from self._rest(other, last, max(end, differs_to) if strict else None)

    def _cut_block_differs(
        self, at: int, length: int, digest: bytes | None, other_length: int, other_digest: bytes | None
    ) -> bool:
        """Whether the block AT an offset, of which one index has only LENGTH bytes, differs. Raises RefusedError."""
        is_zero = digest in (None, self._of_zeros(length))
        other_is_zero = other_digest in (None, self._of_zeros(other_length))
        if not is_zero and not other_is_zero:
            raise RefusedError(
                f"{' and '.join(self.names)} end at different offsets, the shorter one within a block: whether that"
                " differs can't be told without an image",
                offset=at,
            )
        return is_zero != other_is_zero

    def _rest(self, cursor: _Cursor, end: int, strict_from: int | None) -> Iterator[Located]:
        """What the index of CURSOR has up to END, and the other side has not. STRICT_FROM: from there all differs."""
        if strict_from is not None:
            yield strict_from, end - strict_from
            return
        while cursor.at < end:
            at, number = cursor.at, cursor.ready()
            yield from self._blocks(at, min(number * self.unit, end - at), None, cursor.take(number))
            yield min(cursor.at, end), 0

    def _differing(self, start: int, length: int, found: bytes | None, known: _Cursor | None) -> Iterator[Range]:
        """The blocks of LENGTH bytes from START with the digests FOUND (None: zeros) that differ from what is KNOWN.

        KNOWN: None for zeros.
        """
        at, end = start, start + length
        size = self._indexes[0].digest_size
        while at < end:
            number = -(-(end - at) // self.unit)
            if known is not None:
                number = min(number, known.ready())
            first = (at - start) // self.unit
            digests = None if found is None else found[first * size : (first + number) * size]
            bytes_ = min(number * self.unit, end - at)
            yield from self._blocks(at, bytes_, digests, None if known is None else known.take(number))
            at += bytes_

    def _blocks(self, start: int, length: int, one: bytes | None, other: bytes | None) -> Iterator[Range]:
        """The blocks of LENGTH bytes from START whose digests in ONE and OTHER differ. None: all are zeros."""
        if one == other:
            return
        size = self._indexes[0].digest_size
        one, other = (self._of_zeros(length) if digests is None else digests for digests in (one, other))
        for number in range(-(-length // self.unit)):
            if one[number * size : (number + 1) * size] != other[number * size : (number + 1) * size]:
                yield Range(start + number * self.unit, min(self.unit, length - number * self.unit))

    def _of_zeros(self, length: int) -> bytes:
        """The digests of the blocks of LENGTH zeros."""
        whole, rest = divmod(length, self.unit)
        algorithm = self._indexes[0].construction.algorithm
        return self._indexes[0].zero_digest * whole + (zero_digest(algorithm, rest) if rest else b"")


class _Item(NamedTuple):
    """Blocks of the image's content."""

    start: int
    length: int
    """Bytes, with the zeros that the last block is padded with. It may be shorter than a block all the same."""
    part: Part | None = None
    """What is loaded and hashed; None: zeros."""
    all_differ: bool = False
    """The index has nothing there, and that counts."""
    error: Exception | None = None
    """Why nothing follows."""

    @property
    def has_work(self) -> bool:
        """See pool.Item."""
        return self.part is not None

    @property
    def weight(self) -> int:
        """See pool.Item."""
        return 1


class _Cursor:
    """The blocks of an index, taken in order."""

    def __init__(self, index: Index, offset: int) -> None:
        self._runs = index.runs(offset // index.block_size)
        self._size = index.digest_size
        self._left = Blocks(0, None)
        self._block_size = index.block_size
        self.at = offset
        """Where the next block begins, in bytes of content."""

    def ready(self) -> int:
        """How many blocks can be taken: all of them zeros, or at most 1024 that are data."""
        if not self._left.number:
            self._left = next(self._runs)
        return self._left.number

    def take(self, number: int) -> bytes | None:
        """The digests of the next NUMBER blocks, as many as are ready; None: zeros."""
        self.ready()
        left, digests = self._left
        cut = None if digests is None else digests[: number * self._size]
        self.at += number * self._block_size
        self._left = Blocks(left - number, None if digests is None else digests[number * self._size :])
        return cut


def _zeros(count: int) -> Iterator[memoryview]:
    for at in range(0, count, len(_ZEROS)):
        yield _ZEROS[: count - at]
