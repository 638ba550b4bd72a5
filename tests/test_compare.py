"""imgsum compare, as a process and as a function: the same answers as cmp and `qemu-img compare`, and more exact."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from conftest import Imgsum, need, wait_until_it_waits, writer
from fakenbd import Client, FakeNbd
from fakes import FakeSource
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import KIB, MIB

import imgsum as api
from imgsum import OpenOptions, Range
from imgsum.engine.compare import Pair
from imgsum.engine.mask import masks, ranges
from imgsum.errors import ChangedError, OpenError, ReadError, UsageError
from imgsum.extent import Extent

SMALL = OpenOptions(request_size=4 * KIB)
"""Many pieces from a small image."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expected_ranges(first: bytes, second: bytes) -> list[tuple[int, int]]:
    """The obvious way: byte by byte, the shorter one followed by zeros."""
    size = max(len(first), len(second))
    first, second = first.ljust(size, b"\0"), second.ljust(size, b"\0")
    found: list[tuple[int, int]] = []
    for at, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            if found and sum(found[-1]) == at:
                found[-1] = found[-1][0], found[-1][1] + 1
            else:
                found.append((at, 1))
    return found


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_identical(imgsum: Imgsum, here: Path) -> None:
    reference.write("100k:R 1m:- 3:R", here / "a")
    reference.write("100k:R 1m:- 3:R", here / "b", holes=False)
    assert imgsum("compare", "a", "b") == (b"images are identical\n", b"", 0)
    assert imgsum("compare", "--all", "a", "b") == (b"images are identical\n", b"", 0)
    assert imgsum("compare", "-s", "a", "b") == (b"images are identical\n", b"", 0)
    assert imgsum("compare", "-q", "a", "b") == (b"", b"", 0)
    assert imgsum("compare", "--no-extents", "-T", "none", "a", "b").status == 0
    record = json.loads(imgsum("compare", "--json", "a", "b").stdout)
    size = (100 * KIB) + MIB + 3
    assert record == {
        "schema": 1,
        "identical": True,
        "images": [{"name": "a", "size": size, "format": "raw"}, {"name": "b", "size": size, "format": "raw"}],
    }


def test_empty_images(imgsum: Imgsum, here: Path) -> None:
    for name in ("a", "b"):
        (here / name).touch()
    for options in ((), ("--all",), ("-s",), ("-p",)):
        assert imgsum("compare", *options, "a", "b").text == "images are identical\n"
    assert imgsum("compare", "a", "-", stdin=b"").text == "images are identical\n"


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 65535, 65536, MIB - 1, MIB, 3 * MIB + 12345, 5 * MIB - 1])
def test_one_byte_differs(imgsum: Imgsum, here: Path, at: int) -> None:
    reference.write("1m:R 2m:- 2m:R", here / "a")
    content = bytearray((here / "a").read_bytes())
    content[at] ^= 1
    (here / "b").write_bytes(content)
    assert imgsum("compare", "a", "b") == (f"images differ at offset {at}\n".encode(), b"", 1)
    assert imgsum("compare", "b", "a", "--request-size", "64k").text == f"images differ at offset {at}\n"
    assert imgsum("compare", "-q", "a", "b") == (b"", b"", 1)
    assert imgsum("compare", "--all", "a", "b").text == (
        f"differs: offset {at}, 1 bytes\nimages differ in 1 range, 1 bytes\n"
    )
    record = json.loads(imgsum("compare", "--json", "a", "b").stdout)
    assert (record["identical"], record["offset"]) == (False, at)
    assert imgsum("compare", "--length", str(at), "a", "b").status == 0
    assert imgsum("compare", "--offset", str(at + 1), "a", "b").status == 0
    assert imgsum("compare", "--offset", str(at), "--length", "1", "a", "b").text == f"images differ at offset {at}\n"


def test_ranges_as_json(imgsum: Imgsum, here: Path) -> None:
    (here / "a").write_bytes(b"aXXaXaaa")
    (here / "b").write_bytes(b"abbabaab")
    ended = imgsum("compare", "--all", "--json", "a", "b")
    *found, verdict = map(json.loads, ended.text.splitlines())
    assert found == [{"schema": 1, "start": s, "length": n} for s, n in ((1, 2), (4, 1), (7, 1))]
    assert (verdict["identical"], verdict["offset"], verdict["ranges"], verdict["bytes"]) == (False, 1, 3, 4)
    assert ended.status == 1


