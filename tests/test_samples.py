"""Images that other programs made: each gives the checksum that is on record for it, or is refused.

They are in ../shared/samples (or $IMGSUM_SHARED/samples), with INDEX.tsv, which says what they are and whose.
"""

from __future__ import annotations

import bz2
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import need

from imgsum import OpenOptions, checksum
from imgsum.errors import Error, FormatError

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


def unpacked(sample: Sample, directory: Path) -> Path:
    """The image, which may be written to when it is in DIRECTORY."""
    image = INDEX.parent / sample.file
    if image.suffix != ".bz2":
        return image
    (directory / image.stem).write_bytes(bz2.decompress(image.read_bytes()))
    return directory / image.stem


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.file)
def test_sample(sample: Sample, tmp_path: Path) -> None:
    image = unpacked(sample, tmp_path)
    if sample.format == "(rejected)":
        with pytest.raises(FormatError):
            checksum(image)
    else:
        got = checksum(image)
        assert (got.hexdigest, got.size, got.format) == (sample.checksum, int(sample.size), sample.format)


@pytest.mark.parametrize(
    "sample",
    [sample for sample in samples() if sample.format not in ("raw", "(rejected)")],
    ids=lambda sample: sample.file,
)
def test_no_beginning_of_a_sample_gives_another_checksum(sample: Sample, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copy(unpacked(sample, tmp_path), cut)
    length, errors = cut.stat().st_size, 0
    missing = {1, 200, 280, 300, 400, 512, 1024, *(length * part // 11 for part in range(1, 11)), length - 300}
    for count in sorted(missing):
        os.truncate(cut, length - count)
        try:
            got = checksum(cut, options=OpenOptions(format=sample.format))
            assert got.hexdigest == sample.checksum, f"without its last {count} bytes"
        except Error:
            errors += 1
    assert errors
