"""qcow2, read natively by imgsum and through QEMU by its peers."""

from __future__ import annotations

from pathlib import Path

from bench.bars import at_most
from bench.case import Commands, Setup, blksum, case, checksum, qemu_compare
from bench.images import LAYERS
from bench.run import Command


def to_null(image: Path, image_format: str, size: int) -> Command:
    """QEMU reading all of IMAGE, its fastest."""
    target = f"driver=null-co,size={size}"
    return Command(["qemu-img", "convert", "-W", "-n", "-f", image_format, "--target-image-opts", str(image), target])


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


@case("part.raw", "part-fragmented.qcow2", runs=3)
def qcow2_fragmented(s: Setup) -> Commands:
    """2 GiB qcow2, half of it data, each cluster somewhere else."""
    image = s.path("part-fragmented.qcow2")
    return {"imgsum": checksum("part", image), **qcow2_peers(s, "part", image)}


@case("part-chain", "part.qcow2", bars=(at_most(1.3, "imgsum, one image"),))
def qcow2_chain(s: Setup) -> Commands:
    """2 GiB qcow2, half of it data, in a chain of ten: against one image of the same."""
    image = s.path("part-chain") / f"{LAYERS - 1}.qcow2"
    return {
        "imgsum": checksum("part", image),
        "imgsum, one image": checksum("part", s.path("part.qcow2")),
        **qcow2_peers(s, "part", image),
    }


@case("part.raw", "part-4k.qcow2", runs=3)
def qcow2_4k(s: Setup) -> Commands:
    """2 GiB qcow2, half of it data, clusters of 4 KiB."""
    image = s.path("part-4k.qcow2")
    return {"imgsum": checksum("part", image), **qcow2_peers(s, "part", image)}


@case("part.raw", "part-2m.qcow2", runs=3)
def qcow2_2m(s: Setup) -> Commands:
    """2 GiB qcow2, half of it data, clusters of 2 MiB."""
    image = s.path("part-2m.qcow2")
    return {"imgsum": checksum("part", image), **qcow2_peers(s, "part", image)}


@case("preallocated-1t.qcow2", runs=3, bars=(at_most(0.5, "blksum -c"),))
def qcow2_preallocated_1t(s: Setup) -> Commands:
    """1 TiB qcow2 with preallocated metadata, no data."""
    image = s.path("preallocated-1t.qcow2")
    # No qemu-img convert: it reads the 1 TiB, and takes minutes.
    return {"imgsum": checksum("1 TiB", image), "blksum -c": blksum("1 TiB", image, "-c")}
