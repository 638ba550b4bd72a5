"""bmaptool's files: a card, or a copy, is verified by the digests of its mapped ranges."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import Imgsum, find_tool
from reference import GIB, KIB, MIB

from imgsum import checksum, compare
from imgsum.engine.compare_bmap import BmapPair
from imgsum.engine.mask import Range
from imgsum.errors import ChangedError, Error, FormatError, MismatchError, OpenError, RefusedError, UsageError
from imgsum.index.bmap import Bmap
from imgsum.source import OpenOptions

BLOCK = 4 * KIB
SIZE = 40 * BLOCK + 1000
RANGES = ((0, 3), (5, 5), (20, 37), (39, 40))
"""Of the image: blocks, the last included. The last block is shorter."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def content(size: int = SIZE) -> bytes:
    return random.Random(1).randbytes(size)


def bmap_of(
    image: bytes,
    version: str = "2.0",
    ranges: Sequence[tuple[int, int]] = RANGES,
    algorithm: str = "sha256",
    head: str = '<?xml version="1.0" ?>\n<!-- a > comment -->\n',
    **fields: object,
) -> bytes:
    """A bmap of IMAGE as bmaptool writes it in VERSION. FIELDS overrule what is so; None leaves one out."""
    new = version in ("1.4", "2.0")
    blocks = -(-len(image) // BLOCK)
    digests = version >= "1.3"
    values: dict[str, object] = {
        "ImageSize": len(image),
        "BlockSize": BLOCK,
        "BlocksCount": blocks,
        "MappedBlocksCount": sum(last - first + 1 for first, last in ranges),
    }
    zeros = "0" * len(hashlib.new(algorithm).hexdigest())
    if new:
        values["ChecksumType"] = algorithm
    if digests:
        values["BmapFileChecksum" if new else "BmapFileSHA1"] = zeros
    values.update(fields)
    lines = [f'{head}<bmap version="{version}">']
    lines += [f"    <{name}> {value} </{name}>" for name, value in values.items() if value is not None]
    lines.append("    <BlockMap>")
    for first, last in ranges:
        piece = image[first * BLOCK : (last + 1) * BLOCK]
        name = "chksum" if new else "sha1"
        attribute = f' {name}="{hashlib.new(algorithm, piece).hexdigest()}"' if digests else ""
        text = f"{first}" if first == last else f"{first}-{last}"
        lines.append(f"        <Range{attribute}> {text} </Range>")
    text = "\n".join([*lines, "    </BlockMap>", "</bmap>", ""])
    return sealed(text.encode(), algorithm)


def sealed(text: bytes, algorithm: str = "sha256") -> bytes:
    """TEXT with its checksum for the zeros that stand for it."""
    digest = hashlib.new(algorithm, text).hexdigest().encode()
    return text.replace(b" " + b"0" * len(digest) + b" ", b" " + digest + b" ")


def differences(bmap: str = "image.bmap", image: str = "image", **opened: object) -> list[tuple[int, int]]:
    with BmapPair(bmap, image, OpenOptions(**opened)) as pair:  # type: ignore[arg-type]
        found = list(pair.differences())
        pair.check_unchanged()
        return [(start, length) for start, length in found]


def write(image: bytes, bmap: bytes) -> None:
    Path("image").write_bytes(image)
    Path("image.bmap").write_bytes(bmap)


# --- what is verified ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "algorithm"),
    [("1.3", "sha1"), ("1.4", "sha256"), ("1.4", "sha1"), ("2.0", "sha256"), ("2.0", "sha1"), ("2.0", "sha512")],
)
def test_versions(version: str, algorithm: str) -> None:
    image = bytearray(content())
    write(image, bmap_of(image, version, algorithm=algorithm))
    assert differences() == []
    for at in (0, 5 * BLOCK, SIZE - 1):
        image[at] ^= 1
    image[4 * BLOCK] ^= 1  # not mapped
    write(image, Path("image.bmap").read_bytes())
    assert differences() == [(0, 4 * BLOCK), (5 * BLOCK, BLOCK), (39 * BLOCK, BLOCK + 1000)]


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
def test_versions_without_digests_verify_nothing(version: str) -> None:
    write(content(), bmap_of(content(), version))
    with pytest.raises(RefusedError, match="no digests"):
        differences()


