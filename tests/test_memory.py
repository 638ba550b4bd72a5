"""At most 64 MiB resident, whatever the image: measured in the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import Imgsum
from reference import MIB, TIB
from test_vectors import VECTORS

LIMIT = 64 * MIB


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    path = tmp_path / "sparse.raw"
    path.touch()
    return path


def test_gigabytes_of_data(image_in_memory: Callable[..., Path], imgsum: Imgsum) -> None:
    """6 GiB that are all read: for what is kept it makes no difference that they are zeros."""
    vector = next(vector for vector in VECTORS if vector.name == "six-gig-empty-odd")
    result, peak = imgsum.peak_memory("checksum", "-q", "--no-extents", image_in_memory(vector.spec))
    assert result.text.split()[0] == vector.digest
    assert peak <= LIMIT


LETTERS = " ".join(f"16m:{letter}" for letter in "ABCDEFGH")
OPTIONS = (
    ["-a", "blake3"],
    ["-a", "blake3", "-T", "none"],
    ["-a", "sha1", "--request-size=32m"],
    ["-a", "xxh64", "-b", "32m"],
    ["-a", "blake3", "-b", "512"],
)


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_data_that_is_hashed(options: list[str], image: Callable[..., Path], imgsum: Imgsum) -> None:
    result, peak = imgsum.peak_memory("checksum", *options, image(LETTERS))
    assert result.status == 0
    assert peak <= LIMIT


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_streams(options: list[str], image: Callable[..., Path], imgsum: Imgsum) -> None:
    with open(image(LETTERS), "rb") as file:
        result, peak = imgsum.peak_memory("checksum", *options, stdin=file)
    assert result.status == 0
    assert peak <= LIMIT


@pytest.mark.parametrize(
    "options", [["--request-size=32m"], ["-b", "32m"], ["--request-size=4m", "--queue-size=1t"]], ids=" ".join
)
def test_large_buffers_for_files_and_streams(options: list[str], image: Callable[..., Path], imgsum: Imgsum) -> None:
    path = image(LETTERS)
    with open(path, "rb") as file:
        result, peak = imgsum.peak_memory("checksum", "-a", "blake3", *options, path, "-", path, stdin=file)
    assert result.status == 0
    assert len({line.split()[0] for line in result.text.splitlines()}) == 1
    assert peak <= LIMIT


def test_imageio(image: Callable[..., Path], imgsum: Imgsum) -> None:
    result, peak = imgsum.peak_memory("checksum", "--construction=imageio", image(LETTERS))
    assert result.text.split()[0] == reference.imageio(reference.chunks(LETTERS))
    assert peak <= LIMIT


def test_a_hole_of_8_tib(sparse: Path, imgsum: Imgsum) -> None:
    os.truncate(sparse, 8 * TIB)
    result, peak = imgsum.peak_memory("checksum", "-a", "xxh64", sparse)
    blocks, new = 8 * TIB // 65536, reference.HASHES["xxh64"]
    outer = new()
    for _ in range(blocks // MIB):
        outer.update(new(bytes(65536)).digest() * MIB)
    outer.update((8 * TIB).to_bytes(8, "little"))
    assert result.text.split()[0] == outer.hexdigest()
    assert peak <= LIMIT


def test_a_hundred_thousand_extents(sparse: Path, imgsum: Imgsum) -> None:
    count = 100_000
    with open(sparse, "r+b", buffering=0) as file:
        for i in range(count):
            os.pwrite(file.fileno(), b"A", 8192 * i)
        file.truncate(8192 * count)
    result, peak = imgsum.peak_memory("checksum", "-q", "--stats", "-b", "4k", sparse)
    block, zero = (reference.HASHES["sha256"](start.ljust(4096, b"\0")).digest() for start in (b"A", b""))
    outer = reference.HASHES["sha256"]((block + zero) * count + (8192 * count).to_bytes(8, "little"))
    assert result.text.split()[0] == outer.hexdigest()
    assert peak <= LIMIT


def test_thousands_of_images(tmp_path: Path, imgsum: Imgsum) -> None:
    for i in range(3000):
        (tmp_path / f"{i}").write_bytes(b"A" * i)
    result, peak = imgsum.peak_memory("checksum", "-q", *[f"{i}" for i in range(3000)], cwd=tmp_path)
    lines = result.text.splitlines()
    assert [line.split()[1] for line in lines] == [f"{i}" for i in range(3000)]
    assert lines[2999].split()[0] == reference.blkhash(b"A" * 2999)
    assert peak <= LIMIT
