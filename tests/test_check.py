"""imgsum check, as a process: verdicts, messages, counts and status, to the letter."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from conftest import Imgsum, wait_until_it_waits
from reference import KIB

import imgsum as api
from imgsum.errors import RefusedError

GOOD, OTHER = b"the good content", b"other content"
GOOD_SUM, OTHER_SUM = reference.blkhash(GOOD), reference.blkhash(OTHER)
DIFFERS = "the content differs from what the sum says"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a file `good`, and one `bad` whose content is not what sums say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").write_bytes(GOOD.ljust(512, b"\0"))
    (tmp_path / "bad").write_bytes(OTHER.ljust(512, b"\0"))
    return tmp_path


SUM = reference.blkhash(GOOD.ljust(512, b"\0"))
"""Of `good`; lines say it of `bad` too."""


def lines(*names: str, sum: str = SUM) -> bytes:  # noqa: A002
    return b"".join(os.fsencode(f"{sum}  {name}\n") for name in names)


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_all_is_well(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("good", "./good"))
    assert imgsum("check", "sums") == (b"good: OK\n./good: OK\n", b"", 0)
    assert imgsum("check", stdin=lines("good")) == (b"good: OK\n", b"", 0)
    assert imgsum("check", "-", stdin=lines("good")) == (b"good: OK\n", b"", 0)
    assert imgsum("check", "--quiet", "sums") == (b"", b"", 0)
    assert imgsum("check", "--status", "sums") == (b"", b"", 0)
    assert imgsum("check", "--strict", "-w", "sums").status == 0


def test_a_mismatch(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(f"BLKHASH-SHA256 (bad) = {SUM}\n".encode())
    counts = b"imgsum: WARNING: 1 computed checksum did NOT match\n"
    assert imgsum("check", "sums") == (b"bad: FAILED\n", f"imgsum: bad: {DIFFERS}\n".encode() + counts, 1)
    assert imgsum("check", "--quiet", "sums") == (b"bad: FAILED\n", counts, 1)
    assert imgsum("check", "--quiet", stdin=lines("bad")) == (b"bad: FAILED\n", counts, 1)  # and no hint
    assert imgsum("check", "--status", "-w", stdin=lines("bad")) == (b"", b"", 1)
    assert imgsum("check", "--status", "sums") == (b"", b"", 1)


def test_bad_good_bad(imgsum: Imgsum, here: Path) -> None:
    ended = imgsum("check", stdin=lines("bad", "good", "bad"))
    assert ended.text == "bad: FAILED\ngood: OK\nbad: FAILED\n"
    assert "imgsum: WARNING: 2 computed checksums did NOT match\n" in ended.errors
    assert ended.status == 1


def test_one_file_twice_with_two_digests(imgsum: Imgsum, here: Path) -> None:
    ended = imgsum("check", stdin=lines("good") + lines("good", sum=OTHER_SUM) + lines("good"))
    assert ended.text == "good: OK\ngood: FAILED\ngood: OK\n"
    assert ended.status == 1


def test_missing_unreadable_good(imgsum: Imgsum, here: Path) -> None:
    (here / "directory").mkdir()
    ended = imgsum("check", stdin=lines("missing", "directory", "good", "bad"))
    assert ended.text == ("missing: FAILED open or read\ndirectory: FAILED open or read\ngood: OK\nbad: FAILED\n")
    assert ended.errors.splitlines() == [
        "imgsum: missing: no such file or directory",
        "imgsum: directory: is a directory",
        f"imgsum: bad: {DIFFERS}",
        "imgsum: WARNING: 2 listed files could not be read",
        "imgsum: WARNING: 1 computed checksum did NOT match",
    ]
    assert ended.status == 2  # trouble wins
    silent = imgsum("check", "--status", stdin=lines("missing", "good"))
    assert silent == (b"", b"imgsum: missing: no such file or directory\n", 2)


def test_mixed_kinds_and_algorithms(imgsum: Imgsum, here: Path) -> None:
    content = (here / "good").read_bytes()
    assert imgsum("check", stdin=(
        f"# a comment\n\n{SUM.upper()} *good\r\n"
        f"BLKHASH-BLAKE3/1M (good) = {reference.blkhash(content, 'blake3', 1 << 20)}\n"
        f"BLKHASH-SHA512/512 (good) = {reference.blkhash(content, 'sha512', 512)}\n"
        f"IMAGEIO (good) = {reference.imageio(content)}\n"
        f"{SUM}  good"
    ).encode()) == (b"good: OK\n" * 5, b"", 0)  # fmt: skip
    plain = lines("good", sum=reference.blkhash(content, "xxh64", 4096))
    assert imgsum("check", "-a", "xxh64", "-b", "4k", stdin=plain) == (b"good: OK\n", b"", 0)
    plain = lines("good", sum=reference.imageio(content))
    assert imgsum("check", "--construction", "imageio", stdin=plain) == (b"good: OK\n", b"", 0)


def test_a_bom_before_the_first_of_several_lines(imgsum: Imgsum, here: Path) -> None:
    assert imgsum("check", stdin=b"\xef\xbb\xbf" + lines("good", "good")) == (b"good: OK\n" * 2, b"", 0)


@pytest.mark.parametrize("options", [(), ("--tag",), ("-z",), ("--json",), ("--json", "--stats")])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_every_name_comes_back(imgsum: Imgsum, here: Path, options: tuple[str, ...], locale: str) -> None:
    names = [
        b"a\nb", b"\nx", b"a\\b", b"a\rb", b"-leading", b"--", b"\xff\xfe", b"\xc3\xa4", b" a", b"*a", b"#a", b"a ",
        b"[ a ]", b"a) = b", b"{}", b"\x1b[2K", b"nbd:x", b"json:{}", b"x,y.qcow2", b"a:b.raw",
    ]  # fmt: skip
    for name in names:
        (here / os.fsdecode(name)).write_bytes(GOOD.ljust(512, b"\0"))
    env = {"LC_ALL": locale}
    made = imgsum("checksum", *options, "--", *names, env=env)
    assert made.status == 0, made.errors
    zero = ["-z"] if "-z" in options else []
    ended = imgsum("check", *zero, stdin=made.stdout, env=env)
    assert ended.status == 0, ended.errors
    assert ended.stdout.count(b": OK\n") == len(names)
    again = imgsum("check", *zero, "--json", stdin=made.stdout, env=env)
    assert [json.loads(line)["status"] for line in again.text.splitlines()] == ["ok"] * len(names)


def test_names_cannot_write_to_the_terminal(imgsum: Imgsum, here: Path) -> None:
    for name in (b"a\x1b[2Kb", b"a\x9b2Kb", "a\u202eb".encode(), b"a\x07b"):
        ended = imgsum("check", stdin=SUM.encode() + b"  " + name + b"\n")
        for output in (ended.stdout, ended.stderr):
            assert name not in output
            assert output.isascii()
            assert b"\\x" in output or b"\\u" in output
    (here / "a\nb").write_bytes(b"")
    ended = imgsum("check", stdin=b"\\" + SUM.encode() + b"  a\\nb\n")
    assert ended.text == "\\a\\nb: FAILED\n"
    assert ended.errors.startswith("imgsum: a\\nb: ")


# --- malformed lines ------------------------------------------------------------------------------------------------


def test_a_malformed_line_is_reported_and_the_others_verified(imgsum: Imgsum, here: Path) -> None:
    text = lines("good") + b"hello\n" + f"SHA256 (good) = {SUM}\n".encode() + lines("good") + lines("good", sum=SUM[1:])
    reports = (
        "imgsum: sums: line 2: not a line of checksums\n"
        "imgsum: sums: line 3: SHA256 is another tool's tag: a sum of the file, not of the image's content;"
        " `sha256sum -c` verifies those\n"
        "imgsum: sums: line 5: 63 hex digits, where sha256 has 64\n"
    )
    count = "imgsum: WARNING: 3 lines are improperly formatted\n"
    (here / "sums").write_bytes(text)
    ok = b"good: OK\n" * 2
    assert imgsum("check", "sums") == (ok, (reports + count).encode(), 2)
    assert imgsum("check", "--ignore-malformed", "sums") == (ok, count.encode(), 0)
    assert imgsum("check", "--ignore-malformed", "-w", "sums") == (ok, (reports + count).encode(), 0)
    assert imgsum("check", "--status", "sums") == (b"", b"", 2)
    assert imgsum("check", "--status", "-w", "sums") == (b"", reports.encode(), 2)
    assert imgsum("check", "--strict", "--ignore-malformed", "sums").status == 2


def test_utf_16_and_nul(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("good", "good").decode().encode("utf-16"))
    ended = imgsum("check", "sums")
    assert ended.stdout == b""
    assert ended.errors == (
        "imgsum: sums: no properly formatted checksum lines found"
        " (line 1: text is UTF-16; it must be UTF-8; `iconv -f UTF-16 -t UTF-8` converts it)\n"
    )
    assert ended.status == 2
    ended = imgsum("check", stdin=lines("good\0x", "good"))
    assert (ended.text, ended.status) == ("good: OK\n", 2)
    assert "-: line 1: line has a NUL in it" in ended.errors


def test_malformed_lines_are_told_one_by_one_only_beside_good_ones(imgsum: Imgsum, here: Path) -> None:
    text = b"hello\n" * 999
    ended = imgsum("check", stdin=text)
    none = "imgsum: -: no properly formatted checksum lines found (line 1: not a line of checksums)\n"
    assert (ended.stdout, ended.errors, ended.status) == (b"", none, 2)
    ended = imgsum("check", stdin=text + lines("good") + b"hello\n" * 1000 + lines("good"))
    assert (ended.text, ended.status) == ("good: OK\n" * 2, 2)
    assert len(ended.errors.splitlines()) == 1999 + 1
    ended = imgsum("check", stdin=text + b"hello\n" * 100_000 + lines("good"))  # given up before that
    assert (ended.stdout, ended.errors, ended.status) == (b"", none, 2)
    ended = imgsum("check", "--ignore-malformed", stdin=text + b"hello\n" + lines("good"))
    assert (ended.text, ended.status) == ("good: OK\n", 0)


@pytest.mark.parametrize("options", [(), ("--warn",), ("--ignore-malformed",), ("--json", "--status"), ("-z",)])
@pytest.mark.parametrize("image_format", ["raw", "qcow2", "vmdk", "vdi", "vpc"])
def test_an_image_where_a_sums_file_belongs(
    imgsum: Imgsum, here: Path, tool: Callable[[str], str], image_format: str, options: tuple[str, ...]
) -> None:
    """One line, that says what was meant."""
    reference.write("300k:R 724k:-", here / "content")
    subprocess.run([tool("qemu-img"), "convert", "-f", "raw", "-O", image_format, "content", "a disk"], check=True)
    ended = imgsum("check", *options, "a disk")
    assert (ended.text.count("\n") <= 1, ended.status) == (True, 2)
    meant = "is a disk image, not a checksum file; did you mean: imgsum checksum"
    assert ended.errors == f"imgsum: a disk: {meant} 'a disk'\n"
    with open("a disk", "rb") as file:
        assert imgsum("check", *options, stdin=file.fileno()).errors == f"imgsum: -: {meant} -\n"


@pytest.mark.parametrize("content", [b"\0", b"x", b"\n"])
def test_a_huge_file_without_lines_takes_no_time(imgsum: Imgsum, here: Path, content: bytes) -> None:
    with open("huge", "wb") as file:
        file.write(content * (1 << 20))
        file.truncate(1 << 42)  # at 5 GB/s a quarter of an hour
    ended, peak = imgsum.peak_memory("check", "huge")
    assert (ended.stdout, ended.status) == (b"", 2)
    assert len(ended.errors.splitlines()) == 1
    assert peak < 64 << 20
    with open("sums", "wb") as file:
        file.write(lines("good"))
        file.truncate(1 << 42)
    ended = imgsum("check", "sums")
    assert (ended.text, ended.status) == ("good: OK\n", 2)
    assert ended.errors.startswith("imgsum: sums: line 2 has no end within ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{SUM[:32]}  good\n", "for the sum of a file use `md5sum -c`, for that of an image's content say -a md5"),
        (f"{SUM * 2}  good\n", "for the sum of a file use `sha512sum -c`"),
        (f"MD5 (good) = {SUM[:32]}\n", "`md5sum -c` verifies those"),
        (f"SHA512 (good) = {SUM * 2}\n", "`sha512sum -c` verifies those"),
        (f"{SUM}\n", "it is a digest without a name"),
        (f"{SUM}  good\0", "-z reads lines that end with NUL"),
        ("\ufeff" + f"{SUM}  good\n", "`iconv -f UTF-16 -t UTF-8` converts it"),
        (f"{SUM}  good\n", "`iconv -f UTF-16 -t UTF-8` converts it"),
    ],
)
def test_what_to_do_is_said_once(imgsum: Imgsum, here: Path, text: str, told: str) -> None:
    encoding = "utf-16-le" if "iconv" in told else "ascii"
    ended = imgsum("check", stdin=(text * 20).encode(encoding))
    assert (ended.stdout, ended.status) == (b"", 2)
    assert len(ended.errors.splitlines()) == 1
    assert told in ended.errors
    if encoding == "ascii" and "\0" not in text:  # beside a good line each is told, and what to do of the first
        ended = imgsum("check", stdin=lines("good") + text.encode() * 20)
        assert (ended.text, ended.status) == ("good: OK\n", 2)
        assert ended.errors.count("imgsum: -: line ") == 20
        assert ended.errors.count(told) == 1


def test_a_recorded_failure_is_no_success(imgsum: Imgsum, here: Path) -> None:
    made = imgsum("checksum", "--json", "good", "missing")
    assert made.status == 2
    ended = imgsum("check", stdin=made.stdout)
    assert (ended.text, ended.status) == ("good: OK\n", 2)
    assert "line 2: records a failure, and no checksum: no such file or directory" in ended.errors


# --- nothing verified is never success ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--status",), ("--quiet",), ("--ignore-malformed",), ("--ignore-missing",)])
@pytest.mark.parametrize("text", [b"", b"\n\n", b"# only a comment\n", b"hello\n", b"\xef\xbb\xbf"])
def test_no_lines(imgsum: Imgsum, here: Path, text: bytes, options: tuple[str, ...]) -> None:
    ended = imgsum("check", *options, stdin=text)
    assert (ended.stdout, ended.status) == (b"", 2)
    assert ended.errors.startswith("imgsum: -: no properly formatted checksum lines found")
    assert len(ended.errors.splitlines()) == 1


@pytest.mark.parametrize("options", [(), ("--status",), ("--json",)])
def test_all_are_missing(imgsum: Imgsum, here: Path, options: tuple[str, ...]) -> None:
    ended = imgsum("check", "--ignore-missing", *options, stdin=lines("missing", "missing/too"))
    assert ended.errors == "imgsum: -: no file was verified\n"
    assert ended.status == 2


def test_some_are_missing(imgsum: Imgsum, here: Path) -> None:
    assert imgsum("check", "--ignore-missing", stdin=lines("missing", "good")) == (b"good: OK\n", b"", 0)
    assert imgsum("check", "--ignore-missing", stdin=lines("missing", "bad")).status == 1
    (here / "directory").mkdir()  # is there, and can't be read
    assert imgsum("check", "--ignore-missing", stdin=lines("directory", "good")).status == 2


def test_a_missing_backing_file_is_not_a_missing_image(imgsum: Imgsum, here: Path, tool: Callable[[str], str]) -> None:
    subprocess.run(
        [tool("qemu-img"), "create", "-q", "-f", "qcow2", "-u", "-b", "gone", "-F", "raw", "x.qcow2", "1M"], check=True
    )
    ended = imgsum("check", "--ignore-missing", stdin=lines("x.qcow2", "good"))
    assert ended.text == "x.qcow2: FAILED open or read\ngood: OK\n"
    assert ended.status == 2


def test_sums_files_that_cannot_be_read(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("good"))
    (here / "empty").write_bytes(b"")
    ended = imgsum("check", "missing", "empty", ".", "sums")
    assert ended.text == "good: OK\n"
    assert ended.errors.splitlines() == [
        "imgsum: missing: no such file or directory",
        "imgsum: empty: no properly formatted checksum lines found",
        "imgsum: .: is a directory",
    ]
    assert ended.status == 2
    assert imgsum("check", "[", "true", "]").status == 2


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_are_relative_to_here_or_to_the_sums(imgsum: Imgsum, here: Path) -> None:
    (here / "sub").mkdir()
    shutil.copy("good", "sub/inner")
    (here / "sub" / "sums").write_bytes(lines("inner", str(here / "good"), "../good"))
    ended = imgsum("check", "--relative-to-sums", "sub/sums")
    assert ended == (f"inner: OK\n{here}/good: OK\n../good: OK\n".encode(), b"", 0)
    ended = imgsum("check", "sub/sums")
    assert ended.status == 2
    assert ended.text.startswith("inner: FAILED open or read\n")


def test_a_command_in_a_sums_file_is_never_run(imgsum: Imgsum, here: Path) -> None:
    ended = imgsum("check", stdin=lines("[ touch proof ]", "good"))
    assert ended.text == "[ touch proof ]: FAILED open or read\ngood: OK\n"
    assert "no such file or directory (a sums file never runs a command)" in ended.errors
    assert ended.status == 2
    assert not (here / "proof").exists()


def test_standard_input(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("-"))
    assert imgsum("check", "sums", stdin=(here / "good").read_bytes()) == (b"-: OK\n", b"", 0)
    assert imgsum("check", "sums", stdin=b"x" * 512).status == 1
    ended = imgsum("check", stdin=lines("-", "/dev/stdin", "good"))
    assert ended.text == "-: FAILED open or read\n/dev/stdin: FAILED open or read\ngood: OK\n"
    assert "imgsum: -: standard input is the sums file\n" in ended.errors


# --- hints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "sha512", "blake2b"])
def test_sums_of_files(imgsum: Imgsum, here: Path, tool: Callable[[str], str], algorithm: str) -> None:
    """Said of the first only, and only after the file was hashed and has that sum."""
    program = {"blake2b": "b2sum"}.get(algorithm, f"{algorithm}sum")
    made = subprocess.run([tool(program), "bad", "good", "bad"], check=True, capture_output=True).stdout
    (here / "bad").write_bytes(b"x" * 512)
    ended = imgsum("check", "-a", algorithm, stdin=made)
    assert (ended.text, ended.status) == ("bad: FAILED\ngood: FAILED\nbad: FAILED\n", 1)
    told = f"of the file itself, as {program} makes it: `{program} -c` verifies that"
    assert ended.errors.splitlines()[:3] == [
        f"imgsum: bad: {DIFFERS}",
        f"imgsum: good: the content differs from the sum, which is {told}",
        f"imgsum: bad: {DIFFERS}",
    ]


def test_a_sparse_file_is_not_hashed_to_guess(imgsum: Imgsum, here: Path) -> None:
    with open("bad", "ab") as file:
        file.truncate(1 << 42)  # hours of sha256
    ended = imgsum("check", stdin=lines("bad"))
    assert (ended.text, ended.status) == ("bad: FAILED\n", 1)
    assert ended.errors.startswith(f"imgsum: bad: {DIFFERS}\n")


def test_sizes_of_json_lines(imgsum: Imgsum, here: Path) -> None:
    made = imgsum("checksum", "--json", "good").stdout
    with open("good", "ab") as file:
        file.write(bytes(512))
    ended = imgsum("check", stdin=made)
    assert ended.text == "good: FAILED\n"
    assert (
        f"imgsum: good: {DIFFERS}: it has 1024 bytes, and the sum is of 512 bytes (--length 512 reads no"
        in ended.errors
    )
    assert ended.status == 1
    assert imgsum("check", "--length", "512", stdin=made) == (b"good: OK\n", b"", 0)


@pytest.mark.parametrize("other", ["qcow2", "vmdk", "vdi"])
def test_the_format_is_no_part_of_a_json_line(
    imgsum: Imgsum, here: Path, tool: Callable[[str], str], other: str
) -> None:
    reference.write("64k:A 1m:- 64k:B", here / "disk.raw")
    subprocess.run([tool("qemu-img"), "convert", "-f", "raw", "-O", other, "disk.raw", "disk"], check=True)
    of_other = imgsum("checksum", "--json", "disk").stdout
    shutil.move("disk", "kept")
    shutil.move("disk.raw", "disk")
    of_raw = imgsum("checksum", "--json", "disk").stdout
    note = f"the format is raw, and the sum was made of {other}: the content is the same"
    assert imgsum("check", stdin=of_other) == (b"disk: OK\n", f"imgsum: disk: {note}\n".encode(), 0)
    assert imgsum("check", "-q", stdin=of_other) == (b"", b"", 0)
    assert json.loads(imgsum("check", "--json", stdin=of_other).stdout)["note"] == note
    assert imgsum("check", stdin=of_raw) == (b"disk: OK\n", b"", 0)
    shutil.move("kept", "disk")
    assert imgsum("check", stdin=of_raw)[::2] == (b"disk: OK\n", 0)
    (here / "disk").write_bytes(b"x" * ((1 << 20) + (128 << 10)))
    assert imgsum("check", stdin=of_other).status == 1


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (("--offset", "64k", "--length", "64k"), {"offset": 65536, "length": 65536}),
        (("--offset", "64k"), {"offset": 65536}),
        (("--length", "100"), {"offset": 0, "length": 100}),
        ((), {}),
    ],
)
def test_a_json_line_of_a_range(imgsum: Imgsum, here: Path, options: tuple[str, ...], keys: dict[str, int]) -> None:
    reference.write("64k:A 64k:B 1000:C", here / "disk")
    made = imgsum("checksum", "-q", "--json", *options, "disk").stdout
    record = json.loads(made)
    assert {key: record[key] for key in ("offset", "length") if key in record} == keys
    whole = imgsum("checksum", "-q", "--json", "good").stdout
    both = made + whole
    assert imgsum("check", stdin=both) == (b"disk: OK\ngood: OK\n", b"", 0)  # each its own
    (here / "sums").write_bytes(made.replace(b'"disk"', b'"-"'))
    assert imgsum("check", "sums", stdin=(here / "disk").read_bytes()) == (b"-: OK\n", b"", 0)
    verdict = json.loads(imgsum("check", "--json", stdin=made).stdout)
    assert {key: verdict[key] for key in ("offset", "length") if key in verdict} == keys
    with open("disk", "r+b") as file:
        file.seek(keys.get("offset", 0) + 50)
        file.write(b"x")
    assert imgsum("check", stdin=made).status == 1
    with open("disk", "ab") as file:
        file.write(b"more")
    if "length" not in keys:  # to the end, wherever that is
        assert imgsum("check", stdin=made).status == 1


def test_a_device_larger_than_its_image(
    imgsum: Imgsum, here: Path, loop_device: Callable[..., str], tool: Callable[[str], str]
) -> None:
    image, device_file = here / "image", here / "device"
    reference.write("100k:R 28k:-", image)
    content = image.read_bytes()
    device_file.write_bytes(content + bytes(64 * KIB))
    device = loop_device(device_file)
    (here / "link").symlink_to(device)
    shutil.move(image, here / "kept")
    (here / "image").symlink_to(device)
    sums = lines("image", sum=reference.blkhash(content))
    ended = imgsum("check", stdin=sums)
    assert (ended.text, ended.status) == ("image: FAILED\n", 1)
    assert f"the device has {192 * KIB} bytes: for a smaller image, give its size as --length" in ended.errors
    assert imgsum("check", "--length", "128k", stdin=sums) == (b"image: OK\n", b"", 0)


# --- many images, formats, JSON, progress ---------------------------------------------------------------------------


def test_many_images_of_every_size_share_a_pool(imgsum: Imgsum, here: Path) -> None:
    chooser = random.Random(5)
    tags = [
        ("BLKHASH-SHA256", "sha256", 65536),
        ("BLKHASH-BLAKE3/4K", "blake3", 4096),
        ("BLKHASH-MD5/2M", "md5", 2 << 20),
    ]
    text, expected = b"", b""
    for number in range(150):
        content = reference.content(f"{chooser.choice([0, 1, 4095, 65536, 65537, 300_000, 1_100_000])}:R 1:-")
        name = f"image-{number}"
        (here / name).write_bytes(content)
        tag, algorithm, block_size = chooser.choice(tags)
        digest = reference.blkhash(content, algorithm, block_size)
        wrong = chooser.random() < 0.1
        if wrong:
            digest = digest[1:] + "0" if digest[1:] + "0" != digest else digest[1:] + "1"
        text += f"{tag} ({name}) = {digest}\n".encode()
        expected += f"{name}: {'FAILED' if wrong else 'OK'}\n".encode()
    ended, peak = imgsum.peak_memory("check", "-q", "/dev/fd/0", stdin=_pipe(text))
    failed = b"".join(line for line in expected.splitlines(keepends=True) if line.endswith(b"FAILED\n"))
    assert (ended.stdout, ended.status) == (failed, 1)
    assert peak < 64 << 20
    assert imgsum("check", stdin=text).stdout == expected


def _pipe(text: bytes) -> int:
    reader, to_write = os.pipe()
    assert len(text) < 65536
    os.write(to_write, text)
    os.close(to_write)
    return reader


def test_a_sums_file_of_any_length_in_flat_memory(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("missing") * 100_000 + lines("good"))
    ended, peak = imgsum.peak_memory("check", "--ignore-missing", "sums")
    assert (ended.text, ended.status) == ("good: OK\n", 0)
    assert peak < 64 << 20


@pytest.mark.parametrize("output_format", ["qcow2", "vmdk", "vdi"])
def test_the_sum_of_one_format_verifies_another(
    imgsum: Imgsum, here: Path, tool: Callable[[str], str], output_format: str
) -> None:
    reference.write("100k:R 1m:- 924k:A", here / "disk.raw")
    (here / "sums").write_bytes(lines("disk", sum=reference.blkhash((here / "disk.raw").read_bytes())))
    subprocess.run([tool("qemu-img"), "convert", "-O", output_format, "disk.raw", "disk"], check=True)
    assert imgsum("check", "sums") == (b"disk: OK\n", b"", 0)


def test_json(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("good", "bad", "missing") + b"hello\n")
    ended = imgsum("check", "--json", "sums")
    records = [json.loads(line) for line in ended.text.splitlines()]
    assert all(record["schema"] == 1 and record["sums"] == "sums" for record in records)
    assert [(record["line"], record["status"]) for record in records] == [
        (1, "ok"), (2, "mismatch"), (3, "error"), (4, "malformed"),
    ]  # fmt: skip
    assert [record.get("name") for record in records] == ["good", "bad", "missing", None]
    assert [record.get("expected") for record in records] == [SUM, SUM, SUM, None]
    assert [record.get("checksum") for record in records] == [
        SUM, reference.blkhash((here / "bad").read_bytes()), None, None,
    ]  # fmt: skip
    assert records[0]["size"] == 512
    assert records[0]["format"] == "raw"
    assert (records[0]["algorithm"], records[0]["block_size"]) == ("sha256", 65536)
    assert records[1]["reason"] == DIFFERS
    assert records[2]["error"] == "no such file or directory"
    assert ended.status == 2
    ended = imgsum("check", "--json", "-q", "--ignore-missing", stdin=lines("good", "bad", "missing"))
    assert [json.loads(line)["status"] for line in ended.text.splitlines()] == ["mismatch"]
    ended = imgsum("check", "--json", stdin=lines("missing"), env={"LC_ALL": "C"})
    assert json.loads(ended.stdout)["status"] == "error"


def test_progress(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("good", "bad", "missing", "good"))
    ended = imgsum("check", "-p", "sums")
    assert ended.text == "good: OK\nbad: FAILED\nmissing: FAILED open or read\ngood: OK\n"
    assert ended.errors.count("imgsum: good: 100% (512 B of 512 B)\n") == 2
    reader, to_write = os.pipe()
    started = imgsum.start("check", "--progress-fd", str(to_write), "sums", pass_fds=[to_write])
    os.close(to_write)
    assert started.finish().status == 2
    assert os.read(reader, 1000) == b"0/100\n25/100\n50/100\n75/100\n100/100\n"
    os.close(reader)


@pytest.mark.parametrize(
    ("rest", "percents"),
    [
        (b"# nothing\n", [0, 50, 100]),  # that there is none is a verdict
        (b" \t# a comment\n\r\n \n", [0, 50, 100]),
        (b"hello\n", [0, 50, 100]),
        (b"hello\n" + lines("good"), [0, 33, 66, 100]),
        (b"hello\n" * 2000, [0, 50, 100]),
        (b"\xef\xbb\xbf# a comment\r\n" + lines("good"), [0, 50, 100]),
        (b"x" * 100_000 + b"\n" + lines("good"), [0, 33, 66, 100]),
    ],
)
def test_progress_counts_what_has_a_verdict(imgsum: Imgsum, here: Path, rest: bytes, percents: list[int]) -> None:
    (here / "sums").write_bytes(lines("good"))
    (here / "rest").write_bytes(rest)
    reader, to_write = os.pipe()
    imgsum("check", "--progress-fd", str(to_write), "sums", "rest", pass_fds=[to_write])
    os.close(to_write)
    expected = "".join(f"{percent}/100\n" for percent in sorted(set(percents)))
    assert os.read(reader, 1000).decode() == expected
    os.close(reader)


@pytest.mark.parametrize(
    "arguments", [("-a", "nosuch"), ("-b", "3"), ("-f", "nosuch"), ("--nosuch",), ("--construction", "x"), ("-a",)]
)
def test_usage_errors(imgsum: Imgsum, here: Path, arguments: tuple[str, ...]) -> None:
    ended = imgsum("check", *arguments, stdin=lines("good"))
    assert (ended.stdout, ended.status) == (b"", 2)
    assert ended.errors.startswith("imgsum: ")
    assert "Traceback" not in ended.errors


def test_full_disk_and_closed_pipe(imgsum: Imgsum, here: Path) -> None:
    (here / "sums").write_bytes(lines("good"))
    with open("/dev/full", "wb") as full:
        ended = imgsum("check", "sums", stdout=full)
    assert ended.status == 2
    assert "no space left on device" in ended.errors
    reader, to_write = os.pipe()
    os.close(reader)
    ended = imgsum("check", "sums", stdout=to_write)
    os.close(to_write)
    assert (ended.stderr, ended.status) == (b"", -13)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_pipe_that_does_not_block(imgsum: Imgsum, here: Path, stream: str) -> None:
    (here / "sums").write_bytes(lines("good" if stream == "stdout" else "missing"))
    reader, to_write = os.pipe()
    os.set_blocking(to_write, False)
    full = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            full += os.write(to_write, b"x" * 4096)
    started = imgsum.start("check", "sums", **{stream: to_write})
    os.close(to_write)
    wait_until_it_waits(started.process.pid)
    with open(reader, "rb") as pipe:
        told = pipe.read()[full:]
    ended = started.finish()
    if stream == "stdout":
        assert (told, ended.stderr, ended.status) == (b"good: OK\n", b"", 0)
    else:
        assert told.startswith(b"imgsum: missing: no such file or directory\nimgsum: WARNING: 1 listed file")
        assert ended.status == 2


# --- Python ---------------------------------------------------------------------------------------------------------


def test_the_python_function(here: Path) -> None:
    (here / "sums").write_bytes(lines("good"))
    report = api.check(here / "sums")
    assert report
    assert [(verdict.status, verdict.number) for verdict in report.verdicts] == [("ok", 1)]
    for text in (b"", b"# nothing\n", lines("good", "bad"), lines("good", "missing"), lines("good") + b"x\n"):
        (here / "sums").write_bytes(text)
        assert not api.check("sums")
    assert not api.check("no such file")
    content = (here / "good").read_bytes()
    (here / "sums").write_bytes(lines("good", sum=reference.blkhash(content, "blake3", 4096)))
    assert api.check("sums", algorithm="blake3", block_size=4096)


def test_untrusted_sums_connect_to_nothing(here: Path) -> None:
    os.mkfifo("fifo")
    (here / "sums").write_bytes(lines("nbd://localhost:1/", "nbd+unix:///?socket=x", "fifo", "-", "good"))
    report = api.check("sums", options=api.OpenOptions(untrusted=True, format="raw"))
    assert [verdict.status for verdict in report.verdicts] == ["error"] * 4 + ["ok"]
    assert all(isinstance(verdict.error, RefusedError) for verdict in report.verdicts[:4])


def test_untrusted_needs_a_format(imgsum: Imgsum, here: Path) -> None:
    message = "--untrusted needs -f: what an image says of itself does not count\n"
    ended = imgsum("check", "--untrusted", stdin=lines("good"))
    assert (ended.text, ended.status) == ("good: FAILED open or read\n", 2)
    assert ended.errors.startswith(f"imgsum: good: {message}")
    assert imgsum("check", "--untrusted", "-f", "raw", stdin=lines("good")).status == 0
    ended = imgsum("compare", "--untrusted", "-f", "raw", "good", "bad")  # -F is missing
    assert ended == (b"", f"imgsum: bad: {message}".encode(), 2)
    assert imgsum("compare", "--untrusted", "-f", "raw", "-F", "raw", "good", "bad").status == 1


def test_a_stream_larger_than_allowed(imgsum: Imgsum) -> None:
    options = ("checksum", "--untrusted", "-f", "raw", "--max-size")
    assert imgsum(*options, "512", stdin=bytes(512)).status == 0
    ended = imgsum(*options, "511", stdin=bytes(512))
    assert ended == (b"", b"imgsum: -: has more bytes of content than the 511 of --max-size\n", 2)


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["check -", "check fifo-sums", "compare big fifo", "compare --all --json fifo big"])
def test_a_signal_ends_it_quietly(imgsum: Imgsum, here: Path, number: signal.Signals, command: str) -> None:
    (here / "fifo-sums").write_bytes(lines("good", "fifo"))
    reference.write("3m:R", here / "big")
    os.mkfifo("fifo")
    reader, to_write = os.pipe()  # standard input: one good line, and then nothing
    os.write(to_write, lines("good") + lines("big")[:70])
    started = imgsum.start(*command.split(), stdin=reader)
    writer = os.open("fifo", os.O_RDWR)  # so that neither side waits to open it
    os.write(writer, b"x" * 1000)
    wait_until_it_waits(started.process.pid)
    started.signal(number)
    ended = started.finish()
    for fd in (reader, to_write, writer):
        os.close(fd)
    assert ended.status == -number
    assert ended.stderr == b""
