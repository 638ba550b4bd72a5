"""Images through the pipeline, from sources that are slow, fail, or lie: the right checksum, or none."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from conftest import HANG
from fakes import FakeReader, FakeSource, fail_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import KIB, MIB

from imgsum import Checksum, OpenOptions, checksum
from imgsum.engine.checksum import Task, checksum_tasks
from imgsum.errors import ChangedError, Error, OpenError, ReadError
from imgsum.extent import Extent
from imgsum.hash import blkhash
from imgsum.hash.blocks import block_digests, is_zero

BLOCK = 4 * KIB
SMALL = OpenOptions(request_size=BLOCK)
"""Many pieces from a small image."""

Opens = dict[str, Any]


def small_checksum(name: str = "fake", **options: Any) -> Checksum:
    return checksum(name, block_size=BLOCK, options=SMALL, **options)


def expected(content: bytes) -> str:
    return reference.blkhash(content, "sha256", BLOCK)


# --- slow ---------------------------------------------------------------------------------------------------------


def test_random_delays_do_not_matter(opens: Opens) -> None:
    content = reference.content("40k:R 40k:- 40k:R 1:R")
    for seed in range(100):
        random.seed(seed)
        opens["fake"] = FakeSource(content, before_read=lambda offset, length: time.sleep(random.random() / 1000))
        assert small_checksum().hexdigest == expected(content)


def test_queues_are_bounded_while_block_0_is_slow(opens: Opens) -> None:
    content = reference.content("4m:R")
    told: list[int] = []
    reads_before_the_first: list[int] = []
    release = threading.Semaphore(0)

    def extents() -> Iterator[Extent]:
        for at in range(0, len(content), BLOCK):
            told.append(at)
            yield Extent(at, BLOCK, False)

    def before_read(offset: int, length: int) -> None:
        if offset:
            release.release()
            return
        while release.acquire(timeout=0.3):  # until nobody else makes progress any more
            pass
        reads_before_the_first.extend([len(source.reads), len(told)])

    source = opens["fake"] = FakeSource(content, extents(), before_read)
    assert small_checksum().hexdigest == expected(content)
    assert len(told) == 1024
    assert all(count <= 66 for count in reads_before_the_first), reads_before_the_first


# --- failing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, BLOCK, 100_000, 399_999])
def test_a_failed_read_is_an_error_with_its_offset(bad: int, opens: Opens, no_leak: None) -> None:
    source = opens["fake"] = FakeSource(reference.content("400000:R"), before_read=fail_at([bad]))
    with pytest.raises(ReadError) as caught:
        small_checksum()
    assert caught.value.offset == bad
    assert str(caught.value) == f"fake: input/output error at offset {bad}"
    assert source.closed


def test_the_first_error_in_content_order_wins(opens: Opens) -> None:
    later_failed = threading.Event()

    def before_read(offset: int, length: int) -> None:
        if offset == 20 * BLOCK:
            later_failed.set()
            raise ReadError("later in the content, earlier in time", offset=offset)
        if offset == 10 * BLOCK:
            assert later_failed.wait(HANG) or True
            time.sleep(0.01)
            raise ReadError("first", offset=offset)

    opens["fake"] = FakeSource(reference.content("400k:R"), before_read=before_read)
    with pytest.raises(ReadError, match=f"fake: first at offset {10 * BLOCK}"):
        small_checksum()


def test_a_failed_read_before_failed_extents_wins(opens: Opens) -> None:
    def extents() -> Iterator[Extent]:
        yield Extent(0, 20 * BLOCK, False)
        raise ReadError("no extents", offset=20 * BLOCK)

    def before_read(offset: int, length: int) -> None:
        if offset == 5 * BLOCK:
            time.sleep(0.01)
            raise ReadError("no data", offset=offset)

    opens["fake"] = FakeSource(bytes(400 * KIB), extents(), before_read)
    with pytest.raises(ReadError, match="no data"):
        small_checksum()
    opens["fake"] = FakeSource(bytes(400 * KIB), extents())
    with pytest.raises(ReadError, match="no extents"):
        small_checksum()


def test_after_an_error_little_more_is_read(opens: Opens) -> None:
    source = opens["fake"] = FakeSource(reference.content("8m:R"), before_read=fail_at([0]))
    with pytest.raises(ReadError):
        small_checksum()
    assert len(source.reads) <= 66


@pytest.mark.parametrize("kind", [ReadError, OSError, MemoryError])
def test_a_reader_that_can_not_be_made(kind: type[Exception], opens: Opens, no_leak: None) -> None:
    source = opens["fake"] = FakeSource(bytes(400 * KIB))
    source.reader = lambda: _raise(kind("no more connections"))  # type: ignore[method-assign]
    with pytest.raises(Error, match="no more connections"):
        small_checksum()
    assert source.closed


def test_what_nobody_foresaw_is_an_error_of_one_image(opens: Opens) -> None:
    opens["good"] = FakeSource(bytes(BLOCK))
    opens["bad"] = FakeSource(bytes(BLOCK), before_read=lambda offset, length: _raise(ZeroDivisionError("oops")))
    opens["worse"] = ValueError("not even opened")
    results = run(["bad", "worse", "good"])
    assert [type(result) for result in results] == [Error, Error, Checksum]
    assert str(results[0]).startswith("bad: internal error: ZeroDivisionError('oops')")
    assert str(results[1]).startswith("worse: internal error: ValueError('not even opened')")


def test_few_images_are_open_behind_a_slow_one(opens: Opens) -> None:
    """Each may be a chain of 200 files, or a qemu-nbd."""
    open_at_once: list[int] = []
    names = [f"image-{i}" for i in range(40)]
    sources = [FakeSource(b"x" * BLOCK) for _ in names]
    opens.update(zip(names, sources, strict=True))

    def slowly(offset: int, length: int) -> None:
        time.sleep(0.2)
        open_at_once.append(sum(bool(source.readers) and not source.closed for source in sources))

    sources[0].before_read = slowly
    assert all(isinstance(result, Checksum) for result in run(names))
    assert open_at_once[0] <= 5


def _raise(error: Exception) -> Any:
    raise error


def test_a_change_that_is_noticed_at_the_end(opens: Opens) -> None:
    source = opens["fake"] = FakeSource(bytes(400 * KIB))
    source.changed = ChangedError("the file was modified while it was read")
    with pytest.raises(ChangedError, match=r"^fake: the file was modified"):
        small_checksum()
    assert source.closed


# --- lying --------------------------------------------------------------------------------------------------------

LIE_UNIT = 1 * KIB


@st.composite
def contents_and_answers(draw: st.DrawFn) -> tuple[bytes, list[Extent]]:
    """Content of data and zeros, and extents that are wrong in every way but one: zero is zero."""
    kinds = draw(st.lists(st.tuples(st.integers(1, 12), st.sampled_from("A-B0")), min_size=1, max_size=8))
    content = reference.content(" ".join(f"{n}k:{kind}" for n, kind in kinds) + draw(st.sampled_from(["", " 100:C"])))
    spots = st.integers(0, len(content) // LIE_UNIT + 4)
    answer = []
    for start, length in draw(st.lists(st.tuples(spots, spots), max_size=12)):
        covered = content[start * LIE_UNIT : (start + length) * LIE_UNIT]
        zero = covered.count(0) == len(covered) and draw(st.booleans())
        answer.append(Extent(start * LIE_UNIT, length * LIE_UNIT, zero))
    return content, answer


@given(contents_and_answers())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_lies_about_extents_change_nothing(opens: Opens, case: tuple[bytes, list[Extent]]) -> None:
    content, answer = case
    opens["fake"] = FakeSource(content, answer)
    assert small_checksum().hexdigest == expected(content)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [Extent(0, 64 * KIB, True)],
        [Extent(0, 64 * KIB, True), Extent(64 * KIB, 100 * MIB, False)],
        [Extent(0, 0, True), Extent(0, 0, False), Extent(0, 64 * KIB, True), Extent(64 * KIB, 0, True)],
        [Extent(0, 64 * KIB, True)] * 5,
        [Extent(64 * KIB, 36 * KIB, False), Extent(0, 64 * KIB, True)],
        [Extent(0, 1, True), Extent(1, 64 * KIB, False)],
        [Extent(200 * KIB, 64 * KIB, True)],
    ],
    ids=["none", "short", "long", "empty", "repeated", "backwards", "inside", "outside"],
)
def test_kinds_of_lies(answer: list[Extent], opens: Opens) -> None:
    content = reference.content("64k:- 36k:R")
    opens["fake"] = FakeSource(content, answer)
    assert small_checksum().hexdigest == expected(content)


# --- what is read -------------------------------------------------------------------------------------------------


def test_zero_extents_are_never_read(opens: Opens) -> None:
    extents = [Extent(0, 64 * KIB, True), Extent(64 * KIB, 4 * KIB, False), Extent(68 * KIB, 932 * KIB, True)]
    source = opens["fake"] = FakeSource(reference.content("64k:- 4k:A 932k:-"), extents)
    result = small_checksum()
    assert result.hexdigest == expected(source.content)
    assert source.reads == [(64 * KIB, 4 * KIB)]
    assert result.stats.zero_bytes == 996 * KIB
    assert result.stats.bytes_read == 4 * KIB
    assert result.stats.requests == 1
    assert result.stats.extents == 3


def test_blocks_with_any_data_are_read_once(opens: Opens) -> None:
    content = b"".join(b"A" * 512 + bytes(7680) for _ in range(100))
    extents = [
        extent
        for at in range(0, len(content), 8192)
        for extent in (Extent(at, 512, False), Extent(at + 512, 7680, True))
    ]
    source = opens["fake"] = FakeSource(content, extents)
    assert small_checksum().hexdigest == expected(content)
    assert sorted(source.reads) == [(at, BLOCK) for at in range(0, len(content), 8192)]


def test_small_extents_in_one_piece_are_one_read(opens: Opens) -> None:
    content = b"".join(b"A" * 4096 + bytes(4096) for _ in range(512))
    extents = [Extent(at, 4096, at // 4096 % 2 == 1) for at in range(0, len(content), 4096)]
    source = opens["fake"] = FakeSource(content, extents)
    assert checksum("fake").hexdigest == reference.blkhash(content)
    assert sorted(source.reads) == [(at, MIB) for at in range(0, 4 * MIB, MIB)]


def test_no_extents_reads_everything(opens: Opens) -> None:
    source = opens["fake"] = FakeSource(bytes(3 * MIB), [Extent(0, 3 * MIB, True)])
    result = checksum("fake", options=OpenOptions(extents=False))
    assert result.hexdigest == reference.blkhash(source.content)
    assert sorted(source.reads) == [(0, MIB), (MIB, MIB), (2 * MIB, MIB)]
    assert result.stats.zero_bytes == 0


def test_buffers_begin_on_a_page(opens: Opens) -> None:
    import ctypes

    addresses: list[int] = []

    class Reader(FakeReader):
        def read(self, offset: int, buffer: memoryview) -> None:
            addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
            super().read(offset, buffer)

    source = opens["fake"] = FakeSource(reference.content("5m:R 100:A"))
    source.reader = lambda: Reader(source)  # type: ignore[method-assign]
    assert checksum("fake").hexdigest == reference.blkhash(source.content)
    assert len(addresses) == 6
    assert all(address % 4096 == 0 for address in addresses)


def test_zero_blocks_in_data_are_not_hashed() -> None:
    hashed: list[int] = []
    real = blkhash.construction("blkhash", "sha1", 64 * KIB)

    def new(data: bytes | memoryview = b"") -> Any:
        hashed.append(len(data))
        return real.algorithm.new(data)

    counting = real._replace(algorithm=real.algorithm._replace(new=new))
    content = reference.content("64k:0 64k:A 63k:0 1k:A 128k:0 100:0")
    zero = reference.HASHES["sha1"](bytes(64 * KIB)).digest()
    digests = block_digests(memoryview(content), counting, zero)
    assert digests == b"".join(
        reference.HASHES["sha1"](block).digest() for block in reference.blocks(content, 64 * KIB)
    )
    assert hashed == [64 * KIB, 64 * KIB, 100]


@pytest.mark.parametrize("length", [1, 511, 512, 65535, 65536, 65537, 3 * MIB])
def test_is_zero(length: int) -> None:
    content = bytearray(length)
    assert is_zero(memoryview(content))
    for at in {0, length // 2, length - 1}:
        content[at] = 1
        assert not is_zero(memoryview(content))
        content[at] = 0


@pytest.mark.parametrize("request_size", [4 * KIB, 16 * KIB, 64 * KIB, 2 * MIB])
@pytest.mark.parametrize("block_size", [4 * KIB, 64 * KIB, MIB, 2 * MIB])
def test_no_request_is_larger_than_asked(
    request_size: int, block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = reference.content("3m:R 100:A")
    (tmp_path / "image").write_bytes(content)
    reads: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        if count:
            reads.append((offset, len(buffers[0])))
        return count

    options = OpenOptions(format="raw", request_size=request_size, extents=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        result = checksum(tmp_path / "image", block_size=block_size, options=options)
    assert result.hexdigest == reference.blkhash(content, "sha256", block_size)
    assert max(length for _, length in reads) <= request_size
    assert result.stats.requests == len(reads)
    read = sorted(reads)
    assert [offset for offset, _ in read] == [sum(length for _, length in read[:i]) for i in range(len(read))]
    assert sum(length for _, length in read) == len(content)


@pytest.mark.parametrize(("queue_size", "at_once"), [(1, 1), (64 * KIB, 1), (128 * KIB, 2), (MIB, 8), (64 * MIB, 8)])
def test_no_more_is_in_flight_than_asked(queue_size: int, at_once: int, opens: Opens) -> None:
    lock = threading.Lock()
    busy = most = 0

    def before_read(offset: int, length: int) -> None:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.002)
        with lock:
            busy -= 1

    source = opens["fake"] = FakeSource(reference.content("4m:R"), before_read=before_read)
    result = checksum("fake", options=OpenOptions(request_size=64 * KIB, queue_size=queue_size))
    assert result.hexdigest == reference.blkhash(source.content)
    assert most <= at_once
    assert len(source.readers) <= at_once


# --- ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 0),
        (0, 1),
        (1, None),
        (4096, 8192),
        (100, 100_000),
        (65536, None),
        (399_999, 1),
        (400_000, 0),
        (400_000, None),
    ],
)
def test_ranges(offset: int, length: int | None, opens: Opens) -> None:
    content = reference.content("100000:R 200000:- 100000:R")
    opens["fake"] = FakeSource(content, [Extent(0, 100_000, False), Extent(100_000, 200_000, True)])
    result = small_checksum(offset=offset, length=length)
    part = content[offset:] if length is None else content[offset : offset + length]
    assert result.hexdigest == expected(part)
    assert result.size == len(part)


@pytest.mark.parametrize(
    ("offset", "length"), [(400_001, None), (400_001, 0), (0, 400_001), (399_999, 2), (1 << 62, 1 << 62)]
)
def test_ranges_that_are_not_there(offset: int, length: int | None, opens: Opens) -> None:
    source = opens["fake"] = FakeSource(bytes(400_000))
    with pytest.raises(OpenError, match=r"^fake: has 400000 bytes"):
        small_checksum(offset=offset, length=length)
    assert source.closed
    assert source.reads == []


# --- many images --------------------------------------------------------------------------------------------------


def start(names: list[str], **options: Any) -> Generator[Checksum | Error, None, None]:
    construction = blkhash.construction("blkhash", "sha256", BLOCK)
    return checksum_tasks((Task(name, construction, SMALL) for name in names), SMALL, **options)


def run(names: list[str], **options: Any) -> list[Checksum | Error]:
    return list(start(names, **options))


def test_one_pool_for_all_images_and_the_others_go_on(opens: Opens, no_leak: None) -> None:
    names = [f"image-{i}" for i in range(20)]
    sources = {name: FakeSource(reference.content(f"{i * 10000}:R")) for i, name in enumerate(names)}
    opens.update(sources)
    sources["image-7"].before_read = fail_at([30_000])
    opens["image-9"] = OpenError("no such file or directory", name="image-9")
    sources["image-11"].changed = ChangedError("the file was modified while it was read")
    threads: set[threading.Thread] = set()
    sources["image-3"].before_read = sources["image-15"].before_read = lambda offset, length: threads.add(
        threading.current_thread()
    )
    results = run(names)
    assert [result.name for result in results] == names
    for i, result in enumerate(results):
        if i in (7, 9, 11):
            assert isinstance(result, Error)
            continue
        assert isinstance(result, Checksum)
        assert result.hexdigest == expected(sources[names[i]].content)
        assert result.stats.bytes_read == i * 10000
    assert all(source.closed for name, source in sources.items() if name != "image-9")
    assert len(threads) <= 8


def test_the_same_image_twice(opens: Opens, tmp_path: Any) -> None:
    source = FakeSource(reference.content("100000:R"))
    opens["a"], opens["b"] = source, FakeSource(source.content)
    assert [r.hexdigest for r in run(["a", "b"]) if isinstance(r, Checksum)] == [expected(source.content)] * 2


def test_a_result_comes_before_later_images_are_done(opens: Opens) -> None:
    release = threading.Event()
    opens["first"] = FakeSource(bytes(BLOCK))
    opens["second"] = FakeSource(bytes(BLOCK), before_read=lambda offset, length: release.wait(HANG))
    results = start(["first", "second"])
    assert next(results).name == "first"
    release.set()
    assert next(results).name == "second"
    assert list(results) == []


def test_thousands_of_images_do_not_pile_up(opens: Opens) -> None:
    most_open = 0
    made: list[FakeSource] = []

    class Lazily(dict[str, Any]):
        def __getitem__(self, name: str) -> FakeSource:
            nonlocal most_open
            source = FakeSource(b"" if name.endswith("0") else name.encode())
            made.append(source)
            most_open = max(most_open, sum(not s.closed for s in made[-200:]))
            return source

    names = [f"image-{i}" for i in range(2000)]
    with pytest.MonkeyPatch.context() as patch:
        lazily = Lazily()
        patch.setattr("imgsum.engine.content.open_source", lambda name, options: lazily[name])
        results = run(names)
    assert [result.name for result in results] == names
    assert all(isinstance(result, Checksum) for result in results)
    assert most_open <= 64


def test_left_early_everything_is_closed(opens: Opens) -> None:
    for i in range(5):
        opens[f"{i}"] = FakeSource(reference.content("400k:R"))
    results = start(list(opens))
    next(results)
    results.close()
    assert all(source.closed or not source.readers for source in opens.values())


# --- what is said meanwhile ---------------------------------------------------------------------------------------


class Watcher:
    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []

    def begin(self, name: str, size: int | None) -> None:
        self.heard.append((name, size))

    def advance(self, done: int) -> None:
        self.heard.append(("advance", done))

    def end(self) -> None:
        self.heard.append(("end", None))


def test_progress_counts_in_order_zeros_included(opens: Opens) -> None:
    extents = [Extent(0, BLOCK, False), Extent(BLOCK, 3 * BLOCK, True), Extent(4 * BLOCK, BLOCK, False)]
    opens["a"] = FakeSource(reference.content("4k:A 12k:- 4k:A"), extents)
    opens["b"] = OpenError("no such file or directory", name="b")
    opens["c"] = FakeSource(b"")
    watcher = Watcher()
    run(["a", "b", "c"], progress=watcher)
    assert watcher.heard == [
        ("a", 5 * BLOCK),
        ("advance", BLOCK),
        ("advance", 4 * BLOCK),
        ("advance", 5 * BLOCK),
        ("end", None),
        ("b", None),
        ("end", None),
        ("c", 0),
        ("end", None),
    ]


@pytest.mark.parametrize(
    ("size", "offset", "length", "noted"),
    [
        (1024, 0, None, False),
        (1000, 0, None, True),
        (1000, 0, 1000, True),
        (1024, 0, 1000, False),
        (1024, 24, None, False),
        (0, 0, None, False),
    ],
)
def test_the_note_on_odd_sizes(size: int, offset: int, length: int | None, noted: bool, opens: Opens) -> None:
    opens["fake"] = FakeSource(bytes(size))
    note = small_checksum(offset=offset, length=length).note
    assert (note is not None) == noted
    if note:
        assert "24 zeros" in note
