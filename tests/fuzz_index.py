"""Random histories of qcow2 chains, made by QEMU: `python tests/fuzz_index.py --seconds 600`.

Writes, discards, zeros, resizes, snapshots, commits and new overlays, with indexes made in between. With every index
the value of the image must then be that of a full read, or there must be none. Prints what goes against that, with the
seed, and ends with 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import imgsum
from imgsum.errors import RefusedError

KIB = 1024
BLOCK_SIZE = 4 * KIB


def run(*words: str | Path) -> None:
    """Run a program of QEMU's. Raises CalledProcessError."""
    subprocess.run([*map(str, words)], check=True, capture_output=True)


class History:
    """A chain of images in a directory, and what was done to it."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.rng = rng
        self.layers: list[tuple[Path, str, int]] = []
        """Path, format and size of each image, the first is the base."""
        self.indexes: list[Path] = []
        self.log: list[str] = []
        size = self._size()
        base, format_ = directory / "0", rng.choice(["raw", "qcow2"])
        self._create(base, format_, size)
        self.layers.append((base, format_, size))

    def step(self) -> None:
        """Do something to the image on top."""
        changes = [self._write, self._write, self._zero, self._discard, self._resize, self._snapshot, self._commit]
        doing = self.rng.choice([*changes, self._overlay, self._overlay, self.index, self.index, self.index])
        self.log.append(doing.__name__)
        doing()
        if doing == self.index and self.rng.random() < 0.6:
            self._overlay()  # as in a nightly chain

    def index(self) -> None:
        """Make an index of the image on top."""
        path, format_, _ = self.layers[-1]
        index = self.directory / f"{len(self.indexes)}.index"
        imgsum.checksum(path, block_size=BLOCK_SIZE, index=index, options=imgsum.OpenOptions(format=format_))
        self.indexes.append(index)

    def check(self, counts: Counter[str]) -> None:
        """Compare what every index helps to find with the full value. COUNTS gets what came of it."""
        path, format_, _ = self.layers[-1]
        options = imgsum.OpenOptions(format=format_)
        full = imgsum.checksum(path, block_size=BLOCK_SIZE, options=options)
        for index in self.indexes:
            try:
                # Without a sample: that would hide what is reused wrongly behind an error.
                found = imgsum.checksum(path, since=index, sample=0, options=options)
            except RefusedError:
                counts["refused"] += 1
                continue
            assert found.hexdigest == full.hexdigest, (path, index, self.log)
            assert found.size == full.size
            assert found.reused is not None
            assert found.reused.bytes + found.stats.bytes_read + found.stats.zero_bytes == found.size
            counts["reused" if found.reused.bytes else "read"] += 1

    def _size(self) -> int:
        return self.rng.randrange(1, 600) * 512 if self.rng.random() < 0.5 else self.rng.randrange(1, 64) * 4 * KIB

    def _create(self, path: Path, format_: str, size: int, *words: str | Path) -> None:
        options = []
        if format_ == "qcow2":
            cluster = self.rng.choice([512, 4 * KIB, 16 * KIB, 64 * KIB])
            options = ["-o", f"cluster_size={cluster}"]
            if cluster >= 16 * KIB and self.rng.random() < 0.5:
                options = ["-o", f"cluster_size={cluster},extended_l2=on"]
        run("qemu-img", "create", "-q", "-f", format_, *options, *words, path, str(size))

    def _io(self, command: str) -> None:
        path, format_, size = self.layers[-1]
        start = self.rng.randrange(0, size // 512) * 512
        length = min(size - start, self.rng.choice([512, 4 * KIB, 5 * KIB, 64 * KIB, 200 * KIB]))
        run("qemu-io", "-f", format_, "-d", "unmap", "-c", f"{command} {start} {length}", path)

    def _write(self) -> None:
        self._io(f"write -P {self.rng.randrange(256)}")

    def _zero(self) -> None:
        self._io(self.rng.choice(["write -z", "write -z -u"]))

    def _discard(self) -> None:
        self._io("discard")

    def _overlay(self) -> None:
        if len(self.layers) == 5:
            return
        below, format_, size = self.layers[-1]
        if self.rng.random() < 0.5:
            size = self._size()
        path = self.directory / str(len(self.layers))
        self._create(path, "qcow2", size, "-b", below, "-F", format_)
        self.layers.append((path, "qcow2", size))

    def _resize(self) -> None:
        path, format_, _ = self.layers[-1]
        size = self._size()
        try:
            run("qemu-img", "resize", "-q", "--shrink", "-f", format_, path, str(size))
        except subprocess.CalledProcessError:  # an image with snapshots
            return
        self.layers[-1] = path, format_, size

    def _snapshot(self) -> None:
        path, format_, _ = self.layers[-1]
        if format_ == "qcow2":
            action = "-a" if "s" in self.log and self.rng.random() < 0.5 else "-c"
            self.log.append("s")
            subprocess.run(["qemu-img", "snapshot", action, "s", path], check=False, capture_output=True)
            self._reread_size()

    def _reread_size(self) -> None:
        path, format_, _ = self.layers[-1]
        with path.open("rb") as file:
            self.layers[-1] = path, format_, int.from_bytes(file.read(32)[24:], "big")

    def _commit(self) -> None:
        if len(self.layers) == 1:
            return
        path, format_, size = self.layers.pop()
        run("qemu-img", "commit", "-q", "-f", format_, path)
        below, below_format, below_size = self.layers[-1]
        self.layers[-1] = below, below_format, max(size, below_size)
        path.unlink()


def play(seed: int, directory: Path, steps: int = 12) -> Counter[str]:
    """The history of that SEED. Returns how often blocks were reused, all was read, and the index was refused."""
    counts: Counter[str] = Counter()
    history = History(directory, random.Random(seed))
    for _ in range(steps):
        history.step()
    history.check(counts)
    return counts


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    counts: Counter[str] = Counter()
    seed, bad = arguments.seed, 0
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as directory:
            try:
                counts += play(seed, Path(directory))
            except Exception as error:
                print(f"seed {seed}: {error!r}")
                bad += 1
        counts["histories"] += 1
        seed += 1
    print(f"{dict(counts)}, {bad} bad; seeds from {arguments.seed}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
