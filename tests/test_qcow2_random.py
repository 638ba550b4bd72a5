"""Random images, whole and damaged, against QEMU: a small part of what `make fuzz` does for as long as one likes."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import qcow2_images
from conftest import find_tool
from fuzz_qcow2 import WAYS, damaged_cases, streams_case, valid_case
from qcow2_images import random_image, run
from qcow2_streams import ORDERS, random_streams
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


@pytest.mark.parametrize("batch", range(8))
def test_compressed_clusters_in_any_order(batch: int, tmp_path: Path) -> None:
    """Each at several request sizes, with and without O_DIRECT."""
    for seed in range(batch * 12, batch * 12 + 12):
        assert streams_case(seed, tmp_path, seed % 12 == 0, 256 << 10) is None, seed


def test_the_orders_that_are_made() -> None:
    made = [random_streams(seed, 32 << 10) for seed in range(100)]
    story = "\n".join(each.story for each in made)
    for word in (*ORDERS, "zlib", "zstd", "extended True", "gaps none", "gaps far", "clusters of 2097152", "of 512,"):
        assert word in story, word
    assert {each.tidy for each in made} == {True, False}


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_what_convert_writes_out_of_order(compression: str, tmp_path: Path) -> None:
    """16 coroutines, each of which writes its cluster when it is done."""
    content = b"".join(bytes([number % 250 + 1]) * 65536 for number in range(256))
    (tmp_path / "raw").write_bytes(content)
    options = f"compression_type={compression}"
    run("qemu-img", "convert", "-c", "-W", "-m", "16", "-f", "raw", "-O", "qcow2", "-o", options, "raw", "image")
    for way in WAYS:
        opened = imgsum.OpenOptions(**way)  # type: ignore[arg-type]
        assert imgsum.checksum("image", options=opened).hexdigest == blkhash(content), way


def test_two_clusters_that_were_written_backwards() -> None:
    run("qemu-img", "create", "-q", "-f", "qcow2", "image", "128k")
    run("qemu-io", "-f", "qcow2", "-c", "write -q -c -P 2 64k 64k", "-c", "write -q -c -P 1 0 64k", "image")
    for way in WAYS:
        opened = imgsum.OpenOptions(**way)  # type: ignore[arg-type]
        assert imgsum.checksum("image", options=opened).hexdigest == blkhash(b"\1" * 65536 + b"\2" * 65536), way


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
        "discard", "snapshot -c", "resize", "convert -c", "-W -m 16",
    ):  # fmt: skip
        assert word in story, word


def test_the_reference_itself() -> None:
    assert blkhash(b"").startswith("af5570f5a181")