def test_a_tail_of_zeros(imgsum: Imgsum, here: Path) -> None:
    reference.write("100k:R", here / "short")
    reference.write("100k:R 1m:- 10:0", here / "long")
    note = f"imgsum: short has {100 * KIB} bytes, long has {100 * KIB + MIB + 10} bytes: the rest is zeros\n".encode()
    assert imgsum("compare", "short", "long") == (b"images are identical\n", note, 0)
    assert imgsum("compare", "-q", "short", "long") == (b"", b"", 0)
    sizes = f"images differ in size: {100 * KIB} and {100 * KIB + MIB + 10} bytes\n"
    ended = imgsum("compare", "-s", "short", "long")
    assert (ended.text, ended.status) == (sizes, 1)
    ended = imgsum("compare", "-s", "--all", "long", "short")
    assert ended.text == (
        f"differs: offset {100 * KIB}, {MIB + 10} bytes\nimages differ in 1 range, {MIB + 10} bytes\n"
    )
    assert imgsum("compare", "-s", "--length", "100k", "short", "long").status == 0


def test_a_tail_of_data(imgsum: Imgsum, here: Path) -> None:
    reference.write("100k:R", here / "short")
    reference.write("100k:R 1m:- 10:0 1:A", here / "long")
    at = 100 * KIB + MIB + 10
    for names in (("short", "long"), ("long", "short")):
        ended = imgsum("compare", *names)
        assert (ended.text, ended.status) == (f"images differ at offset {at}\n", 1)
        assert f"{at + 1} bytes" in ended.errors
        assert f"--length {100 * KIB} compares what both have" in ended.errors


def test_a_device_larger_than_the_image(
    imgsum: Imgsum, here: Path, loop_device: Callable[..., str], tool: Callable[[str], str]
) -> None:
    reference.write("1m:R 1m:-", here / "image")
    subprocess.run([tool("qemu-img"), "convert", "-O", "qcow2", "image", "image.qcow2"], check=True)
    reference.write("1m:R 1m:- 1m:A", here / "device")
    device = loop_device(here / "device")
    ended = imgsum("compare", "image.qcow2", device)
    assert (ended.text, ended.status) == (f"images differ at offset {2 * MIB}\n", 1)
    assert ended.errors == (
        f"imgsum: image.qcow2 has {2 * MIB} bytes, {device} has {3 * MIB} bytes:"
        f" --length {2 * MIB} compares what both have\n"
    )
    assert imgsum("compare", "--length", str(2 * MIB), "image.qcow2", device).status == 0
    assert imgsum("compare", "--length", "2m", "-T", "none", "image.qcow2", device).status == 0


def test_two_formats(imgsum: Imgsum, here: Path, tool: Callable[[str], str]) -> None:
    reference.write("1m:R 1m:-", here / "a")
    subprocess.run([tool("qemu-img"), "convert", "-O", "qcow2", "a", "a.qcow2"], check=True)
    assert imgsum("compare", "-f", "raw", "-F", "qcow2", "a", "a.qcow2").status == 0
    assert imgsum("compare", "a.qcow2", "a").status == 0
    ended = imgsum("compare", "-F", "raw", "a", "a.qcow2")  # its own bytes
    assert (ended.text, ended.status) == ("images differ at offset 0\n", 1)
    assert imgsum("compare", "-f", "nosuch", "a", "a").status == 2
    assert imgsum("compare", "-F", "nosuch", "a", "a").status == 2


# --- against cmp and qemu-img ---------------------------------------------------------------------------------------


def random_image(chooser: random.Random) -> bytearray:
    content = bytearray()
    for _ in range(chooser.randrange(1, 5)):
        length = chooser.choice([1, 511, 512, 4096, 65536, 65537, 200_000, 400_000])
        content += bytes(length) if chooser.random() < 0.5 else chooser.randbytes(length)
    return content


