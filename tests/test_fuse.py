"""Files that fail and dawdle for real: nbdkit behind nbdfuse, which is a file system of one file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from conftest import HANG, Imgsum, find_tool
from reference import MIB

FILE_SIZE = 8 * MIB
FAILS_AT = 5 * MIB


@pytest.fixture
def served(tmp_path: Path, root: None) -> Iterator[Callable[..., Path]]:
    """served(*nbdkit's arguments): the path of a file that this nbdkit is the content of."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse here")
    with contextlib.ExitStack() as cleanup:

        def serve(*arguments: str) -> Path:
            path = tmp_path / "served.raw"
            path.touch()
            command = [find_tool("nbdfuse"), "--readonly", str(path), "[", find_tool("nbdkit"), *arguments, "]"]
            process = cleanup.enter_context(subprocess.Popen(command))
            cleanup.callback(subprocess.run, [find_tool("umount"), str(path)], check=True)
            deadline = time.monotonic() + HANG
            while path.stat().st_size == 0:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            return path

        yield serve


def failing(served: Callable[..., Path]) -> Path:
    """8 MiB of `A`, which can't be read from 5 MiB on."""
    return served(
        "eval",
        f"get_size=echo {FILE_SIZE}",
        f"pread=if [ $(($4 + $3)) -gt {FAILS_AT} ]; then echo EIO broken >&2; exit 1; fi;"
        " head -c $3 /dev/zero | tr '\\0' A",
    )


@pytest.mark.parametrize("cache", ["writeback", "none"])
def test_a_read_that_fails(cache: str, served: Callable[..., Path], imgsum: Imgsum) -> None:
    path = failing(served)
    for request_size in ("64k", "1m"):
        result = imgsum("checksum", "-f", "raw", "-T", cache, f"--request-size={request_size}", path)
        assert (result.stdout, result.status) == (b"", 2)
        assert result.errors == f"imgsum: {path}: input/output error at offset {FAILS_AT}\n"
    result = imgsum("checksum", "-f", "raw", "-T", cache, "--length=5m", path)
    assert result.text.split()[0] == reference.blkhash(b"A" * FAILS_AT)
    assert result.status == 0


def test_reads_that_are_slow(served: Callable[..., Path], imgsum: Imgsum) -> None:
    path = served("--filter=delay", "pattern", str(FILE_SIZE), "delay-read=10ms")
    pattern = b"".join(at.to_bytes(8, "big") for at in range(0, FILE_SIZE, 8))
    for options in (["-T", "none"], ["--request-size=128k"]):
        result = imgsum("checksum", *options, path)
        assert (result.text.split()[0], result.status) == (reference.blkhash(pattern), 0)
