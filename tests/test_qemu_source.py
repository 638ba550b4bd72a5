"""Formats that a private qemu-nbd reads: their content, what is refused, and what is left behind (nothing)."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import reference
from conftest import find_tool, need, wait_until, wait_until_it_serves
from reference import KIB, MIB

from imgsum import OpenOptions, checksum
from imgsum.errors import ChangedError, Error, FormatError, MissingError, OpenError, RefusedError, TruncatedError
from imgsum.source import open_source
from imgsum.source.qemu.formats import inspect

if TYPE_CHECKING:
    from conftest import Imgsum, Running

pytest_plugins = ["nbdservers"]

SPEC = "1m:R 3m:- 70k:R 1m:0 954k:A"
SIZE = 6 * MIB
EXPECTED = reference.blkhash(reference.content(SPEC))

FORMATS = {
    "vmdk": ["vmdk"],
    "vmdk-stream": ["vmdk", "-o", "subformat=streamOptimized"],
    "vmdk-flat": ["vmdk", "-o", "subformat=monolithicFlat"],
    "vmdk-split": ["vmdk", "-o", "subformat=twoGbMaxExtentSparse"],
    "vmdk-split-flat": ["vmdk", "-o", "subformat=twoGbMaxExtentFlat"],
    "vmdk-3": ["vmdk", "-o", "compat6,subformat=monolithicSparse"],
    "vhdx": ["vhdx"],
    "vhdx-fixed": ["vhdx", "-o", "subformat=fixed"],
    "vdi": ["vdi"],
    "vdi-static": ["vdi", "-o", "static=on"],
    "vpc": ["vpc", "-o", "force_size=on"],
    "vpc-fixed": ["vpc", "-o", "subformat=fixed,force_size=on"],
    "qed": ["qed"],
    "parallels": ["parallels"],
    "qcow": ["qcow"],
}

Convert = Callable[..., Path]


def run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def convert(image: Callable[..., Path], tmp_path: Path) -> Convert:
    """convert(KIND, name=None): SPEC's content as an image of that kind, in the test's directory."""
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")

    def make(kind: str, name: str = "disk", spec: str = SPEC) -> Path:
        format_name, *more = FORMATS[kind]
        path = tmp_path / name
        run(find_tool("qemu-img"), "convert", "-f", "raw", "-O", format_name, *more, image(spec), path)
        return path

    return make


def content_of(path: Path | str, **options: Any) -> str:
    return checksum(path, options=OpenOptions(**options)).hexdigest


# --- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("direct", [False, True])
def test_formats(convert: Convert, kind: str, direct: bool) -> None:
    got = checksum(convert(kind), options=OpenOptions(direct=direct))
    assert (got.hexdigest, got.size, got.format) == (EXPECTED, SIZE, FORMATS[kind][0])


@pytest.mark.parametrize("kind", ["vmdk", "vdi", "qed", "parallels", "vpc"])
def test_what_is_not_allocated_is_not_read(convert: Convert, kind: str) -> None:
    got = checksum(convert(kind, spec="64k:A 60m:-"))
    assert got.stats.bytes_read <= 2 * MIB


@pytest.mark.parametrize(
    "name", ["a:b.vmdk", "json:{}", "nbd:x", ",", "x,y=z", "file:x", "-rf", "a b", "%s", "\u017ee", "fd\udcff", "x.dmg"]
)
@pytest.mark.parametrize("kind", ["vmdk", "vmdk-flat"])
def test_a_name_is_a_name(convert: Convert, tmp_path: Path, imgsum: Imgsum, name: str, kind: str) -> None:
    made = convert(kind, "plain")
    made.rename(tmp_path / name)
    for reader in ("native", "qemu"):
        result = imgsum("checksum", "--reader", reader, "--", name, cwd=tmp_path)
        if reader == "qemu" and kind == "vmdk-flat" and "\udcff" in name:
            assert result.status == 2
            assert "not UTF-8" in result.errors
        else:
            assert (result.stdout, result.status) == (os.fsencode(f"{EXPECTED}  {name}\n"), 0)


def test_direct_where_that_is_not_possible(convert: Convert, mounted: Callable[[str], Path]) -> None:
    """A ramfs has no O_DIRECT."""
    disk = mounted("ramfs") / "disk"
    shutil.copy(convert("qed"), disk)
    got = checksum(disk, options=OpenOptions(direct=True))
    assert got.hexdigest == EXPECTED
    assert "cache_note" in got.stats.details


def test_formats_on_a_block_device(convert: Convert, loop_device: Callable[..., str]) -> None:
    assert content_of(loop_device(convert("qed"))) == EXPECTED


def test_a_directory_for_sockets_with_a_long_name(convert: Convert, tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    directory.mkdir(parents=True)
    code = "import imgsum, sys; print(imgsum.checksum(sys.argv[1]).hexdigest)"
    words = [sys.executable, "-c", code, str(convert("qed"))]
    made = subprocess.run(
        words, check=True, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(directory)}
    )
    assert made.stdout == f"{EXPECTED}\n"
    assert list(directory.iterdir()) == []


def test_a_format_that_is_given_is_not_overruled(convert: Convert) -> None:
    vmdk = convert("vmdk")
    assert content_of(vmdk, format="raw") == reference.blkhash(vmdk.read_bytes())
    for wrong in ("vdi", "vhdx", "vpc", "qed", "bochs", "cloop", "dmg", "parallels", "qcow"):
        with pytest.raises(Error):
            content_of(vmdk, format=wrong)


def test_qcow2_by_qemu(image: Callable[..., Path], tmp_path: Path) -> None:
    """A chain, of which QEMU is told each image's format and file."""
    qemu_img = find_tool("qemu-img")
    run(qemu_img, "convert", "-f", "raw", "-O", "qcow2", image(SPEC), tmp_path / "base,1")
    (tmp_path / "over").mkdir()
    top = tmp_path / "over" / "top"
    run(qemu_img, "create", "-f", "qcow2", "-F", "qcow2", "-b", "../base,1", top)
    assert content_of(top, reader="qemu") == content_of(top) == EXPECTED
    run(qemu_img, "rebase", "-u", "-F", "qcow2", "-b", "nbd://localhost/", top)
    with pytest.raises(RefusedError, match="the backing file 'nbd://localhost/' is not a plain path"):
        content_of(top, reader="qemu")
    run(qemu_img, "rebase", "-u", "-F", "qcow2", "-b", "top", top)
    with pytest.raises(RefusedError, match="is its own backing file"):
        content_of(top, reader="qemu")