def change(content: bytearray, chooser: random.Random) -> bytearray:
    """A copy that differs here and there, or not at all, and is sometimes longer or shorter."""
    changed = bytearray(content)
    for _ in range(chooser.choice([0, 0, 1, 3, 20])):
        at = chooser.randrange(len(changed))
        length = chooser.choice([1, 1, 2, 100, 5000])
        changed[at : at + length] = chooser.choice([bytes(length), chooser.randbytes(length)])[: len(changed) - at]
    if chooser.random() < 0.3:
        changed += chooser.choice([bytes(chooser.randrange(1, 100_000)), chooser.randbytes(700), bytes(4096) + b"x"])
    elif chooser.random() < 0.2:
        del changed[chooser.randrange(1, len(changed) + 1) :]
    return changed


def write_sparse(path: Path, content: bytes) -> None:
    """CONTENT, with holes where whole blocks of it are zeros."""
    with open(path, "wb") as file:
        for at in range(0, len(content), 4 * KIB):
            block = content[at : at + 4 * KIB]
            if block.count(0) == len(block):
                file.seek(len(block), os.SEEK_CUR)
            else:
                file.write(block)
        file.truncate(len(content))


@pytest.mark.parametrize("seed", range(16))
def test_random_pairs(imgsum: Imgsum, here: Path, tool: Callable[[str], str], seed: int) -> None:
    chooser = random.Random(seed)
    first = random_image(chooser)
    second = change(first, chooser)
    write_sparse(here / "a", first)
    (here / "b").write_bytes(second)
    found = expected_ranges(first, second)

    request = chooser.choice(["4k", "64k", "1m"])
    ended = imgsum("compare", "--all", "--json", "-q" if chooser.random() < 0.2 else "--no-progress", "a", "b",
                   "--request-size", request)  # fmt: skip
    if ended.stdout:
        *got, verdict = map(json.loads, ended.text.splitlines())
        assert [(record["start"], record["length"]) for record in got] == found
        assert verdict["identical"] == (not found)
    assert ended.status == (1 if found else 0)
    one = imgsum("compare", "a", "b", "--request-size", request)
    assert one.text == (f"images differ at offset {found[0][0]}\n" if found else "images are identical\n")
    streamed = imgsum("compare", *(("-", "b") if seed % 2 else ("b", "-")), stdin=bytes(first))
    assert (streamed.text, streamed.status) == (one.text, one.status)
    strict = imgsum("compare", "-s", "a", "b").status
    assert strict == (1 if first != second else 0)

    cmp = subprocess.run([tool("cmp"), "a", "b"], check=False, capture_output=True, text=True)
    assert cmp.returncode == strict
    if len(first) == len(second) and found:
        assert f"byte {found[0][0] + 1}," in cmp.stdout
    if len(first) % 512 == len(second) % 512 == 0:  # QEMU pads other sizes
        qemu = subprocess.run(
            [tool("qemu-img"), "compare", "-f", "raw", "-F", "raw", "a", "b"], check=False, capture_output=True
        )
        assert qemu.returncode == one.status
    if first and len(first) % 512 == 0:
        subprocess.run([tool("qemu-img"), "convert", "-f", "raw", "-O", "qcow2", "a", "a.qcow2"], check=True)
        got = imgsum("compare", "-F", "raw", "a.qcow2", "b")
        assert (got.text, got.status) == (one.text, one.status)


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 4), st.integers(0, 20_000))
@settings(deadline=None)
def test_ranges_of_any_two_buffers(first: bytes, second: bytes, copies: int, gap: int) -> None:
    size = min(len(first), len(second))
    one = bytearray((first[:size] + bytes(gap)) * copies + first[:size])
    other = bytearray((second[:size] + bytes(gap)) * copies + second[:size])
    if not one:
        return
    assert list(ranges(masks(memoryview(one), memoryview(other)))) == expected_ranges(one, other)
    assert list(ranges(masks(memoryview(one), None))) == expected_ranges(one, b"")


# --- streams --------------------------------------------------------------------------------------------------------


