"""Extents: which parts of an image are certainly zero. Pure, lazy functions on runs of extents.

Every run is in order and exactly tiles its range. Runs are iterators, and are never collected in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Extent(NamedTuple):
    """`length` > 0 bytes of content from `start`. `zero` only when a guest certainly reads zeros there."""

    start: int
    length: int
    zero: bool

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + self.length


def tile(extents: Iterable[Extent], start: int, end: int) -> Iterator[Extent]:
    """EXTENTS in the form that all other code expects: in order, and exactly tiling START..END.

    A source may answer with gaps, overlaps, or more than was asked for. A gap is data; in an overlap the first extent
    counts; what is outside the range is dropped. So only areas reported as zero are zero.
    """
    at = start
    for extent in extents:
        if extent.start > at:
            gap_end = min(extent.start, end)
            if gap_end > at:
                yield Extent(at, gap_end - at, False)
                at = gap_end
        extent_end = min(extent.end, end)
        if extent_end > at:
            yield Extent(at, extent_end - at, extent.zero)
            at = extent_end
        if at >= end:
            return
    if at < end:
        yield Extent(at, end - at, False)


def align(extents: Iterable[Extent], block_size: int, start: int, end: int) -> Iterator[Extent]:
    """EXTENTS, which tile START..END, with every boundary moved to a block boundary.

    Blocks are counted from START; the last one may be shorter. A block is zero when all of it is, and data when any
    of it is, so zero extents shrink and data extents grow. Neighbours of one kind are not merged.
    """
    done = start  # all before it was yielded; on a block boundary
    dirty = False  # the block at `done` begins in an extent seen before, and has data
    for extent in extents:
        if dirty and extent.zero:
            block_end = min(done + block_size, end)
            if extent.end < block_end:
                continue
            yield Extent(done, block_end - done, False)
            done, dirty = block_end, False
        whole = end if extent.end >= end else start + (extent.end - start) // block_size * block_size
        if whole > done:
            yield Extent(done, whole - done, extent.zero)
            done, dirty = whole, False
        if not extent.zero and extent.end > done:
            dirty = True


def coalesce(extents: Iterable[Extent], maximum: int, maximum_zero: int) -> Iterator[Extent]:
    """EXTENTS, with neighbours of one kind merged, up to MAXIMUM bytes of data and MAXIMUM_ZERO bytes of zeros.

    A merged extent is yielded as soon as it is full, not at the end of a long run.
    """
    start = length = 0
    zero = False
    for extent in extents:
        if length and extent.zero != zero:
            yield Extent(start, length, zero)
            length = 0
        if not length:
            start, zero = extent.start, extent.zero
        length += extent.length
        limit = maximum_zero if zero else maximum
        while length >= limit:
            yield Extent(start, limit, zero)
            start, length = start + limit, length - limit
    if length:
        yield Extent(start, length, zero)


def below(extents: Iterable[Extent], limit: int) -> Iterator[Extent]:
    """EXTENTS, with everything from offset LIMIT on as data."""
    for start, length, zero in extents:
        inside = min(length, max(0, limit - start)) if zero else length
        if inside:
            yield Extent(start, inside, zero)
        if inside < length:
            yield Extent(start + inside, length - inside, False)


def overlay(first: Iterable[Extent], second: Iterable[Extent]) -> Iterator[tuple[int, int, tuple[bool, bool]]]:
    """Two runs that tile the same range, laid over each other: start, length, and whether each is zero there."""
    one, other = iter(first), iter(second)
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None:
        start, end = max(a.start, b.start), min(a.end, b.end)
        yield start, end - start, (a.zero, b.zero)
        if a.end == end:
            a = next(one, None)
        if b.end == end:
            b = next(other, None)
