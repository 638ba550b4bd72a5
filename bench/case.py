"""What a case is, and the commands that cases are made of."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.bars import Bar
from bench.images import IMAGES, KIB, MIB, Images
from bench.run import Command, FailedError, Limit

Commands = Mapping[str, Command | Limit]

HERE = Path(__file__).parent
_SCRIPT = Path(sys.executable).with_name("imgsum")
IMGSUM = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "imgsum"]
PYTHON = Command([sys.executable, "-c", "pass"])
VERSION = Command([*IMGSUM, "--version"])


class Setup:
    """What a case finds while it runs."""

    def __init__(self, images: Images, stack: contextlib.ExitStack, scratch: Path) -> None:
        self.images = images
        self.scratch = scratch
        self._stack = stack

    def path(self, name: str) -> Path:
        """Where image NAME is."""
        return self.images.path(name)

    def serve(self, server: contextlib.AbstractContextManager[str]) -> str:
        """The URI of SERVER, which runs until the case ends."""
        return self._stack.enter_context(server)

    def sums(self, name: str, *images: Path) -> Path:
        """A sums file of IMAGES, by imgsum. Raises FailedError."""
        path = self.scratch / name
        with path.open("w") as file:
            if subprocess.run([*IMGSUM, "checksum", "-q", *map(str, images)], stdout=file, check=False).returncode:
                raise FailedError("imgsum checksum failed")
        return path


class Case(NamedTuple):
    """One thing that is measured."""

    name: str
    about: str
    images: tuple[str, ...]
    bars: tuple[Bar, ...]
    runs: int | None
    """The most rounds, where that is fewer than in general."""
    sweep: bool
    """The labels are values of one option; the fastest is the label `best` too."""
    commands: Callable[[Setup], Commands]


CASES: dict[str, Case] = {}


def case(
    *images: str, bars: tuple[Bar, ...] = (), runs: int | None = None, sweep: bool = False
) -> Callable[[Callable[[Setup], Commands]], Callable[[Setup], Commands]]:
    """Make a case of a function that returns its commands: its name and docstring are those of the case."""
    assert set(images) <= set(IMAGES)

    def register(function: Callable[[Setup], Commands]) -> Callable[[Setup], Commands]:
        name = function.__name__.replace("_", "-")
        about = (function.__doc__ or "").rstrip(".")
        CASES[name] = Case(name, about, images, bars, 3 if sweep else runs, sweep, function)
        return function

    return register


def checksum(content: str, image: Path | str, *options: str, algorithm: str = "sha256") -> Command:
    """Imgsum on IMAGE."""
    argv = [*IMGSUM, "checksum", "-q", "-a", algorithm, *options, str(image)]
    return Command(argv, f"blkhash {algorithm} of {content}")


def blksum(content: str, image: Path | str, *options: str) -> Command:
    """Its C peer, on the same."""
    return Command(["blksum", *options, str(image)], f"blkhash sha256 of {content}")


def before(content: str, image: Path | str, *options: str) -> Command:
    """The simple loop, on the same."""
    return Command([sys.executable, str(HERE / "naive.py"), *options, str(image)], f"blkhash sha256 of {content}")


def with_request_size(content: str, image: Path | str) -> Commands:
    """Imgsum with requests of 256 KiB to 32 MiB, one for each worker in flight: nothing else differs."""
    sizes = [256 * KIB << step for step in range(8)]
    return {
        size_name(size): checksum(content, image, f"--request-size={size}", f"--queue-size={max(16 * MIB, 8 * size)}")
        for size in sizes
    }


def size_name(size: int) -> str:
    """SIZE bytes in a table."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def qemu_compare(one: Path, other: Path, differ_at: int | None = None) -> Command:
    """QEMU comparing two images, which are identical or DIFFER_AT an offset."""
    formats = ["-f", one.suffix[1:], "-F", other.suffix[1:]]
    return comparison(["qemu-img", "compare", *formats, str(one), str(other)], differ_at)


def comparison(argv: list[str], differ_at: int | None) -> Command:
    """A command that compares, and must say where the difference is."""
    if differ_at is None:
        return Command(argv, says="identical")
    return Command(argv, status=1, says=f"offset {differ_at}")
