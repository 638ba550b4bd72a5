"""The images that are measured, and the server of one. Seeded, so the same everywhere; no two blocks of data are alike.

A name in IMAGES is a file in the directory of images, with the size it was made for in its name, so that --keep can
reuse it. All sizes follow one number, the size of the largest content (6 GiB): a small one makes a small bench.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from bench.run import FailedError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZE = 6 * GIB
BLOCK = 64 * KIB
SMALL_IMAGES = 100
_LONGEST_RUN = 128  # blocks: 8 MiB


class Image(NamedTuple):
    """How an image is made."""

    make: Callable[[Images, Path], None]
    cost: float
    """Bytes on disk, as a part of the size."""
    base: str | None = None
    """The image that it is made from."""


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

    def make(self, names: Iterable[str]) -> None:
        """Make those of NAMES, and what they are made from, that aren't there yet. Raises FailedError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in closure(names):
            if self.path(name).exists():
                continue
            need, free = int(IMAGES[name].cost * self.size), shutil.disk_usage(self.directory).free
            if need * 1.05 > free:
                raise FailedError(f"{name} needs {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free")
            part = self.path(f"part-{name}")
            _remove(part)
            try:
                IMAGES[name].make(self, part)
            except OSError as error:
                raise FailedError(f"no {name}: {error}") from error
            for file in part.iterdir() if part.is_dir() else [part]:
                with file.open("rb") as written:
                    os.fsync(written.fileno())  # nothing is written behind the measurements
            part.rename(self.path(name))  # what has its name is whole

    def remove(self, names: Iterable[str]) -> None:
        """Remove NAMES."""
        for name in names:
            _remove(self.path(name))
            _remove(self.path(f"part-{name}"))  # of what was interrupted


def closure(names: Iterable[str]) -> list[str]:
    """NAMES and what they are made from, in an order in which they can be made."""
    found: dict[str, None] = {}
    for name in names:
        base = IMAGES[name].base
        found.update(dict.fromkeys([*closure([base] if base else []), name]))
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
        words = [bytes(rng.choices(b"etaoinshrdlucmfwypvbgkjqxz", k=rng.randrange(2, 11))) for _ in range(5000)]
        weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
        self._lines = [b" ".join(rng.choices(words, cum_weights=weights, k=12)) + b"\n" for _ in range(1 << 15)]

    def __call__(self, seed: str, length: int) -> Iterator[bytes]:
        rng = random.Random(seed)
        for at in range(0, length, MIB):
            size = min(MIB, length - at)
            yield b"".join(rng.choices(self._lines, k=size // 36 + 1))[:size]  # no line is shorter than 36 bytes


def _half(full: int, filler: Callable[[], Callable[[str, int], Iterator[bytes]]]) -> Callable[[Images, Path], None]:
    """Half of it data: runs of data and holes of random length, to 8 MiB (less in small images)."""

    def make(images: Images, path: Path) -> None:
        rng, fill, size = random.Random("runs"), filler(), images.scaled(full)
        longest = max(1, min(_LONGEST_RUN, size // BLOCK // 32))
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

    return make


def _full(images: Images, path: Path) -> None:
    with path.open("wb") as file:
        file.writelines(_random("full", images.scaled(2 * GIB)))


def _hole(full: int) -> Callable[[Images, Path], None]:
    def make(images: Images, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(images.scaled(full))

    return make


def _extents(images: Images, path: Path) -> None:
    """4 KiB of data, 4 KiB of hole, and so on."""
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


def _preallocated(images: Images, path: Path) -> None:
    size = images.scaled(1 << 40)
    _run("qemu-img", "create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", path, str(size))


def _converted(base: str, image_format: str, cost: float, *options: str) -> Image:
    """BASE, as QEMU writes it in another format. Its writes stay in the page cache until all is made."""

    def make(images: Images, path: Path) -> None:
        argv = ["qemu-img", "convert", "-f", "raw", "-O", image_format, "-t", "unsafe", *options]
        _run(*argv, images.path(base), path)

    return Image(make, cost, base)


IMAGES = {
    "half.raw": Image(_half(SIZE, lambda: _random), 0.51),
    "full.raw": Image(_full, 0.34),
    "text.raw": Image(_half(2 * GIB, _Text), 0.17),
    "hole.raw": Image(_hole(8 << 40), 0),
    "extents.raw": Image(_extents, 0.07),
    "small": Image(_small, 0.02),
    "half.qcow2": _converted("half.raw", "qcow2", 0.51),
    "text-zlib.qcow2": _converted("text.raw", "qcow2", 0.1, "-c", "-o", "compression_type=zlib"),
    "text-zstd.qcow2": _converted("text.raw", "qcow2", 0.1, "-c", "-o", "compression_type=zstd"),
    "preallocated.qcow2": Image(_preallocated, 0.03),
    "half.vhdx": _converted("half.raw", "vhdx", 0.8),
    "half.vmdk": _converted("half.raw", "vmdk", 0.51),
    "half.vpc": _converted("half.raw", "vpc", 0.7, "-o", "force_size=on"),
    "half.vdi": _converted("half.raw", "vdi", 0.6),
    "empty.raw": Image(_hole(10 * GIB), 0),
    "empty.vhdx": _converted("empty.raw", "vhdx", 0.01),
    "text.vmdk": _converted("text.raw", "vmdk", 0.1, "-o", "subformat=streamOptimized"),
}


def _run(*argv: str | Path) -> None:
    try:
        subprocess.run(list(map(str, argv)), check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise FailedError(f"{argv[0]} is not installed", absent=True) from None
    except subprocess.CalledProcessError as error:
        raise FailedError(f"{argv[0]}: {error.stderr.strip()}") from None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def qemu_nbd(image: Path) -> Iterator[str]:
    """The URI of the raw IMAGE, exported by qemu-nbd. Raises FailedError."""
    with tempfile.TemporaryDirectory(prefix="imgsum-bench-") as directory:
        path, pid = Path(directory, "socket"), Path(directory, "pid")
        # With --fork it returns when it serves: the socket exists before the image is open.
        argv = ["qemu-nbd", "--fork", f"--pid-file={pid}", "--read-only", "--persistent", "--shared=16"]
        _run(*argv, "--format=raw", f"--socket={path}", image)
        try:
            yield f"nbd+unix:///?socket={path}"
        finally:
            os.kill(int(pid.read_text()), signal.SIGTERM)
