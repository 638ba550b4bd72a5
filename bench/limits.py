"""What no tool can beat: the work limit of hashing and copying, measured beside the commands."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from bench.images import KIB, MIB, data_bytes, data_runs

CORES = len(os.sched_getaffinity(0))
_SAMPLE = 256 * MIB


def work_limit(image: Path) -> Callable[[], float]:
    """The seconds that hashing (sha256) and copying the data of the raw IMAGE take with all cores busy, no less."""
    data = data_bytes(image)

    def measure() -> float:
        return (data / hash_rate() + data / read_rate(image)) / CORES if data else 0.0

    return measure


def outer_hash(size: int) -> Callable[[], float]:
    """The seconds that one core takes to hash 32 bytes for each 64 KiB of SIZE bytes: all that a hole costs."""

    def measure() -> float:
        return size / (64 * KIB) * 32 / hash_rate()

    return measure


def hash_rate(sample: int = _SAMPLE) -> float:
    """Bytes of sha256 a second on one core, 64 KiB at a time."""
    block = os.urandom(64 * KIB)
    start = time.perf_counter()
    for _ in range(sample // len(block)):
        hashlib.sha256(block).digest()
    return sample / (time.perf_counter() - start)


def read_rate(image: Path) -> float:
    """Bytes read a second from the page cache on one core, 1 MiB at a time, of the data of IMAGE."""
    buffer = memoryview(mmap.mmap(-1, MIB))
    done = 0
    with image.open("rb", buffering=0) as file:
        runs = list(data_runs(image))
        start = time.perf_counter()
        for at, length in runs:
            for offset in range(at, at + length, MIB):
                done += os.preadv(file.fileno(), [buffer[: min(MIB, at + length - offset)]], offset)
                if done >= _SAMPLE:
                    return done / (time.perf_counter() - start)
    return done / (time.perf_counter() - start)
