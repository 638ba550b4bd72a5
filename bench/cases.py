"""What is measured: a case is a few commands on the same content, and the bars that their ratios are to reach.

Bars are those of PERFORMANCE.md and of the issues. All that reads the same content must give the same checksum.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.bars import Bar, at_most
from bench.images import IMAGES, KIB, LAYERS, MIB, SMALL_IMAGES, Images
from bench.limits import outer_hash, work_limit
from bench.run import Command, FailedError, Limit
from bench.servers import nbdkit, qemu_nbd

Commands = Mapping[str, Command | Limit]

_HERE = Path(__file__).parent
_SCRIPT = Path(sys.executable).with_name("imgsum")
IMGSUM = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "imgsum"]
PYTHON = Command([sys.executable, "-c", "pass"])


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
    return Command([sys.executable, str(_HERE / "naive.py"), *options, str(image)], f"blkhash sha256 of {content}")


def with_workers(content: str, image: Path, algorithm: str) -> Commands:
    """Imgsum with 1 to 16 workers."""
    script = str(_HERE / "workers.py")
    return {
        f"{count} worker{'s' if count > 1 else ''}": Command(
            [sys.executable, script, str(count), algorithm, str(image)], f"blkhash {algorithm} of {content}"
        )
        for count in (1, 2, 3, 4, 6, 8, 12, 16)
    }


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


def dd_direct(image: Path) -> Command:
    """The disk's own speed."""
    return Command(["dd", f"if={image}", "of=/dev/null", "iflag=direct", "bs=1M", "status=none"])


def nbdcopy(uri: str) -> Command:
    """The fastest reader of NBD."""
    return Command(["nbdcopy", uri, "null:"])


def to_null(image: Path, image_format: str, size: int) -> Command:
    """QEMU reading all of IMAGE, its fastest."""
    target = f"driver=null-co,size={size}"
    return Command(["qemu-img", "convert", "-W", "-n", "-f", image_format, "--target-image-opts", str(image), target])


def qemu_compare(one: Path, other: Path, status: int = 0) -> Command:
    """QEMU comparing two images."""
    formats = ["-f", one.suffix[1:], "-F", other.suffix[1:]]
    return Command(["qemu-img", "compare", *formats, str(one), str(other)], status=status)


def compare(one: Path, other: Path, status: int = 0) -> Command:
    """Imgsum comparing two images."""
    return Command([*IMGSUM, "compare", "-q", str(one), str(other)], status=status)


# Raw images.


@case(bars=(at_most(3, "python3 -c pass"),))
def start_up(_: Setup) -> Commands:
    """Start-up: imgsum --version."""
    return {"imgsum": Command([*IMGSUM, "--version"]), "python3 -c pass": PYTHON}


@case("half.raw", bars=(at_most(1.15, "work limit"), at_most(0.5, "blksum -c")))
def raw_half_cached(s: Setup) -> Commands:
    """6 GiB raw, half of it data in random runs, in the page cache."""
    image = s.path("half.raw")
    return {
        "imgsum": checksum("half", image),
        "work limit": work_limit(image),
        "blksum -c": blksum("half", image, "-c"),
        "before": before("half", image),
    }


@case("full.raw", bars=(at_most(1.15, "work limit"), at_most(0.5, "blksum -c")))
def raw_full_cached(s: Setup) -> Commands:
    """2 GiB raw, all data, in the page cache."""
    image = s.path("full.raw")
    return {
        "imgsum": checksum("full", image),
        "work limit": work_limit(image),
        "blksum -c": blksum("full", image, "-c"),
        "openssl dgst": Command(["openssl", "dgst", "-r", "-sha256", str(image)], "sha256 of full"),
    }


@case("full.raw", runs=1)
def raw_full_sha256sum(s: Setup) -> Commands:
    """What people run today: sha256sum of 2 GiB."""
    image = s.path("full.raw")
    return {"imgsum": checksum("full", image), "sha256sum": Command(["sha256sum", str(image)], "sha256 of full")}


@case("half.raw", bars=(at_most(1.15, "work limit", "dd iflag=direct"),))
def raw_half_direct(s: Setup) -> Commands:
    """6 GiB raw, half of it data, O_DIRECT."""
    image = s.path("half.raw")
    return {
        "imgsum": checksum("half", image, "-T", "none"),
        "dd iflag=direct": dd_direct(image),
        "work limit": work_limit(image),
        "blksum": blksum("half", image),
        "before": before("half", image, "--direct"),
    }


@case("full.raw", bars=(at_most(1.15, "work limit", "dd iflag=direct"),))
def raw_full_direct(s: Setup) -> Commands:
    """2 GiB raw, all data, O_DIRECT."""
    image = s.path("full.raw")
    return {
        "imgsum": checksum("full", image, "-T", "none"),
        "dd iflag=direct": dd_direct(image),
        "work limit": work_limit(image),
        "blksum": blksum("full", image),
    }


