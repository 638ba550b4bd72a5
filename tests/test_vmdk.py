"""VMDK, read natively: sparse, flat, split, compressed, ESXi's kinds, parents, and what is refused."""

from __future__ import annotations

import os
import random
import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import vmdk_build as build
from conftest import Imgsum, find_tool
from qcow2_images import run
from vmdk_build import SECTOR, content_of, descriptor

import imgsum as api
from imgsum import OpenOptions
from imgsum.errors import Error, FormatError, OpenError, RefusedError, TruncatedError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
PROGRAMS = os.environ["PATH"]
ONE = 'RW {} SPARSE "a.vmdk"'


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


def raw(content: bytes) -> str:
    Path("expected.raw").write_bytes(content)
    return checksum("expected.raw", format="raw")


def refusal(kind: type[Error], name: str = "a.vmdk", **options: object) -> str:
    with pytest.raises(kind) as caught:
        checksum(name, **options)
    return str(caught.value)


def patch(offset: int, data: bytes, name: str = "a.vmdk") -> None:
    with open(name, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("per_table", [512, 128, 7, 1])
def test_hosted_extents(seed: int, per_table: int) -> None:
    rng = random.Random(seed)
    grain = rng.choice([1, 8, 17, 128])
    sectors = rng.randrange(1, 3000)
    grains = build.random_content(rng, -(-sectors // grain), grain * SECTOR)
    text = descriptor("monolithicSparse", [ONE.format(sectors)])
    build.hosted(
        Path("a.vmdk"),
        sectors,
        grains,
        grain=grain,
        per_table=per_table,
        text=text,
        gaps=rng.random() < 0.5,
        rng=rng if rng.random() < 0.5 else None,
    )
    expected = raw(content_of(sectors * SECTOR, grain * SECTOR, grains))
    assert checksum("a.vmdk") == checksum("a.vmdk", format="vmdk", untrusted=True) == expected
    assert checksum("a.vmdk", direct=True, request_size=4096) == expected


@pytest.mark.parametrize("seed", range(6))
def test_compressed_extents(seed: int) -> None:
    rng = random.Random(seed)
    grain = rng.choice([8, 128, 1024])
    sectors = rng.randrange(1, 9000)
    grains = build.random_content(rng, -(-sectors // grain), grain * SECTOR, zeros=False)
    text = descriptor("streamOptimized", [ONE.format(sectors).replace("RW", "RDONLY")])
    build.stream(
        Path("a.vmdk"), sectors, grains, grain=grain, text=text, footer=seed % 3 > 0, rng=rng if seed % 2 else None
    )
    expected = raw(content_of(sectors * SECTOR, grain * SECTOR, grains))
    assert checksum("a.vmdk") == checksum("a.vmdk", format="vmdk", untrusted=True) == expected
    assert checksum("a.vmdk", direct=True, request_size=4096) == expected


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_several_extents(seed: int, qemu: None) -> None:
    """Three images, each of extents of every kind, against a bytearray.

    And against QEMU where each extent has whole grains: else QEMU reads the rest of its last one over the next extent.
    """
    odd = seed % 2 > 0
    path, content = build.random_chain(random.Random(seed), Path(), odd)
    expected = raw(content)
    assert checksum(path) == expected
    assert api.compare(path, "expected.raw", options=OpenOptions(direct=True, request_size=4096)).identical
    if not odd:
        run(find_tool("qemu-img"), "convert", "-f", "vmdk", "-O", "raw", path, "qemu.raw")
        assert checksum("qemu.raw", format="raw") == expected


@pytest.mark.parametrize("seed", range(4))
def test_sesparse_in_any_order_over_many_tables(seed: int) -> None:
    """The number of a grain has its lower 12 bits above the others: what is contiguous ends at each 4096."""
    rng = random.Random(seed)
    sectors = 5000 * 8
    grains = {number: struct.pack("<I", number) for number in range(seed * 100, 5000) if number % 977}
    build.sesparse(Path("a-s.vmdk"), sectors, grains, rng=rng if seed % 2 else None)
    Path("a.vmdk").write_text(descriptor("seSparse", [f'RW {sectors} SESPARSE "a-s.vmdk"']))
    assert checksum("a.vmdk") == raw(content_of(sectors * SECTOR, 4096, grains))


SUBFORMATS = ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "zeroed_grain"]


@pytest.mark.parametrize("subformat", SUBFORMATS)
def test_histories_of_qemu(subformat: str, qemu: None) -> None:
    rng = random.Random(subformat)
    option = "zeroed_grain=on" if subformat == "zeroed_grain" else f"subformat={subformat}"
    size = 9 * MIB + 512 * rng.randrange(200)
    run(find_tool("qemu-img"), "create", "-q", "-f", "vmdk", "-o", option, "base.vmdk", size)
    name = "base.vmdk"
    for step in range(4):
        if step == 2 and "Flat" not in subformat:
            name = "a.vmdk"
            run(
                find_tool("qemu-img"), "create", "-q", "-f", "vmdk", "-o", option, "-b", "base.vmdk", "-F", "vmdk", name
            )
        commands = []
        for _ in range(rng.randrange(1, 6)):
            at, length = rng.randrange(size // 512) * 512, rng.choice([512, 4096, 65536, MIB])
            what = rng.choice([f"write -P {rng.randrange(1, 255)}", "write -z", "discard"])
            commands += ["-c", f"{what} {at} {min(length, size - at)}"]
        run(find_tool("qemu-io"), "-f", "vmdk", *commands, name)
        run(find_tool("qemu-img"), "convert", "-f", "vmdk", "-O", "raw", name, "a.raw")
        expected = checksum("a.raw")
        for how in ({"reader": "native"}, {"extents": False}, {"direct": True}):
            assert checksum(name, format="vmdk", **how) == expected
        if name == "base.vmdk":
            assert checksum(name, reader="qemu") == expected
        if option in ("subformat=monolithicSparse", "zeroed_grain=on") and name == "base.vmdk":
            assert checksum(name, format="vmdk", untrusted=True) == expected
        run(find_tool("qemu-img"), "convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "a.raw", "s.vmdk")
        assert checksum("s.vmdk") == checksum("s.vmdk", format="vmdk", untrusted=True) == expected


def chain(cid: int = 1, parent: tuple[int, str] | None = (1, "base.vmdk"), text: bool = False) -> None:
    """base.vmdk with that CID, and a.vmdk on it, its descriptor a file of its own if TEXT."""
    build.hosted(Path("base.vmdk"), 256, {0: b"x", 1: b"y"}, text=descriptor("monolithicSparse", [], cid))
    words = descriptor("twoGbMaxExtentSparse", ['RW 256 SPARSE "a-s001.vmdk"'] if text else [], 2, parent)
    build.hosted(Path("a-s001.vmdk" if text else "a.vmdk"), 256, {1: b"z"}, text="" if text else words)
    if text:
        Path("a.vmdk").write_text(words)


@pytest.mark.parametrize("text", [False, True])
def test_a_parent(text: bool) -> None:
    chain(text=text)
    assert checksum("a.vmdk") == raw(content_of(128 * KIB, 64 * KIB, {0: b"x", 1: b"z"}))
    reason = "has its content in other files" if text else "has a parent"
    assert f"{reason}, which --untrusted does not allow" in refusal(RefusedError, untrusted=True, format="vmdk")


@pytest.mark.parametrize(
    ("cid", "parent", "kind", "reason"),
    [
        (3, (1, "base.vmdk"), RefusedError, "base.vmdk: is not as it was when it became a parent: its CID is not 1"),
        (1, (1, "nosuch"), OpenError, "its parent 'nosuch' can't be read: no such file"),
        (1, (1, "/etc/hostname"), RefusedError, "its parent is in another place: '/etc/hostname'"),
        (1, (1, "../base.vmdk"), RefusedError, "its parent is in another place"),
        (1, (1, "C:\\\\base.vmdk"), RefusedError, "its parent is in another place"),
        (1, (1, "json:{}"), RefusedError, "its parent is in another place"),
        (1, (1, "link.vmdk"), RefusedError, "'link.vmdk' is a symbolic link"),
        (1, (1, "a.vmdk"), RefusedError, "is one of its own files"),
        (1, (1, "disk.raw"), RefusedError, "not understood"),
        (0xFFFFFFFF, (0xFFFFFFFF, "base.vmdk"), RefusedError, "with a parent 'base.vmdk', and says that it has none"),
    ],
)
def test_parents_that_are_refused(cid: int, parent: tuple[int, str], kind: type[Error], reason: str) -> None:
    chain(cid, parent)
    Path("link.vmdk").symlink_to("base.vmdk")
    Path("disk.raw").write_bytes(b"raw\n" * 1000)
    message = refusal(kind)
    assert message.startswith("a.vmdk: ")
    assert reason in message


def test_a_parent_without_a_name() -> None:
    chain()
    data = Path("a.vmdk").read_bytes()
    Path("a.vmdk").write_bytes(data.replace(b"parentFileNameHint=", b"#arentFileNameHint="))
    assert "with a parent, and does not record its name" in refusal(RefusedError)


def test_one_file_with_two_flat_extents() -> None:
    Path("flat").write_bytes(b"a" * 1024 + b"b" * 512)
    lines = ['RW 1 FLAT "flat" 2', 'RW 2 FLAT "flat" 0']
    Path("a.vmdk").write_text(descriptor("twoGbMaxExtentFlat", lines))
    assert checksum("a.vmdk") == raw(b"b" * 512 + b"a" * 1024)


@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        ("fullDevice", 'RW 1 FLAT "flat" 0', "of a type that is not read: 'fullDevice'"),
        ("vmfs", 'RW 1 FLAT "flat"', "an extent line that is not as it should be: 'flat'"),
        ("vmfs", 'RW 1 VMFS "flat" 0', "an extent line that is not as it should be"),
        ("vmfs", 'RW 8 SPARSE "sparse" 0', "begins at sector 0 of its file, as only a flat one can"),
        ("vmfs", 'RW 0 VMFS "flat"', "an extent line that is not as it should be"),
        ("vmfs", 'RW 1 SPARSE "flat"', "its extent 'flat' is not a sparse extent of a VMDK"),
        ("vmfs", 'RW 8 SESPARSE "sparse"', "its extent 'sparse' is not of the kind SESPARSE"),
        ("vmfs", 'RW 8 SPARSE "seSparse"', "its extent 'seSparse' is not of the kind SPARSE"),
        ("vmfs", 'RW 9 SPARSE "sparse"', "its extent 'sparse' is a VMDK that says its size twice"),
        ("vmfs", 'RW 8 SPARSE "sparse"\nRW 1 VMFS "flat"', None),
        ("vmfs", 'RW 7 SPARSE "sparse"\nRW 1 VMFS "flat"', "says its size twice"),
        ("vmfs", 'RW 8 SPARSE "packed"\nRW 1 VMFS "flat"', "of several extents, and compressed"),
    ],
)
def test_descriptors(kind: str, line: str, reason: str | None) -> None:
    Path("flat").write_bytes(b"f" * 512)
    build.hosted(Path("sparse"), 8, {0: b"s"})
    build.sesparse(Path("seSparse"), 8, {0: b"s"})
    build.stream(Path("packed"), 8, {0: b"s"})
    Path("a.vmdk").write_text(descriptor(kind, line.split("\n")))
    if reason is None:
        assert checksum("a.vmdk") == raw(b"s".ljust(4096, b"\0") + b"f" * 512)
    else:
        assert reason in refusal(Error)


@pytest.mark.parametrize("line", ["\xfe\x12\x9b", "a\x1b[31m=1", "\udcae=1"])
def test_a_descriptor_that_is_no_text(line: str) -> None:
    Path("a.vmdk").write_bytes(line.encode("latin-1" if line < "\ud800" else "utf-8", "surrogateescape"))
    assert "is not a VMDK image, or is damaged: what should be its descriptor is not text" in refusal(
        FormatError, format="vmdk"
    )


@pytest.mark.parametrize("name", ["cowd", "seSparse", "sparse"])
def test_an_extent_by_itself(name: str) -> None:
    build.cowd(Path("cowd"), 8, {0: b"s"})
    build.sesparse(Path("seSparse"), 8, {0: b"s"})
    build.hosted(Path("sparse"), 8, {0: b"s"})
    assert "is an extent of a VMDK: name the .vmdk file" in refusal(RefusedError, name, format="vmdk")


def monolithic(sectors: int = 256, grains: Mapping[int, bytes] | None = None, **options: object) -> dict[str, int]:
    text = descriptor("monolithicSparse", [ONE.format(sectors)])
    return build.hosted(Path("a.vmdk"), sectors, grains or {0: b"x", 1: b"y"}, text=text, **options)  # type: ignore[arg-type]


def test_copies_of_grain_tables_that_disagree(qemu: None) -> None:
    places = monolithic()
    good = checksum("a.vmdk")
    patch(places["table 0"] + 4, bytes(4))
    assert "two grain tables disagree: it is damaged" in refusal(FormatError)
    run(find_tool("qemu-img"), "convert", "-f", "vmdk", "-O", "raw", "a.vmdk", "qemu.raw")
    assert checksum("qemu.raw") == good
    patch(8, struct.pack("<I", 1))  # it says that there is no copy
    assert checksum("a.vmdk") == good


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (4, struct.pack("<I", 4), "of version 4"),
        (12, struct.pack("<Q", 0), "without a capacity"),
        (12, struct.pack("<Q", 1 << 60), "which can't be"),
        (20, struct.pack("<Q", 0), "in grains of 0"),
        (20, struct.pack("<Q", 1 << 22), "in grains of 2147483648"),
        (44, struct.pack("<I", 0), "which can't be"),
        (44, struct.pack("<I", 513), "513 entries in a grain table"),
        (64, struct.pack("<Q", 1 << 30), "before its first grain"),
        (56, struct.pack("<Q", 1 << 40), "truncated"),
        (73, b"\n  \n", "damaged when it was copied as text"),
        (77, b"\1", "compressed in a way that is not known"),
        (77, b"\2", "compressed in a way that is not known"),
        (10, b"\1", "compressed in a way that is not known"),
    ],
)
def test_damaged_headers(offset: int, data: bytes, reason: str) -> None:
    monolithic()
    patch(offset, data)
    assert reason in refusal(Error)


def test_two_descriptors_that_disagree() -> None:
    places = monolithic()
    with open("a.vmdk", "ab") as file:
        file.write(descriptor("monolithicSparse", [ONE.format(256)], 7).encode().ljust(1024, b"\0"))
    patch(28, struct.pack("<QQ", places["end"] // SECTOR, 2))
    assert "two descriptors that disagree" in refusal(FormatError)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (
            struct.pack("<QI", 0, 5) + zlib.compress(bytes(65536)),
            "the marker of a compressed grain is not of this grain",
        ),
        (struct.pack("<QI", 128, 0), "marker"),
        (struct.pack("<QI", 128, 1 << 20), "marker"),
        (struct.pack("<QI", 128, 40) + zlib.compress(b"x")[:-1] + b"?", "compressed grain: "),
        (struct.pack("<QI", 128, 9) + zlib.compress(b"x"), "the data ends early"),
        (struct.pack("<QI", 128, 7) + zlib.compress(b"x" * 65536), "the data ends early"),
        (struct.pack("<QI", 128, 1000) + zlib.compress(bytes(65537)), "longer than a grain"),
        (struct.pack("<QI", 128, 1000) + b"no zlib stream", "compressed grain: "),
    ],
)
def test_compressed_grains_that_qemu_refuses_too(packed: bytes, reason: str, qemu: None) -> None:
    text = descriptor("streamOptimized", [ONE.format(384)])
    build.stream(Path("a.vmdk"), 384, {0: b"x", 1: b"y", 2: b"z"}, text=text, packed={1: packed})
    message = refusal(FormatError)
    assert reason in message
    assert message.endswith("at offset 65536")
    if "not of this grain" not in reason:  # QEMU does not look at which grain it is
        with pytest.raises(Exception, match="error while reading at byte 65536"):
            run(find_tool("qemu-img"), "convert", "-f", "vmdk", "-O", "raw", "a.vmdk", "qemu.raw")


@pytest.mark.parametrize("kind", ["hosted", "stream", "cowd", "sesparse"])
def test_cut_at_the_edge_of_each_structure(kind: str) -> None:
    rng = random.Random(kind)
    grains = {number: rng.randbytes(4096) for number in (0, 1, 5, 6, 9)}
    text = descriptor("monolithicSparse", [ONE.format(80)]) if kind in ("hosted", "stream") else ""
    if text:
        make = build.hosted if kind == "hosted" else build.stream
        places = make(Path("a.vmdk"), 80, grains, grain=8, text=text)
        name = "a.vmdk"
    else:
        name = "part"
        places = (
            build.cowd(Path(name), 80, grains, grain=8) if kind == "cowd" else build.sesparse(Path(name), 80, grains)
        )
        line = "VMFSSPARSE" if kind == "cowd" else "SESPARSE"
        Path("a.vmdk").write_text(descriptor("seSparse", [f'RW 80 {line} "part"']))
    good = checksum("a.vmdk")
    assert good == raw(content_of(80 * SECTOR, 4096, grains))
    shutil.copy(name, "whole")
    for offset in sorted(set(places.values()) - {0}):
        for end in (offset - 1, offset, offset + 1):
            if end < places["end"]:
                shutil.copy("whole", name)
                os.truncate(name, end)
                refusal(TruncatedError if end > 4 * SECTOR else Error, format="vmdk")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [(4 << 60, "entry 0x4000000000000000 of a grain table is not known"), (5, "of a grain table is not known")],
)
def test_sesparse_entries(entry: int, reason: str) -> None:
    places = build.sesparse(Path("part"), 8, {0: b"s"})
    Path("a.vmdk").write_text(descriptor("seSparse", ['RW 8 SESPARSE "part"']))
    patch(places["tables"], struct.pack("<Q", entry), "part")
    assert reason in refusal(FormatError)
    patch(places["directory"], struct.pack("<Q", 2 << 60), "part")
    assert "of the grain directory is not known" in refusal(FormatError)
    build.sesparse(Path("part"), 8, {0: b"s"}, dirty=1)
    assert "changes in its journal" in refusal(RefusedError)
    patch(SECTOR, b"?", "part")
    assert "whose second header is damaged" in refusal(FormatError)
    patch(24, b"\7", "part")
    assert "of a kind that is not known" in refusal(RefusedError)


def test_untrusted_data_is_read_once() -> None:
    places = monolithic(512 * 1024, {0: b"x" * 65536}, redundant=False)
    count = 512 * 1024 // 128
    entries = struct.pack("<I", places["grain 0"] // SECTOR) * count
    patch(places["table 0"], entries[: 512 * 4])
    assert "too many for its size with --untrusted" in refusal(RefusedError, untrusted=True, format="vmdk")


def test_untrusted_compressed_data_is_in_proportion() -> None:
    """1 GiB of zeros in 2 MiB."""
    grain = zlib.compress(bytes(MIB))
    text = descriptor("streamOptimized", [ONE.format(1024 * 2048)])
    packed = {number: struct.pack("<QI", number * 2048, len(grain)) + grain for number in range(1024)}
    grains = dict.fromkeys(range(1024), b"")
    places = build.stream(Path("a.vmdk"), 1024 * 2048, grains, grain=2048, text=text, packed=packed)
    assert places["end"] < 4 * MIB
    assert "of decompressed data" in refusal(RefusedError, untrusted=True, format="vmdk")


def test_bounded_memory_and_absent_tables(imgsum: Imgsum) -> None:
    """2 TiB, all of it absent but the last grain: the directory has 65536 entries."""
    sectors = 2 * TIB // SECTOR
    build.hosted(Path("part"), sectors, {sectors // 128 - 1: b"y"}, gaps=True, redundant=False)
    Path("a.vmdk").write_text(descriptor("vmfsSparse", [f'RW {sectors} SPARSE "part"']))
    with open("expected.raw", "wb") as file:
        file.truncate(2 * TIB)
        file.seek(2 * TIB - 65536)
        file.write(b"y")
    result, peak = imgsum.peak_memory("compare", "a.vmdk", "expected.raw")
    assert (result.errors, result.status) == ("", 0)
    assert peak < 64 * MIB


def test_memory_of_compressed_grains(imgsum: Imgsum) -> None:
    rng = random.Random(5)
    grains = {number: rng.randbytes(MIB) for number in range(12)}
    text = descriptor("streamOptimized", [ONE.format(12 * 2048)])
    build.stream(Path("a.vmdk"), 12 * 2048, grains, grain=2048, text=text)
    result, peak = imgsum.peak_memory("checksum", "a.vmdk")
    assert result.text.split()[0] == raw(b"".join(grains.values()))
    assert peak < 64 * MIB
    Path("a.vmdk").unlink()
    build.stream(Path("a.vmdk"), 4096, {0: b"x"}, grain=4096, text=text.replace("24576", "4096"))
    assert "compressed grains of 2097152 bytes" in refusal(RefusedError)