def test_what_lies_after_the_image_is_ignored() -> None:
    image = content()
    write(image + b"the rest of the card", bmap_of(image))
    assert differences() == []


def test_a_device_that_is_too_small() -> None:
    write(content()[:-1], bmap_of(content()))
    with pytest.raises(RefusedError, match=f"has {SIZE - 1} bytes, fewer than the {SIZE}"):
        differences()


def test_a_stream(imgsum: Imgsum) -> None:
    image = bytearray(content(3 * MIB + 5))
    ranges = ((0, 3), (300, 700), (760, 768))
    write(image, bmap_of(image, ranges=ranges))
    assert imgsum("compare", "image.bmap", "-", stdin=bytes(image) + b"more").status == 0
    image[301 * BLOCK] ^= 1
    result = imgsum("compare", "--all", "image.bmap", "-", stdin=bytes(image))
    assert (result.status, result.text.splitlines()[0]) == (1, f"differs: offset {300 * BLOCK}, {401 * BLOCK} bytes")
    result = imgsum("compare", "image.bmap", "-", stdin=content(3 * MIB))
    assert (result.status, "fewer than" in result.errors) == (2, True)


def test_large_ranges_and_many() -> None:
    image = content(12 * MIB)
    many = tuple((block, block) for block in range(1, 2800, 2))
    for ranges in (((0, 3071),), many):
        damaged = bytearray(image)
        damaged[8 * MIB + BLOCK] ^= 1
        write(damaged, bmap_of(image, ranges=ranges))
        (found,) = differences(request_size=64 * KIB)
        assert found[0] <= 8 * MIB + BLOCK < sum(found)
        first, last = ranges[0]
        assert found[1] == (last - first + 1) * BLOCK


def test_only_what_is_mapped_is_read() -> None:
    image = content()
    write(image, bmap_of(image, ranges=((5, 5), (39, 40))))
    with BmapPair("image.bmap", "image", OpenOptions()) as pair:
        assert list(pair.differences()) == []
        assert pair.stats().bytes_read == BLOCK + BLOCK + 1000
        assert pair.sizes == (SIZE, SIZE)


def test_the_first_bad_range_ends_it() -> None:
    image = content()
    write(bytes(SIZE), bmap_of(image))
    with BmapPair("image.bmap", "image", OpenOptions()) as pair:
        assert pair.first_difference() == 0


def test_a_bmap_that_changes_meanwhile() -> None:
    write(content(), bmap_of(content()))
    with BmapPair("image.bmap", "image", OpenOptions()) as pair:
        assert next(pair.differences(), None) is None
        Path("image.bmap").write_bytes(bmap_of(content(), ranges=((0, 3),)))
        with pytest.raises(ChangedError, match=r"image\.bmap"):
            pair.check_unchanged()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(imgsum: Imgsum) -> None:
    image = bytearray(content())
    write(image, bmap_of(image))
    result = imgsum("compare", "image.bmap", "image")
    assert (result.status, result.text, result.errors) == (0, "the mapped ranges are as the bmap says\n", "")
    image[5 * BLOCK] ^= 1
    image[SIZE - 1] ^= 1
    Path("image").write_bytes(image + b"more")
    result = imgsum("compare", "image.bmap", "image")
    assert (result.status, result.text, result.errors) == (1, f"images differ at offset {5 * BLOCK}\n", "")
    result = imgsum("compare", "--all", "image.bmap", "image")
    assert result.text.splitlines() == [
        f"differs: offset {5 * BLOCK}, {BLOCK} bytes",
        f"differs: offset {39 * BLOCK}, {BLOCK + 1000} bytes",
        f"images differ in 2 ranges, {2 * BLOCK + 1000} bytes",
    ]
    lines = [json.loads(line) for line in imgsum("compare", "--all", "--json", "image.bmap", "image").text.splitlines()]
    assert [line.get("start") for line in lines[:2]] == [5 * BLOCK, 39 * BLOCK]
    assert [image["format"] for image in lines[2]["images"]] == ["bmap", "raw"]
    assert (lines[2]["identical"], lines[2]["ranges"]) == (False, 2)