@case("zeros.raw")
def raw_zeros_cached(s: Setup) -> Commands:
    """6 GiB raw, zeros that were written, in the page cache."""
    image = s.path("zeros.raw")
    return {"imgsum": checksum("empty", image), "before": before("empty", image)}


@case("zeros.raw", runs=3)
def raw_zeros_direct(s: Setup) -> Commands:
    """6 GiB raw, zeros that were written, O_DIRECT."""
    image = s.path("zeros.raw")
    return {"imgsum": checksum("empty", image, "-T", "none"), "before": before("empty", image, "--direct")}


@case("empty.raw")
def raw_empty(s: Setup) -> Commands:
    """6 GiB raw, a hole."""
    image = s.path("empty.raw")
    return {"imgsum": checksum("empty", image), "blksum -c": blksum("empty", image, "-c")}


@case("hole-8t.raw", runs=3, bars=(at_most(1.15, "outer hash"),))
def raw_hole_8t(s: Setup) -> Commands:
    """8 TiB raw, a hole: against hashing 32 bytes for each 64 KiB on one core."""
    image = s.path("hole-8t.raw")
    return {"imgsum": checksum("8 TiB", image), "outer hash": outer_hash(image.stat().st_size)}


@case("extents.raw")
def raw_extents(s: Setup) -> Commands:
    """100,000 extents of 4 KiB, raw, in the page cache."""
    image = s.path("extents.raw")
    return {"imgsum": checksum("extents", image), "blksum -c": blksum("extents", image, "-c")}


@case("full.raw", bars=(at_most(1.3, "b3sum"),))
def raw_full_blake3(s: Setup) -> Commands:
    """2 GiB raw, all data, blake3."""
    image = s.path("full.raw")
    return {"imgsum": checksum("full", image, algorithm="blake3"), "b3sum": Command(["b3sum", str(image)])}


@case("full.raw")
def raw_full_xxh3(s: Setup) -> Commands:
    """2 GiB raw, all data, xxh3-128."""
    image = s.path("full.raw")
    return {
        "imgsum": checksum("full", image, algorithm="xxh3-128"),
        "xxhsum -H128": Command(["xxhsum", "-q", "-H128", str(image)]),
    }


@case("full.raw", sweep=True)
def workers_sha256(s: Setup) -> Commands:
    """1 to 16 workers, sha256, 2 GiB raw in the page cache."""
    return with_workers("full", s.path("full.raw"), "sha256")


@case("full.raw", sweep=True, bars=(at_most(1.25, "best", who="8 workers"),))
def workers_blake3(s: Setup) -> Commands:
    """1 to 16 workers, blake3, 2 GiB raw in the page cache."""
    return with_workers("full", s.path("full.raw"), "blake3")


@case("full.raw", sweep=True, bars=(at_most(1.25, "best", who="8 workers"),))
def workers_xxh3(s: Setup) -> Commands:
    """1 to 16 workers, xxh3-128, 2 GiB raw in the page cache."""
    return with_workers("full", s.path("full.raw"), "xxh3-128")


@case("full.raw", sweep=True)
def request_size_raw(s: Setup) -> Commands:
    """Requests of 256 KiB to 32 MiB, 2 GiB raw in the page cache."""
    return with_request_size("full", s.path("full.raw"))


# Over NBD: the server runs for the whole case.

_NBD_BARS = (at_most(1, "blksum"), at_most(1.5, "nbdcopy", "work limit"))


def over_nbd(s: Setup, uri: str) -> Commands:
    """The peers on an export of half."""
    return {
        "imgsum": checksum("half", uri),
        "nbdcopy": nbdcopy(uri),
        "work limit": work_limit(s.path("half.raw")),
        "blksum": blksum("half", uri),
    }


@case("half.raw", bars=_NBD_BARS)
def nbd_raw(s: Setup) -> Commands:
    """6 GiB raw, half of it data, exported by qemu-nbd, page cache."""
    uri = s.serve(qemu_nbd(s.path("half.raw"), "raw"))
    return {**over_nbd(s, uri), "before": before("half", uri)}


@case("half.raw", runs=3)
def nbd_raw_direct(s: Setup) -> Commands:
    """6 GiB raw, half of it data, exported by qemu-nbd, O_DIRECT."""
    uri = s.serve(qemu_nbd(s.path("half.raw"), "raw", cache="none"))
    return {"imgsum": checksum("half", uri), "before": before("half", uri)}


@case("half.qcow2", bars=_NBD_BARS)
def nbd_qcow2(s: Setup) -> Commands:
    """6 GiB qcow2, half of it data, exported by qemu-nbd."""
    return over_nbd(s, s.serve(qemu_nbd(s.path("half.qcow2"), "qcow2")))


