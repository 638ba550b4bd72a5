"""The images that are measured: seeded, so the same everywhere, and without two blocks alike where that matters.

A name in IMAGES is a file in the directory of images, with the size it was made for in its name, so that --keep can
reuse it. All sizes follow one number, the size of the largest content (6 GiB): a small one makes a small bench.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from bench.run import FailedError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZE = 6 * GIB
BLOCK = 64 * KIB
LONGEST_RUN = 128  # blocks: 8 MiB
LAYERS = 10
SMALL_IMAGES = 100


class NoSpaceError(Exception):
    """There is no room for the images."""


class Image(NamedTuple):
    """How an image is made."""

    make: Callable[[Images, Path], None]
    cost: float
    """Bytes on disk, as a part of the size."""
    needs: tuple[str, ...] = ()
    """Images that it is made from."""


class Images:
    """The images of one size in DIRECTORY."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.size = size - size % BLOCK

    def scaled(self, full: int) -> int:
        """FULL bytes of the bench of 6 GiB, at this size: whole blocks, at least one."""
        return max(BLOCK, full * self.size // SIZE // BLOCK * BLOCK)

    def path(self, name: str) -> Path:
        """Where image NAME is, made or not."""
        return self.directory / f"{self.size}-{name}"

    def check_space(self, steps: Sequence[Iterable[str]], keep: bool) -> None:
        """Raise NoSpaceError unless there is room for the images of all STEPS.

        Unless they are to be KEPT, each is removed after the last step that needs it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        needs = [set(closure(names)) for names in steps]
        live: set[str] = set()
        for index, names in enumerate(needs):
            live |= {name for name in names if not self.path(name).exists()}
            need = int(sum(IMAGES[name].cost for name in live) * self.size * 1.05)
            if need > free:
                raise NoSpaceError(f"{self.directory}: {free / GIB:.1f} GiB are free, {need / GIB:.1f} GiB needed")
            if not keep:
                live &= set().union(*needs[index + 1 :])

    def make(self, names: Iterable[str]) -> None:
        """Make those of NAMES, and what they need, that aren't there yet.

        In another process, as the most that this one ever had resident shows in what is measured: see run.py. Raises
        FailedError.
        """
        missing = [name for name in closure(names) if not self.path(name).exists()]
        if missing:
            argv = [sys.executable, "-m", "bench.images", str(self.directory.absolute()), str(self.size), *missing]
            made = subprocess.run(argv, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True, check=False)
            if made.returncode:
                raise FailedError(f"no {' '.join(missing)}: {made.stderr.strip().splitlines()[-1]}")
            os.sync()  # nothing is written behind the measurements

    def make_one(self, name: str) -> None:
        """Make image NAME from those it needs. What has its name is whole."""
        part = self.path(f"part-{name}")
        _remove(part)
        IMAGES[name].make(self, part)
        part.rename(self.path(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove NAMES."""
        for name in names:
            _remove(self.path(name))
            _remove(self.path(f"part-{name}"))  # of what was interrupted


def closure(names: Iterable[str]) -> list[str]:
    """NAMES and what they are made from, in an order in which they can be made."""
    found: dict[str, None] = {}
    for name in names:
        found.update(dict.fromkeys([*closure(IMAGES[name].needs), name]))
    return list(found)


def data_runs(path: Path) -> Iterator[tuple[int, int]]:
    """The runs of data of a sparse file: (offset, length)."""
    with path.open("rb") as file:
        end = 0
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole is left
                return
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            yield start, end - start


def data_bytes(path: Path) -> int:
    """The bytes of a sparse file that are not holes."""
    return sum(length for _, length in data_runs(path))


def _random(seed: str, length: int) -> Iterator[bytes]:
    """LENGTH bytes that don't compress, in pieces of at most 1 MiB. shake_128: twice as fast as randbytes()."""
    for at in range(0, length, MIB):
        yield hashlib.shake_128(f"{seed} {at}".encode()).digest(min(MIB, length - at))


class _Text:
    """Words as in a language, a few of them frequent: zlib makes a third of it."""

    def __init__(self) -> None:
        rng = random.Random("text")
        letters = b"etaoinshrdlucmfwypvbgkjqxz"
        words = [bytes(rng.choices(letters, k=rng.randrange(2, 11))) for _ in range(5000)]
        weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
        self._lines = [b" ".join(rng.choices(words, cum_weights=weights, k=12)) + b"\n" for _ in range(1 << 15)]

    def __call__(self, seed: str, length: int) -> Iterator[bytes]:
        rng = random.Random(seed)
        shortest = 12 * 3
        for at in range(0, length, MIB):
            size = min(MIB, length - at)
            yield b"".join(rng.choices(self._lines, k=size // shortest + 1))[:size]


def _runs(path: Path, size: int, fill: Callable[[str, int], Iterator[bytes]]) -> None:
    """SIZE bytes, half of it data: runs of data and holes of random length, to 8 MiB (less in small images)."""
    rng = random.Random("runs")
    longest = max(1, min(LONGEST_RUN, size // BLOCK // 32))
    at, data = 0, 0
    with path.open("wb") as file:
        while at < size:
            length = min(rng.randint(1, longest) * BLOCK, size - at)
            # Whichever is behind, so that half is half.
            if data * 2 <= at:
                file.seek(at)
                file.writelines(fill(f"{at}", length))
                data += length
            at += length
        file.truncate(size)


def _half(size: int) -> Callable[[Images, Path], None]:
    return lambda images, path: _runs(path, images.scaled(size), _random)


def _text(images: Images, path: Path) -> None:
    _runs(path, images.scaled(2 * GIB), _Text())


def _full(images: Images, path: Path) -> None:
    with path.open("wb") as file:
        file.writelines(_random("full", images.scaled(2 * GIB)))


def _zeros(images: Images, path: Path) -> None:
    with path.open("wb") as file:
        for at in range(0, images.size, MIB):
            file.write(bytes(min(MIB, images.size - at)))


def _hole(size: int) -> Callable[[Images, Path], None]:
    def make(images: Images, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(images.scaled(size))

    return make


def _copy(images: Images, path: Path) -> None:
    half = images.path("half.raw")
    _copy_runs(half, path, data_runs(half))


def _extents(images: Images, path: Path) -> None:
    """100,000 extents: 4 KiB of data, 4 KiB of hole, and so on."""
    with path.open("wb") as file:
        for index, data in enumerate(_random("extents", images.scaled(100_000 * BLOCK) // BLOCK * 4 * KIB)):
            for at in range(0, len(data), 4 * KIB):
                file.seek(2 * (index * MIB + at))
                file.write(data[at : at + 4 * KIB])
        file.truncate(file.tell() + 4 * KIB)


def _small(images: Images, path: Path) -> None:
    path.mkdir()
    size = images.scaled(SMALL_IMAGES * MIB) // SMALL_IMAGES // BLOCK * BLOCK or BLOCK
    for index in range(SMALL_IMAGES):
        (path / f"{index:03}.raw").write_bytes(b"".join(_random(f"small {index}", size)))


def _qcow2(base: str, *options: str, compress: bool = False) -> Callable[[Images, Path], None]:
    def make(images: Images, path: Path) -> None:
        _convert(images.path(base), path, *(["-c"] if compress else []), *(f"-o{option}" for option in options))

    return make


def _fragmented(images: Images, path: Path) -> None:
    """The content of part, its clusters allocated in random order."""
    part = images.path("part.raw")
    clusters = [at for start, length in data_runs(part) for at in range(start, start + length, BLOCK)]
    random.Random("fragmented").shuffle(clusters)
    _run("qemu-img", "create", "-q", "-f", "qcow2", path, str(part.stat().st_size))
    # The writes of qemu-io allocate; converting with -n then fills the same clusters with the content.
    writes = "".join(f"write -q -P 1 {at} {BLOCK}\n" for at in clusters)
    _run("qemu-io", "-f", "qcow2", "-t", "unsafe", path, text=writes)
    _convert(part, path, "-n")


def _chain(images: Images, path: Path) -> None:
    """The content of part in ten images, each of which has a tenth of the runs."""
    path.mkdir()
    part = images.path("part.raw")
    layer = path / "layer.raw"
    for index in range(LAYERS):
        _copy_runs(part, layer, list(data_runs(part))[index::LAYERS])
        _convert(layer, path / f"{index}.qcow2")
        layer.unlink()
        if index:
            _run("qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", f"{index - 1}.qcow2",
                 path / f"{index}.qcow2")  # fmt: skip


def _changed(images: Images, path: Path) -> None:
    """Half, but for its last 64 KiB: an overlay of it."""
    last = images.size - BLOCK
    base = images.path("half.qcow2").name
    _run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, path)
    _run("qemu-io", "-f", "qcow2", "-c", f"write -q -P 255 {last} {BLOCK}", path)


def _preallocated(images: Images, path: Path) -> None:
    size = images.scaled(1 << 40)
    _run("qemu-img", "create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", path, str(size))


IMAGES = {
    "empty.raw": Image(_hole(SIZE), 0),
    "half.raw": Image(_half(SIZE), 0.51),
    "half-copy.raw": Image(_copy, 0.51, ("half.raw",)),
    "part.raw": Image(_half(2 * GIB), 0.17),
    "full.raw": Image(_full, 0.34),
    "text.raw": Image(_text, 0.17),
    "zeros.raw": Image(_zeros, 1),
    "hole-8t.raw": Image(_hole(8 << 40), 0),
    "extents.raw": Image(_extents, 0.07),
    "small": Image(_small, 0.02),
    "half.qcow2": Image(_qcow2("half.raw"), 0.51, ("half.raw",)),
    "half-changed.qcow2": Image(_changed, 0, ("half.qcow2",)),
    "part.qcow2": Image(_qcow2("part.raw"), 0.17, ("part.raw",)),
    "part-4k.qcow2": Image(_qcow2("part.raw", "cluster_size=4k"), 0.18, ("part.raw",)),
    "part-2m.qcow2": Image(_qcow2("part.raw", "cluster_size=2m"), 0.25, ("part.raw",)),
    "part-fragmented.qcow2": Image(_fragmented, 0.18, ("part.raw",)),
    "part-chain": Image(_chain, 0.2, ("part.raw",)),
    "text-zlib.qcow2": Image(_qcow2("text.raw", "compression_type=zlib", compress=True), 0.1, ("text.raw",)),
    "text-zstd.qcow2": Image(_qcow2("text.raw", "compression_type=zstd", compress=True), 0.1, ("text.raw",)),
    "preallocated-1t.qcow2": Image(_preallocated, 0.03),
}


def _convert(source: Path, target: Path, *options: str) -> None:
    """A raw image as qcow2. Its writes stay in the page cache until all images are made."""
    _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-t", "unsafe", *options, source, target)


def _copy_runs(source: Path, target: Path, runs: Iterable[tuple[int, int]]) -> None:
    """A raw image of the size of SOURCE, with those RUNS of its data."""
    with source.open("rb") as read, target.open("wb") as write:
        write.truncate(source.stat().st_size)
        for start, length in runs:
            at, end = start, start + length
            while at < end:
                at += os.copy_file_range(read.fileno(), write.fileno(), end - at, at, at)


def _run(*argv: str | Path, text: str = "") -> None:
    try:
        subprocess.run(list(map(str, argv)), input=text, text=True, check=True, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        sys.exit(f"{argv[0]} is not installed")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    """Make images: DIRECTORY SIZE NAME..."""
    images = Images(Path(sys.argv[1]), int(sys.argv[2]))
    for name in sys.argv[3:]:
        images.make_one(name)


if __name__ == "__main__":
    main()
