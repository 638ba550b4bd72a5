"""The fixed pool of workers and the ordered queue: work done in any order, results taken in content order.

The caller's thread feeds: it walks an iterator of pieces, which enter two structures, the work queue, served in any
order, and the ordered queue, from whose head it takes each piece as soon as it is complete. Both are bounded: while
the head is slow, nothing is fed, so memory does not grow. The pipeline knows no format and no digest.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

WORKERS = 8
"""Enough to keep a disk or a server busy."""

_AHEAD = 4 * WORKERS
"""Pieces between the head and the feeder, by weight. Results are small; buffers belong to workers, not to pieces."""

_LOOK_UP_EVERY = 0.3
"""Seconds after which a wait looks whether a signal came."""

_LEAVE_WITHIN = 0.3
"""Seconds that workers get to end what they are doing when nobody wants the rest of it."""


class Worker:
    """What a piece of work finds in the thread that does it."""

    def __init__(self, index: int) -> None:
        self.index = index
        """0 .. workers - 1, so that work can keep something for each worker without a lock."""
        self._buffers: list[mmap.mmap] = []

    def buffer(self, size: int, which: int = 0) -> memoryview:
        """A page-aligned buffer of SIZE bytes, this worker's own; WHICH = 1 is a second one. The content is old."""
        while len(self._buffers) <= which:
            self._buffers.append(page_aligned(size))
        if len(self._buffers[which]) < size:
            self._buffers[which] = page_aligned(size)
        return memoryview(self._buffers[which])[:size]


def page_aligned(size: int) -> mmap.mmap:
    """A new buffer of SIZE bytes that begins on a page boundary, as O_DIRECT wants it."""
    return mmap.mmap(-1, size)


class Piece:
    """One step of the whole, in content order. A piece without work is complete from the beginning."""

    __slots__ = ("error", "ready")

    has_work = True
    weight = 1
    """How much of _AHEAD it takes: more for a piece that stands for more than a small result."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.ready = threading.Lock()
        """Held until the work is done."""

    def work(self, worker: Worker) -> None:
        """Do it, in any worker, in any order. What it raises becomes `error`."""


P = TypeVar("P", bound=Piece)


class Pipeline(Generic[P]):
    """A pool of workers that lives for one command. Use as a context manager."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._queue: SimpleQueue[P | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(Worker(index),), name=f"worker-{index}", daemon=True)
            for index in range(workers)
        ]
        self._throttle = _Throttle(workers)
        for thread in self._threads:
            thread.start()

    def run(self, pieces: Iterable[P]) -> Iterator[P]:
        """PIECES in their order, each when its work is done. They are asked for only as far ahead as needed."""
        ordered: deque[P] = deque()
        weight = 0  # of what is in it
        for piece in pieces:
            ordered.append(piece)
            weight += piece.weight
            if piece.has_work:
                piece.ready.acquire()
                self._queue.put(piece)
            while weight >= _AHEAD:
                # To wake once for many pieces, rather than for each, saves a worker's worth of passing the GIL around:
                # blake3 with 2 workers on 2 cores takes 0.18 s for 2 GiB, and 0.21 s when waiting for the head alone.
                _wait_for(ordered[len(ordered) // 2])
                self._throttle.adapt()
                weight -= ordered[0].weight
                yield _wait_for(ordered.popleft())
            while ordered and not ordered[0].ready.locked():
                weight -= ordered[0].weight
                yield ordered.popleft()
        while ordered:
            yield _wait_for(ordered.popleft())

    def _serve(self, worker: Worker) -> None:
        while True:
            self._throttle.wait(worker.index)
            piece = self._queue.get()
            if piece is None:
                return
            try:
                piece.work(worker)
            except BaseException as error:  # whatever it is, the thread that waits must hear of it
                piece.error = error
            piece.ready.release()

    def _discard_waiting(self) -> None:
        """Drop the work that no worker has begun: nobody will take its result."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def __enter__(self) -> Pipeline[P]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._discard_waiting()
        self._throttle.open()
        for _ in self._threads:
            self._queue.put(None)
        # Whoever leaves early closes what the workers read, so they are waited for; but not for ever, as one may be
        # stuck in a read: a signal is obeyed within a second, and a difference that was found is reported.
        deadline = None if error is None else time.monotonic() + _LEAVE_WITHIN
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _wait_for(piece: P) -> P:
    # A signal's handler may run, and raise, meanwhile. One that comes just before acquire() blocks is seen only when
    # that ends: with workers that are stuck in a read, and never again without a time-out, every second ^C was lost.
    while not piece.ready.acquire(timeout=_LOOK_UP_EVERY):
        pass
    piece.ready.release()
    return piece


class _Throttle:
    """Keeps the workers that the cores have no room for from taking work, while the process keeps all cores busy.

    With data in the page cache nothing waits for a disk, and more threads than cores only pass the GIL around: of 2
    GiB on 2 cores, 8 workers make blake3 in 0.22 s and xxh3-128 in 0.095 s; 3 in 0.18 s and 0.08 s. As soon as
    reading takes time, the cores are no longer busy, and all workers are wanted.
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
        """Return when worker INDEX may take work."""
        if index >= self._active:
            with self._changed:
                self._changed.wait_for(lambda: index < self._active)

    def adapt(self) -> None:
        """Look at how busy the cores were since the last look."""
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._wall < self._INTERVAL:
            return
        busy = cpu - self._cpu > self._BUSY * self._cores * (wall - self._wall)
        self._wall, self._cpu = wall, cpu
        self._let(min(self._cores + 1, self._workers) if busy else self._workers)

    def open(self) -> None:
        """Let all workers go on."""
        self._let(self._workers)

    def _let(self, active: int) -> None:
        if active != self._active:
            with self._changed:
                self._active = active
                self._changed.notify_all()
