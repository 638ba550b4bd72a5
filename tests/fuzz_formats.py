"""Random VHDs, VHDXs, VMDKs and VDIs against QEMU: `python tests/fuzz_formats.py --seconds 600`.

Three kinds of cases: images that qemu-img and qemu-io made, which must have QEMU's checksum whoever reads them; images
made by hand, with their content; images with bytes changed, or cut off. The last must end in time with QEMU's
checksum or with an error, and where only one of the two sides has an error, in a way that docs/formats.md lists.
Prints what goes against that, with the seed, and ends with 1.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import vhdx_build
import vmdk_build
from fuzz_qcow2 import MAX_SIZE, WAYS, Outcome, _listed, by_imgsum, by_qemu
from qcow2_images import MIB, SECTOR, clear, run
from reference import blkhash
from vhd_build import checksummed, random_chain, vdi


class Format(NamedTuple):
    """What is done with images of one format."""

    options: Sequence[str]
    """Of `qemu-img create`, one of them for each image."""
    damage: Callable[[bytearray, random.Random], None]
    """Change a structure of the image."""
    size: Callable[[bytes], int]
    """The most bytes of content that a damaged image may say that it has."""
    by_hand: Callable[[random.Random, Path], tuple[Path, bytes]]
    """An image made without QEMU, and its content."""
    stricter: Sequence[str]
    """What imgsum refuses and QEMU reads."""
    more_lenient: Sequence[str] = ()
    """What QEMU refuses and imgsum reads."""
    converted: Sequence[str] = ()
    """More options, of `qemu-img convert`."""


def number(rng: random.Random, bits: int, near: int) -> int:
    """A number that a damaged structure may have, where NEAR is a good one."""
    kind = rng.random()
    if kind < 0.4:
        return (near + rng.choice((-512, -2, -1, 1, 2, 512))) % (1 << bits)
    if kind < 0.6:
        return near ^ 1 << rng.randrange(bits)
    return rng.choice((0, 1, (1 << bits) - 1, (1 << bits) - 2, 1 << bits - 1, rng.randrange(1 << bits)))


def change(data: bytearray, rng: random.Random, at: int, code: str) -> None:
    """Give the number AT a place another value."""
    (value,) = struct.unpack_from(code, data, at)
    struct.pack_into(code, data, at, number(rng, 8 * struct.calcsize(code), value))


# --- VHD ------------------------------------------------------------------------------------------------------------

# Not the creator, at 28: whether the geometry counts depends on QEMU's version, but for a few.
_FOOTER_FIELDS = ((12, ">I"), (16, ">Q"), (48, ">Q"), (56, ">H"), (58, ">B"), (59, ">B"), (60, ">I"))
_HEADER_FIELDS = ((0, ">Q"), (16, ">Q"), (24, ">I"), (28, ">I"), (32, ">I"), (40, ">Q"))


def damage_vhd(data: bytearray, rng: random.Random) -> None:
    """Change a footer, the header or the table, mostly with the checksums that belong to it."""
    is_dynamic = data.startswith(b"conectix")
    end = len(data) - 512
    kind = rng.random()
    if kind < 0.3 or not is_dynamic:
        at, code = rng.choice(_FOOTER_FIELDS)
        change(data, rng, end + at, code)
        if rng.random() < 0.9:
            data[end:] = checksummed(data[end:], 64)
        if is_dynamic and rng.random() < 0.9:
            data[:512] = data[end:]
    elif kind < 0.6:
        at, code = rng.choice(_HEADER_FIELDS)
        change(data, rng, 512 + at, code)
        if rng.random() < 0.9:
            data[512:1536] = checksummed(data[512:1536], 36)
    elif kind < 0.9:
        table, _, entries = struct.unpack_from(">QII", data, 512 + 16)
        for _ in range(rng.choice((1, 1, 3))):
            change(data, rng, table + 4 * rng.randrange(max(1, entries)), ">I")
    else:
        data[rng.choice((0, 512, end)) + rng.randrange(512)] ^= 1 << rng.randrange(8)


def vhd_size(data: bytes) -> int:
    """See Format.size."""
    sizes = [0]
    for at in (0, len(data) - 512):
        if at >= 0 and len(data) >= at + 60 and data[at : at + 8] == b"conectix":
            current, cylinders, heads, sectors = struct.unpack_from(">QHBB", data, at + 48)
            geometry = cylinders * heads * sectors * 512
            by_geometry = data[at + 28 : at + 32] == b"qemu" and geometry != 65535 * 16 * 255 * 512
            sizes.append(geometry if by_geometry else current)
    return max(sizes)


# --- VDI ------------------------------------------------------------------------------------------------------------

_VDI_FIELDS = (
    (0x40, "<I"), (0x44, "<I"), (0x48, "<I"), (0x4C, "<I"), (0x50, "<I"), (0x154, "<I"), (0x158, "<I"), (0x15C, "<I"),
    (0x168, "<I"), (0x170, "<Q"), (0x178, "<I"), (0x17C, "<I"), (0x180, "<I"), (0x184, "<I"), (0x188, "<Q"),
    (0x198, "<Q"), (0x1A8, "<Q"), (0x1B8, "<Q"),
)  # fmt: skip


def damage_vdi(data: bytearray, rng: random.Random) -> None:
    """Change the header or the table."""
    if rng.random() < 0.6:
        change(data, rng, *rng.choice(_VDI_FIELDS))
        return
    (table,) = struct.unpack_from("<I", data, 0x154)
    (blocks,) = struct.unpack_from("<I", data, 0x180)
    for _ in range(rng.choice((1, 1, 3))):
        change(data, rng, table + 4 * rng.randrange(max(1, blocks)), "<I")


def vdi_size(data: bytes) -> int:
    """See Format.size."""
    return int(struct.unpack_from("<Q", data.ljust(512, b"\0"), 0x170)[0])


def vdi_by_hand(rng: random.Random, directory: Path) -> tuple[Path, bytes]:
    """See Format.by_hand. Blocks in any order, and discarded ones."""
    size = rng.randrange(1, 5 * MIB // 512) * 512
    numbers = list(range(-(-size // MIB)))
    kept = [number for number in numbers if rng.random() < 0.6]
    blocks = {number: rng.randbytes(MIB) for number in kept}
    rng.shuffle(kept)
    discarded = [number for number in numbers if number not in kept and rng.random() < 0.5]
    path = directory / "hand.vdi"
    path.write_bytes(vdi(size, blocks, order=kept, discarded=discarded))
    return path, b"".join(blocks.get(number, bytes(MIB)) for number in numbers)[:size]


FORMATS = {
    "vpc": Format(
        options=(
            "subformat=dynamic", "subformat=dynamic,force_size=on", "subformat=fixed", "subformat=fixed,force_size=on"
        ),
        damage=damage_vhd,
        size=vhd_size,
        by_hand=random_chain,
        stricter=(
            r"^truncated",
            r"(header|footer) is damaged: its checksum",
            r"too many for its size with --untrusted",
            r"two footers disagree",
            r"^is a VHD of an unknown type",
            r"^is a differencing VHD",
            r"several blocks of its content are in one place",
            r"copy of the VHD's footer is not where the file begins",
            r"geometry is of 0 bytes",
            r"size is not a multiple of 512",
            r"more than the \d+ of --max-size",
        ),
        more_lenient=(r"free_data_block_offset",),  # blocks that the content does not need
    ),
    "vdi": Format(
        options=("static=off", "static=on"),
        damage=damage_vdi,
        size=vdi_size,
        by_hand=vdi_by_hand,
        stricter=(
            r"^truncated",
            r"too many for its size with --untrusted",
            r"differencing VDI|undo VDI|VDI of type",
            r"says its size twice",
            r"bytes and \d+ more for each",
            r"several blocks of its content are in one place",
            r"more than the \d+ of --max-size",
        ),
    ),
    "vhdx": Format(
        options=("subformat=dynamic", "subformat=fixed", "block_size=1M", "block_state_zero=off"),
        damage=vhdx_build.damage,
        size=vhdx_build.said_size,
        by_hand=vhdx_build.random_chain,
        stricter=(
            r"^truncated",
            r"too many for its size with --untrusted",
            r"two region tables disagree|two headers disagree",
            r"not at a multiple of 1 MiB|which can't be|says of its log|says that it has none|metadata is damaged",
            r"more than the \d+ of --max-size",
        ),
        more_lenient=(),
    ),
    "vmdk": Format(
        options=(
            "subformat=monolithicSparse", "subformat=monolithicFlat", "subformat=twoGbMaxExtentSparse",
            "subformat=twoGbMaxExtentFlat", "zeroed_grain=on",
        ),
        damage=vmdk_build.damage,
        size=vmdk_build.said_size,
        by_hand=vmdk_build.random_chain,
        stricter=(
            r"^truncated",
            r"too many for its size with --untrusted",
            r"has its content in other files",
            r"two grain tables disagree|two descriptors that disagree|header and footer disagree",
            r"line that is not understood|would leave out|extent line that is not as it should be|after a blank line",
            r"says its size twice|which can't be|entries in a grain table|without a capacity|of version \d",
            r"is an extent of a VMDK|several extents|is in another place|one of its own files|can't be read",
            r"with a parent|is a VMDK of a type|descriptor without extents|its CID is not",
            r"compressed in a way|compressed grain|copied as text|footer is damaged",
            r"more than the \d+ of --max-size",
        ),
        more_lenient=(),
        converted=("subformat=streamOptimized",) * 3,
    ),
}  # fmt: skip


def make(name: str, rng: random.Random, directory: Path) -> tuple[Path, list[str]]:
    """An image by qemu-img and qemu-io, and the commands that made it."""
    size = rng.choice((rng.randrange(1, 6 * MIB // SECTOR) * SECTOR, rng.randrange(1, 7) * MIB))
    path = directory / f"image.{name}"
    story = [f"qemu-img create -q -f {name} -o {rng.choice(FORMATS[name].options)} {path} {size}"]
    run(*story[0].split())
    operations = []
    for _ in range(rng.randrange(8)):
        at = rng.randrange(size // SECTOR) * SECTOR
        length = min(size - at, rng.randrange(1, rng.choice((8, 600, 5000))) * SECTOR)
        what = rng.choice(
            ("write -q -P 65", "write -q -P 66", "write -q -P 0", "write -q -z", "write -q -z -u", "discard -q")
        )
        operations.append(f"{what} {at} {length}")
    if operations:
        command = ["qemu-io", "-d", "unmap", "-f", name, *(word for each in operations for word in ("-c", each)), path]
        run(*command)
        story.append(" ".join(map(str, command)))
    if rng.random() < 0.2 or (FORMATS[name].converted and rng.random() < 0.3):
        copy = directory / f"copy.{name}"
        options = [*FORMATS[name].options, *FORMATS[name].converted]
        story.append(f"qemu-img convert -f {name} -O {name} -o {rng.choice(options)} {path} {copy}")
        run(*story[-1].split())
        path = copy
    return path, story


def read_in_all_ways(path: Path, name: str, right: Outcome, ways: Sequence[dict[str, object]]) -> str | None:
    """What is wrong about imgsum's checksums of a good image, or None."""
    for way in ways:
        ours = by_imgsum(path, name, **way)
        if ours != right and "has its content in other files, which --untrusted" not in str(ours.error):
            return f"{way}: imgsum: {ours}, right: {right}"
    return None


