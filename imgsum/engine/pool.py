"""The pool of workers and the ordered queue: work is done in any order, results are taken in the order of the items.

The caller's thread feeds. It walks an iterator of items; each enters the work queue, which workers serve in any order,
and the ordered queue, from whose head it is taken as soon as it is done. Both are bounded: while the head is slow,
nothing more is fed, so memory does not grow. The pool knows no image and no digest.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from imgsum.trace import debug
from imgsum.units import MIB

WORKERS = 8
"""Enough to keep a disk or a server busy."""

_AHEAD = 4 * WORKERS
"""The weight of all items between the head and the feeder."""

_STACK_SIZE = MIB
"""Bytes of a worker's stack. The usual 8 MiB for each worker do not fit a small RLIMIT_AS."""

_ROOM = 4 * MIB
"""Bytes that must be free to start a worker: Thread.start() waits forever if the thread has no memory to begin."""

_CHECK_SIGNALS_EVERY = 0.3
"""Seconds. Python runs signal handlers in the main thread only, and only between two waits."""

_BATCH_WITHIN = 0.05
"""Seconds for which the consumer waits for several items to be done, so that it wakes once for all of them."""

_LEAVE_WITHIN = 0.3
"""Seconds that workers get to end what they are doing when nobody wants the rest of it."""


class Worker:
    """The state of one worker, which its work function gets: a number, and buffers."""

    def __init__(self, index: int) -> None:
        self.index = index
        """0 .. WORKERS - 1. Work can keep something for each worker without a lock."""
        self._buffers: list[mmap.mmap] = []

    def buffer(self, size: int, which: int = 0) -> memoryview:
        """A page-aligned buffer of SIZE bytes, which is not cleared. WHICH = 1 is a second one."""
        while len(self._buffers) <= which:
            self._buffers.append(page_aligned(size))
        if len(self._buffers[which]) < size:
            self._buffers[which] = page_aligned(size)
        return memoryview(self._buffers[which])[:size]


def page_aligned(size: int) -> mmap.mmap:
    """A new buffer of SIZE bytes that begins on a page boundary, as O_DIRECT needs it."""
    return mmap.mmap(-1, size)


class Item(Protocol):
    """The interface of items."""

    @property
    def has_work(self) -> bool:
        """False: the item takes its place in the order, and no worker sees it."""

    @property
    def weight(self) -> int:
        """Larger for an item with a large result: a limit on the sum bounds what waits behind a slow head."""


T = TypeVar("T", bound=Item)
R = TypeVar("R")


class Done(Generic[T, R]):
    """An item, and its result or error."""

    __slots__ = ("error", "item", "ready", "result")

    def __init__(self, item: T) -> None:
        self.item = item
        self.result: R | None = None
        """What the work function returned; None when it raised, or when there was no work."""
        self.error: BaseException | None = None
        """What it raised."""
        self.ready = threading.Lock()
        """Held until the work is done."""


