"""Every line of blkhash.tsv, as blksum 0.11 printed it: from files with holes, files without, and standard input."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import reference
from reference import GIB

from imgsum import OpenOptions, checksum


class Vector(NamedTuple):
    name: str
    spec: str
    size: int
    algorithm: str
    block_size: int
    digest: str

    def check(self, image: str | Path, options: OpenOptions | None = None) -> None:
        result = checksum(image, algorithm=self.algorithm, block_size=self.block_size, options=options)
        assert result.hexdigest == self.digest
        assert result.size == self.size


def _vectors() -> list[Vector]:
    lines = (Path(__file__).parent / "blkhash.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [Vector(row[0], row[1], int(row[2]), row[3], int(row[4]), row[5]) for row in rows]


def _vector_id(vector: Vector) -> str:
    return f"{vector.name}-{vector.algorithm}-{vector.block_size}"


VECTORS = _vectors()
every_vector = pytest.mark.parametrize("vector", VECTORS, ids=_vector_id)


def test_all_are_here() -> None:
    assert len(VECTORS) == 206
    assert all(reference.size(vector.spec) == vector.size for vector in VECTORS)


@every_vector
def test_file_with_holes(vector: Vector, image: Callable[..., Path]) -> None:
    vector.check(image(vector.spec))


@every_vector
def test_file_without_holes(vector: Vector, image: Callable[..., Path], image_in_memory: Callable[..., Path]) -> None:
    if vector.size < GIB:
        vector.check(image(vector.spec, holes=False))
    else:  # not written for real: read as if it were
        vector.check(image_in_memory(vector.spec), OpenOptions(extents=False))


@every_vector
def test_standard_input(
    vector: Vector, image_in_memory: Callable[..., Path], stdin_from: Callable[[int], None]
) -> None:
    fd = os.open(image_in_memory(vector.spec), os.O_RDONLY)
    stdin_from(fd)
    os.close(fd)
    vector.check("-")


@pytest.mark.parametrize("vector", [v for v in VECTORS if v.size < GIB], ids=_vector_id)
def test_the_reference_itself(vector: Vector) -> None:
    assert reference.blkhash(reference.chunks(vector.spec), vector.algorithm, vector.block_size) == vector.digest
