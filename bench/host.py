"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import imgsum
from bench.rates import CORES
from imgsum.hash import lanes

_PEERS = ("blksum", "qemu-img", "nbdcopy", "sha256sum", "openssl", "b3sum", "dd")
_PACKAGES = ("blake3", "xxhash", "isal", "backports.zstd")


def describe(images: Path, size: int) -> dict[str, object]:
    """The host, the file system of IMAGES, and their SIZE in bytes."""
    commit = _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "size": size,
        "imgsum": f"{imgsum.__version__} {commit or ''}",
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": CORES,
        "sha256": lanes.sha256().description,
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "openssl of python": ssl.OPENSSL_VERSION,
        "packages": {name: _version(name) for name in _PACKAGES},
        "file system": _first_line("stat", "-f", "-c", "%T", str(images)),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "least resident memory that shows, KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        # blksum can't say its version.
        "peers": {name: shutil.which(name) and (_first_line(name, _option(name)) or "installed") for name in _PEERS},
    }


def _option(peer: str) -> str:
    return "version" if peer == "openssl" else "--version"


def _first_line(*argv: str) -> str | None:
    """What ARGV prints first; None when it fails or isn't installed."""
    done = None
    if shutil.which(argv[0]):
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] if done and done.returncode == 0 else None


def _field(path: str, key: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
