"""checksum --since: always the value of a full read, or an error; what is reused is not read."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fuzz_index
import pytest
import reference
from conftest import Imgsum, find_tool
from reference import KIB, MIB

import imgsum as api
from imgsum import OpenOptions
from imgsum.errors import ChangedError, RefusedError
from imgsum.source.file import HostFile

SPEC = "1m:R 1m:- 64k:0 1m:R 300:A"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def qemu(*words: str) -> None:
    subprocess.run([find_tool(words[0]), *words[1:]], check=True, capture_output=True)


def same_as_full(image: str, since: str, sample: int = 0, **options: Any) -> api.Checksum:
    """The checksum of IMAGE with an index, which must be that of a full read."""
    opened = OpenOptions(**options)
    found = api.checksum(image, since=since, sample=sample, options=opened)
    full = api.checksum(image, algorithm=found.algorithm, block_size=found.block_size, options=opened)
    assert found.hexdigest == full.hexdigest
    assert found.size == full.size
    return found


# --- the same image -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["raw", "qcow2", "vmdk"])
def test_an_unchanged_image_is_not_read(format_: str, here: Path) -> None:
    reference.write(SPEC, here / "raw")
    qemu("qemu-img", "convert", "-f", "raw", "-O", format_, "raw", "disk")
    api.checksum("disk", algorithm="blake2b", block_size=4 * KIB, index="disk.index")
    found = same_as_full("disk", "disk.index")
    assert found.stats.bytes_read == 0
    assert found.stats.zero_bytes + found.stats.reused_bytes == found.size
    sampled = api.checksum("disk", since="disk.index", sample=10)
    assert sampled.hexdigest == found.hexdigest
    assert 9 * 4 * KIB < sampled.stats.bytes_read <= 11 * 4 * KIB  # the last block may be a short one
    with pytest.raises(RefusedError):  # it is another image: the container's own bytes
        api.checksum("raw", since="disk.index")
    if format_ != "raw":
        with pytest.raises(RefusedError):
            api.checksum("disk", since="disk.index", options=OpenOptions(format="raw"))


def test_whatever_moves_its_times_makes_an_image_another_one(here: Path) -> None:
    reference.write(SPEC, here / "disk")
    for change in (
        lambda: Path("disk").write_bytes(Path("disk").read_bytes()),
        lambda: os.utime("disk", ns=(1, 1)),
        lambda: os.replace("copy", "disk"),
        lambda: os.truncate("disk", 100_000),
    ):
        before = os.stat("disk")
        api.checksum("disk", index="disk.index")
        Path("copy").write_bytes(Path("disk").read_bytes())
        change()
        os.utime("disk", ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(RefusedError, match="nothing is certain"):
            api.checksum("disk", since="disk.index")


def test_a_write_right_after_the_index_has_another_time(here: Path) -> None:
    """Two writes in one tick of the kernel's clock have the same times: --index waits until that is over."""
    reference.write("64k:A", here / "disk")
    for number in range(5):
        with open("disk", "r+b") as file:
            file.write(b"%d" % number)
        api.checksum("disk", index="disk.index")
        status = os.stat("disk")
        assert time.time_ns() - status.st_ctime_ns >= 10_000_000
        with open("disk", "r+b") as file:
            file.write(b"other")
        with pytest.raises(RefusedError):
            api.checksum("disk", since="disk.index")


def test_evidence_that_lies_is_caught_by_the_sample(
    here: Path, monkeypatch: pytest.MonkeyPatch, imgsum: Imgsum
) -> None:
    """A file replaced by another one, with all times put back: nobody can do that with the usual means."""
    reference.write("4m:R", here / "disk")
    api.checksum("disk", index="disk.index")
    monkeypatch.setattr(HostFile, "evidence", lambda self, known=HostFile.evidence: {**known(self), **lie})
    (record,) = json.loads((here / "disk.index").read_bytes().partition(b"\n")[0])["evidence"]
    lie = {key: record[key] for key in ("inode", "device", "size", "mtime_ns", "ctime_ns")}
    reference.write("4m:A", here / "disk")
    with pytest.raises(ChangedError, match="differs from the index: that is not of what this image was made from"):
        api.checksum("disk", since="disk.index", index="new.index")
    assert sorted(os.listdir()) == ["disk", "disk.index"]
    with open("disk", "r+b") as file:  # one block of 64: a sample of 64 reads them all
        file.write(reference.content("4m:R"))
        file.seek(3 * MIB)
        file.write(b"other")
    with pytest.raises(ChangedError, match=f"at offset {3 * MIB}"):
        api.checksum("disk", since="disk.index", sample=64)