def test_what_is_taken_for_a_bmap() -> None:
    """The name and the first bytes, or -f. Never the bytes alone: a guest may write them to its disk."""
    bmap = bmap_of(content())
    write(content(), bmap)
    Path("other").write_bytes(bmap)
    Path("UPPER.BMAP").write_bytes(bmap)
    Path("disk.bmap").write_bytes(content())
    assert compare("UPPER.BMAP", "image").identical
    assert compare("other", "image", format="bmap", second_format="raw").identical
    assert not compare("other", "image")
    assert compare("image.bmap", "other", format="raw").identical
    for first, second, message, options in (
        ("disk.bmap", "image", "disk.bmap: is named .bmap, and does not begin as one", {}),
        ("image", "image.bmap", "image.bmap: is a bmap: it is the first that compare takes", {}),
        ("image.bmap", "image.bmap", "is a bmap", {}),
        ("image", "image", "not well-formed", {"format": "bmap", "second_format": "raw"}),
        ("image.bmap", "image", "strict", {"strict": True}),
        ("image.bmap", "image", "--length", {"length": 5}),
        ("missing.bmap", "image", "no such file", {}),
    ):
        with pytest.raises(Error) as caught:
            compare(first, second, **options)
        assert message in str(caught.value)
    for name, image_format in (("image.bmap", None), ("other", "bmap")):
        with pytest.raises(UsageError, match="is a bmap"):
            checksum(name, format=image_format)
    assert checksum("image.bmap", format="raw").size == len(bmap)


def test_the_options(imgsum: Imgsum) -> None:
    write(content(), bmap_of(content()))
    Path("other").write_bytes(bmap_of(content()))
    assert imgsum("compare", "-f", "bmap", "other", "image").status == 0
    result = imgsum("compare", "-s", "image.bmap", "image")
    assert (result.status, "--strict" in result.errors) == (2, True)


def test_bmaptool(imgsum: Imgsum) -> None:
    """An image as bmaptool maps it, copied by bmaptool, and a copy that it calls a success."""
    bmaptool = find_tool("bmaptool")
    with open("image.raw", "wb") as file:
        file.truncate(MIB + 700)
        for at, size in ((0, 5000), (256 * KIB, 64 * KIB), (MIB, 700)):
            file.seek(at)
            file.write(content(size))
    run(bmaptool, "create", "-o", "image.bmap", "image.raw")
    run(bmaptool, "copy", "--bmap", "image.bmap", "image.raw", "card")
    assert imgsum("compare", "image.bmap", "card").status == 0
    with open("card", "r+b") as file:
        file.seek(300 * KIB)
        file.write(b"bad")
    result = imgsum("compare", "--all", "image.bmap", "card")
    assert result.status == 1
    assert result.text.splitlines()[0] == f"differs: offset {256 * KIB}, {64 * KIB} bytes"


def test_a_card(imgsum: Imgsum, loop_device: Callable[..., str]) -> None:
    image = content(64 * BLOCK)
    write(image + bytes(512 * KIB), bmap_of(image))
    assert imgsum("compare", "image.bmap", loop_device(Path("image"))).status == 0
    assert imgsum("compare", "-T", "none", "image.bmap", loop_device(Path("image"))).status == 0


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)


# --- damaged and hostile files ---------------------------------------------------------------------------------------


def damaged(change: Callable[[bytes], bytes]) -> bytes:
    """A bmap that was changed, and then sealed."""
    text = bmap_of(content(), BmapFileChecksum="0" * 64)
    digest = text.partition(b"<BmapFileChecksum> ")[2][:64]
    return sealed(change(text.replace(digest, b"0" * 64)))