def test_qcow2_over_a_format_that_qemu_reads(convert: Convert, tmp_path: Path) -> None:
    vmdk = convert("vmdk", "base.vmdk")
    run(find_tool("qemu-img"), "create", "-f", "qcow2", "-F", "vmdk", "-b", "base.vmdk", tmp_path / "top")
    assert content_of(tmp_path / "top") == EXPECTED
    with pytest.raises(Error):
        content_of(tmp_path / "top", reader="native")
    vmdk.unlink()
    with pytest.raises(OpenError, match=r"base\.vmdk"):
        content_of(tmp_path / "top")


# --- encryption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["luks", "aes"])
def test_encrypted_qcow2(image: Callable[..., Path], tmp_path: Path, imgsum: Imgsum, kind: str) -> None:
    secret, wrong, disk = tmp_path / "se,cret", tmp_path / "wrong", tmp_path / "disk"
    secret.write_text("password-1")
    wrong.write_text("password-2")
    options = f"encrypt.format={kind},encrypt.key-secret=s" + (",encrypt.iter-time=10" if kind == "luks" else "")
    plain = secret.with_name("s")
    plain.write_text("password-1")
    qemu_img = find_tool("qemu-img")
    create = [qemu_img, "create", "-q", "--object", f"secret,id=s,file={plain}", "-f", "qcow2", "-o", options]
    for _ in range(20):  # on a busy machine: Unable to get accurate CPU usage
        if subprocess.run([*create, str(disk), "6M"], check=False, capture_output=True).returncode == 0:
            break
    target = f"driver=qcow2,encrypt.format={kind},encrypt.key-secret=s,file.filename={disk}"
    words = [qemu_img, "convert", "--object", f"secret,id=s,file={plain}", "-n", "-f", "raw", image(SPEC)]
    made = subprocess.run([*words, "--target-image-opts", target], check=False, capture_output=True, text=True)
    need(made.returncode == 0, f"this qemu-img can't write {kind}: {made.stderr}")

    assert content_of(disk, secret_file=str(secret)) == EXPECTED
    with pytest.raises(RefusedError, match="is encrypted: --secret-file FILE"):
        content_of(disk)
    with pytest.raises(OpenError, match=r"the secret can't be read: .*no such file"):
        content_of(disk, secret_file=str(tmp_path / "nosuch"))
    if kind == "luks":
        with pytest.raises(OpenError, match=r"qemu-nbd: .*[Ii]nvalid password"):
            content_of(disk, secret_file=str(wrong))
    with pytest.raises(RefusedError):
        content_of(disk, format="qcow2", secret_file=str(secret), untrusted=True)
    size = disk.stat().st_size
    os.truncate(disk, size - 128 * KIB)
    with pytest.raises(TruncatedError):
        content_of(disk, secret_file=str(secret))
    result = imgsum("checksum", disk)
    assert (result.status, result.text) == (2, "")


