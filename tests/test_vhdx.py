"""VHDX, read natively: blocks in each state, parents, the log, and what is refused."""

from __future__ import annotations

import os
import random
import shutil
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
import vhdx_build as build
from conftest import Imgsum, find_tool
from qcow2_images import run
from vhdx_build import ABSENT, BAT, LOG, METADATA, PARTIAL, PRESENT, UNDEFINED, UNMAPPED, ZERO, Block

import imgsum as api
from imgsum import OpenOptions
from imgsum.errors import Error, FormatError, OpenError, RefusedError, TruncatedError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
GUID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
LINK = {"parent_linkage": "{" + str(GUID).upper() + "}", "relative_path": ".\\base.vhdx"}


PROGRAMS = os.environ["PATH"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))  # there is no QEMU


@pytest.fixture
def qemu(_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is QEMU."""
    monkeypatch.setenv("PATH", PROGRAMS)


def checksum(name: str | Path, **options: object) -> str:
    return api.checksum(name, options=OpenOptions(**options)).hexdigest  # type: ignore[arg-type]


def raw(size: int, content: Mapping[int, bytes]) -> str:
    """The checksum of a raw image of SIZE bytes that has CONTENT, and zeros."""
    with open("expected.raw", "wb") as file:
        for offset, data in content.items():
            file.seek(offset)
            file.write(data)
    os.truncate("expected.raw", size)
    return checksum("expected.raw")


def refusal(kind: type[Error], name: str = "a.vhdx", **options: object) -> str:
    with pytest.raises(kind) as caught:
        checksum(name, **options)
    return str(caught.value)


def patch(offset: int, data: bytes, name: str = "a.vhdx") -> None:
    with open(name, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("block_size", [MIB, 32 * MIB, 256 * MIB])
def test_blocks_in_each_state_over_several_chunks(block_size: int, sector: int) -> None:
    ratio = (sector << 23) // block_size
    size = (2 * ratio + 1) * block_size + 5 * sector
    blocks, content = {}, {}
    for number in (0, 1, ratio - 1, ratio, 2 * ratio, size // block_size):
        data = random.Random(number).randbytes(5 * sector)
        blocks[number] = Block(PRESENT, {0: data})
        content[number * block_size] = data
    for number, state in enumerate((ABSENT, UNDEFINED, ZERO, UNMAPPED, 5), ratio + 1):
        blocks[number] = Block(state)
    build.build(Path("a.vhdx"), size, blocks, block_size=block_size, sector=sector)
    assert (
        checksum("a.vhdx") == checksum("a.vhdx", untrusted=True, format="vhdx", max_size=1 << 60) == raw(size, content)
    )


@pytest.mark.parametrize("state", [4, PARTIAL])
def test_states_that_a_dynamic_image_can_not_have(state: int) -> None:
    build.build(Path("a.vhdx"), MIB, {0: Block(ABSENT)})
    patch(BAT, struct.pack("<Q", state))
    assert refusal(FormatError) == f"a.vhdx: is a VHDX with a block in state {state} at offset 0"


@pytest.mark.parametrize("seed", range(8))
def test_differencing_images(seed: int) -> None:
    path, content = build.random_chain(random.Random(seed), Path())
    Path("expected.raw").write_bytes(content)
    assert checksum(path) == checksum("expected.raw", format="raw")
    assert api.compare(path, "expected.raw").identical


def test_a_long_sector_bitmap() -> None:
    """Of a block of 256 MiB, in three parts; the parent has the rest."""
    block = 256 * MIB
    piece = random.Random(1).randbytes(512)
    sectors = [0, 1, 262143, 262144, 524287]
    build.build(
        Path("base.vhdx"),
        block,
        {0: Block(PRESENT, {512: b"p" * 512, 1024: b"p" * 512})},
        block_size=block,
        data_guid=GUID.bytes_le,
    )
    data = {sector * 512: piece for sector in sectors}
    build.build(Path("a.vhdx"), block, {0: Block(PARTIAL, data, sectors)}, block_size=block, parent=LINK)
    assert checksum("a.vhdx") == raw(block, {**data, 1024: b"p" * 512})


@pytest.mark.parametrize(
    ("link", "kind", "reason"),
    [
        ({**LINK, "parent_linkage": "{" + str(uuid.UUID(int=1)) + "}"}, RefusedError, "its GUID is another one"),
        ({**LINK, "parent_linkage": "x"}, FormatError, "whose parent has no valid GUID"),
        (
            {**LINK, "relative_path": "..\\base.vhdx"},
            RefusedError,
            "is in another place: '..\\base.vhdx' (only a file beside it is read)",
        ),
        ({**LINK, "relative_path": "/etc/passwd"}, RefusedError, "in another place"),
        ({**LINK, "relative_path": ".\\"}, RefusedError, "in another place"),
        ({**LINK, "relative_path": "nosuch"}, OpenError, "its parent 'nosuch' can't be read: no such file"),
        ({**LINK, "relative_path": "a.vhdx"}, RefusedError, "is one of its own files"),
        ({**LINK, "relative_path": "link.vhdx"}, RefusedError, "is a symbolic link"),
        ({**LINK, "relative_path": "disk.raw"}, FormatError, "disk.raw: is not a VHDX image"),
        ({"parent_linkage": LINK["parent_linkage"], "absolute_win32_path": "C:\\b.vhdx"}, RefusedError, "'C:\\b.vhdx'"),
        ({}, FormatError, "no valid GUID"),
    ],
)
def test_parents_that_are_refused(link: dict[str, str], kind: type[Error], reason: str) -> None:
    build.build(Path("base.vhdx"), MIB, {}, data_guid=GUID.bytes_le)
    Path("link.vhdx").symlink_to("base.vhdx")
    Path("disk.raw").write_bytes(bytes(MIB))
    build.build(Path("a.vhdx"), MIB, {}, parent=link)
    message = refusal(kind)
    assert message.startswith("a.vhdx: ")
    assert reason in message


def test_the_second_guid_of_a_parent() -> None:
    build.build(Path("base.vhdx"), MIB, {0: Block(PRESENT, {0: b"x"})}, data_guid=GUID.bytes_le)
    link = {**LINK, "parent_linkage": "{" + str(uuid.UUID(int=1)) + "}", "parent_linkage2": LINK["parent_linkage"]}
    build.build(Path("a.vhdx"), MIB, {}, parent=link)
    assert checksum("a.vhdx") == raw(MIB, {0: b"x"})
    assert refusal(RefusedError, untrusted=True, format="vhdx") == (
        "a.vhdx: has a parent, which --untrusted does not allow"
    )


def test_a_damaged_header_or_region_table_is_replaced_by_the_other() -> None:
    build.build(Path("a.vhdx"), MIB, {0: Block(PRESENT, {0: b"x"})})
    expected = checksum("a.vhdx")
    patch(64 * KIB + 100, b"?")
    patch(192 * KIB + 100, b"?")
    assert checksum("a.vhdx") == expected
    patch(128 * KIB + 100, b"?")
    assert "without a valid header" in refusal(FormatError)
    patch(128 * KIB, build.header(6, bytes(16)))
    patch(256 * KIB + 100, b"?")
    assert "without a valid region table" in refusal(FormatError)


def test_copies_that_disagree() -> None:
    build.build(Path("a.vhdx"), MIB, {})
    patch(128 * KIB, build.header(7, bytes(16)))
    assert checksum("a.vhdx") == raw(MIB, {})  # the same: Disk2vhd writes such
    patch(128 * KIB, build.header(7, GUID.bytes_le))
    assert "two headers disagree" in refusal(FormatError)
    patch(128 * KIB, build.header(6, bytes(16)))
    patch(256 * KIB, build.region_table(*build.regions(2 * MIB)))
    assert "two region tables disagree" in refusal(FormatError)


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (METADATA + 64 * KIB, struct.pack("<I", 3 * MIB), "blocks of 3145728 bytes"),
        (METADATA + 64 * KIB, struct.pack("<I", 512 * MIB), "blocks of 536870912 bytes"),
        (METADATA + 64 * KIB + 8, struct.pack("<Q", 100), "of 100 bytes, which can't be"),
        (METADATA + 64 * KIB + 8, struct.pack("<Q", 0), "of 0 bytes, which can't be"),
        (METADATA + 64 * KIB + 8, struct.pack("<Q", TIB), "block allocation table is too short"),
        (METADATA + 64 * KIB + 32, struct.pack("<I", 1024), "sectors of 1024"),
        (METADATA, b"?", "metadata is damaged"),
        (METADATA + 10, b"\4", "metadata lacks an item"),
        (METADATA + 10, b"\xff\xff", "metadata is damaged"),
        (METADATA + 32 + 16, struct.pack("<I", MIB), "metadata is damaged"),
        (METADATA + 32, uuid.UUID(int=1).bytes_le, "metadata that is required and not known"),
        (BAT, struct.pack("<Q", PRESENT), "with data where its tables are"),
        (BAT, struct.pack("<Q", METADATA | PRESENT), "with data where its tables are"),
        (BAT, struct.pack("<Q", (1 << 63) | PRESENT), "truncated"),
    ],
)
def test_damage(offset: int, data: bytes, reason: str) -> None:
    build.build(Path("a.vhdx"), MIB, {0: Block(PRESENT, {0: b"x"})})
    patch(offset, data)
    assert reason in refusal(Error)


def test_cut_at_the_edge_of_each_structure() -> None:
    build.build(Path("base.vhdx"), 3 * MIB, {}, data_guid=GUID.bytes_le)
    blocks = {0: Block(PRESENT, {0: b"a" * MIB}), 2: Block(PARTIAL, {0: b"b" * 512}, [0, 2047])}
    places = build.build(Path("a.vhdx"), 3 * MIB, blocks, parent=LINK)
    for offset in sorted(places.values()):
        for end in (offset - 1, offset + 1):
            shutil.copy("a.vhdx", "cut.vhdx")
            os.truncate("cut.vhdx", min(end, places["end"]))
            if end < places["bitmap 0"] + 768:
                refusal(TruncatedError, "cut.vhdx", format="vhdx")
            else:
                assert checksum("cut.vhdx") == checksum("a.vhdx")


def with_log(*entries: tuple[int, bytes]) -> None:
    """Give a.vhdx a log with ENTRIES at these bytes of it."""
    for offset, entry in entries:
        end = min(len(entry), MIB - offset)
        patch(LOG + offset, entry[:end])
        patch(LOG, entry[end:])
    patch(128 * KIB, build.header(8, bytes(16), build.LOG_GUID))


def table(*entries: int) -> bytes:
    return struct.pack(f"<{len(entries)}Q", *entries).ljust(4096, b"\0")


def test_changes_in_the_log_are_read() -> None:
    """The newest entry, what it goes on from around the end of the ring, and none that is torn or of another time."""
    places = build.build(Path("a.vhdx"), 2 * MIB, {0: Block(PRESENT, {0: b"x"}), 1: Block(PRESENT, {0: b"y"})})
    x, y, size = places["block 0"] | PRESENT, places["block 1"] | PRESENT, places["end"]
    before = checksum("a.vhdx")
    assert before == raw(2 * MIB, {0: b"x", MIB: b"y"})
    torn = build.log_entry(12, [(BAT, 4096)], size)[:-1] + b"?"
    with_log(
        (MIB - 4096, build.log_entry(10, [(BAT, table(y, x))], size, MIB - 4096)),
        (4096, build.log_entry(11, [(BAT + 4096, 4096)], size, MIB - 4096)),
        (8192, torn),
        (64 * KIB, build.log_entry(9, [(BAT, 4096)], size, 64 * KIB)),
        (80 * KIB, build.log_entry(99, [(BAT, 4096)], size).replace(build.LOG_GUID, bytes(15) + b"?")),
    )
    assert checksum("a.vhdx") == raw(2 * MIB, {0: b"y", MIB: b"x"})
    patch(128 * KIB, build.header(8, bytes(16)))
    assert checksum("a.vhdx") == before


def test_qemu_replays_the_same(qemu: None) -> None:
    places = build.build(Path("a.vhdx"), 2 * MIB, {0: Block(PRESENT, {0: b"x"}), 1: Block(PRESENT, {0: b"y"})})
    entries = [
        (0, build.log_entry(1, [(BAT, 4096)], places["end"])),
        (4096, build.log_entry(2, [(BAT, table(0, places["block 0"] | PRESENT))], places["end"])),
    ]
    with_log(*entries)
    expected = raw(2 * MIB, {MIB: b"x"})
    assert checksum("a.vhdx") == expected
    shutil.copy("a.vhdx", "copy.vhdx")
    run(find_tool("qemu-img"), "check", "-r", "all", "copy.vhdx")
    run(find_tool("qemu-img"), "convert", "-O", "raw", "copy.vhdx", "copy.raw")
    assert checksum("copy.vhdx") == checksum("copy.raw") == expected


def test_logs_that_are_refused() -> None:
    places = build.build(Path("a.vhdx"), MIB, {0: Block(PRESENT, {0: b"x"})})
    good = checksum("a.vhdx")
    with_log((0, build.log_entry(1, [(BAT, 4096)], places["end"] + 1)))
    assert "truncated" in refusal(TruncatedError)
    with_log((0, build.log_entry(1, [(places["block 0"], 4096)], 0)))
    assert "whose log has data (`qemu-img check -r all COPY`" in refusal(RefusedError)
    with_log((0, build.log_entry(1, [(BAT + 5, 4096)], 0)))
    assert "log is damaged" in refusal(FormatError)
    with_log((0, build.log_entry(1, [(BAT, 1 << 40)], 0)))
    assert "many changes" in refusal(RefusedError)
    with_log((0, bytes(4096)))
    assert checksum("a.vhdx") == good
    patch(128 * KIB, build.header(8, bytes(16), build.LOG_GUID, 512 * MIB))
    assert "changes in a log of 536870912 bytes" in refusal(RefusedError)


def test_a_log_of_overlapping_entries_is_not_checked_for_ever() -> None:
    build.build(Path("a.vhdx"), MIB, {})
    head = bytearray(build.log_entry(1, [(BAT, 4096)]))
    struct.pack_into("<I", head, 8, MIB)
    with_log(*((offset, bytes(head)) for offset in range(0, MIB, 4096)))
    assert "a log that is not understood" in refusal(RefusedError)


def test_bounded_memory(imgsum: Imgsum) -> None:
    """2 TiB of blocks of 1 MiB: a table of 16 MiB."""
    build.build(Path("a.vhdx"), 2 * TIB, {5: Block(PRESENT, {0: b"x"}), 2 * MIB - 1: Block(PRESENT, {0: b"y"})})
    raw(2 * TIB, {5 * MIB: b"x", 2 * TIB - MIB: b"y"})
    result, peak = imgsum.peak_memory("compare", "a.vhdx", "expected.raw")
    assert (result.errors, result.status) == ("", 0)
    assert peak < 64 * MIB


def test_untrusted_data_is_read_once() -> None:
    """All entries refer to the same block: 4 GiB of work in a file of a few KiB."""
    places = build.build(Path("a.vhdx"), 4 * GIB, {0: Block(PRESENT, {0: b"x" * MIB})})
    patch(BAT, struct.pack("<Q", places["block 0"] | PRESENT) * 4096)
    assert "too many for its size with --untrusted" in refusal(RefusedError, untrusted=True, format="vhdx")


@pytest.mark.parametrize("options", ["subformat=dynamic", "subformat=fixed", "block_size=32M", "block_state_zero=off"])
def test_histories_of_qemu(options: str, qemu: None) -> None:
    rng = random.Random(options)
    for size in (9 * MIB, 40 * MIB + 512):
        run(find_tool("qemu-img"), "create", "-q", "-f", "vhdx", "-o", options, "a.vhdx", size)
        for _ in range(2):
            commands = []
            for _ in range(rng.randrange(1, 5)):
                at, length = rng.randrange(size // 512) * 512, rng.choice([512, 4096, MIB, 5 * MIB])
                what = rng.choice([f"write -P {rng.randrange(1, 255)}", "write -z", "discard"])
                commands += ["-c", f"{what} {at} {min(length, size - at)}"]
            run(find_tool("qemu-io"), "-f", "vhdx", *commands, "a.vhdx")
            run(find_tool("qemu-img"), "convert", "-f", "vhdx", "-O", "raw", "a.vhdx", "a.raw")
            expected = checksum("a.raw")
            for how in ({"reader": "qemu"}, {"reader": "native"}, {"untrusted": True}, {"extents": False}):
                assert checksum("a.vhdx", format="vhdx", **how) == expected
        os.unlink("a.vhdx")