def test_the_image_changes_meanwhile(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.write("4m:R", here / "disk")
    api.checksum("disk", index="disk.index")
    known = HostFile.evidence

    def evidence(self: HostFile) -> dict[str, object]:
        Path("disk").touch()
        return known(self)

    monkeypatch.setattr(HostFile, "evidence", evidence)
    with pytest.raises(ChangedError):
        api.checksum("disk", since="disk.index", index="new.index")
    assert sorted(os.listdir()) == ["disk", "disk.index"]


def test_a_block_device_is_read(here: Path, loop_device: Any) -> None:
    reference.write("1m:R", here / "disk")
    device = loop_device(here / "disk")
    made = api.checksum(device, index="disk.index")
    assert made.hexdigest == reference.blkhash(reference.content("1m:R"))
    with pytest.raises(RefusedError, match="block device"):
        api.checksum(device, since="disk.index")


# --- chains ---------------------------------------------------------------------------------------------------------

OVERLAY = ["qemu-img", "create", "-q", "-f", "qcow2"]


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("size", ["4m", "3m", "6m", "1000k"])
def test_an_overlay_is_read_where_it_has_something(size: str, extended: bool, here: Path) -> None:
    reference.write("2m:R 64k:- 2m:R", here / "base")
    os.truncate("base", 4 * MIB)
    api.checksum("base", block_size=4 * KIB, index="base.index")
    option = f"cluster_size=64k,extended_l2={'on' if extended else 'off'}"
    qemu(*OVERLAY, "-o", option, "-b", "base", "-F", "raw", "overlay", size)
    qemu("qemu-io", "-c", "write -P 1 300k 2k", "-c", "write -z 400k 64k", "-c", "discard 512k 64k", "overlay")
    found = same_as_full("overlay", "base.index")
    unit = 2 * KIB if extended else 64 * KIB
    changed = (-(-2 * KIB // unit) * unit) + 3 * 64 * KIB + unit
    assert found.reused is not None
    assert found.reused.bytes >= min(found.size, 4 * MIB) - changed
    assert found.reused.bytes < found.size


def test_a_shorter_image_in_the_middle_hides_what_is_below(here: Path) -> None:
    reference.write("4m:R", here / "base")
    api.checksum("base", block_size=4 * KIB, index="base.index")
    qemu(*OVERLAY, "-b", "base", "-F", "raw", "middle", "1m")
    qemu(*OVERLAY, "-b", "middle", "-F", "qcow2", "top", "8m")
    found = same_as_full("top", "base.index")
    assert found.reused == (MIB, 0)
    api.checksum("middle", block_size=4 * KIB, index="middle.index")
    assert same_as_full("top", "middle.index").reused == (MIB, 0)


def test_the_index_of_any_layer_serves(here: Path) -> None:
    reference.write("4m:R", here / "0")
    for number in range(1, 5):
        qemu(*OVERLAY, "-b", str(number - 1), "-F", "raw" if number == 1 else "qcow2", str(number))
        qemu("qemu-io", "-c", f"write -P {number} {number * 64}k 64k", str(number))
    for number in range(5):
        api.checksum(str(number), block_size=4 * KIB, index=f"{number}.index")
    for number in range(5):
        found = same_as_full("4", f"{number}.index")
        assert found.reused == (4 * MIB - (4 - number) * 64 * KIB, 0)
    qemu("qemu-io", "-c", "write -P 9 0 1k", "2")
    for number in (2, 3, 4):
        with pytest.raises(RefusedError):
            api.checksum("4", since=f"{number}.index")
    assert same_as_full("4", "1.index").reused is not None


def test_snapshots_and_data_files(here: Path) -> None:
    qemu(*OVERLAY, "-o", "data_file=data,data_file_raw=on", "disk", "2m")
    qemu("qemu-io", "-c", "write -P 1 0 1m", "disk")
    api.checksum("disk", index="data.index")
    assert len(json.loads((here / "data.index").read_bytes().partition(b"\n")[0])["evidence"]) == 2
    assert same_as_full("disk", "data.index").stats.bytes_read == 0
    with open("data", "r+b") as file:
        file.write(b"x")
    with pytest.raises(RefusedError):
        api.checksum("disk", since="data.index")
    qemu(*OVERLAY, "snapped", "2m")
    qemu("qemu-io", "-c", "write -P 1 0 1m", "snapped")
    qemu("qemu-img", "snapshot", "-c", "one", "snapped")
    qemu("qemu-io", "-c", "write -P 2 0 1m", "snapped")
    api.checksum("snapped", index="now.index")
    api.checksum("snapped", index="one.index", options=OpenOptions(snapshot="one"))
    assert same_as_full("snapped", "now.index").stats.bytes_read == 0
    assert same_as_full("snapped", "one.index", snapshot="one").stats.bytes_read == 0
    with pytest.raises(RefusedError):
        api.checksum("snapped", since="one.index")
    with pytest.raises(RefusedError):
        api.checksum("snapped", since="now.index", options=OpenOptions(snapshot="one"))
    qemu(*OVERLAY, "-b", "snapped", "-F", "qcow2", "top")
    assert same_as_full("top", "now.index").stats.bytes_read == 0
    with pytest.raises(RefusedError):
        api.checksum("top", since="one.index")


def test_random_histories(tmp_path: Path) -> None:
    """More of them: make fuzz."""
    counts: Counter[str] = Counter()
    for seed in range(8):
        directory = tmp_path / str(seed)
        directory.mkdir()
        counts += fuzz_index.play(seed, directory)
    assert counts["reused"] > 0
    assert counts["refused"] > 0


# --- what is said ---------------------------------------------------------------------------------------------------


def test_what_the_command_says(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:R", here / "disk")
    line = imgsum("checksum", "-q", "--index", "disk.index", "disk").stdout
    result = imgsum("checksum", "--since", "disk.index", "disk")
    note = b"imgsum: disk: 1.0 MiB of 1.0 MiB came from the index (16 of its blocks were read, and are the same)\n"
    assert result == (line, note, 0)
    assert imgsum("checksum", "-q", "--since", "disk.index", "disk") == (line, b"", 0)
    stats = imgsum("checksum", "-q", "--stats", "--since", "disk.index", "--sample", "0", "disk").errors
    assert "reused 1.0 MiB" in stats
    record = json.loads(imgsum("checksum", "--json", "--stats", "--since", "disk.index", "disk").stdout)
    assert record["reused_bytes"] == record["stats"]["reused_bytes"] == MIB
    assert record["sampled_blocks"] == 16
    reference.write("1m:A", here / "disk")
    result = imgsum("checksum", "--json", "--since", "disk.index", "disk")
    assert result.status == 2
    assert "checksum" not in json.loads(result.stdout)
    words = " ".join(imgsum("checksum", "--help").text.split())
    assert "a statement about changes made through software" in words
    assert "A medium that rots under an unchanged file is found by a full read only." in words


def test_streams_and_exports_are_read(here: Path, imgsum: Imgsum) -> None:
    reference.write("1m:R", here / "disk")
    line = imgsum("checksum", "-q", "--index", "a.index", "[", find_tool("nbdkit"), "-r", "file", "disk", "]").text
    assert line.startswith(reference.blkhash(reference.content("1m:R")))
    record = json.loads((here / "a.index").read_bytes().partition(b"\n")[0])
    assert record["evidence"] == [{"nbd_size": MIB}]
    assert imgsum("checksum", "--since", "a.index", "[", find_tool("nbdkit"), "-r", "file", "disk", "]").status == 2