@case("half.raw", bars=_NBD_BARS)
def nbd_nbdkit(s: Setup) -> Commands:
    """6 GiB raw, half of it data, exported by nbdkit."""
    return over_nbd(s, s.serve(nbdkit("file", str(s.path("half.raw")))))


@case("empty.raw", bars=(at_most(1.5, "nbdcopy", less="python3 -c pass"),))
def nbd_empty(s: Setup) -> Commands:
    """6 GiB empty, exported by qemu-nbd: by its ZERO flag, against reading."""
    uri = s.serve(qemu_nbd(s.path("empty.raw"), "raw"))
    return {
        "imgsum": checksum("empty", uri),
        "nbdcopy": nbdcopy(uri),
        "python3 -c pass": PYTHON,
        "imgsum --no-extents": checksum("empty", uri, "--no-extents"),
    }


def _ten_seconds() -> float:
    return 10.0


@case("hole-8t.raw", runs=1, bars=(at_most(1, "ten seconds"),))
def nbd_hole_8t(s: Setup) -> Commands:
    """8 TiB empty, exported by qemu-nbd: a matter of seconds."""
    image = s.path("hole-8t.raw")
    return {
        "imgsum": checksum("8 TiB", s.serve(qemu_nbd(image, "raw"))),
        "ten seconds": _ten_seconds,
        "outer hash": outer_hash(image.stat().st_size),
    }


@case("full.raw", sweep=True)
def request_size_nbd(s: Setup) -> Commands:
    """Requests of 256 KiB to 32 MiB, 2 GiB raw exported by qemu-nbd."""
    return with_request_size("full", s.serve(qemu_nbd(s.path("full.raw"), "raw")))


@case("full.raw", sweep=True)
def queue_size_nbd(s: Setup) -> Commands:
    """Queues of 1 to 64 MiB, 2 GiB raw exported by qemu-nbd."""
    uri = s.serve(qemu_nbd(s.path("full.raw"), "raw"))
    return {size_name(MIB << step): checksum("full", uri, f"--queue-size={MIB << step}") for step in range(7)}


@case("full.raw", sweep=True)
def connections_nbd(s: Setup) -> Commands:
    """1 to 8 connections, 2 GiB raw exported by qemu-nbd."""
    uri = s.serve(qemu_nbd(s.path("full.raw"), "raw"))
    return {
        f"{count} connection{'s' if count > 1 else ''}": checksum("full", uri, f"--connections={count}")
        for count in (1, 2, 4, 8)
    }


# qcow2.


def qcow2_peers(s: Setup, content: str, image: Path) -> Commands:
    """Those that read IMAGE through QEMU."""
    raw = s.path(f"{content}.raw")
    return {
        "blksum -c": blksum(content, image, "-c"),
        "qemu-img convert to null": to_null(image, "qcow2", raw.stat().st_size),
        "qemu-img compare with raw": qemu_compare(raw, image),
    }


@case("half.raw", "half.qcow2", bars=(at_most(1.1, "imgsum, raw"),))
def qcow2_half(s: Setup) -> Commands:
    """6 GiB qcow2, half of it data."""
    image = s.path("half.qcow2")
    return {
        "imgsum": checksum("half", image),
        "imgsum, raw": checksum("half", s.path("half.raw")),
        **qcow2_peers(s, "half", image),
    }


@case("text.raw", "text-zlib.qcow2", runs=3, bars=(at_most(0.5, "blksum -c"),))
def qcow2_zlib(s: Setup) -> Commands:
    """2 GiB of text, half of it data, compressed with zlib."""
    image = s.path("text-zlib.qcow2")
    return {"imgsum": checksum("text", image), **qcow2_peers(s, "text", image)}


@case("text.raw", "text-zstd.qcow2", bars=(at_most(0.55, "blksum -c"),))
def qcow2_zstd(s: Setup) -> Commands:
    """2 GiB of text, half of it data, compressed with zstd."""
    image = s.path("text-zstd.qcow2")
    return {"imgsum": checksum("text", image), **qcow2_peers(s, "text", image)}


@case("half-fragmented.qcow2", runs=3)
def qcow2_fragmented(s: Setup) -> Commands:
    """6 GiB qcow2, half of it data, each cluster somewhere else."""
    image = s.path("half-fragmented.qcow2")
    return {"imgsum": checksum("half", image), **qcow2_peers(s, "half", image)}


@case("half-chain", "half.qcow2", bars=(at_most(1.3, "imgsum, one image"),))
def qcow2_chain(s: Setup) -> Commands:
    """6 GiB qcow2, half of it data, in a chain of ten: against one image of the same."""
    image = s.path("half-chain") / f"{LAYERS - 1}.qcow2"
    return {
        "imgsum": checksum("half", image),
        "imgsum, one image": checksum("half", s.path("half.qcow2")),
        "blksum -c": blksum("half", image, "-c"),
    }