def test_streams(imgsum: Imgsum, here: Path) -> None:
    content = reference.content("300k:R 2m:- 100:R")
    write_sparse(here / "a", content)
    assert imgsum("compare", "-", "a", stdin=content) == (b"images are identical\n", b"", 0)
    assert imgsum("compare", "-s", "a", "-", stdin=content) == (b"images are identical\n", b"", 0)
    longer = imgsum("compare", "-", "a", stdin=content + bytes(3 * MIB))
    assert longer.text == "images are identical\n"
    assert f"- has {len(content) + 3 * MIB} bytes, a has {len(content)} bytes: the rest is zeros" in longer.errors
    assert imgsum("compare", "-s", "-", "a", stdin=content + b"\0").text == f"images differ at offset {len(content)}\n"
    ended = imgsum("compare", "-", "a", stdin=content + bytes(2 * MIB) + b"x")
    assert ended.text == f"images differ at offset {len(content) + 2 * MIB}\n"
    shorter = imgsum("compare", "a", "-", stdin=content[: 300 * KIB])
    assert shorter.text == f"images differ at offset {300 * KIB + 2 * MIB}\n"
    assert imgsum("compare", "a", "-", "--length", "300k", stdin=content[: 300 * KIB]).status == 0
    ended = imgsum("compare", "a", "-", "--length", "301k", stdin=content[: 300 * KIB])
    assert (ended.stdout, ended.status) == (b"", 2)
    assert "the stream ends 1024 bytes early" in ended.errors
    ended = imgsum("compare", "-", "a", "--offset", "100k", stdin=content)
    assert ended.text == "images are identical\n"


def test_two_streams_are_refused_before_either_is_waited_for(imgsum: Imgsum, here: Path) -> None:
    os.mkfifo("fifo")
    for names in (("-", "-"), ("fifo", "-"), ("fifo", "fifo")):
        ended = imgsum("compare", *names)
        assert (ended.stdout, ended.status) == (b"", 2)
        assert "both images are streams" in ended.errors


def test_a_stream_that_never_ends_is_left_at_the_first_difference(here: Path) -> None:
    (here / "a").write_bytes(bytes(100))

    def zeros_and_then_ones() -> Iterator[bytes]:
        yield bytes(100)
        while True:
            yield b"1" * 65536

    reader, to_write = os.pipe()
    with writer(zeros_and_then_ones(), to_write):
        with Pair("a", f"/dev/fd/{reader}", SMALL, SMALL) as pair:
            assert pair.first_difference() == 100
            assert pair.sizes == (100, None)
        os.close(reader)


# --- what is read, and what is not ----------------------------------------------------------------------------------


def compare_fakes(opens: dict[str, Any], first: FakeSource, second: FakeSource, **options: Any) -> api.Comparison:
    opens["a"], opens["b"] = first, second
    return api.compare("a", "b", options=SMALL, **options)


def runs(*parts: tuple[int, bool]) -> list[Extent]:
    extents, at = [], 0
    for length, zero in parts:
        extents.append(Extent(at, length, zero))
        at += length
    return extents


