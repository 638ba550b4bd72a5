"""Compare and check."""

from __future__ import annotations

import shlex
from pathlib import Path

from bench.bars import at_most
from bench.case import IMGSUM, Commands, Setup, case, checksum, comparison, qemu_compare
from bench.images import BLOCK, SMALL_IMAGES
from bench.run import Command


def compare(one: Path, other: Path, differ_at: int | None = None) -> Command:
    """Imgsum comparing two images, which are identical or DIFFER_AT an offset."""
    return comparison([*IMGSUM, "compare", str(one), str(other)], differ_at)


@case("half.raw", "half-copy.raw", runs=3)
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


@case("part.qcow2", "part-2m.qcow2", runs=3)
def compare_qcow2_qcow2(s: Setup) -> Commands:
    """Two qcow2 images of 2 GiB, half of it data, clusters of 64 KiB and 2 MiB, identical."""
    one, other = s.path("part.qcow2"), s.path("part-2m.qcow2")
    return {"imgsum": compare(one, other), "qemu-img compare": qemu_compare(one, other)}


@case("half.raw", "half-changed.qcow2", runs=3)
def compare_different(s: Setup) -> Commands:
    """Raw and qcow2 of 6 GiB, half of it data, different at the end."""
    one, other = s.path("half.raw"), s.path("half-changed.qcow2")
    at = s.images.size - BLOCK
    return {"imgsum": compare(one, other, at), "qemu-img compare": qemu_compare(one, other, at)}


@case("half.raw", bars=(at_most(1.05, "imgsum checksum"),))
def check_one(s: Setup) -> Commands:
    """Check of one image, 6 GiB raw, half of it data: against its checksum."""
    image = s.path("half.raw")
    return {
        "imgsum": Command([*IMGSUM, "check", str(s.sums("one.sums", image))], says=": OK"),
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
        "imgsum": Command([*IMGSUM, "check", str(whole)], "check of 100 images", says="099.raw: OK"),
        "100 commands": Command(_for_each([*IMGSUM, "check"], each), "check of 100 images", says="099.raw: OK"),
    }


def _for_each(command: list[str], names: list[str]) -> list[str]:
    """A shell that runs COMMAND with each of NAMES; what it costs itself is 0.1 ms for each."""
    return ["sh", "-c", f'for name do {shlex.join(command)} "$name" || exit; done', "sh", *names]