def valid_case(name: str, rng: random.Random, path: Path) -> str | None:
    """What is wrong about the image at PATH that QEMU made, or None."""
    theirs = by_qemu(path, name)
    if theirs.error is not None:
        return f"QEMU: {theirs}"
    ways = [*rng.sample(WAYS, 3), {"untrusted": True}, *([{"reader": "qemu"}] if rng.random() < 0.3 else [])]
    return read_in_all_ways(path, name, theirs, ways)


def by_hand_case(name: str, rng: random.Random, directory: Path) -> str | None:
    """What is wrong about an image made by hand, or None."""
    path, content = FORMATS[name].by_hand(rng, directory)
    return read_in_all_ways(path, name, Outcome(blkhash(content), None), rng.sample(WAYS, 3))


def damaged_cases(name: str, rng: random.Random, path: Path, count: int, tally: Counter[str]) -> list[str]:
    """What is wrong about COUNT images made from the one at PATH by changing bytes, and by cutting."""
    good, fmt = path.read_bytes(), FORMATS[name]
    damaged, wrong = path.with_name(f"damaged.{name}"), []
    for _ in range(count):
        made = bytearray(good)
        if rng.random() < 0.2:
            del made[rng.randrange(len(made)) :]
        else:
            fmt.damage(made, rng)
        damaged.write_bytes(made)
        ours = by_imgsum(damaged, name, untrusted=rng.random() < 0.2)
        theirs = by_qemu(damaged, name) if fmt.size(bytes(made)) <= MAX_SIZE else Outcome(None, "not asked")
        answers = [(outcome.error and "error") or "checksum" for outcome in (ours, theirs)]
        tally[f"{name}: imgsum {answers[0]}, QEMU {theirs.error if theirs.error == 'not asked' else answers[1]}"] += 1
        if problem := disagreement(fmt, ours, theirs):
            descriptor, kept = tempfile.mkstemp(prefix="imgsum-fuzz.", suffix=f".{name}", dir=path.parent.parent)
            os.write(descriptor, made)
            os.close(descriptor)
            wrong.append(f"{problem}\n    kept as {kept}")
    return wrong


