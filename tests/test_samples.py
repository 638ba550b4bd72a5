"""Images that other programs made: each gives the checksum that is on record for it, or is refused.

They are in ../shared/samples (or $IMGSUM_SHARED/samples), with INDEX.tsv, which says what they are and whose.
"""

from __future__ import annotations

import bz2
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import need

from imgsum import checksum
from imgsum.errors import Error

SHARED = Path(os.environ.get("IMGSUM_SHARED") or Path(__file__).parents[2] / "shared")
INDEX = SHARED / "samples" / "INDEX.tsv"


class Sample(NamedTuple):
    file: str
    format: str
    size: str
    checksum: str


def samples() -> list[Sample]:
    if not INDEX.exists():
        return []
    lines = [line.split("\t") for line in INDEX.read_text().splitlines()[1:]]
    return [Sample(line[0], line[3], line[4], line[5]) for line in lines]


def test_there_are_samples() -> None:
    need(samples(), f"there is no {INDEX}")


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.file)
def test_sample(sample: Sample, tmp_path: Path) -> None:
    image = INDEX.parent / sample.file
    if image.suffix == ".bz2":
        packed, image = image, tmp_path / image.stem
        image.write_bytes(bz2.decompress(packed.read_bytes()))
    if sample.format == "(rejected)":
        with pytest.raises(Error):
            checksum(image)
    else:
        got = checksum(image)
        assert (got.hexdigest, got.size, got.format) == (sample.checksum, int(sample.size), sample.format)