class Pool:
    """The workers of one command. Use as a context manager.

    If the system limits the number of threads, those that started do all the work; if none did, the caller's thread.
    """

    def __init__(self, workers: int = WORKERS) -> None:
        self._queue: SimpleQueue[tuple[Callable[[Worker, Any], Any], Done[Any, Any]] | None] = SimpleQueue()
        self._throttle = _Throttle(workers)
        self._threads: list[threading.Thread] = []
        usual = threading.stack_size(_STACK_SIZE)
        try:
            for index in range(workers):
                page_aligned(_ROOM).close()
                thread = threading.Thread(target=self._serve, args=(Worker(index),), daemon=True)
                thread.start()
                self._threads.append(thread)
        except (RuntimeError, MemoryError, OSError):  # a limit on processes (pids cgroup, RLIMIT_NPROC) or on memory
            pass
        finally:
            threading.stack_size(usual)
        debug("%s of %s workers started", len(self._threads), workers)
        self._caller = None if self._threads else Worker(0)

    def map(self, work: Callable[[Worker, T], R], items: Iterable[T]) -> Iterator[Done[T, R]]:
        """Call WORK(worker, item) for each of ITEMS. Yields them in order, as soon as they are done.

        ITEMS are consumed only as far ahead as the queue allows.
        """
        ordered: deque[Done[T, R]] = deque()
        weight = 0  # of what is in it
        for item in items:
            done: Done[T, R] = Done(item)
            ordered.append(done)
            weight += item.weight
            if item.has_work:
                done.ready.acquire()
                if self._caller is None:
                    self._queue.put((work, done))
                else:
                    _do(work, done, self._caller)
            while weight >= _AHEAD:
                # Waking once for many items, rather than for each, saves passing the GIL around: blake3 of 2 GiB with
                # 2 workers on 2 cores takes 0.18 s, and 0.21 s when only the head is waited for.
                # The wait is short: a server may never answer what lies behind the difference that ends a comparison.
                if ordered[len(ordered) // 2].ready.acquire(timeout=_BATCH_WITHIN):
                    ordered[len(ordered) // 2].ready.release()
                self._throttle.adapt()
                weight -= ordered[0].item.weight
                yield _wait_for(ordered.popleft())
            while ordered and not ordered[0].ready.locked():
                weight -= ordered[0].item.weight
                yield ordered.popleft()
        while ordered:
            yield _wait_for(ordered.popleft())

    def _serve(self, worker: Worker) -> None:
        while True:
            self._throttle.wait(worker.index)
            job = self._queue.get()
            if job is None:
                return
            _do(*job, worker)
            del job  # its item and result are the consumer's alone now

    def _discard_waiting(self) -> None:
        """Drop the work that no worker has begun."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._discard_waiting()
        self._throttle.open()
        for _ in self._threads:
            self._queue.put(None)
        # The caller closes next what the workers read from, so wait for them. After an error, don't wait long, as one
        # may be stuck in a read: a signal must end the process, and a difference be reported, within a second.
        deadline = None if error is None else time.monotonic() + _LEAVE_WITHIN
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _do(work: Callable[[Worker, T], R], done: Done[T, R], worker: Worker) -> None:
    try:
        done.result = work(worker, done.item)
    except BaseException as error:  # whatever it is, the waiting thread must get it
        done.error = error
    done.ready.release()


D = TypeVar("D", bound=Done[Any, Any])


def _wait_for(done: D) -> D:
    # A signal that arrives just before acquire() blocks is handled only when that returns. Without a time-out, and
    # with workers that are stuck in a read, every second ^C was lost.
    while not done.ready.acquire(timeout=_CHECK_SIGNALS_EVERY):
        pass
    done.ready.release()
    return done


class _Throttle:
    """Limits the active workers to the number of cores and one, while all cores are busy.

    With data in the page cache no worker waits for a disk, and more threads than cores only contend for the GIL. 2 GiB
    on 2 cores take 8 workers 0.22 s with blake3 and 0.095 s with xxh3-128; 3 workers 0.18 s and 0.08 s. When reading is
    slow, the cores are not busy, and all workers are active.
    """

    _INTERVAL = 0.02  # seconds between two looks at the clocks
    _BUSY = 0.85  # of all cores

    def __init__(self, workers: int) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._workers = workers
        self._active = workers
        self._changed = threading.Condition()
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def wait(self, index: int) -> None:
        """Return when worker INDEX is active."""
        if index >= self._active:
            with self._changed:
                self._changed.wait_for(lambda: index < self._active)

    def adapt(self) -> None:
        """Set the number of active workers by how busy the cores were since the last call."""
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._wall < self._INTERVAL:
            return
        busy = cpu - self._cpu > self._BUSY * self._cores * (wall - self._wall)
        self._wall, self._cpu = wall, cpu
        self._set_active(min(self._cores + 1, self._workers) if busy else self._workers)

    def open(self) -> None:
        """Make all workers active."""
        self._set_active(self._workers)

    def _set_active(self, active: int) -> None:
        if active != self._active:
            with self._changed:
                self._active = active
                self._changed.notify_all()
