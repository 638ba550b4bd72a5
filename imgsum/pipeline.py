"""The fixed pool of workers and the ordered queue: work done in any order, results taken in content order.

The caller's thread feeds: it walks an iterator of pieces, which enter two structures, the work queue, served in any
order, and the ordered queue, from whose head it takes each piece as soon as it is complete. Both are bounded: while
the head is slow, nothing is fed, so memory does not grow. The pipeline knows no format and no digest.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

WORKERS = 8
"""Enough to keep a disk or a server busy; with data in the page cache, within 3 % of one worker for each core."""

_AHEAD = 8 * WORKERS  # pieces between the head and the feeder; their results are small, their buffers are not kept


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
        for thread in self._threads:
            thread.start()

    def run(self, pieces: Iterable[P]) -> Iterator[P]:
        """PIECES in their order, each when its work is done. They are asked for only as far ahead as needed."""
        ordered: deque[P] = deque()
        for piece in pieces:
            ordered.append(piece)
            if piece.has_work:
                piece.ready.acquire()
                self._queue.put(piece)
            while ordered and (len(ordered) >= _AHEAD or not ordered[0].ready.locked()):
                yield _completed(ordered.popleft())
        while ordered:
            yield _completed(ordered.popleft())

    def _serve(self, worker: Worker) -> None:
        while (piece := self._queue.get()) is not None:
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
        for _ in self._threads:
            self._queue.put(None)
        if error is None:
            for thread in self._threads:
                thread.join()


def _completed(piece: P) -> P:
    with piece.ready:  # waits for the worker; a signal's handler runs meanwhile
        return piece
