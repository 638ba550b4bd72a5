"""What one core can do: the rates that limits are made of, measured in the same rounds as the commands.

As a script, in a process of its own: rates.py sha256|hashlib|import prints seconds, and ends with status 3 where this
machine hasn't got it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.images import BLOCK, MIB, data_bytes, data_runs
from bench.run import FailedError
from imgsum.hash import blkhash, lanes
from imgsum.hash.blocks import block_digests

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0))
_SAMPLE = 256 * MIB
_ABSENT = 3


def sha256_of_blocks() -> float:
    """Seconds for 256 MiB on one core as imgsum hashes it: in lanes where there are, else by hashlib."""
    construction = blkhash.construction("blkhash", "sha256", None)
    zero_digest = blkhash.zero_digest(construction.algorithm, BLOCK)
    data = memoryview(bytearray(os.urandom(MIB)))
    start = time.perf_counter()
    for _ in range(_SAMPLE // MIB):
        block_digests(data, construction, zero_digest)
    return time.perf_counter() - start


def hashlib_of_blocks() -> float:
    """Seconds for the same by hashlib, one block of 64 KiB at a time."""
    block = os.urandom(BLOCK)
    start = time.perf_counter()
    for _ in range(_SAMPLE // BLOCK):
        hashlib.sha256(block).digest()
    return time.perf_counter() - start


def work_limit(image: str, hashing: str = "sha256") -> float:
    """Seconds in which all cores could read the data of the raw IMAGE from the page cache and hash it, no less."""
    data = data_bytes(Path(image))
    return data * (MEASURES[hashing]() / _SAMPLE + _reading(Path(image))) / CORES if data else 0.0


def outer_hash(size: str) -> float:
    """Seconds in which one core hashes 32 bytes for each block of SIZE bytes: all that a hole costs."""
    return int(size) // BLOCK * 32 * hashlib_of_blocks() / _SAMPLE


def in_own_process(what: str, env: Mapping[str, str] | None = None) -> float:
    """WHAT by this file as a script, with ENV added to the environment. Raises FailedError."""
    argv = [sys.executable, "-m", "bench.rates", what]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(done.stderr.strip().splitlines()[-1], absent=done.returncode == _ABSENT)
    return float(done.stdout)


def _reading(image: Path) -> float:
    """Seconds a byte on one core: the data of IMAGE from the page cache, 1 MiB at a time, at most 256 MiB of it."""
    buffer = memoryview(mmap.mmap(-1, MIB))
    runs = list(data_runs(image))
    done = 0
    with image.open("rb", buffering=0) as file:
        start = time.perf_counter()
        for at, length in runs:
            for offset in range(at, at + length, MIB):
                if done < _SAMPLE:
                    done += os.preadv(file.fileno(), [buffer[: min(MIB, at + length - offset)]], offset)
        return (time.perf_counter() - start) / done


def main() -> int:
    """Print seconds."""
    (what,) = sys.argv[1:]
    if what == "import":
        sys.modules.pop("imgsum.hash._lanes", None)
        start = time.perf_counter()
        try:
            from imgsum.hash import _lanes  # noqa: F401
        except ImportError:
            print("the extension is not installed", file=sys.stderr)
            return _ABSENT
        print(time.perf_counter() - start)
    elif what == "sha256" and lanes.sha256().hash_blocks is None:
        print(lanes.sha256().description, file=sys.stderr)
        return _ABSENT
    else:
        print(MEASURES[what]())
    return 0


MEASURES: dict[str, Callable[..., float]] = {
    "sha256": sha256_of_blocks,
    "hashlib": hashlib_of_blocks,
    "own-process": in_own_process,
    "work-limit": work_limit,
    "outer-hash": outer_hash,
    "seconds": float,
}
"""What cases.toml can measure beside programs: each gives seconds."""

if __name__ == "__main__":
    sys.exit(main())