@case("half-4k.qcow2", runs=3)
def qcow2_4k(s: Setup) -> Commands:
    """6 GiB qcow2, half of it data, clusters of 4 KiB."""
    image = s.path("half-4k.qcow2")
    return {"imgsum": checksum("half", image), **qcow2_peers(s, "half", image)}


@case("half-2m.qcow2", runs=3)
def qcow2_2m(s: Setup) -> Commands:
    """6 GiB qcow2, half of it data, clusters of 2 MiB."""
    image = s.path("half-2m.qcow2")
    return {"imgsum": checksum("half", image), **qcow2_peers(s, "half", image)}


@case("preallocated-1t.qcow2", runs=3, bars=(at_most(0.5, "blksum -c"),))
def qcow2_preallocated_1t(s: Setup) -> Commands:
    """1 TiB qcow2 with preallocated metadata, no data."""
    image = s.path("preallocated-1t.qcow2")
    size = s.images.scaled(1 << 40)
    return {
        "imgsum": checksum("1 TiB", image),
        "blksum -c": blksum("1 TiB", image, "-c"),
        "qemu-img convert to null": to_null(image, "qcow2", size),
    }


# Verifying.


@case("half.raw", "half-copy.raw")
def compare_raw_raw(s: Setup) -> Commands:
    """Two raw images of 6 GiB, half of it data, identical."""
    one, other = s.path("half.raw"), s.path("half-copy.raw")
    return {
        "imgsum": compare(one, other),
        "qemu-img compare": qemu_compare(one, other),
        "cmp": Command(["cmp", str(one), str(other)]),
    }


@case("half.raw", "half.qcow2", bars=(at_most(1, "qemu-img compare"),))
def compare_raw_qcow2(s: Setup) -> Commands:
    """Raw and qcow2 of 6 GiB, half of it data, identical."""
    one, other = s.path("half.raw"), s.path("half.qcow2")
    return {"imgsum": compare(one, other), "qemu-img compare": qemu_compare(one, other)}


@case("half.qcow2", "half-2m.qcow2")
def compare_qcow2_qcow2(s: Setup) -> Commands:
    """Two qcow2 images of 6 GiB, half of it data, clusters of 64 KiB and 2 MiB, identical."""
    one, other = s.path("half.qcow2"), s.path("half-2m.qcow2")
    return {"imgsum": compare(one, other), "qemu-img compare": qemu_compare(one, other)}


@case("half.raw", "half-changed.qcow2")
def compare_different(s: Setup) -> Commands:
    """Raw and qcow2 of 6 GiB, half of it data, different at the end."""
    one, other = s.path("half.raw"), s.path("half-changed.qcow2")
    return {"imgsum": compare(one, other, status=1), "qemu-img compare": qemu_compare(one, other, status=1)}


@case("half.raw", bars=(at_most(1.05, "imgsum checksum"),))
def check_one(s: Setup) -> Commands:
    """Check of one image, 6 GiB raw, half of it data: against its checksum."""
    image = s.path("half.raw")
    return {
        "imgsum": Command([*IMGSUM, "check", "-q", str(s.sums("one.sums", image))]),
        "imgsum checksum": checksum("half", image),
    }


@case("small", runs=3, bars=(at_most(0.1, "100 commands"),))
def checksum_100(s: Setup) -> Commands:
    """Checksums of 100 images of 1 MiB: one command against 100."""
    images = sorted(map(str, s.path("small").iterdir()))
    return {
        "imgsum": Command([*IMGSUM, "checksum", *images], "blkhash sha256 of 100 images"),
        "100 commands": Command(_for_each([*IMGSUM, "checksum"], images), "blkhash sha256 of 100 images"),
    }


@case("small", runs=3, bars=(at_most(0.1, "100 commands"),))
def check_100(s: Setup) -> Commands:
    """Check of 100 images of 1 MiB: one command against 100."""
    images = sorted(s.path("small").iterdir())
    whole = s.sums("all.sums", *images)
    each = []
    for index, line in enumerate(whole.read_text().splitlines()):
        path = s.scratch / f"{index:03}.sums"
        path.write_text(line + "\n")
        each.append(str(path))
    assert len(each) == SMALL_IMAGES
    return {
        "imgsum": Command([*IMGSUM, "check", str(whole)], "check of 100 images"),
        "100 commands": Command(_for_each([*IMGSUM, "check"], each), "check of 100 images"),
    }


def _for_each(command: list[str], names: list[str]) -> list[str]:
    """A shell that runs COMMAND with each of NAMES; what it costs itself is 0.1 ms for each."""
    return ["sh", "-c", f'for name do {shlex.join(command)} "$name" || exit; done', "sh", *names]
