"""image x source x algorithm x cache mode x block size x request size: always the reference's checksum."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import reference
from conftest import HANG, writer
from reference import KIB, MIB

from imgsum import OpenOptions, checksum

SPECS = (
    "",
    "1:A",
    "513:A",
    "4k:- 4k:A 56k:- 64k:0 100:B",
    "1m:R 1m:- 63k:A 65k:0 1m:B 4095:-",
    "300k:- 300k:R 2m:- 4097:R",
    "64k:A 3m:-",
)
ALGORITHMS = ("sha256", "blake3", "xxh3-128")
BLOCK_SIZES = (4 * KIB, 64 * KIB, MIB)
REQUEST_SIZES = (4 * KIB, 64 * KIB, MIB, 32 * MIB)
COMBINATIONS = list(itertools.product(ALGORITHMS, BLOCK_SIZES, REQUEST_SIZES, (False, True)))

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.replace(" ", ",") or "empty")


@cache
def expected(spec: str, size: int, algorithm: str, block_size: int) -> str:
    return reference.blkhash(reference.content(spec)[:size], algorithm, block_size)


def check_all(path: str | Path, spec: str, size: int | None = None) -> None:
    """Every combination on a source that can be read again and again. SIZE: of a device, in whole sectors."""
    size = reference.size(spec) if size is None else size
    for algorithm, block_size, request_size, direct in COMBINATIONS:
        options = OpenOptions(request_size=request_size, direct=direct, format="raw")
        result = checksum(path, algorithm=algorithm, block_size=block_size, options=options)
        assert result.hexdigest == expected(spec, size, algorithm, block_size), (algorithm, block_size, options)
        assert result.size == size
        assert result.stats.bytes_read + result.stats.zero_bytes == size


@every_spec
@pytest.mark.parametrize("holes", [True, False])
def test_file(spec: str, holes: bool, image: Callable[..., Path]) -> None:
    check_all(image(spec, holes=holes), spec)


@every_spec
def test_file_in_memory(spec: str, image_in_memory: Callable[..., Path]) -> None:
    check_all(image_in_memory(spec), spec)


@every_spec
@pytest.mark.parametrize("sector_size", [512, 4096])
def test_block_device(spec: str, sector_size: int, tmp_path: Path, loop_device: Callable[[Path, int], str]) -> None:
    path = tmp_path / "disk.raw"
    reference.write(spec, path)
    size = reference.size(spec) // sector_size * sector_size
    os.truncate(path, size)
    if size:
        check_all(loop_device(path, sector_size), spec, size)


@every_spec
def test_pipe(spec: str) -> None:
    for algorithm, block_size, request_size, _ in COMBINATIONS[::2]:
        reader, to_write = os.pipe()
        with writer(reference.chunks(spec), to_write):
            result = checksum(
                f"/dev/fd/{reader}",
                algorithm=algorithm,
                block_size=block_size,
                options=OpenOptions(request_size=request_size, format="raw"),
            )
        os.close(reader)
        assert result.hexdigest == expected(spec, reference.size(spec), algorithm, block_size)
        assert result.stats.bytes_read == reference.size(spec)


@contextlib.contextmanager
def fifo(path: Path, spec: str) -> Iterator[Path]:
    """A named pipe with a process's worth of writer behind it."""
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: path.write_bytes(reference.content(spec)))
    thread.start()
    try:
        yield path
    finally:
        thread.join(HANG)
        path.unlink()


@every_spec
def test_fifo(spec: str, tmp_path: Path) -> None:
    for algorithm, block_size, request_size, _ in COMBINATIONS[::6]:
        with fifo(tmp_path / "fifo", spec) as path:
            result = checksum(
                path, algorithm=algorithm, block_size=block_size, options=OpenOptions(request_size=request_size)
            )
        assert result.hexdigest == expected(spec, reference.size(spec), algorithm, block_size)