def disagreement(fmt: Format, ours: Outcome, theirs: Outcome) -> str | None:
    """What is wrong about two outcomes of a damaged image, or None."""
    if ours.checksum and theirs.checksum and ours.checksum != theirs.checksum:
        return "another checksum than QEMU"
    if ours.error is not None and theirs.checksum and not _listed(ours.error, tuple(fmt.stricter)):
        return f"only imgsum has an error: {ours.error}"
    if theirs.error not in (None, "not asked") and ours.checksum and not _listed(theirs.error, tuple(fmt.more_lenient)):
        return f"only QEMU has an error: {theirs.error}"
    return None


def cases(name: str, seed: int, directory: Path, damaged: int, tally: Counter[str]) -> list[str]:
    """All kinds of cases of one SEED: what is wrong."""
    rng = random.Random(f"{name} {seed}")
    path, story = make(name, rng, directory)
    problems = [valid_case(name, rng, path), by_hand_case(name, rng, directory)]
    tally[f"{name}: valid"] += 2
    found = [problem for problem in problems if problem] + damaged_cases(name, rng, path, damaged, tally)
    return [f"seed {seed} of {name}:", *found, *story] if found else []


def main() -> int:
    """Run cases until the time is over; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--seed", type=int, help="only this case")
    parser.add_argument("--format", choices=[*FORMATS], help="only this format")
    parser.add_argument("--damaged", type=int, default=15, help="damaged images for each valid one (15)")
    arguments = parser.parse_args()
    run("qemu-img", "--version")
    seed = first = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    end = time.monotonic() + arguments.seconds
    tally: Counter[str] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="imgsum-fuzz.") as temporary:
        directory = Path(temporary)
        while True:
            for name in [arguments.format] if arguments.format else FORMATS:
                problems = cases(name, seed, directory, arguments.damaged, tally)
                if problems:
                    failures += 1
                    print(*problems, sep="\n    ", flush=True)
                clear(directory)
            if arguments.seed is not None or time.monotonic() > end:
                break
            seed += 1
    print(f"seeds {first} to {seed}: {dict(tally)}, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