def test_only_what_may_differ_is_read(opens: dict[str, Any], no_leak: None) -> None:
    quarter = 64 * KIB
    data = reference.content("64k:A")
    first = FakeSource(bytes(quarter) + bytes(quarter) + data + data, runs((2 * quarter, True), (2 * quarter, False)))
    second = FakeSource(
        bytes(quarter) + bytes(quarter) + bytes(quarter) + data,
        runs((quarter, True), (quarter, False), (quarter, True), (quarter, False)),
    )
    found = compare_fakes(opens, first, second)
    assert found.ranges == (Range(2 * quarter, quarter),)
    assert (min(first.reads)[0], sum(length for _, length in first.reads)) == (2 * quarter, 2 * quarter)
    assert sorted({at // quarter for at, _ in second.reads}) == [1, 3]
    assert sum(length for _, length in second.reads) == 2 * quarter
    assert first.closed
    assert second.closed


def test_nothing_is_read_far_behind_the_first_difference(opens: dict[str, Any], no_leak: None) -> None:
    content = reference.content("4m:R")
    first, second = FakeSource(b"x" + content[1:]), FakeSource(content)
    opens["a"], opens["b"] = first, second
    with Pair("a", "b", SMALL, SMALL) as pair:
        assert pair.first_difference() == 0
    assert len(second.reads) < 100  # of 1024


@pytest.mark.parametrize("multi_conn", [True, False])
def test_a_server_that_stops_answering_behind_the_first_difference(
    imgsum: Imgsum, here: Path, no_leak: None, multi_conn: bool
) -> None:
    need(importlib.util.find_spec("nbd"), "libnbd's Python binding is not installed")
    content = reference.content("16m:R")
    (here / "b").write_bytes(content[:5] + b"?" + content[6:])

    def on_read(client: Client, cookie: int, offset: int, length: int) -> None:
        if offset < MIB:
            server.answer_read(client, cookie, offset, length)

    with FakeNbd(here, content, on_read=on_read, multi_conn=multi_conn) as server:
        ended = imgsum("compare", server.uri, "b")
        assert ended == (b"images differ at offset 5\n", b"", 1)
        assert len(server.reads()) > 2  # it was asked for more than it answered
        assert api.compare(server.uri, "b", length=MIB).ranges == (Range(5, 1),)
        with Pair(server.uri, "b", OpenOptions(), OpenOptions()) as pair:
            assert pair.first_difference() == 5


def test_the_first_difference_wins_whatever_comes_first(opens: dict[str, Any], no_leak: None) -> None:
    content = reference.content("256k:R")
    changed = bytearray(content)
    changed[5000] ^= 1
    changed[200_000] ^= 1
    late = threading.Event()

    def before_read(offset: int, length: int) -> None:
        if offset == 4 * KIB:
            late.wait(10)  # until what is behind it was read
        elif offset >= 48 * KIB:
            late.set()

    found = compare_fakes(opens, FakeSource(content, before_read=before_read), FakeSource(bytes(changed)), limit=1)
    assert found.ranges == (Range(5000, 1),)


def test_an_error_before_a_difference_is_trouble_and_behind_it_is_not_reached(
    opens: dict[str, Any], no_leak: None
) -> None:
    content = reference.content("256k:R")
    changed = bytearray(content)
    changed[100_000] ^= 1

    def fail(at: int) -> Callable[[int, int], None]:
        def before_read(offset: int, length: int) -> None:
            if offset <= at < offset + length:
                raise ReadError("input/output error", offset=offset)

        return before_read

    for at, outcome in ((50_000, None), (200_000, 100_000)):
        opens["a"], opens["b"] = FakeSource(content, before_read=fail(at)), FakeSource(bytes(changed))
        with Pair("a", "b", SMALL, SMALL) as pair:
            if outcome is None:
                with pytest.raises(ReadError, match="a: input/output error at offset 49152"):
                    pair.first_difference()
            else:
                assert pair.first_difference() == outcome
        opens["a"], opens["b"] = FakeSource(content, before_read=fail(at)), FakeSource(bytes(changed))
        with pytest.raises(ReadError):
            api.compare("a", "b", options=SMALL)


def test_an_image_that_changes_is_trouble(opens: dict[str, Any], no_leak: None) -> None:
    first, second = FakeSource(bytes(10)), FakeSource(bytes(10))
    second.changed = ChangedError("the file was modified while it was read")
    with pytest.raises(ChangedError, match=r"^b: the file was modified"):
        compare_fakes(opens, first, second)


def test_everything_is_closed_when_the_second_cannot_be_opened(opens: dict[str, Any], no_leak: None) -> None:
    opens["a"], opens["b"] = FakeSource(bytes(10)), OpenError("no", name="b")
    with pytest.raises(OpenError):
        api.compare("a", "b")
    assert opens["a"].closed


# --- the Python function --------------------------------------------------------------------------------------------


def test_the_python_function(here: Path, no_leak: None) -> None:
    (here / "a").write_bytes(b"a" * 100)
    (here / "b").write_bytes(b"a" * 50 + b"b" + b"a" * 49)
    (here / "c").write_bytes(b"a" * 100 + bytes(20))
    assert api.compare("a", "a") == api.Comparison(True, (), (100, 100))
    found = api.compare(here / "a", here / "b")
    assert found == api.Comparison(False, (Range(50, 1),), (100, 100))
    assert not found
    assert api.compare("a", "c") == (True, (), (100, 120), True)
    assert api.compare("a", "c", strict=True) == (False, (Range(100, 20),), (100, 120), True)
    assert api.compare("a", "b", length=50)
    assert api.compare("a", "b", offset=51)
    with pytest.raises(OpenError):
        api.compare("a", "b", length=101)
    with pytest.raises(OpenError, match=r"^nosuch: "):
        api.compare("a", "nosuch")
    with pytest.raises(UsageError):
        api.compare("-", "-")


def test_ranges_are_limited(here: Path) -> None:
    (here / "a").write_bytes(b"ab" * 5000)
    (here / "b").write_bytes(b"aa" * 5000)
    for limit, listed in ((1, 1), (3, 3), (4999, 4999), (5000, 5000), (5001, 5000), (None, 5000)):
        found = api.compare("a", "b", limit=limit)
        assert found.ranges == tuple(Range(2 * n + 1, 1) for n in range(listed))
        assert (found.identical, found.complete) == (False, listed == 5000)
    found = api.compare("a", "b")
    assert (len(found.ranges), found.complete) == (1000, False)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_would_find_nothing_is_refused(here: Path, limit: int) -> None:
    (here / "a").write_bytes(b"a")
    (here / "b").write_bytes(b"b")
    with pytest.raises(UsageError, match="limit: less than 1"):
        api.compare("a", "b", limit=limit)


# --- memory, progress, usage ----------------------------------------------------------------------------------------


def test_memory_is_flat_when_every_other_byte_differs(imgsum: Imgsum, here: Path) -> None:
    size = 3 * MIB
    (here / "a").write_bytes(b"ab" * (size // 2))
    (here / "b").write_bytes(b"aa" * (size // 2))
    ended, peak = imgsum.peak_memory("compare", "--all", "a", "b")
    assert ended.text.endswith(f"images differ in {size // 2} ranges, {size // 2} bytes\n")
    assert ended.text.count("\n") == size // 2 + 1
    assert peak < 64 * MIB


def test_memory_is_flat_when_everything_differs(imgsum: Imgsum, image_in_memory: Callable[..., Path]) -> None:
    first, second = image_in_memory("200m:A"), image_in_memory("200m:B")
    for request in ("1m", "32m"):
        ended, peak = imgsum.peak_memory("compare", "--all", "--request-size", request, first, second)
        assert ended.text == f"differs: offset 0, {200 * MIB} bytes\nimages differ in 1 range, {200 * MIB} bytes\n"
        assert peak < 64 * MIB


def test_huge_holes_take_no_time_or_memory(imgsum: Imgsum, image_in_memory: Callable[..., Path]) -> None:
    first, second = image_in_memory("4t:- 1:A"), image_in_memory("4t:- 1:B")
    ended, peak = imgsum.peak_memory("compare", "--all", first, second)
    assert ended.text.startswith(f"differs: offset {4 << 40}, 1 bytes\n")
    assert peak < 64 * MIB


# --- what --all writes ------------------------------------------------------------------------------------------------


@pytest.fixture
def many_ranges(here: Path) -> int:
    """Files `a` and `b` that differ in so many ranges, each of one byte: 9 MB of lines."""
    count = 150_000
    (here / "a").write_bytes(b"ab" * count)
    (here / "b").write_bytes(b"aa" * count)
    return count


def assert_whole_lines(text: str, json_lines: bool) -> int:
    """TEXT is the first so many lines of many_ranges, in order, none repeated or torn."""
    *rows, rest = text.split("\n")
    assert rest == ""
    for number, row in enumerate(rows):
        if json_lines:
            assert row == f'{{"schema": 1, "start": {2 * number + 1}, "length": 1}}'
        else:
            assert row == f"differs: offset {2 * number + 1}, 1 bytes"
    return len(rows)


@pytest.mark.parametrize("options", [("--json",), ()])
@pytest.mark.parametrize("read_first", [0, 100_001, 1_000_000])
def test_interrupted_while_its_pipe_is_full(
    imgsum: Imgsum, many_ranges: int, options: tuple[str, ...], read_first: int
) -> None:
    reader, to_write = os.pipe()
    running = imgsum.start("compare", "--all", *options, "a", "b", stdout=to_write)
    os.close(to_write)
    with open(reader, "rb") as pipe:
        text = pipe.read(read_first)
        wait_until_it_waits(running.process.pid)
        running.signal(signal.SIGINT)
        ended = running.finish()  # nobody reads meanwhile
        text += pipe.read()
    assert (ended.stderr, ended.status) == (b"", -signal.SIGINT)
    assert assert_whole_lines(text.decode(), bool(options)) < many_ranges


def test_interrupted_at_any_time(imgsum: Imgsum, many_ranges: int, here: Path) -> None:
    for size in (1, 5_000, 70_000, 200_000, 2_000_000):
        with open("out", "wb") as out:
            running = imgsum.start("compare", "--all", "a", "b", stdout=out)
            while os.stat("out").st_size < size:
                assert running.process.poll() is None
                time.sleep(0.001)
            running.signal(signal.SIGINT)
            ended = running.finish()
        text = (here / "out").read_text()
        if ended.status == 1:  # it was faster
            text = text[: text.index("images differ")]
        assert_whole_lines(text, json_lines=False)


@pytest.mark.parametrize("size", [1, 5000, 100_001, 1_000_000])
def test_out_of_space_in_the_middle_of_a_line(imgsum: Imgsum, many_ranges: int, here: Path, size: int) -> None:
    before = b"kept\n"
    (here / "out").write_bytes(before)
    with open("out", "ab") as out:
        ended = imgsum(
            "compare", "--all", "a", "b", stdout=out,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size + len(before), size + len(before))),
        )  # fmt: skip
    text = (here / "out").read_bytes().removeprefix(before).decode()
    assert size - 100 < len(text) <= size or not text
    assert_whole_lines(text, json_lines=False)
    assert (ended.errors, ended.status) == ("imgsum: standard output: file too large\n", 2)


def test_nowhere_to_write(imgsum: Imgsum, many_ranges: int) -> None:
    with open("/dev/full", "wb") as full:
        ended = imgsum("compare", "--all", "a", "b", stdout=full)
    assert (ended.errors, ended.status) == ("imgsum: standard output: no space left on device\n", 2)
    reader, to_write = os.pipe()
    running = imgsum.start("compare", "--all", "a", "b", stdout=to_write)
    os.close(to_write)
    with open(reader, "rb") as pipe:
        pipe.read(100_000)
    ended = running.finish()
    assert (ended.stderr, ended.status) == (b"", -signal.SIGPIPE)


def test_a_range_is_written_as_soon_as_it_is_known(imgsum: Imgsum, here: Path) -> None:
    content = reference.content("4m:R")
    (here / "a").write_bytes(content)
    os.mkfifo("fifo")
    running = imgsum.start("compare", "--all", "a", "fifo")
    with open("fifo", "wb") as fifo:
        fifo.write(b"\0\0" + content[2 : 3 * MIB])  # and the rest only when the line has come
        fifo.flush()
        assert running.process.stdout is not None
        assert os.read(running.process.stdout.fileno(), 1000) == b"differs: offset 0, 2 bytes\n"
        fifo.write(content[3 * MIB : -1])
    ended = running.finish()
    last = f"differs: offset {4 * MIB - 1}, 1 bytes\n" * (content[-1] != 0)
    count = 2 if last else 1
    assert ended.text == f"{last}images differ in {count} range{'s' * (count > 1)}, {1 + count} bytes\n"


def test_ranges_before_an_error_are_written(imgsum: Imgsum, here: Path) -> None:
    (here / "a").write_bytes(b"x" + bytes(2 * MIB))
    ended = imgsum("compare", "--all", "--length", "2m", "a", "-", stdin=bytes(MIB))
    assert (ended.text, ended.status) == ("differs: offset 0, 1 bytes\n", 2)
    assert ended.errors.startswith("imgsum: -: the stream ends ")


def test_progress(imgsum: Imgsum, here: Path) -> None:
    reference.write("3m:R 3m:-", here / "a")
    ended = imgsum("compare", "-p", "a", "a")
    assert ended.text == "images are identical\n"
    assert ended.errors == "imgsum: a: 100% (6.0 MiB of 6.0 MiB)\n"
    reader, to_write = os.pipe()
    started = imgsum.start("compare", "--progress-fd", str(to_write), "a", "a", pass_fds=[to_write])
    os.close(to_write)
    assert started.finish().status == 0
    told = os.read(reader, 10_000).decode().split()
    os.close(reader)
    assert told[0] == "0/100"
    assert told[-1] == "100/100"


@pytest.mark.parametrize("arguments", [(), ("a",), ("a", "a", "a"), ("a", "a", "-F"), ("a", "a", "-a", "sha256")])
def test_usage_errors(imgsum: Imgsum, here: Path, arguments: tuple[str, ...]) -> None:
    (here / "a").touch()
    ended = imgsum("compare", *arguments)
    assert (ended.stdout, ended.status) == (b"", 2)
    assert ended.errors.startswith("imgsum: ")


def test_errors_in_json(imgsum: Imgsum, here: Path) -> None:
    (here / "a").touch()
    ended = imgsum("compare", "--json", "a", "missing")
    assert json.loads(ended.stdout) == {"schema": 1, "name": "missing", "error": "no such file or directory"}
    assert ended.errors == "imgsum: missing: no such file or directory\n"
    assert ended.status == 2


def test_errors_of_a_backing_file_name_the_image_too(imgsum: Imgsum, here: Path, tool: Callable[[str], str]) -> None:
    (here / "a").write_bytes(bytes(1024))
    create = [tool("qemu-img"), "create", "-q", "-f", "qcow2", "-u", "-b", "gone", "-F", "raw", "x.qcow2", "1M"]
    subprocess.run(create, check=True)
    ended = imgsum("compare", "--json", "a", "x.qcow2")
    record = json.loads(ended.stdout)
    assert record["name"] == "x.qcow2"
    assert "gone" in record["error"]
    assert "gone" in ended.errors
    assert ended.status == 2
    checked = imgsum("check", "--json", stdin=f"{'0' * 64}  x.qcow2\n".encode())
    assert "gone" in json.loads(checked.stdout)["error"]


@pytest.mark.parametrize("extra", [(), ("--no-extents",), ("--offset", "1000", "--length", "150001")])
def test_odd_ends_against_a_server_that_insists_on_blocks(
    imgsum: Imgsum, here: Path, tool: Callable[[str], str], extra: tuple[str, ...]
) -> None:
    need(importlib.util.find_spec("nbd"), "libnbd's Python binding is not installed")
    reference.write("200000:R", here / "short")
    reference.write("200000:R 848576:-", here / "long")
    server = ["[", tool("nbdkit"), "-r", "--filter=blocksize-policy", "file", "long", "blocksize-minimum=4096",
              "blocksize-maximum=65536", "blocksize-error-policy=error", "]"]  # fmt: skip
    ended = imgsum("compare", *extra, "short", *server)
    assert (ended.text, ended.status) == ("images are identical\n", 0)
    with open("long", "r+b") as file:
        file.seek(150_000)
        file.write(b"!!")
    ended = imgsum("compare", "--all", *extra, *server, "short")
    assert ended.text.startswith("differs: offset 150000, 2 bytes\n")
    assert ended.status == 1


def test_stats(imgsum: Imgsum, here: Path) -> None:
    reference.write("1m:R 2m:- 1m:R", here / "a")
    reference.write("1m:R 2m:- 1m:R", here / "b", holes=False)
    stats = json.loads(imgsum("compare", "--json", "--stats", "a", "b").stdout)["stats"]
    assert (stats["bytes_read"], stats["zero_bytes"], stats["requests"]) == (6 * MIB, 2 * MIB, 6)
    assert (stats["extents"], stats["cache"], stats["second_cache"]) == (4, "writeback", "writeback")
    ended = imgsum("compare", "--stats", "a", "b")
    assert ended.text == "images are identical\n"
    assert ended.errors.startswith("imgsum: read 6.0 MiB in 6 requests, skipped 2.0 MiB of zeros, 4 extents, ")
    stats = json.loads(imgsum("compare", "--json", "--stats", "a", "-", stdin=b"").stdout)["stats"]
    assert stats["bytes_read"] < 2 * MIB
