"""Runs of extents, against a map with one entry for each byte."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import GIB, KIB, MIB, TIB

from imgsum.extent import Extent, align, coalesce, tile

SMALL = st.integers(0, 40)
ANY_EXTENTS = st.lists(st.builds(Extent, SMALL, SMALL, st.booleans()), max_size=12)
"""What a source may answer: extents in no order, overlapping, empty, missing, outside of the range."""


@st.composite
def runs(draw: st.DrawFn) -> list[Extent]:
    """Extents that exactly tile a range, from any start."""
    at = draw(SMALL)
    run = []
    for length, zero in draw(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=15)):
        run.append(Extent(at, length, zero))
        at += length
    return run


def byte_map(run: Iterable[Extent]) -> dict[int, bool]:
    """offset -> zero, of extents that must not overlap."""
    seen: dict[int, bool] = {}
    for extent in run:
        for at in range(extent.start, extent.end):
            assert at not in seen
            seen[at] = extent.zero
    return seen


def assert_tiles(run: list[Extent], start: int, end: int) -> None:
    at = start
    for extent in run:
        assert extent.start == at
        assert extent.length > 0
        at = extent.end
    assert at == end


def bounds(run: list[Extent]) -> tuple[int, int]:
    return (run[0].start, run[-1].end) if run else (0, 0)


def test_end() -> None:
    assert Extent(5, 7, True).end == 12


class TestTile:
    @given(ANY_EXTENTS, SMALL, SMALL)
    def test_tiles_whatever_was_answered(self, answer: list[Extent], start: int, length: int) -> None:
        end = start + length
        run = list(tile(answer, start, end))
        assert_tiles(run, start, end)
        for at, zero in byte_map(run).items():
            if zero:  # somebody must have said so
                assert any(e.zero and e.start <= at < e.end for e in answer)

    @given(runs())
    def test_leaves_a_good_answer_alone(self, run: list[Extent]) -> None:
        assert list(tile(run, *bounds(run))) == run

    @pytest.mark.parametrize(
        ("answer", "tiled"),
        [
            ([], [Extent(0, 100, False)]),
            ([Extent(0, 60, True)], [Extent(0, 60, True), Extent(60, 40, False)]),  # short
            ([Extent(0, 900, True)], [Extent(0, 100, True)]),  # past the end
            ([Extent(40, 60, True)], [Extent(0, 40, False), Extent(40, 60, True)]),  # begins late
            ([Extent(0, 0, True), Extent(0, 100, False)], [Extent(0, 100, False)]),  # empty
            ([Extent(0, 50, True)] * 2, [Extent(0, 50, True), Extent(50, 50, False)]),  # repeated
            ([Extent(0, 50, False), Extent(30, 70, True)], [Extent(0, 50, False), Extent(50, 50, True)]),
            ([Extent(100, 20, True)], [Extent(0, 100, False)]),  # all outside
        ],
    )
    def test_lies(self, answer: list[Extent], tiled: list[Extent]) -> None:
        assert list(tile(answer, 0, 100)) == tiled

    def test_asks_no_further_than_the_end(self) -> None:
        asked = itertools.count()
        answer = (Extent(10 * i, 10, False) for i in asked)
        assert len(list(tile(answer, 0, 100))) == 10
        assert next(asked) == 10


class TestAlign:
    @given(runs(), st.sampled_from([1, 2, 4, 8, 16, 64]))
    @example([Extent(0, 3, True), Extent(3, 1, False), Extent(4, 4, True)], 4)
    @example([Extent(1, 1, False), Extent(2, 62, True)], 64)
    def test_a_block_is_zero_when_all_of_it_is(self, run: list[Extent], block_size: int) -> None:
        start, end = bounds(run)
        zero = byte_map(run)
        aligned = list(align(run, block_size, start, end))
        assert_tiles(aligned, start, end)
        for extent in aligned:
            assert (extent.start - start) % block_size == 0
            assert extent.end == end or (extent.end - start) % block_size == 0
        answer = byte_map(aligned)
        for at in range(start, end):
            first = start + (at - start) // block_size * block_size
            assert answer[at] == all(zero[i] for i in range(first, min(first + block_size, end)))

    def test_asks_for_one_block_at_a_time(self) -> None:
        asked = itertools.count()
        run = (Extent(48 * KIB * i, 48 * KIB, i % 2 == 0) for i in asked)
        aligned = align(run, 64 * KIB, 0, TIB)
        next(aligned)
        assert next(asked) <= 3


class TestCoalesce:
    @given(runs(), st.integers(1, 30), st.integers(1, 30))
    def test_pieces(self, run: list[Extent], most: int, most_zero: int) -> None:
        pieces = list(coalesce(run, most, most_zero))
        assert_tiles(pieces, *bounds(run))
        assert byte_map(pieces) == byte_map(run)
        for piece, following in itertools.pairwise(pieces):
            limit = most_zero if piece.zero else most
            assert piece.length == limit or piece.zero != following.zero
        assert all(piece.length <= (most_zero if piece.zero else most) for piece in pieces)

    def test_a_full_piece_does_not_wait(self) -> None:
        asked = itertools.count()
        run = (Extent(64 * KIB * i, 64 * KIB, False) for i in asked)
        assert next(coalesce(run, MIB, GIB)) == Extent(0, MIB, False)
        assert next(asked) == 16

    def test_one_long_extent_is_cut(self) -> None:
        assert list(coalesce([Extent(0, 5 * MIB, False)], 2 * MIB, GIB)) == [
            Extent(0, 2 * MIB, False),
            Extent(2 * MIB, 2 * MIB, False),
            Extent(4 * MIB, MIB, False),
        ]


def test_many_extents_take_no_memory() -> None:
    def fragments(count: int) -> Iterator[Extent]:
        for i in range(count):
            yield Extent(4 * KIB * i, 4 * KIB, i % 2 == 0)

    count = 100_000
    end = count * 4 * KIB
    tracemalloc.start()
    try:
        for _ in coalesce(align(tile(fragments(count), 0, end), 64 * KIB, 0, end), MIB, GIB):
            pass
        assert tracemalloc.get_traced_memory()[1] < 64 * KIB
    finally:
        tracemalloc.stop()
