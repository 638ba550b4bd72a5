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
from bench.limits import CORES, hash_rate

_VERSIONS = {
    "blksum": [],  # it can't say
    "qemu-img": ["--version"],
    "nbdkit": ["--version"],
    "nbdcopy": ["--version"],
    "sha256sum": ["--version"],
    "openssl": ["version"],
    "b3sum": ["--version"],
    "xxhsum": ["--version"],
    "cmp": ["--version"],
    "dd": ["--version"],
}


def details(images: Path) -> dict[str, object]:
    """The host, and the file system of IMAGES."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "imgsum": f"{imgsum.__version__} {_commit()}".strip(),
        "cpu": _line("/proc/cpuinfo", "model name"),
        "cores": CORES,
        "sha256 of one core": f"{hash_rate() / 1e9:.2f} GB/s",
        "memory": _line("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "openssl of python": ssl.OPENSSL_VERSION,
        "packages": _packages("blake3", "xxhash", "isal", "backports.zstd", "zlib-ng", "zstandard"),
        "file system": _file_system(images),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "floor of resident memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peers": {name: _version(name, options) for name, options in _VERSIONS.items()},
    }


def _commit() -> str:
    """The commit that is measured, with a + when files differ from it."""
    argv = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _line(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return "unknown"


def _packages(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _file_system(path: Path) -> str:
    """The type of the file system that PATH is on: of the mount point that is the longest of its parents."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(point), kind) for _, point, kind, *_ in mounts if path.resolve().is_relative_to(point)]
    return max(above, default=(0, "unknown"))[1]


def _version(name: str, options: list[str]) -> str | None:
    """The first line that NAME says of itself; None when it isn't installed."""
    if shutil.which(name) is None:
        return None
    if not options:
        return "installed"
    process = subprocess.run([name, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return next(iter(process.stdout.strip().splitlines()), "installed").strip()
