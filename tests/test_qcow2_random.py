"""Random images, whole and damaged, against QEMU: a small part of what `make fuzz` does for as long as one likes."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import qcow2_images
from conftest import find_tool
from fuzz_qcow2 import damaged_cases, valid_case
from qcow2_images import random_image
from reference import blkhash

import imgsum


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_tool("qemu-img")
    find_tool("qemu-io")
    monkeypatch.chdir(tmp_path)  # a data file's name is relative to it


@pytest.mark.parametrize("batch", range(8))
def test_valid_images(batch: int, tmp_path: Path) -> None:
    for seed in range(batch * 8, batch * 8 + 8):
        directory = tmp_path / str(seed)
        directory.mkdir()
        with pytest.MonkeyPatch.context() as context:
            context.chdir(directory)
            image = random_image(seed, directory)
            assert valid_case(image) is None, (seed, image.story)


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_damaged_images(seed: int, tmp_path: Path) -> None:
    image = random_image(seed, tmp_path)
    if image.format != "qcow2":
        pytest.skip("this seed is a raw image")
    tally: Counter[str] = Counter()
    assert damaged_cases(image, random.Random(seed), 12, tally) == []
    assert tally.total() == 12


@pytest.mark.parametrize(
    "options", [{"direct": True}, {"extents": False}, {"request_size": 4096}, {"reader": "native"}]
)
def test_ways_to_read(options: dict[str, object], tmp_path: Path) -> None:
    for seed in range(2000, 2006):
        directory = tmp_path / str(seed)
        directory.mkdir()
        with pytest.MonkeyPatch.context() as context:
            context.chdir(directory)
            image = random_image(seed, directory, most=1 << 20)
            plain = imgsum.checksum(image.path)
            opened = imgsum.OpenOptions(**options)  # type: ignore[arg-type]
            assert imgsum.checksum(image.path, options=opened).hexdigest == plain.hexdigest, (seed, image.story)


def test_by_qemu(tmp_path: Path) -> None:
    """A second opinion, over NBD, by the same command."""
    find_tool("qemu-nbd")
    pytest.importorskip("nbd")
    for seed in range(3000, 3010):
        directory = tmp_path / str(seed)
        directory.mkdir()
        with pytest.MonkeyPatch.context() as context:
            context.chdir(directory)
            image = random_image(seed, directory)
            if image.format == "qcow2" and "data_file" not in "".join(image.story):
                by_qemu = imgsum.checksum(image.path, options=imgsum.OpenOptions(reader="qemu"))
                assert by_qemu.hexdigest == imgsum.checksum(image.path).hexdigest, (seed, image.story)


def test_the_generator_makes_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a change of it does not quietly stop testing something. QEMU isn't run for it."""
    nothing = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(qcow2_images.subprocess, "run", lambda *args, **kwargs: nothing)
    monkeypatch.setattr(qcow2_images._Maker, "_bytes", lambda *args: b"")
    told = []
    for seed in range(200):
        told += random_image(seed, tmp_path).story
    story = "\n".join(told)
    for word in (
        "extended_l2=on", "compression_type=zstd", "data_file=", "data_file_raw=on", "compat=0.10", "-F raw",
        "-F qcow2", "preallocation=metadata", "cluster_size=512,", "cluster_size=2097152", "write -q -c", "write -q -z",
        "discard", "snapshot -c", "resize", "convert -c",
    ):  # fmt: skip
        assert word in story, word


def test_the_reference_itself() -> None:
    assert blkhash(b"").startswith("af5570f5a181")
