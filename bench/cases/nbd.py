"""Over NBD. The server runs for the whole case."""

from __future__ import annotations

from bench.bars import at_most
from bench.case import PYTHON, VERSION, Commands, Setup, before, blksum, case, checksum, size_name, with_request_size
from bench.images import MIB
from bench.limits import outer_hash, work_limit
from bench.run import Command
from bench.servers import nbdkit, qemu_nbd

_NBD_BARS = (at_most(1, "blksum"), at_most(1.5, "nbdcopy", "work limit"))


def nbdcopy(uri: str) -> Command:
    """The fastest reader of NBD."""
    return Command(["nbdcopy", uri, "null:"])


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
        "imgsum --version": VERSION,
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
