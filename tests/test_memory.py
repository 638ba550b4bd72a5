"""At most 64 MiB resident, whatever the image: measured in the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import reference
from conftest import Imgsum
from reference import GIB, MIB, TIB

LIMIT = 64 * MIB


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    path = tmp_path / "sparse.raw"
    path.touch()
    return path


def test_gigabytes_of_data(image_in_memory: object, imgsum: Imgsum) -> None:
    """6 GiB that are all read: for what is kept it makes no difference that they are zeros."""
    path = image_in_memory("6g:-")  # type: ignore[operator]
    result, peak = imgsum.peak_memory("checksum", "-q", "--no-extents", path)
    assert result.status == 0
    assert result.text.split()[0] == reference.blkhash(reference.chunks("6g:-"))
    assert peak <= LIMIT


def test_data_that_is_hashed(image_in_memory: object, imgsum: Imgsum) -> None:
    path = image_in_memory("256m:R")  # type: ignore[operator]
    for options in (["-a", "xxh3-128"], ["-a", "blake3", "-T", "none"], ["-a", "blake3", "--request-size=32m"]):
        result, peak = imgsum.peak_memory("checksum", "-q", *options, path)
        assert result.text.split()[0] == reference.blkhash(reference.chunks("256m:R"), options[1])
        assert peak <= LIMIT


@pytest.mark.parametrize("options", [[], ["--request-size=32m"], ["-b", "32m"], ["--construction=imageio"]])
def test_streams(options: list[str], image_in_memory: object, imgsum: Imgsum) -> None:
    with open(image_in_memory("256m:R"), "rb") as file:  # type: ignore[operator]
        result, peak = (
            imgsum.peak_memory("checksum", "-a", "xxh64", *options, stdin=file)
            if ("imageio" not in "".join(options))
            else imgsum.peak_memory("checksum", *options, stdin=file)
        )
    assert result.status == 0
    assert peak <= LIMIT


def test_a_hole_of_8_tib(sparse: Path, imgsum: Imgsum) -> None:
    os.truncate(sparse, 8 * TIB)
    result, peak = imgsum.peak_memory("checksum", "-q", "-a", "sha1", sparse)
    zero = reference.HASHES["sha1"](bytes(65536)).digest()
    outer = reference.HASHES["sha1"]()
    for _ in range(8 * TIB // GIB):
        outer.update(zero * (GIB // 65536))
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
