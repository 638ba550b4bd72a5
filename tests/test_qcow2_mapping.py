"""The mapping against an obvious one, on tables made by hand; chains; what is read of tables, and kept."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable

import pytest
from qcow2_build import COMPRESSED as COMPRESSED_FLAG
from qcow2_build import COPIED, compressed_entry, header, image
from qcow2_build import ZERO as ZERO_FLAG

from imgsum.errors import FormatError, TruncatedError
from imgsum.source.layers import COMPRESSED, DATA, UNALLOCATED, ZERO, Run, resolve
from imgsum.source.qcow2.header import parse
from imgsum.source.qcow2.mapping import Mapping
from imgsum.source.tables import TableCache

SECTOR = 512
HUGE = 1 << 62  # files that nothing lies past the end of
OFFSET = 0x00FFFFFFFFFFFE00


class File:
    """Bytes of a file, and the reads that were made of it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self.raw[offset : offset + length]


def mapping(
    raw: bytes | File,
    file_size: int = HUGE,
    data_size: int | None = None,
    cache: TableCache | None = None,
    backed: bool = True,
) -> Mapping:
    file = raw if isinstance(raw, File) else File(raw)
    data_size = file_size if data_size is None else data_size
    return Mapping(parse(file.read), file.read, file_size, data_size, cache or TableCache(), "image", backed=backed)


def sectors(runs: Iterable[Run], start: int, end: int) -> list[tuple[int, int, int]]:
    """(kind, host, stored) of each sector, having checked that RUNS tile START..END."""
    answer = []
    at = start
    for run in runs:
        assert run.start == at
        assert run.length > 0
        at = run.end
        for offset in range(0, run.length, SECTOR):
            host = run.host + offset if run.kind == DATA else run.host
            answer.append((run.kind, host, run.stored))
    assert at == end
    return answer