# --- refused --------------------------------------------------------------------------------------------------------


def test_untrusted(convert: Convert) -> None:
    with pytest.raises(RefusedError, match="--untrusted does not allow"):
        content_of(convert("qed"), format="qed", untrusted=True)


def test_max_size(convert: Convert) -> None:
    disk = convert("vmdk")
    assert content_of(disk, max_size=SIZE) == EXPECTED
    with pytest.raises(RefusedError, match=f"has {SIZE} bytes of content, more than the {SIZE - 1} of --max-size"):
        content_of(disk, max_size=SIZE - 1)


@pytest.mark.parametrize("kind", [*FORMATS])
@pytest.mark.parametrize("missing", [1, 512, 4096, 300 * KIB])
def test_truncated_images(convert: Convert, tmp_path: Path, kind: str, missing: int) -> None:
    """QEMU takes what is missing for zeros."""
    disk = convert(kind, "disk.img")
    largest = max((path for path in tmp_path.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - missing)
    if kind == "vpc-fixed":  # without its footer at the end it is a raw image
        assert checksum(disk).format == "raw" or missing == 1
        return
    try:
        assert content_of(disk) == EXPECTED  # nothing of the content is missing
    except TruncatedError:
        return
    # QEMU, too, reads a VHDX without the end of its last block, which is larger than the rest of the content.
    assert missing <= 4096 or kind.startswith("vhdx")


def cuts(length: int) -> list[int]:
    """Lengths to which a file of LENGTH bytes is cut: in its header, and all over."""
    return sorted({1, 47, 63, 135, 300, 511, 513, 1024, 4100, *(length * part // 11 for part in range(1, 11))})


def assert_none_is_wrong(path: Path, cut: Path, expected: str, format_name: str) -> int:
    """PATH's content is EXPECTED; that of any of its beginnings is too, or is an error. Returns how many are errors."""
    assert content_of(path, format=format_name) == expected
    length, errors = cut.stat().st_size, 0
    for end in reversed(cuts(length)):
        if end < length:
            os.truncate(cut, end)
            try:
                assert content_of(path, format=format_name) == expected, f"cut at {end} of {length}"
            except Error:
                errors += 1
    return errors


@pytest.mark.parametrize("kind", FORMATS)
def test_no_truncated_image_gives_another_checksum(convert: Convert, tmp_path: Path, kind: str) -> None:
    disk = convert(kind, "disk.img")
    largest = max((path for path in tmp_path.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    assert assert_none_is_wrong(disk, largest, EXPECTED, FORMATS[kind][0]) >= 10


def bochs(content: bytes, version: int = 0x20000) -> bytes:
    """A `growing` image, as bximage writes it, with its extents in reverse."""
    extent = 64 * KIB
    count = len(content) // extent
    header = struct.pack("<32s16s16sII", b"Bochs Virtual HD Image", b"Redolog", b"Growing", version, 512)
    header += struct.pack("<III", count + 1, 512, extent) + (b"" if version == 0x10000 else bytes(4))
    header += struct.pack("<Q", len(content))
    catalog = struct.pack(f"<{count + 1}I", *reversed(range(count)), 0xFFFFFFFF)
    extents = [b"\xff" * 512 + content[at : at + extent] for at in range(0, len(content), extent)]
    return header.ljust(512, b"\0") + catalog + b"".join(reversed(extents))


def cloop(content: bytes) -> bytes:
    block = 16 * KIB
    packed = [zlib.compress(content[at : at + block]) for at in range(0, len(content), block)]
    header = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n".ljust(128, b"\0")
    first = 136 + 8 * (len(packed) + 1)
    offsets = [first + sum(map(len, packed[:number])) for number in range(len(packed) + 1)]
    return header + struct.pack(f">II{len(offsets)}Q", block, len(packed), *offsets) + b"".join(packed)


@pytest.mark.parametrize(
    ("make", "format_name"), [(bochs, "bochs"), (lambda content: bochs(content, 0x10000), "bochs"), (cloop, "cloop")]
)
def test_truncated_images_that_qemu_does_not_write(
    tmp_path: Path, make: Callable[[bytes], bytes], format_name: str
) -> None:
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")
    content = reference.content("256k:R")
    disk = tmp_path / "disk"
    disk.write_bytes(make(content))
    assert checksum(disk).format == format_name
    assert assert_none_is_wrong(disk, disk, reference.blkhash(content), format_name) >= 18


def test_a_vdi_whose_number_of_blocks_is_wrong(convert: Convert) -> None:
    """It is in the header, but QEMU goes by the block map."""
    disk = convert("vdi", spec="3m:R")
    data = bytearray(disk.read_bytes())
    data[0x184:0x188] = struct.pack("<I", 1)
    disk.write_bytes(data)
    assert content_of(disk) == reference.blkhash(reference.content("3m:R"))
    os.truncate(disk, len(data) - MIB)
    with pytest.raises(TruncatedError):
        content_of(disk)


@pytest.mark.parametrize("spec", ["512:R", "66048:R", "1m:R 512:A", "5m:- 70k:R", "2m:R 3m:- 33k:A"])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not kind.startswith("vpc")])
def test_whole_images_are_not_taken_for_truncated(convert: Convert, kind: str, spec: str) -> None:
    """Where the last part of the content, or what is allocated for it, is smaller than a cluster."""
    disk = convert(kind, spec=spec)
    got = checksum(disk)
    size = reference.size(spec)
    zeros = bytes(got.size - size)  # some formats have no such size
    assert got.hexdigest == reference.blkhash(reference.content(spec) + zeros)


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_headers_and_tables(convert: Convert, kind: str) -> None:
    """Looking at an image ends, and in nothing but an Error."""
    whole = convert(kind, spec="300k:R").read_bytes()
    random.seed(kind)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(random.randint(1, 8)):
            at = random.choice([random.randrange(min(512, len(data))), random.randrange(len(data))])
            data[at : at + 4] = random.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", random.randbytes(4), b"\x01\0\0\0"])
        if random.random() < 0.3:
            del data[random.randrange(len(data)) :]
        with contextlib.suppress(Error):
            inspect(
                lambda offset, length, data=bytes(data): data[offset : offset + length], len(data), FORMATS[kind][0]
            )


def test_a_truncated_extent_of_a_vmdk(convert: Convert) -> None:
    disk = convert("vmdk-flat", "disk.vmdk")
    os.truncate(disk.with_name("disk-flat.vmdk"), SIZE - 1)
    with pytest.raises(TruncatedError, match=r"'disk-flat.vmdk' has 6291455 of 6291456 bytes"):
        content_of(disk)


DESCRIPTOR = """# Disk DescriptorFile
version=1
CID=12345678
parentCID=ffffffff
createType="monolithicFlat"
# Extent description
{}

ddb.adapterType = "ide"
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('RW 8 FLAT "part" 0', None),
        ('  RW 8 FLAT "part" 0  ', None),
        ('RW 8 FLAT "part" 0\nRW 8 FLAT "part2" 0', None),
        ('RW\t8\t\tFLAT \t"part"\t0\t', None),
        ('RW 8 FLAT "part" 0 partitionUUID 0', None),
        ('RW 8 FLAT "part"0x', None),
        ('RW 8 VMFS "part" partitionUUID', None),
        pytest.param("name" + " " * 200_000 + "x", "not understood", id="spaces-1"),
        pytest.param("RW" + " " * 200_000 + "x", "would leave out", id="spaces-2"),
        pytest.param("name=" + " " * 200_000 + 'x\nRW 8 FLAT "part" 0', None, id="spaces-3"),
        ('RDONLY 8 FLAT "part" 0', "would leave out, as it is RDONLY"),
        ('NOACCESS 8 FLAT "part" 0', "would leave out"),
        ('RW 8 FLAT "part" 0\nRW 8 ZERO', "would leave out"),
        ('RW 8 FLAT "part" 0\nrw 8 FLAT "part2" 0', "would leave out"),
        ('RW 8 FLAT "part" 0\n8 FLAT "part2" 0', "not understood"),
        ('RW 8 FLAT "/etc/hostname" 0', "in another place: '/etc/hostname'"),
        ('RW 8 FLAT "../part" 0', "in another place"),
        ('RW 8 FLAT "sub/part" 0', "in another place"),
        ('RW 8 FLAT "nbd:localhost:1" 0', "in another place"),
        ('RW 8 FLAT "json:{}" 0', "in another place"),
        ('RW 8 FLAT "link" 0', "is a symbolic link"),
        ('RW 8 FLAT "nosuch" 0', r"disk\.vmdk: its extent 'nosuch' can't be read: no such file"),
        ('RW 9 FLAT "part" 0', "truncated"),
        ('RW 8 FLAT "part" 1', "truncated"),
        ('RW 8 SPARSE "lure" 0', "without a capacity"),
        ('RW 8 VMFSSPARSE "cowd"', "truncated"),
        ('RW 8 SPARSE "cowd"', "truncated"),
        ('RW 8 SESPARSE "sesparse"', "its extent 'sesparse' is a VMDK .seSparse. of a kind that is not known"),
        ('RW 8 FLAT "part" 0\nparentFileNameHint="base.vmdk"', "with a parent 'base.vmdk', and says that it has none"),
        ('RW 8 FLAT "part" 0\nparentCID=01234567', "with a parent"),
        ('RW 8 FLAT "part" 0\rRW 8 FLAT "/etc/hostname" 0', "in another place"),
        ('\nRW 8 FLAT "part" 0', "after a blank line"),
        ('# \n \nRW 8 FLAT "part" 0', "after a blank line"),
        ('\n# \nRW 8 FLAT "part" 0', None),
        ("", "without extents"),
    ],
)
def test_vmdk_descriptors(tmp_path: Path, lines: str, reason: str | None) -> None:
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")
    content = reference.content("8k:R")
    (tmp_path / "part").write_bytes(content[:4096])
    (tmp_path / "part2").write_bytes(content[4096:])
    (tmp_path / "link").symlink_to("part")
    (tmp_path / "lure").write_bytes(sparse_vmdk(0, DESCRIPTOR.format('RW 8 FLAT "/etc/hostname" 0')))
    (tmp_path / "cowd").write_bytes(cowd_vmdk())
    (tmp_path / "sesparse").write_bytes(struct.pack("<Q", 0xCAFEBABE).ljust(4096, b"\0"))
    disk = tmp_path / "disk.vmdk"
    disk.write_text(DESCRIPTOR.format(lines), newline="")
    if reason is None:
        size = 4096 * lines.count("RW")
        assert content_of(disk) == reference.blkhash(content[:size])
    else:
        with pytest.raises(Error, match=reason):
            content_of(disk)


def test_a_split_vmdk(convert: Convert, tmp_path: Path) -> None:
    """Its extent by itself, and with another size than the descriptor says."""
    disk = convert("vmdk-split", "disk.vmdk")
    with pytest.raises(RefusedError, match=r"disk-s001\.vmdk: is an extent of a VMDK: name the \.vmdk file that lists"):
        content_of(tmp_path / "disk-s001.vmdk")
    sectors = SIZE // 512
    disk.write_bytes(disk.read_bytes().replace(b"RW %d " % sectors, b"RW %d " % (sectors + 8)))
    with pytest.raises(FormatError, match=rf"{sectors + 8} sectors in its descriptor and {sectors} in its header"):
        content_of(disk)


@pytest.mark.parametrize("more", [-1, 1, 127, 128])
def test_a_vmdk_whose_capacity_is_not_what_its_descriptor_says(convert: Convert, more: int) -> None:
    """VirtualBox rounds it up to 64 KiB."""
    disk = convert("vmdk")
    sectors = SIZE // 512
    disk.write_bytes(disk.read_bytes().replace(b"RW %d " % sectors, b"RW %d " % (sectors - more)))
    if 0 < more < 128:
        assert content_of(disk) == EXPECTED
    else:
        with pytest.raises(FormatError, match="says its size twice"):
            content_of(disk)


def edit_vhd(path: Path, creator: bytes, geometry: tuple[int, int, int], places: Sequence[int] = (0, -512)) -> None:
    """Give the footers of a VHD at PLACES another creator and geometry, and the checksum that goes with them."""
    data = bytearray(path.read_bytes())
    for place in places:
        at = place % len(data)
        if data[at : at + 8] == b"conectix":
            footer = data[at : at + 512]
            footer[28:32] = creator
            struct.pack_into(">HBB4x", footer, 56, *geometry)
            struct.pack_into(">I", footer, 60, data[at + 63])
            struct.pack_into(">I", footer, 64, 0)
            struct.pack_into(">I", footer, 64, ~sum(footer) & 0xFFFFFFFF)
            data[at : at + 512] = footer
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["vpc", "vpc-fixed"])
@pytest.mark.parametrize("creator", [b"wa\0\0", b"vbox", b"win ", b"vpc ", b"qemu", b"\xff\n*?"])
def test_the_size_of_a_vhd(convert: Convert, creator: bytes, kind: str) -> None:
    """Its geometry for two creators, for all others the current size: whatever this QEMU knows."""
    disk = convert(kind)
    edit_vhd(disk, creator, (180, 4, 17))
    got = checksum(disk)
    geometry = 180 * 4 * 17 * 512
    size = geometry if creator in (b"vpc ", b"qemu") else SIZE
    assert (got.size, got.hexdigest) == (size, reference.blkhash(reference.content(SPEC)[:size]))
    assert f"geometry says {geometry} bytes, its current size {SIZE}" in (got.note or "")


def test_vhds_that_contradict_themselves(convert: Convert) -> None:
    disk = convert("vpc")
    edit_vhd(disk, b"win ", (180, 4, 17), [-512])
    with pytest.raises(FormatError, match="whose two footers disagree"):
        content_of(disk)
    edit_vhd(disk, b"qemu", (0, 4, 17))
    with pytest.raises(FormatError, match="geometry is of 0 bytes"):
        content_of(disk)
    data = bytearray(disk.read_bytes())
    data[55] ^= 1
    disk.write_bytes(data)
    with pytest.raises(FormatError, match="footer is damaged"):
        content_of(disk)


def dmg(content: bytes, sectors: int, kinds: Sequence[int] = (1, 0x80000005), shift: int = 0) -> bytes:
    """A dmg of CONTENT that says it has SECTORS, in chunks of 64 KiB of these KINDS, which begin at sector SHIFT."""
    data, chunks = bytearray(), []
    for number, at in enumerate(range(0, len(content), 64 * KIB)):
        part = content[at : at + 64 * KIB]
        kind = kinds[number % len(kinds)]
        stored = part if kind == 1 else zlib.compress(part)
        chunks.append((kind, 0, at // 512 + shift, len(part) // 512, len(data), len(stored)))
        data += stored
    total = len(content) // 512
    chunks.append((0xFFFFFFFF, 0, total, 0, len(data), 0))
    table = struct.pack(">4sIQQ", b"mish", 1, 0, total).ljust(200, b"\0") + struct.pack(">I", len(chunks))
    table += b"".join(struct.pack(">IIQQQQ", *chunk) for chunk in chunks)
    xml = b"<plist><data>\n" + base64.encodebytes(table) + b"\t</data></plist>"
    trailer = bytearray(512)
    struct.pack_into(">4sIIIQQQ", trailer, 0, b"koly", 4, 512, 1, 0, 0, len(data))
    struct.pack_into(">QQ", trailer, 0xD8, len(data), len(xml))
    struct.pack_into(">IQ", trailer, 0x1E8, 1, sectors)
    return bytes(data) + xml + bytes(trailer)


@pytest.mark.parametrize(
    ("sectors", "options", "reason"),
    [
        (512, {}, None),
        (0, {}, "0 sectors in its trailer and 512 in its tables"),
        (511, {}, "511 sectors in its trailer and 512"),
        (513, {}, "513 sectors in its trailer and 512"),
        (512, {"shift": 1}, "a gap or overlap at sector 0"),
        (512, {"kinds": (1, 0x80000008)}, "has lzma chunks|with lzma chunks, which QEMU can't read"),
        (512, {"kinds": (1, 0x80000004)}, "with ADC chunks"),
        (512, {"kinds": (1, 0x80000099)}, "of a kind that QEMU can't read: 0x80000099"),
    ],
)
def test_dmg(tmp_path: Path, sectors: int, options: dict[str, Any], reason: str | None) -> None:
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")
    content = reference.content("256k:R")
    disk = tmp_path / "disk.dmg"
    disk.write_bytes(dmg(content, sectors, **options))
    if reason is None:
        assert content_of(disk) == reference.blkhash(content)
    else:
        with pytest.raises(Error, match=reason):
            content_of(disk)


def test_a_differencing_vhdx(convert: Convert) -> None:
    disk = convert("vhdx")
    data = bytearray(disk.read_bytes())
    table = data.index(b"metadata")
    guid = bytes.fromhex("3767a1ca36fa434db3b633f0aa44e76b")
    at = table + struct.unpack_from("<I", data, data.index(guid, table) + 16)[0]
    data[at + 4] |= 2
    disk.write_bytes(data)
    with pytest.raises(RefusedError, match=r"is a differencing VHDX.*merge it with its parent first"):
        content_of(disk)


@pytest.mark.parametrize("kind", ["bochs", "cloop", "parallels", "qcow", "qcow2", "qed", "vdi", "vhdx", "vpc", "dmg"])
@pytest.mark.parametrize("size", [0, 10, 1024])
def test_a_format_that_it_is_not(tmp_path: Path, kind: str, size: int) -> None:
    """Nothing was cut off, whatever its size."""
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")
    disk = tmp_path / "disk"
    disk.write_bytes(b"x" * size)
    with pytest.raises(Error) as caught:
        content_of(disk, format=kind, reader="qemu")
    assert "truncated" not in caught.value.reason
    assert "is not a" in caught.value.reason


def sparse_vdi(blocks: int, content: int) -> bytes:
    header = bytearray(512)
    struct.pack_into("<4sIII", header, 0x40, b"\x7f\x10\xda\xbe", 0x10001, 0x180, 1)
    struct.pack_into("<II", header, 0x154, 512, 1 << 30)
    struct.pack_into("<I", header, 0x168, 512)
    struct.pack_into("<QIII", header, 0x170, content, MIB, 0, blocks)
    return bytes(header)


def sparse_parallels(entries: int) -> bytes:
    return struct.pack("<16sIIIIIQ", b"WithoutFreeSpace", 2, 16, 1, 1, entries, entries).ljust(512, b"\0")


def sparse_qcow(bits: int) -> bytes:
    return struct.pack(">4sIQIIQBBHIQ", b"QFI\xfb", 1, 0, 0, 0, 1 << bits, 12, 9, 0, 0, 512).ljust(512, b"\0")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (sparse_vdi(0x3FFFFFFF, 0x3FFFFFFF << 20), "1073741823 blocks, more than 536870784"),
        (sparse_vdi(1 << 20, 1 << 40), "several blocks of its content are in one place"),
        (sparse_vdi(1 << 20, 1 << 30), "says its size twice"),
        (sparse_parallels(0xFFFFFFFF), "larger than such a file can need"),
        (sparse_qcow(62), "larger than such a file can need"),
        (bochs(b"")[:72] + struct.pack("<I", 1 << 31) + bytes(436), "QEMU reads up to 1048576"),
        (cloop(b"")[:132] + b"\xff" * 4, "larger than such a file can need"),
    ],
    ids=["vdi", "vdi-one-place", "vdi-size", "parallels", "qcow", "bochs", "cloop"],
)
def test_tables_in_holes(tmp_path: Path, header: bytes, reason: str) -> None:
    """4 KiB on the disk, in a file of 2 TiB: what is read of it is bounded."""
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")
    disk = tmp_path / "disk"
    disk.write_bytes(header)
    os.truncate(disk, 1 << 41)
    with pytest.raises(Error, match=reason):
        content_of(disk)


def test_an_overlong_table_again_and_again(tmp_path: Path) -> None:
    """Every table of the second level is the same one."""
    header = struct.pack(">4sIQIIQBBHIQ", b"QFI\xfb", 1, 0, 0, 0, 1 << 40, 12, 9, 0, 0, 512).ljust(512, b"\0")
    table = 512 + (8 << 19)
    data = header + struct.pack(">Q", table) * (1 << 19) + struct.pack(">Q", table) * 512
    with pytest.raises(RefusedError, match="larger than such a file can need"):
        inspect(lambda offset, length: data[offset : offset + length], len(data), "qcow")


def cowd_vmdk() -> bytes:
    """ESX's first sparse kind, with one grain of 4 KiB, all of which is missing."""
    header = struct.pack("<4s10I", b"COWD", 1, 3, 8, 8, 4, 1, 37, 16, 16, 63).ljust(2048, b"\0")
    return header + struct.pack("<I", 5).ljust(512, b"\0") + struct.pack("<I", 37).ljust(16384, b"\0")


def sparse_vmdk(capacity: int, descriptor: str) -> bytes:
    """A VMDK with this header and descriptor, and nothing else."""
    header = struct.pack("<4sIIQQQQIQQQ", b"KDMV", 1, 3, capacity, 128, 1, 20, 512, 0, 0, 128)
    return header.ljust(512, b"\0") + descriptor.encode().ljust(20 * 512, b"\0")


def test_a_vmdk_with_its_content_elsewhere(tmp_path: Path) -> None:
    """CVE-2022-47951, in a file that looks like a sparse one."""
    need(shutil.which("qemu-nbd"), "qemu-nbd is not installed")
    disk = tmp_path / "disk"
    disk.write_bytes(sparse_vmdk(0, DESCRIPTOR.format('RW 8 FLAT "/etc/hostname" 0')))
    with pytest.raises(RefusedError, match="without a capacity"):
        content_of(disk)


@pytest.mark.parametrize("line", ['parentFileNameHint="base.vmdk"', "parentCID=01234567"])
def test_a_sparse_vmdk_with_a_parent(convert: Convert, line: str) -> None:
    disk = convert("vmdk")
    data = disk.read_bytes()
    assert data.count(b"parentCID=ffffffff") == 1
    new = line.encode() + b"\n#" if "Hint" in line else line.encode()
    data = (
        data.replace(b"parentCID=ffffffff"[: len(new)], new, 1)
        if "CID" in line
        else data.replace(b"# Extent description\n", new + b"\n", 1)
    )
    disk.write_bytes(data)
    with pytest.raises(RefusedError, match="with a parent"):
        content_of(disk)


def test_qed_and_qcow_with_a_backing_file(image: Callable[..., Path], tmp_path: Path) -> None:
    """Neither records a format, apart from raw in QED."""
    base = image(SPEC)
    shutil.copy(base, tmp_path / "base")
    for format_name in ("qed", "qcow"):
        disk = tmp_path / format_name
        run(find_tool("qemu-img"), "create", "-f", format_name, "-F", "raw", "-b", "base", disk)
        if format_name == "qed":
            assert content_of(disk) == EXPECTED
        else:
            with pytest.raises(RefusedError, match=r"'base' is not recorded.*qemu-img convert -f qcow"):
                content_of(disk)


def test_an_image_in_use(convert: Convert, short_path: Path) -> None:
    disk = convert("vmdk")
    socket = short_path / "sock"
    words = [find_tool("qemu-nbd"), "-f", "vmdk", "-t", "-k", str(socket), str(disk)]
    with subprocess.Popen(words) as writer:
        try:
            wait_until_it_serves(writer, socket)
            with pytest.raises(RefusedError, match="is in use"):
                content_of(disk)
            assert content_of(disk, force_share=True) == EXPECTED
        finally:
            writer.kill()


def test_an_image_that_changes(convert: Convert) -> None:
    disk = convert("vmdk-flat", "disk.vmdk")
    source = open_source(str(disk), OpenOptions())
    source.check_unchanged()
    with open(disk.with_name("disk-flat.vmdk"), "r+b") as file:
        file.write(b"x")
    with pytest.raises(ChangedError, match=r"disk-flat\.vmdk"):
        source.check_unchanged()
    source.close()


def test_without_qemu_nbd_nothing_is_made_of_it(convert: Convert, imgsum: Imgsum, tmp_path: Path) -> None:
    for kind in ("qed", "parallels"):
        result = imgsum("checksum", convert(kind, kind), env={"PATH": str(tmp_path / "nothing")})
        assert (result.status, result.text) == (2, "")
        assert result.errors == (
            f"imgsum: {tmp_path / kind}: is a {FORMATS[kind][0]} image, which takes qemu-nbd to read, and that is not"
            " installed: install qemu-utils (Debian, Ubuntu) or qemu-img (Fedora, RHEL)\n"
        )


def test_without_libnbd_nothing_is_made_of_it(convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbd", None)
    with pytest.raises(MissingError, match="python3-libnbd"):
        content_of(convert("qed"))


# --- the child ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(convert: Convert, imgsum: Imgsum) -> Callable[..., tuple[Running, int]]:
    """stopped(): an imgsum that reads a VMDK, and its qemu-nbd, which is stopped."""

    def start() -> tuple[Running, int]:
        for _ in range(20):
            running = imgsum.start("checksum", "-a", "sha512", disk)
            wait_until(lambda running=running: qemu_of(running) or running.process.poll() is not None)
            pid = qemu_of(running)
            if pid:
                try:
                    os.kill(pid, signal.SIGSTOP)
                except ProcessLookupError:
                    continue
                return running, pid
        pytest.fail("qemu-nbd was never seen")

    disk = convert("qed", spec="300m:A")
    return start


def qemu_of(running: Running) -> int:
    """The process ID of its qemu-nbd, or 0."""
    for line in running.descendants():
        pid, _, command = line.partition(" ")
        if "/qemu-nbd --read-only" in command and "/bin/sh" not in command:
            return int(pid)
    return 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_qemu_nbd_ends_with_us(stopped: Callable[..., tuple[Running, int]], number: int) -> None:
    """Even if it hangs. finish() asserts that no process, socket or directory is left."""
    running, _ = stopped()
    running.signal(number)
    result = running.finish()
    assert (result.status, result.stdout, result.stderr) == (-number, b"", b"")


def test_qemu_nbd_is_killed(stopped: Callable[..., tuple[Running, int]]) -> None:
    running, pid = stopped()
    os.kill(pid, signal.SIGKILL)
    result = running.finish()
    assert (result.status, result.text) == (2, "")
    assert result.errors.count("\n") == 1


def test_what_qemu_nbd_gets(stopped: Callable[..., tuple[Running, int]], tmp_path: Path) -> None:
    """No standard output of ours, nothing to read, and no secret or name on its command line."""
    running, pid = stopped()
    for fd in (0, 1):
        assert os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/null"
    assert str(tmp_path) not in Path(f"/proc/{pid}/cmdline").read_text()
    assert os.listdir(running.directory) == [], "the socket's directory is gone while qemu-nbd runs"
    os.kill(pid, signal.SIGCONT)
    assert running.finish().status == 0


def test_nothing_is_left(convert: Convert, no_leak: None, tmp_path: Path) -> None:
    disk = convert("qed")
    assert content_of(disk) == EXPECTED
    (tmp_path / "bad").write_bytes(disk.read_bytes()[:512].ljust(4096, b"\xff"))
    for _ in range(3):
        with pytest.raises(Error):
            content_of(tmp_path / "bad")