@pytest.mark.parametrize(
    ("old", "new", "kind", "reason"),
    [
        (b'version="2.0"', b'version="3.0"', FormatError, "version 3.0"),
        (b'version="2.0"', b'version="two"', FormatError, "is not a bmap"),
        (b'version="2.0"', b"", FormatError, "is not a bmap"),
        (b"bmap", b"html", FormatError, "is not a bmap"),
        (b"<ImageSize> 1", b"<ImageSize> -1", FormatError, "ImageSize"),
        (b"<ImageSize> 1", b"<ImageSize> 99999999999999999999", FormatError, "ImageSize"),
        (b"<ImageSize> 1", b"<ImageSize> 1_", FormatError, "ImageSize"),
        (b"<ImageSize> 1", b"<ImageSize> 2", FormatError, "BlocksCount"),
        (b"<BlockSize> 4096", b"<BlockSize> 0", FormatError, "BlockSize"),
        (b"<BlocksCount> 41", b"<BlocksCount> 42", FormatError, "BlocksCount"),
        (b"<MappedBlocksCount> 25", b"<MappedBlocksCount> 24", FormatError, "the ranges have 25"),
        (b"<MappedBlocksCount> 25", b"<MappedBlocksCount> 42", FormatError, "MappedBlocksCount"),
        (b"<MappedBlocksCount> 25 </MappedBlocksCount>", b"", FormatError, "no MappedBlocksCount"),
        (b"<ChecksumType> sha256", b"<ChecksumType> sha999", RefusedError, "sha999"),
        (b"<ChecksumType> sha256", b"<ChecksumType> shake_128", RefusedError, "shake_128"),
        (b"<ChecksumType> sha256", b"<ChecksumType> sha1", FormatError, "its own checksum"),
        (b"<BlockMap>", b"<BlockMap></BlockMap><BlockMap>", FormatError, "two block maps"),
        (b"<BlockSize>", b"<BlockSize> 512 </BlockSize><BlockSize>", FormatError, "two elements BlockSize"),
        (b" 0-3 ", b" 3-0 ", FormatError, "3-0"),
        (b" 0-3 ", b" 0-5 ", FormatError, "not in order"),
        (b" 0-3 ", b" -3 ", FormatError, "a range is '-3'"),
        (b" 0-3 ", b"", FormatError, "a range is ''"),
        (b" 0-3 ", b" 0-99999999999999999999 ", FormatError, "a range is"),
        (b" 5 ", b" 2 ", FormatError, "not in order"),
        (b" 39-40 ", b" 39-41 ", FormatError, "beyond the image"),
        (b' 39-40 ', b" 39-40 <Range> 1 </Range>", FormatError, "elements in a Range"),
        (b"<Range chksum", b"<Range sha1", FormatError, "no sha256 digest"),
        (b'<Range chksum="', b'<Range chksum="0', FormatError, "no sha256 digest"),
        (b'<Range chksum="', b'<Range chksum="', None, ""),
        (b"</bmap>", b"", FormatError, "not well-formed"),
        (b"</BlockMap>", b"", FormatError, "not well-formed"),
        (b"</bmap>", b"</bmap><bmap/>", FormatError, "not well-formed"),
        (b"<bmap ", b"<!DOCTYPE bmap><bmap ", FormatError, "document type"),
        (
            b"<bmap ",
            b'<!DOCTYPE b [<!ENTITY a "0123456789"><!ENTITY b "&a;&a;&a;&a;">]><bmap ',
            FormatError,
            "document type",
        ),
        (b"<bmap ", b'<!DOCTYPE b SYSTEM "file:///etc/hostname"><bmap ', FormatError, "document type"),
        (b"<BlockMap>", b"<x>" * 100 + b"</x>" * 100 + b"<BlockMap>", FormatError, "nested"),
        (b"<BlockSize>", b"<BlockSize>" + b" " * 5000, FormatError, "more than 1024 characters"),
        (b" 0-3 ", b" " * 5000, FormatError, "more than 1024 characters"),
        (b'<Range chksum="', b'<Range x="' + b"y" * 5000 + b'" chksum="', None, ""),
        (b"<BlockMap>", b"<!-- " + b">" * 600000 + b" --><BlockMap>", FormatError, "a tag or a comment"),
        (b"<BlockMap>", b"<b " + b"x" * 600000 + b"/><BlockMap>", FormatError, "a tag or a comment"),
    ],
)  # fmt: skip
def test_damaged_files(old: bytes, new: bytes, kind: type[Error] | None, reason: str) -> None:
    write(content(), damaged(lambda text: text.replace(old, new, 1 if old != b"bmap" else -1)))
    if kind is None:
        assert differences() == []
        return
    with pytest.raises(kind) as caught:
        differences()
    assert reason in str(caught.value)
    assert str(caught.value).startswith("image.bmap: ")


