"""The pool and the ordered queue, with work that is slow, fails, or ends in any order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from conftest import HANG

from imgsum.engine.pool import WORKERS, Pool, Worker, page_aligned

AHEAD = 32  # pieces, however little each is
"""The most pieces that may wait behind the head: their number bounds memory."""


class Task(NamedTuple):
    """An item with a function to run, if it has one."""

    index: int
    action: Callable[[Worker], object] | None = None
    weight: int = 1

    @property
    def has_work(self) -> bool:
        return self.action is not None


def work(worker: Worker, task: Task) -> object:
    assert task.action is not None
    return task.action(worker)


def nothing(worker: Worker) -> None:
    pass


def test_exactly_eight_workers_each_with_its_number() -> None:
    seen = set()
    barrier = threading.Barrier(8, timeout=HANG)  # passes only when eight work at once

    def meet(worker: Worker) -> None:
        barrier.wait()
        seen.add((worker.index, threading.current_thread()))

    with Pool() as pool:
        list(pool.map(work, (Task(i, meet) for i in range(32))))
    assert WORKERS == 8
    assert sorted(index for index, _ in seen) == list(range(8))


def test_order_does_not_depend_on_timing() -> None:
    def dawdle(worker: Worker) -> None:
        time.sleep(random.random() / 1000)

    for seed in range(100):
        random.seed(seed)
        with Pool() as pool:
            pieces = (Task(i, dawdle if random.random() < 0.7 else None) for i in range(40))
            assert [done.item.index for done in pool.map(work, pieces)] == list(range(40))


def test_a_slow_head_stops_the_feeder() -> None:
    fed = 0
    others_done = threading.Semaphore(0)
    most_fed = 0

    def head(worker: Worker) -> None:
        nonlocal most_fed
        for _ in range(AHEAD - 1):  # all that may pass it have passed
            assert others_done.acquire(timeout=HANG)
        assert not others_done.acquire(timeout=0.2)
        most_fed = fed

    def other(worker: Worker) -> None:
        others_done.release()

    def feed() -> Iterator[Task]:
        nonlocal fed
        for i in range(1000):
            fed += 1
            yield Task(i, other if i else head)

    with Pool() as pool:
        done = list(pool.map(work, feed()))
    assert len(done) == 1000
    assert all(done.error is None for done in done)
    assert most_fed == AHEAD


def test_zeros_behind_a_slow_head_are_bounded_too() -> None:
    fed: list[int] = []
    enough = threading.Event()
    fed_meanwhile: list[int] = []

    def head(worker: Worker) -> None:
        assert enough.wait(HANG)
        time.sleep(0.1)
        fed_meanwhile.extend(fed)

    def feed() -> Iterator[Task]:
        for i in range(1000):
            fed.append(i)
            if len(fed) == AHEAD:
                enough.set()
            yield Task(i, None if i else head)

    with Pool() as pool:
        assert len(list(pool.map(work, feed()))) == 1000
    assert len(fed_meanwhile) == AHEAD


def test_a_complete_head_is_taken_before_more_is_fed() -> None:
    fed = []

    def feed() -> Iterator[Task]:
        for i in range(10):
            fed.append(i)
            yield Task(i)

    with Pool() as pool:
        for done in pool.map(work, feed()):
            assert fed[-1] == done.item.index


@pytest.mark.parametrize("kind", [ValueError, MemoryError, KeyboardInterrupt, SystemExit])
def test_an_error_stays_with_its_piece(kind: type[BaseException]) -> None:
    def fail(worker: Worker) -> None:
        raise kind("no")

    with Pool() as pool:
        done = list(pool.map(work, (Task(i, fail if i == 5 else nothing) for i in range(20))))
        assert [done.item.index for done in done] == list(range(20))
        assert [done.item.index for done in done if done.error is not None] == [5]
        assert isinstance(done[5].error, kind)
        # The worker that met it goes on.
        assert len(list(pool.map(work, (Task(i, nothing) for i in range(100))))) == 100


def test_an_error_of_the_feeder_reaches_the_caller(no_leak: None) -> None:
    def feed() -> Iterator[Task]:
        yield Task(0, nothing)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"), Pool() as pool:
        list(pool.map(work, feed()))
    for thread in pool._threads:
        thread.join(HANG)


def test_workers_end_with_it(no_leak: None) -> None:
    with Pool() as pool:
        list(pool.map(work, (Task(i, nothing) for i in range(100))))


def test_workers_end_when_it_is_left_early() -> None:
    def leave(pool: Pool) -> None:
        next(pool.map(work, (Task(i, nothing) for i in range(100))))
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), Pool() as pool:
        leave(pool)
    for thread in pool._threads:
        thread.join(HANG)
        assert not thread.is_alive()


def test_nothing_to_do() -> None:
    with Pool() as pool:
        assert list(pool.map(work, iter(()))) == []


class TestBuffers:
    def test_kept_and_own(self) -> None:
        worker = Worker(0)
        first = worker.buffer(8192)
        first[0] = 7
        assert worker.buffer(4096)[0] == 7
        assert len(worker.buffer(4096)) == 4096
        assert Worker(1).buffer(8192)[0] == 0

    def test_second_buffer_is_another(self) -> None:
        worker = Worker(0)
        worker.buffer(4096)[0] = 7
        assert worker.buffer(4096, which=1)[0] == 0

    def test_grows(self) -> None:
        worker = Worker(0)
        worker.buffer(4096)
        assert len(worker.buffer(1 << 20)) == 1 << 20

    def test_begins_on_a_page(self) -> None:
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(page_aligned(4096)))
        assert address % 4096 == 0
