"""Raw images, algorithms, and the start."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.bars import at_most
from bench.case import HERE, PYTHON, VERSION, Commands, Setup, before, blksum, case, checksum, with_request_size
from bench.limits import outer_hash, work_limit
from bench.run import Command


def with_workers(content: str, image: Path, algorithm: str) -> Commands:
    """Imgsum with 1 to 16 workers."""
    script = str(HERE / "workers.py")
    return {
        f"{count} worker{'s' if count > 1 else ''}": Command(
            [sys.executable, script, str(count), algorithm, str(image)], f"blkhash {algorithm} of {content}"
        )
        for count in (1, 2, 3, 4, 6, 8, 12, 16)
    }


def dd_direct(image: Path) -> Command:
    """The disk's own speed."""
    return Command(["dd", f"if={image}", "of=/dev/null", "iflag=direct", "bs=1M", "status=none"])


@case(bars=(at_most(3, "python3 -c pass"),))
def start_up(_: Setup) -> Commands:
    """Start-up: imgsum --version."""
    return {"imgsum": VERSION, "python3 -c pass": PYTHON}


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


@case("extents.raw", runs=3)
def raw_extents(s: Setup) -> Commands:
    """100,000 extents of 4 KiB, raw, in the page cache."""
    image = s.path("extents.raw")
    return {"imgsum": checksum("extents", image), "imgsum --no-extents": checksum("extents", image, "--no-extents")}


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
