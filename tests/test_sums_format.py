"""The grammar of sums files: what each rule of docs/sums-format.md takes, and what no rule takes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import Imgsum
from hypothesis import example, given
from hypothesis import strategies as st

from imgsum import Checksum, Stats
from imgsum.errors import Error
from imgsum.hash import blkhash
from imgsum.output import report
from imgsum.sums.grammar import LONGEST_LINE, Line, MalformedError, parse_line, read_lines

CONTENT = b"some content"
SUM = reference.blkhash(CONTENT)
PLAIN = blkhash.construction()
STATS = Stats(0, 0, 0, 0, 0.0, {})

names = st.binary(min_size=1, max_size=300).filter(lambda name: b"\0" not in name)
"""Every name that a file can have, and slashes."""


def parse(line: bytes, number: int = 2, *, zero: bool = False) -> Line | None:
    return parse_line(number, line, PLAIN, zero)


def taken(line: bytes, number: int = 2, *, zero: bool = False) -> tuple[bytes, str]:
    parsed = parse(line, number, zero=zero)
    assert parsed is not None
    return os.fsencode(parsed.name), parsed.hexdigest


def result(name: bytes, algorithm: str = "sha256", block_size: int = 65536, construction: str = "blkhash") -> Checksum:
    hexdigest = reference.imageio(CONTENT) if construction == "imageio" else reference.blkhash(CONTENT, algorithm)
    return Checksum(hexdigest, algorithm, block_size, len(CONTENT), "raw", os.fsdecode(name), construction, STATS, None)


# --- round trips ----------------------------------------------------------------------------------------------------


@given(names)
@example(b"\\")
@example(b" leading")
@example(b"*star")
@example(b"#not a comment")
@example(b"-a")
@example(b"a) = b")
@example(b"\r")
@example(b"a\nb\\n")
@example(b"\xff\xfe")
@example(b"{}")
def test_every_name_survives(name: bytes) -> None:
    one = result(name)
    for line in (report.checksum_line(one), report.checksum_line(one, tag=True), report.checksum_json(one)):
        raw = os.fsencode(line)
        assert b"\n" not in raw
        for ending in (b"", b"\r"):
            assert taken(raw + ending) == (name, SUM)
    for tag in (False, True):
        assert taken(os.fsencode(report.checksum_line(one, tag=tag, zero=True)), zero=True) == (name, SUM)


@given(st.lists(names, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_a_file_of_lines_survives(many: list[bytes], zero: bool, last_end: bool) -> None:
    end = b"\0" if zero else b"\n"
    lines = [os.fsencode(report.checksum_line(result(name), zero=zero)) for name in many]
    text = end.join(lines) + (end if last_end else b"")
    reader, to_write = os.pipe()
    os.write(to_write, text)
    os.close(to_write)
    try:
        parsed = [parse(line, number, zero=zero) for number, line in read_lines(reader, zero) if line is not None]
    finally:
        os.close(reader)
    assert [(line.number, os.fsencode(line.name)) for line in parsed if line] == list(enumerate(many, 1))


@pytest.mark.parametrize("algorithm", ["sha256", "sha512", "sha3-256", "blake2b", "blake3", "xxh3-128", "xxh64"])
@pytest.mark.parametrize("block_size", [512, 65536, 1 << 20, 32 << 20])
def test_tags_and_json_say_how(algorithm: str, block_size: int) -> None:
    one = result(b"x", algorithm, block_size)
    for line in (report.checksum_line(one, tag=True), report.checksum_json(one)):
        parsed = parse(line.encode())
        assert parsed is not None
        assert (parsed.construction.algorithm.name, parsed.construction.block_size, parsed.construction.name) == (
            algorithm,
            block_size,
            "blkhash",
        )
        assert parsed.tagged


@pytest.mark.parametrize(
    ("algorithm", "block_size", "construction"), [("blake2b-256", 4 << 20, "imageio"), ("sha512-256", 65536, "blkhash")]
)
def test_json_lines_of_one_kind_share_the_digest_of_zeros(algorithm: str, block_size: int, construction: str) -> None:
    one = result(b"x")._replace(algorithm=algorithm, block_size=block_size, construction=construction)
    line = report.checksum_json(one).encode()
    before = blkhash.zero_digest.cache_info().misses
    for number in range(1, 4):
        parsed = parse(line, number)
        assert parsed is not None
        blkhash.BlkHash(parsed.construction)
    assert blkhash.zero_digest.cache_info().misses - before <= 1


def test_imageio_says_how() -> None:
    one = result(b"x", "blake2b-256", 4 << 20, "imageio")
    for line in (report.checksum_line(one, tag=True), report.checksum_json(one)):
        parsed = parse(line.encode())
        assert parsed is not None
        assert (parsed.construction.name, parsed.construction.block_size, parsed.hexdigest) == (
            "imageio",
            4 << 20,
            one.hexdigest,
        )


def test_json_says_size_and_format() -> None:
    parsed = parse(report.checksum_json(result(b"x")._replace(format="qcow2", size=123)).encode())
    assert parsed is not None
    assert (parsed.size, parsed.format) == (123, "qcow2")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"offset": 4096}, (4096, None)),
        ({"length": len(CONTENT)}, (0, len(CONTENT))),
        ({"offset": 4096, "length": len(CONTENT)}, (4096, len(CONTENT))),
        ({"offset": 0, "length": None}, (0, None)),
        ({"offset": None, "length": None}, None),
    ],
)
def test_json_says_the_range(keys: dict[str, int], expected: tuple[int, int | None] | None) -> None:
    parsed = parse(json_line(**keys))
    assert parsed is not None
    assert parsed.range == expected


@pytest.mark.parametrize("name", [b"plain", b"a\nb", b"a\\b", b"a\rb", b"a b", b"\xff", b" *x"])
def test_names_are_escaped_as_coreutils_does(name: bytes, tmp_path: Path, tool: Callable[[str], str]) -> None:
    (tmp_path / os.fsdecode(name)).write_bytes(CONTENT)
    made = subprocess.run([tool("sha256sum"), b"--", name], cwd=tmp_path, check=True, capture_output=True).stdout
    if b"\r" in name and not made.startswith(b"\\"):
        pytest.skip("this sha256sum is older than the escape of CR")
    ours = os.fsencode(report.checksum_line(result(name))) + b"\n"
    digits = len(SUM)
    assert (ours[:1] == b"\\", ours.lstrip(b"\\")[digits:]) == (made[:1] == b"\\", made.lstrip(b"\\")[digits:])
    assert taken(made[:-1])[0] == name


# --- what is taken --------------------------------------------------------------------------------------------------

HEX = SUM.encode()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (HEX + b"  disk.img", b"disk.img"),
        (HEX + b" *disk.img", b"disk.img"),
        (HEX + b" disk.img", b"disk.img"),
        (HEX + b"  disk.img\r", b"disk.img"),
        (HEX.upper() + b"  disk.img", b"disk.img"),
        (b" \t" + HEX + b"  disk.img", b"disk.img"),
        (HEX + b"   ", b" "),
        (HEX + b"  -", b"-"),
        (HEX + b"  nbd://localhost/", b"nbd://localhost/"),
        (b"\\" + HEX + b"  a\\nb\\\\c\\r", b"a\nb\\c\r"),
        (HEX + b"  a\\nb", b"a\\nb"),
        (b"BLKHASH-SHA256 (a (b) = c) = " + HEX, b"a (b) = c"),
        (b"BLKHASH-SHA256 (x) = " + HEX.upper(), b"x"),
        (b"BLKHASH-SHA256/64K (x) = " + HEX, b"x"),
        (b"\\BLKHASH-SHA256 (a\\nb) = " + HEX + b"\r", b"a\nb"),
    ],
)
def test_lines_that_are_taken(line: bytes, name: bytes) -> None:
    assert taken(line) == (name, SUM)


@pytest.mark.parametrize("line", [b"", b"\r", b"  \t ", b"# comment", b"#" + HEX + b"  x", b"  # comment"])
def test_lines_without_content(line: bytes) -> None:
    assert parse(line) is None


def test_a_bom_only_before_the_first_line() -> None:
    assert taken(b"\xef\xbb\xbf" + HEX + b"  x", 1) == (b"x", SUM)
    with pytest.raises(MalformedError):
        parse(b"\xef\xbb\xbf" + HEX + b"  x", 2)


# --- what is not ----------------------------------------------------------------------------------------------------


def json_line(**changes: object) -> bytes:
    record = json.loads(report.checksum_json(result(b"x")))
    record |= changes
    return json.dumps({key: value for key, value in record.items() if value != "absent"}).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (HEX[:-2] + b"  x", "62 hex digits, where sha256 has 64"),
        (HEX[:-1] + b"  x", "63 hex digits, where sha256 has 64"),
        (HEX + b"0  x", "65 hex digits, where sha256 has 64"),
        (HEX[:32] + b"  x", "32 hex digits"),
        (HEX, "not a line of checksums"),
        (HEX + b" ", "not a line of checksums"),
        (HEX + b"  ", "not a line of checksums"),
        (HEX + b" *", "not a line of checksums"),
        (HEX + b"\tx", "not a line of checksums"),
        (b"x" + HEX[1:] + b"  x", "not a line of checksums"),
        (b"hello", "not a line of checksums"),
        (b"\xff\xff", "not a line of checksums"),
        (b"\\" + HEX + b"  a\\x", "unknown escape in the name: \\x"),
        (b"\\" + HEX + b"  a\\", "unknown escape in the name: \\"),
        (HEX + b"  a\0b", "NUL"),
        ((HEX + b"  x").decode().encode("utf-16-le"), "NUL"),
        (b"SHA256 (x) = " + HEX, "SHA256 is another tool's tag"),
        (b"SHA256(x)= " + HEX, "SHA256 is another tool's tag"),
        (b"MD5 (x) = " + HEX[:32], "MD5 is another tool's tag"),
        (b"BLAKE2b (x) = " + HEX * 2, "BLAKE2b is another tool's tag"),
        (b"BLAKE2b-256 (x) = " + HEX, "BLAKE2b-256 is another tool's tag"),
        (b"BLAKE3 (x) = " + HEX, "BLAKE3 is another tool's tag"),
        (b"XXH3 (x) = " + HEX[:16], "XXH3 is another tool's tag"),
        (b"blkhash-sha256 (x) = " + HEX, "blkhash-sha256 is another tool's tag"),
        (b"BLKHASH- (x) = " + HEX, "another tool's tag"),
        (b"BLKHASH-NOSUCH (x) = " + HEX, "unknown algorithm 'nosuch'"),
        (b"BLKHASH-SHA256/65K (x) = " + HEX, "power of two"),
        (b"BLKHASH-SHA256/ (x) = " + HEX, "size"),
        (b"BLKHASH-SHA256/64M (x) = " + HEX, "power of two"),
        (b"BLKHASH-SHA512 (x) = " + HEX, "64 hex digits, where sha512 has 128"),
        (b"BLKHASH-SHA256 () = " + HEX, "name is empty"),
        (b"BLKHASH-SHA256 (x) = ", "not a line of checksums"),
        (b"{", "not JSON"),
        (b"{}", "schema"),
        (b'{"a":' * 30_000, "not JSON"),
        (b'{"schema": 1, "size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"schema": 1, "name": "\xff"}', "not JSON"),
        (json_line()[:-1] + b', "name": "y"}', "twice"),
        (json_line()[:-1] + b', "size": 5, "more": {"a": 1, "a": 1}}', "twice"),
        (json_line(schema=2), "schema"),
        (json_line(schema=True), "schema"),
        (json_line(checksum="absent"), '"checksum" is not text'),
        (json_line(checksum=7), '"checksum" is not text'),
        (json_line(checksum=SUM[1:]), "63 hex digits"),
        (json_line(checksum="g" * 64), "checksum is not hex"),
        (json_line(name="absent"), '"name" is not text'),
        (json_line(name=""), "name is empty"),
        (json_line(name="a\0b"), "NUL"),
        (json_line(name="\ud800"), "name is not Unicode"),
        (json_line(name_b64="?"), "name_b64 is not base64"),
        (json_line(name_b64=base64.b64encode(b"a\0").decode()), "NUL"),
        (json_line(size=-1), "size is negative"),
        (json_line(size=True), '"size" is not a number'),
        (json_line(offset=-1), "not that of a range"),
        (json_line(offset=1 << 64), "not that of a range"),
        (json_line(offset="1"), '"offset" is not a number'),
        (json_line(offset=0, length=len(CONTENT) + 1), "not that of a range"),
        (json_line(length=-1), "not that of a range"),
        (json_line(length=1.5), '"length" is not a number'),
        (json_line(size="absent"), '"size" is not a number'),
        (json_line(format=None), '"format" is not text'),
        (json_line(algorithm="nosuch"), "unknown algorithm 'nosuch'"),
        (json_line(algorithm="absent"), '"algorithm" is not text'),
        (json_line(block_size=1000), "power of two"),
        (json_line(block_size=1.5), '"block_size" is not a number'),
        (json_line(construction="nosuch"), "construction: not one of"),
        (json_line(construction=[]), '"construction" is not text'),
        (json_line(error="no such file"), "records a failure, and no checksum: no such file"),
        (json_line(status="mismatch"), "records a verdict"),
    ],
)
def test_lines_that_are_malformed(line: bytes, reason: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse(line, 7)
    assert caught.value.number == 7
    assert str(caught.value).startswith("line 7: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named(encoding: str) -> None:
    with pytest.raises(MalformedError, match="line 1: text is UTF-16"):
        parse(("\ufeff" + SUM + "  x").encode(encoding), 1)


@given(st.binary(max_size=200))
def test_no_line_does_anything_else(line: bytes) -> None:
    try:
        parsed = parse(line)
    except Error:
        return
    assert parsed is None or len(parsed.hexdigest) == 64


def test_a_line_of_10_mb_is_bounded(imgsum: Imgsum, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(CONTENT)
    good = SUM + "  good\n"
    for long in ("x" * 10_000_000, SUM + "  " + "y" * 10_000_000, "#" * (LONGEST_LINE + 1)):
        (tmp_path / "sums").write_text(good + long + "\n" + good)
        ended, peak = imgsum.peak_memory("check", "sums", cwd=tmp_path)
        assert ended.text == "good: OK\ngood: OK\n"
        assert f"imgsum: sums: line 2: line is longer than {LONGEST_LINE} bytes\n" in ended.errors
        assert ended.status == 2
        assert peak < 64 << 20
    (tmp_path / "sums").write_text(good + "x" * 10_000_000)  # without its end
    assert imgsum("check", "sums", cwd=tmp_path).status == 2