def expected(raw: bytes, at: int, cluster_bits: int, extended: bool) -> tuple[int, int, int]:
    """(kind, host, stored) of the sector at AT: the specification's sentences, one after the other."""
    cluster_size = 1 << cluster_bits
    width = 16 if extended else 8
    per_table = cluster_size // width
    cluster = at // cluster_size
    (l1_entry,) = struct.unpack_from(">Q", raw, 3 * cluster_size + cluster // per_table * 8)
    if l1_entry & OFFSET == 0:
        return UNALLOCATED, 0, 0
    place = (l1_entry & OFFSET) + cluster % per_table * width
    (entry,) = struct.unpack_from(">Q", raw, place)
    if entry & COMPRESSED_FLAG:
        x = 62 - (cluster_bits - 8)
        host = entry % (1 << x)
        additional = (entry % (1 << 62)) >> x
        return COMPRESSED, host, 512 - host % 512 + additional * 512
    inside = at % cluster_size
    host = (entry & OFFSET) + inside
    if not extended:
        if entry & ZERO_FLAG:
            return ZERO, 0, 0
        return (DATA, host, 0) if entry & OFFSET else (UNALLOCATED, 0, 0)
    (bitmap,) = struct.unpack_from(">Q", raw, place + 8)
    subcluster = inside // (cluster_size // 32)
    if bitmap >> (32 + subcluster) & 1:
        return ZERO, 0, 0
    return (DATA, host, 0) if bitmap >> subcluster & 1 else (UNALLOCATED, 0, 0)


def random_entries(rng: random.Random, count: int, cluster_bits: int, extended: bool) -> list[int]:
    """COUNT entries (pairs of words if EXTENDED) in runs of 1 to 200 that are alike, or nearly so."""
    cluster_size = 1 << cluster_bits
    words: list[int] = []
    while len(words) < count * (2 if extended else 1):
        kind = rng.choice(("none", "zero", "zero at", "data", "data", "data", "compressed", "odd"))
        host = rng.randrange(1, 1 << 20) * cluster_size
        flags = rng.choice((0, COPIED))
        for number in range(rng.choice((1, 1, 2, 3, 31, 32, 33, 34, 200))):
            bitmap = 0
            if kind == "none":
                entry = flags if rng.random() < 0.05 else 0
            elif kind == "zero":
                entry, bitmap = ZERO_FLAG, 0xFFFFFFFF << 32
            elif kind == "zero at":
                entry, bitmap = host + number * cluster_size | ZERO_FLAG | flags, 0xFFFFFFFF << 32
            elif kind == "data":
                entry, bitmap = host + number * cluster_size | (flags if rng.random() < 0.99 else 0), 0xFFFFFFFF
            elif kind == "compressed":
                entry = compressed_entry(host + rng.randrange(1000), rng.randrange(1, cluster_size), cluster_bits)
                bitmap = rng.getrandbits(64)  # means nothing
            else:
                entry = rng.randrange(1 << 20) * cluster_size | flags | rng.choice((0, ZERO_FLAG, 0x3E << 56, 0x1FC))
                allocated = rng.getrandbits(32) & rng.getrandbits(32) if entry & OFFSET else 0
                bitmap = (rng.getrandbits(32) & ~allocated) << 32 | allocated
            if extended:
                entry &= ~ZERO_FLAG
            words += [entry, bitmap] if extended else [entry]
    return words[: count * (2 if extended else 1)]


@pytest.mark.parametrize(
    ("cluster_bits", "extended"), [(9, False), (12, False), (14, False), (14, True), (16, True), (16, False)]
)
@pytest.mark.parametrize("seed", range(8))
def test_random_tables(cluster_bits: int, extended: bool, seed: int) -> None:
    rng = random.Random(f"{cluster_bits} {extended} {seed}")
    cluster_size = 1 << cluster_bits
    per_table = cluster_size // (16 if extended else 8)
    count = min(per_table, 600)
    tables = {number: random_entries(rng, count, cluster_bits, extended) for number in (4, 5, 6)}
    l1 = [rng.choice((0, 4, 5, 6)) * cluster_size | rng.choice((0, COPIED, 0x1FF)) for _ in range(5)]
    size = rng.randrange(4 * per_table * cluster_size, 5 * per_table * cluster_size) // SECTOR * SECTOR
    raw = image(
        tables[4],
        {number: struct.pack(f">{len(words)}Q", *words) for number, words in tables.items()},
        cluster_bits,
        l1,
        size=size,
        l1_size=5,
        incompatible_features=0x10 if extended else 0,
    )
    tested, alone = mapping(raw), mapping(raw, backed=False)
    for _ in range(60):
        start = rng.randrange(0, size, SECTOR)
        if rng.random() < 0.6:
            start = start // (per_table * cluster_size) * per_table * cluster_size + rng.randrange(count) * cluster_size
        start = min(start, size - SECTOR)
        length = rng.choice((SECTOR, cluster_size, 3 * cluster_size, 300 * cluster_size, 3 * cluster_size + SECTOR))
        end = min(start + length, size, start + (4 << 20))
        want = [expected(raw, at, cluster_bits, extended) for at in range(start, end, SECTOR)]
        assert sectors(tested.runs(start, end), start, end) == want
        got = [(kind or ZERO, *rest) for kind, *rest in sectors(alone.runs(start, end), start, end)]
        assert got == [(kind or ZERO, *rest) for kind, *rest in want]  # UNALLOCATED is 0


def test_alike_entries_are_one_run() -> None:
    words = [COPIED | (16 + number) << 16 for number in range(4096)] + [0] * 1000 + [ZERO_FLAG] * 3000
    raw = image(words, size=512 << 20)
    runs = list(mapping(raw).runs(0, 512 << 20))
    middle = 4096 << 16
    assert runs == [
        Run(0, middle, DATA, 16 << 16),
        Run(middle, 1000 << 16, UNALLOCATED),
        Run(middle + (1000 << 16), 3000 << 16, ZERO),
        Run(middle + (4000 << 16), 96 << 16, UNALLOCATED),
    ]


def test_flags_do_not_break_a_run() -> None:
    words = [16 << 16, COPIED | 17 << 16, 18 << 16, COPIED | 19 << 16]
    assert list(mapping(image(words, size=4 << 16)).runs(0, 4 << 16)) == [Run(0, 4 << 16, DATA, 16 << 16)]


def test_a_run_ends_where_the_range_does() -> None:
    words = [COPIED | (16 + number) << 16 for number in range(16)]
    assert list(mapping(image(words)).runs(70000, 80000)) == [Run(70000, 10000, DATA, (16 << 16) + 70000)]


def test_past_the_size_there_are_zeros() -> None:
    tested = mapping(image([16 << 16, 17 << 16], size=(1 << 16) + 512))
    assert list(tested.runs(0, 1 << 20)) == [
        Run(0, (1 << 16) + 512, DATA, 16 << 16),
        Run((1 << 16) + 512, (1 << 20) - (1 << 16) - 512, ZERO),
    ]


@pytest.mark.parametrize(("cluster_bits", "length"), [(9, 600), (16, 70000), (21, 3000000)])
def test_a_compressed_cluster(cluster_bits: int, length: int) -> None:
    size = 1 << cluster_bits
    tested = mapping(image([compressed_entry(12345, length, cluster_bits)], cluster_bits=cluster_bits, size=size))
    (run,) = tested.runs(0, size)
    end = (12345 + length + 511) // 512 * 512  # the last sector is padded
    assert run == Run(0, size, COMPRESSED, 12345, end - 12345)
    assert list(tested.runs(100, 300)) == [Run(100, 200, COMPRESSED, 12345, end - 12345)]


@pytest.mark.parametrize(
    ("fields", "words", "message"),
    [
        ({}, [0x1234200 | COPIED], "L2 entry 0x8000000001234200: the cluster is not at a multiple"),
        ({}, [0x1234200 | ZERO_FLAG], "the cluster is not at a multiple"),
        ({"version": 2}, [ZERO_FLAG], "zero clusters need version 3"),
        ({"incompatible_features": 0x10}, [0, 1], "subcluster bitmap 0x0000000000000001 contradicts"),
        ({"incompatible_features": 0x10}, [1 << 16, 1 << 33 | 2], "subcluster bitmap 0x0000000200000002 contradicts"),
        ({"incompatible_features": 4}, [1 << 16], "the external data is not where the content is"),
        ({"incompatible_features": 4}, [COMPRESSED_FLAG], "compressed, in an image with an external data file"),
        ({"incompatible_features": 4}, [COPIED, COPIED], "the external data is not where the content is"),
    ],
)
def test_bad_entries(fields: dict[str, int], words: list[int], message: str) -> None:
    tested = mapping(image(words, **fields))
    with pytest.raises(FormatError) as caught:
        list(tested.runs(0, 1 << 20))
    assert message in caught.value.reason
    assert caught.value.name == "image"
    assert caught.value.offset is not None


def test_a_bad_l1_entry() -> None:
    tested = mapping(image([], l1=[0x42A00 | COPIED]))
    with pytest.raises(FormatError, match="L1 entry 0 is 0x8000000000042a00") as caught:
        list(tested.runs(4096, 8192))
    assert caught.value.offset == 4096


def test_external_data_is_where_the_content_is() -> None:
    words = [COPIED, 1 << 16 | COPIED, 0, 3 << 16 | ZERO_FLAG, ZERO_FLAG | COPIED, 5 << 16]
    tested = mapping(image(words, incompatible_features=4, size=6 << 16))
    assert [(run.start >> 16, run.length >> 16, run.kind, run.host) for run in tested.runs(0, 6 << 16)] == [
        (0, 2, DATA, 0),
        (2, 1, UNALLOCATED, 0),
        (3, 2, ZERO, 0),
        (5, 1, DATA, 5 << 16),
    ]


def test_copied_without_an_offset_is_unallocated() -> None:
    assert list(mapping(image([COPIED], size=1 << 16)).runs(0, 1 << 16)) == [Run(0, 1 << 16, UNALLOCATED)]


class TestTruncated:
    """Whatever the content needs must be in the file."""

    words = (COPIED | 5 << 16, COPIED | 6 << 16)

    def test_all_there(self) -> None:
        assert len(list(mapping(image(self.words, size=2 << 16), 7 << 16).runs(0, 2 << 16))) == 1

    @pytest.mark.parametrize(("size", "offset"), [((7 << 16) - 1, (2 << 16) - 1), (6 << 16, 1 << 16), (5 << 16, 0)])
    def test_data(self, size: int, offset: int) -> None:
        with pytest.raises(TruncatedError, match=f"truncated: the file ends at byte {size}") as caught:
            list(mapping(image(self.words, size=2 << 16), size).runs(0, 2 << 16))
        assert caught.value.offset == offset

    def test_the_end_of_the_last_cluster_is_not_content(self) -> None:
        tested = mapping(image(self.words, size=(1 << 16) + 512), (6 << 16) + 512)
        assert [run.kind for run in tested.runs(0, (1 << 16) + 512)] == [DATA]

    @pytest.mark.parametrize("size", [4 << 16, (4 << 16) + 15])
    def test_l2_table(self, size: int) -> None:
        file = File(image(self.words, size=2 << 16)[:size])
        with pytest.raises(TruncatedError, match="in the L2 table"):
            list(mapping(file, size).runs(0, 2 << 16))

    def test_the_part_of_an_l2_table_that_is_needed(self) -> None:
        size = (4 << 16) + 16
        file = File(image([0, ZERO_FLAG], size=2 << 16)[:size])
        assert [run.kind for run in mapping(file, size).runs(0, 2 << 16)] == [UNALLOCATED, ZERO]

    def test_l1_table(self) -> None:
        size = (3 << 16) + 7
        with pytest.raises(TruncatedError, match="in the L1 table"):
            list(mapping(File(image([])[:size]), size).runs(0, 512))

    def test_an_offset_that_no_file_has(self) -> None:
        tested = mapping(image([0x00FFFFFFFFFF0000 | COPIED, 0x40FFFFFFFFFF0000]), 1 << 40)
        with pytest.raises(TruncatedError):
            list(tested.runs(0, 1 << 16))

    def test_compressed(self) -> None:
        tested = mapping(image([compressed_entry(5 << 16, 3000)]), (5 << 16) + 1)
        assert next(iter(tested.runs(0, 1 << 16))).kind == COMPRESSED  # decompressing shows whether it suffices
        with pytest.raises(TruncatedError, match="compressed"):
            list(mapping(image([compressed_entry(5 << 16, 3000)]), 5 << 16).runs(0, 1 << 16))


class Flat:
    """A layer of the runs that it is given, as (length, kind) from 0 on."""

    def __init__(self, size: int, *runs: tuple[int, int]) -> None:
        self.size = size
        self.kinds: list[int] = [kind for length, kind in runs for _ in range(length)]
        self.asked: list[tuple[int, int]] = []

    def runs(self, start: int, end: int) -> list[Run]:
        self.asked.append((start, end))
        kinds = [self.kinds[at] if at < self.size else ZERO for at in range(start, end)]
        return [Run(start + at, 1, kind, start + at) for at, kind in enumerate(kinds)]


class TestChains:
    def resolved(self, *layers: Flat, end: int) -> list[tuple[int, int]]:
        runs = list(resolve(layers, 0, end))
        assert [run.start for _, run in runs] == list(range(end))
        return [(depth, run.kind) for depth, run in runs]

    def test_each_range_from_the_first_that_has_it(self) -> None:
        top = Flat(4, (1, DATA), (3, UNALLOCATED))
        middle = Flat(4, (1, UNALLOCATED), (1, ZERO), (2, UNALLOCATED))
        base = Flat(4, (3, DATA), (1, UNALLOCATED))
        assert self.resolved(top, middle, base, end=4) == [(0, DATA), (1, ZERO), (2, DATA), (2, ZERO)]

    def test_a_short_middle_hides_a_longer_base(self) -> None:
        top, middle, base = Flat(4, (4, UNALLOCATED)), Flat(2, (2, UNALLOCATED)), Flat(4, (4, DATA))
        assert self.resolved(top, middle, base, end=4) == [(2, DATA), (2, DATA), (1, ZERO), (1, ZERO)]

    def test_nothing_is_asked_that_is_not_needed(self) -> None:
        top, base = Flat(4, (2, DATA), (2, UNALLOCATED)), Flat(4, (4, DATA))
        self.resolved(top, base, end=4)
        assert base.asked == [(2, 3), (3, 4)]

    def test_deep(self) -> None:
        layers = [Flat(1, (1, UNALLOCATED)) for _ in range(5000)]  # no recursion
        assert self.resolved(*layers, end=1) == [(4999, ZERO)]


def tables_of(count: int) -> bytes:
    """An image of COUNT L2 tables, each of one data cluster and then a hole."""
    l1 = [(4 + number) << 16 for number in range(count)]
    table = struct.pack(">Q", 1 << 40)
    return image([1 << 40], {4 + number: table for number in range(count)}, l1=l1, size=count << 29, l1_size=count)


class TestTables:
    def test_one_cluster_needs_two_reads(self) -> None:
        file = File(tables_of(20))
        tested = mapping(file)
        file.reads.clear()
        list(tested.runs((7 << 29) + 5, (7 << 29) + 6))
        assert [offset for offset, _ in file.reads] == [3 << 16, 11 << 16]
        assert max(length for _, length in file.reads) <= 64 << 10

    def test_a_second_look_needs_none(self) -> None:
        file = File(tables_of(20))
        tested = mapping(file)
        list(tested.runs(0, tested.size))
        file.reads.clear()
        list(tested.runs(0, tested.size))
        assert file.reads == []

    def test_what_is_kept_is_bounded(self) -> None:
        file = File(tables_of(40))
        cache = TableCache(limit=256 << 10)
        tested = mapping(file, cache=cache)
        for _ in range(2):
            list(tested.runs(0, tested.size))
        kept = sum(8 * len(entries) for entries, _ in cache._tables.values())
        assert 128 << 10 < kept <= 256 << 10
        assert len(file.reads) > 40 * 2  # so the second pass had to read again

    def test_unallocated_tables_are_passed_over(self) -> None:
        head = header(size=1 << 50, l1_size=1 << 21)
        file = File(head.ljust(3 << 16, b"\0") + bytes(8 << 21))
        tested = mapping(file)
        runs = list(tested.runs(0, 1 << 50))
        assert {run.kind for run in runs} == {UNALLOCATED}
        assert len(runs) == (8 << 21) // (32 << 10)  # one for each slice of the L1 table

    def test_runs_come_lazily(self) -> None:
        file = File(tables_of(200))
        runs = iter(mapping(file).runs(0, 200 << 29))
        next(runs)
        assert len(file.reads) < 10

    @pytest.mark.parametrize("extended", [False, True])
    def test_an_l1_table_that_is_an_l2_table_too(self, extended: bool) -> None:
        """So that one place is read as two kinds of tables, whose entries and slices differ."""
        size = 64 << 20
        raw = image([], l1=[3 << 16 | COPIED] * 64, size=size, l1_size=512, incompatible_features=extended << 4)
        want = [expected(raw, at, 16, extended) for at in range(0, size, SECTOR)]
        assert sectors(mapping(raw).runs(0, size), 0, size) == want


def test_subclusters_that_alternate_are_one_run_without_a_backing_file() -> None:
    words = [0, 0x5555555500000000] * 100
    raw = image(words, size=100 << 16, incompatible_features=0x10)
    assert list(mapping(raw, backed=False).runs(0, 100 << 16)) == [Run(0, 100 << 16, ZERO)]
    assert len(list(mapping(raw).runs(0, 100 << 16))) == 3200
    words = [5 << 16, 0xAAAAAAAA00000001]
    raw = image(words, size=1 << 16, incompatible_features=0x10)
    assert list(mapping(raw, backed=False).runs(0, 1 << 16)) == [Run(0, 2048, DATA, 5 << 16), Run(2048, 63488, ZERO)]
