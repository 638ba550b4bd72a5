"""How long imgsum holds the GIL for each MiB, and what that lets 2, 8 and 32 cores do: python -m bench.gil [SIZE].

The checksum of an image in the page cache is made in this process. Held is the CPU time of all its threads, less the
CPU time inside the calls that release the GIL (reading and hashing), each timed by its thread's own clock; waiting is
no CPU time. What the timing itself takes is measured and taken off. Handing the GIL over is counted as held, though
part of it is not: so held is an upper bound. With `released` us a MiB outside the GIL and `held` inside it, N cores do
at most N / (released + held) MiB a us, and all cores together 1 / held. Memory's own limit is left out.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.images import GIB, MIB, SIZE, Images
from bench.rates import CORES
from imgsum.engine.checksum import Task, checksum_tasks
from imgsum.errors import Error
from imgsum.hash import blkhash
from imgsum.source import OpenOptions
from imgsum.units import parse_size

_RUNS = 5


class Cost(NamedTuple):
    """CPU time of one checksum, in us for each MiB of data, and the MiB a second that it was made with."""

    released: float
    held: float
    speed: float

    def limit(self, cores: int) -> float:
        """MiB a second with so many CORES, at most."""
        return 1e6 * min(cores / (self.released + self.held), 1 / self.held)


class _Clock:
    """The CPU time inside calls that release the GIL, of all threads."""

    def __init__(self) -> None:
        self.spent: dict[int, float] = {}
        self.calls: dict[int, int] = {}

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                thread = threading.get_ident()  # each thread adds to its own
                self.spent[thread] = self.spent.get(thread, 0.0) + time.thread_time() - began
                self.calls[thread] = self.calls.get(thread, 0) + 1

        return timed


def measure(image: Path, algorithm: str) -> Cost:
    """The cost of ALGORITHM over IMAGE, which is all data."""
    clock = _Clock()
    construction = blkhash.construction("blkhash", algorithm, None)
    chosen = construction.algorithm
    if chosen.hash_blocks is not None:
        chosen = chosen._replace(hash_blocks=clock.timed(chosen.hash_blocks))
    elif not algorithm.startswith("xxh"):  # xxhash holds the GIL for blocks of 64 KiB
        chosen = chosen._replace(new=clock.timed(chosen.new))
    task = Task(str(image), construction._replace(algorithm=chosen), OpenOptions())
    preadv = os.preadv
    os.preadv = clock.timed(preadv)
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        (result,) = checksum_tasks([task], OpenOptions())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        os.preadv = preadv
    if isinstance(result, Error):
        sys.exit(str(result))
    size = result.size / MIB
    released = sum(clock.spent.values())
    held = cpu - released - sum(clock.calls.values()) * _overhead()
    return Cost(1e6 * released / size, 1e6 * held / size, size / wall)


def _overhead() -> float:
    """Seconds that timing one call takes, outside what it times."""
    clock, count = _Clock(), 10_000
    nothing = clock.timed(int)
    began = time.thread_time()
    for _ in range(count):
        nothing()
    return (time.thread_time() - began - sum(clock.spent.values())) / count


def main() -> None:
    """Print a table of medians."""
    size = parse_size(sys.argv[1]) if sys.argv[1:] else 2 * GIB
    print(f"Here, on {CORES} cores, and at most (GiB/s):\n")
    print(
        "| algorithm | released, us/MiB | held, us/MiB | here | 2 cores | 8 cores | 32 cores | cores that are enough |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="images-", dir=Path(__file__).parent) as directory:
        images = Images(Path(directory), size * SIZE // (2 * GIB))
        images.make(["full.raw"])
        for algorithm in ("sha256", "blake3", "xxh3-128", "sha512", "sha1"):
            runs = [measure(images.path("full.raw"), algorithm) for _ in range(_RUNS + 1)][1:]  # after a warm-up
            cost = Cost(*map(statistics.median, zip(*runs, strict=True)))
            speeds = (cost.speed, *map(cost.limit, (2, 8, 32)))
            row = [f"{cost.released:.0f}", f"{cost.held:.0f}", *(f"{speed / 1024:.1f}" for speed in speeds)]
            enough = (cost.released + cost.held) / cost.held
            print(f"| {algorithm} | {' | '.join(row)} | {enough:.0f} |", flush=True)


if __name__ == "__main__":
    main()