def test_its_own_checksum_is_verified_first() -> None:
    bmap = bmap_of(content())
    write(content(), bmap.replace(b"a > comment", b"a < comment"))
    with pytest.raises(MismatchError, match="its own checksum"):
        differences()
    digest = bmap.partition(b"<BmapFileChecksum> ")[2][:64]
    for wrong in (b"", b"x" * 64, digest[:-1], digest + b"0"):
        write(content(), bmap.replace(digest, wrong))
        with pytest.raises(FormatError, match="its own checksum"):
            differences()


def test_other_encodings() -> None:
    text = bmap_of(content(), head='<?xml version="1.0" encoding="UTF-16" ?>\n').decode()
    write(content(), text.encode("utf-16"))
    with pytest.raises(FormatError, match="its own checksum"):
        differences()
    write(content(), b"\xef\xbb\xbf" + bmap_of(content()))
    with pytest.raises(MismatchError, match="its own checksum"):
        differences()


def test_nothing_to_verify() -> None:
    write(content(), bmap_of(content(), ranges=()))
    with pytest.raises(RefusedError, match="maps no blocks"):
        differences()


def test_a_signed_bmap() -> None:
    write(content(), b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n" + bmap_of(content()))
    with pytest.raises(RefusedError, match="gpg --decrypt"):
        differences()


def test_what_is_no_regular_file() -> None:
    with pytest.raises(OpenError):
        Bmap("/dev/null")
    with pytest.raises(OpenError):
        Bmap("a\0b")


def test_memory_does_not_grow_with_the_file() -> None:
    """10,000 ranges are 1 MB of XML, and 4 MB in Python."""
    digest = hashlib.sha256(bytes(BLOCK)).hexdigest()
    count = 10_000
    text = (
        f'<bmap version="2.0"><ImageSize> {2 * count * BLOCK} </ImageSize><BlockSize> {BLOCK} </BlockSize>'
        f"<BlocksCount> {2 * count} </BlocksCount><MappedBlocksCount> {count} </MappedBlocksCount>"
        f"<ChecksumType> sha256 </ChecksumType><BmapFileChecksum> {'0' * 64} </BmapFileChecksum><BlockMap>"
    )
    ranges = "".join(f'<Range chksum="{digest}"> {2 * number} </Range>\n' for number in range(count))
    Path("image.bmap").write_bytes(sealed((text + ranges + "</BlockMap></bmap>").encode()))
    tracemalloc.start()
    try:
        with Bmap("image.bmap") as bmap:
            assert sum(1 for _ in bmap.ranges()) == count
        assert tracemalloc.get_traced_memory()[1] < MIB // 2
    finally:
        tracemalloc.stop()


def test_random_changes_of_the_file_are_errors_or_harmless() -> None:
    image = content()
    good = bmap_of(image)
    chosen = random.Random(5)
    write(image, good)
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(chosen.randrange(1, 4)):
            at = chosen.randrange(len(raw))
            if chosen.random() < 0.5:
                raw[at] = chosen.randrange(256)
            else:
                del raw[at : at + chosen.randrange(1, 50)]
        Path("image.bmap").write_bytes(raw)
        if bytes(raw) == good:
            continue
        with pytest.raises(Error):
            differences()


def test_a_huge_image_of_few_ranges() -> None:
    """Counts that are large but right cost nothing."""
    size = 1 << 60
    digest = hashlib.sha256(bytes(BLOCK)).hexdigest()
    text = (
        f'<bmap version="2.0"><ImageSize> {size} </ImageSize><BlockSize> {BLOCK} </BlockSize>'
        f"<BlocksCount> {size // BLOCK} </BlocksCount><MappedBlocksCount> 1 </MappedBlocksCount>"
        f"<ChecksumType> sha256 </ChecksumType><BmapFileChecksum> {'0' * 64} </BmapFileChecksum><BlockMap>"
        f'<Range chksum="{digest}"> 0 </Range></BlockMap></bmap>'
    )
    write(bytes(GIB // KIB), sealed(text.encode()))
    with pytest.raises(RefusedError, match="fewer than"):
        differences()


def test_the_unit_is_a_range() -> None:
    assert Range(0, 5) == (0, 5)
    with pytest.raises(UsageError):
        BmapPair("image.bmap", "image", OpenOptions(offset=5))
