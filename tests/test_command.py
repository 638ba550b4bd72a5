"""`imgsum checksum` as a process: exact output, messages and status."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
from conftest import Imgsum

from imgsum import __version__
from imgsum.commands import COMMANDS
from imgsum.commands.parser import command_parser

SUM_A = reference.blkhash(b"A" * 512)


@pytest.fixture
def disk(here: Path) -> str:
    (here / "disk.raw").write_bytes(b"A" * 512)
    return "disk.raw"


def usage_error(result: Any, *words: str) -> None:
    """RESULT is one line on stderr that has these WORDS, and nothing else."""
    assert result.stdout == b""
    assert result.errors.startswith("imgsum: ")
    assert result.errors.count("\n") == 1
    for word in words:
        assert word in result.errors
    assert result.status == 2


# --- lines --------------------------------------------------------------------------------------------------------


def test_a_line(disk: str, imgsum: Imgsum) -> None:
    assert imgsum("checksum", disk) == (f"{SUM_A}  disk.raw\n".encode(), b"", 0)


def test_the_note_on_odd_sizes(here: Path, imgsum: Imgsum) -> None:
    (here / "odd").write_bytes(b"A" * 1000)
    line = f"{reference.blkhash(b'A' * 1000)}  odd\n".encode()
    result = imgsum("checksum", "odd")
    assert (result.stdout, result.status) == (line, 0)
    assert result.errors.startswith("imgsum: odd: the size, 1000 bytes, is not a multiple of 512")
    assert result.errors.count("\n") == 1
    assert imgsum("checksum", "-q", "odd") == (line, b"", 0)


@pytest.mark.parametrize(
    ("options", "tag"),
    [
        ([], "BLKHASH-SHA256"),
        (["-a", "SHA3_256"], "BLKHASH-SHA3-256"),
        (["-a", "blake2b512"], "BLKHASH-BLAKE2B"),
        (["-a", "xxh128"], "BLKHASH-XXH3-128"),
        (["-b", "64k"], "BLKHASH-SHA256"),
        (["-a", "blake3", "-b", "1m"], "BLKHASH-BLAKE3/1M"),
        (["-b", "512"], "BLKHASH-SHA256/512"),
        (["--construction=imageio"], "IMAGEIO"),
    ],
)
def test_tags(options: list[str], tag: str, disk: str, imgsum: Imgsum) -> None:
    plain = imgsum("checksum", *options, disk)
    assert plain.status == 0
    digest = plain.text.split()[0]
    assert imgsum("checksum", "--tag", *options, disk) == (f"{tag} (disk.raw) = {digest}\n".encode(), b"", 0)


NAMES = [
    b"a b",
    b"new\nline",
    b"back\\slash",
    b"c\rr",
    b"\\n",
    b"-f",
    b"--",
    b"caf\xc3\xa9",
    b"\xff\xfe",
    b"\x1b[2K",
    b")",
    b" x ",
]


def coreutils_line(digest: str, name: bytes, tag: bool = False) -> bytes:
    """As sha256sum writes it: a backslash first when a backslash, newline or CR in the name is escaped."""
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    mark = b"\\" if escaped != name else b""
    value = digest.encode()
    return mark + (b"BLKHASH-SHA256 (" + escaped + b") = " + value if tag else value + b"  " + escaped) + b"\n"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
@pytest.mark.parametrize("name", NAMES)
def test_names(name: bytes, locale: str, here: Path, imgsum: Imgsum) -> None:
    (here / os.fsdecode(name)).write_bytes(b"A" * 512)
    env = {"LC_ALL": locale}
    assert imgsum("checksum", "--", name, env=env) == (coreutils_line(SUM_A, name), b"", 0)
    assert imgsum("checksum", "--tag", "--", name, env=env).stdout == coreutils_line(SUM_A, name, tag=True)
    assert imgsum("checksum", "-z", "--", name, env=env).stdout == SUM_A.encode() + b"  " + name + b"\0"
    record = json.loads(imgsum("checksum", "--json", "--", name, env=env).stdout)
    assert record["checksum"] == SUM_A
    assert base64.b64decode(record.get("name_b64", "")) == (name if name == b"\xff\xfe" else b"")
    if name != b"\xff\xfe":
        assert record["name"] == name.decode()


def test_escapes_as_sha256sum_does(here: Path, imgsum: Imgsum, tool: Callable[[str], str]) -> None:
    for name in NAMES:
        (here / os.fsdecode(name)).write_bytes(b"A" * 512)
    ours = imgsum("checksum", "--", *NAMES).stdout
    theirs = subprocess.run([tool("sha256sum"), "--", *NAMES], capture_output=True, check=True).stdout
    digests = re.compile(rb"[0-9a-f]{64}")
    assert digests.sub(b"", ours) == digests.sub(b"", theirs)


@pytest.mark.parametrize("options", [[], ["--tag"], ["-a", "blake3", "--tag", "-b", "1m"]])
def test_what_checksum_prints_check_takes(options: list[str], here: Path, imgsum: Imgsum) -> None:
    for name in NAMES:
        (here / os.fsdecode(name)).write_bytes(b"A" * 512)
    (here / "SUMS").write_bytes(imgsum("checksum", *options, "--", *NAMES, env={"LC_ALL": "C"}).stdout)
    result = imgsum("check", "SUMS", env={"LC_ALL": "C"})
    assert (result.stderr, result.status) == (b"", 0)
    assert result.stdout.count(b": OK\n") == len(NAMES)


def test_images_in_the_order_given(here: Path, imgsum: Imgsum) -> None:
    names = [f"{i}" for i in (5, 3, 9, 1, 1, 7)]
    for name in names:
        (here / name).write_bytes(name.encode() * 512)
    expected = "".join(f"{reference.blkhash(name.encode() * 512)}  {name}\n" for name in names)
    assert imgsum("checksum", *names) == (expected.encode(), b"", 0)


def test_one_that_fails_and_the_rest_go_on(disk: str, here: Path, imgsum: Imgsum) -> None:
    (here / "dir").mkdir()
    result = imgsum("checksum", "missing", disk, "dir", "/dev/null", disk)
    assert result.text == f"{SUM_A}  disk.raw\n" * 2
    assert result.errors.splitlines() == [
        "imgsum: missing: no such file or directory",
        "imgsum: dir: is a directory",
        "imgsum: /dev/null: is a character device",
    ]
    assert result.status == 2


def test_names_are_quoted_in_messages(here: Path, imgsum: Imgsum) -> None:
    result = imgsum("checksum", b"a\x1b[2K\xffb\nc", env={"LC_ALL": "C"})
    assert (result.errors, result.status) == ("imgsum: a\\x1b[2K\\xffb\\nc: no such file or directory\n", 2)


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_json(disk: str, imgsum: Imgsum) -> None:
    result = imgsum("checksum", "--json", "-b", "4k", "-a", "sha1", disk, "missing")
    good, bad = map(json.loads, result.stdout.splitlines())
    assert good == {
        "schema": 1,
        "name": "disk.raw",
        "checksum": reference.blkhash(b"A" * 512, "sha1", 4096),
        "algorithm": "sha1",
        "block_size": 4096,
        "size": 512,
        "format": "raw",
    }
    assert bad == {"schema": 1, "name": "missing", "error": "no such file or directory"}
    assert result.errors == "imgsum: missing: no such file or directory\n"
    assert result.status == 2


def test_json_names_the_image_also_where_another_file_is_at_fault(
    here: Path, imgsum: Imgsum, tool: Callable[[str], str]
) -> None:
    for args in (["base.qcow2", "1M"], ["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]):
        subprocess.run([tool("qemu-img"), "create", "-q", "-f", "qcow2", *args], check=True)
    (here / "base.qcow2").unlink()
    result = imgsum("checksum", "--json", "top.qcow2")
    record = json.loads(result.stdout)
    assert record["name"] == "top.qcow2"
    assert "base.qcow2" in record["error"]
    assert "checksum" not in record
    assert "base.qcow2" in result.errors
    assert result.status == 2


@pytest.mark.parametrize("name", ["é.raw", "€.raw", "\U0001f4be", b"\xff\xe9", b"\xc3"])
@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}]
)
def test_json_in_any_locale(name: str | bytes, locale: dict[str, str], here: Path, imgsum: Imgsum) -> None:
    raw = name if isinstance(name, bytes) else name.encode()
    (here / os.fsdecode(raw)).write_bytes(b"A" * 512)
    made = imgsum("checksum", "--json", raw, b"missing-" + raw, env=locale)
    records = [json.loads(line) for line in made.stdout.splitlines()]
    for record, expected in zip(records, (raw, b"missing-" + raw), strict=True):
        encoded = record.get("name_b64", base64.b64encode(record["name"].encode()))
        assert base64.b64decode(encoded) == expected
    (here / os.fsdecode(b"SUMS-" + raw)).write_bytes(made.stdout.splitlines()[0] + b"\n")
    result = imgsum("check", "--json", b"SUMS-" + raw, env=locale)
    assert json.loads(result.stdout)["status"] == "ok"
    result = imgsum("compare", "--json", raw, raw, env=locale)
    assert json.loads(result.stdout)["identical"]


def test_json_stats(here: Path, imgsum: Imgsum) -> None:
    reference.write("64k:A 1m:- 64k:B", here / "disk")
    stats = json.loads(imgsum("checksum", "--json", "--stats", "-T", "none", "disk").stdout)["stats"]
    assert stats["bytes_read"] + stats["zero_bytes"] == (1 << 20) + (128 << 10)
    assert stats["extents"] >= 1
    assert stats["requests"] >= 1
    assert stats["seconds"] > 0
    assert stats["cache"] in ("none", "writeback")
    assert list(stats) == ["bytes_read", "zero_bytes", "extents", "requests", "seconds", "reused_bytes", "cache"]


def test_stats_for_people(here: Path, imgsum: Imgsum) -> None:
    reference.write("64k:A", here / "disk")
    result = imgsum("checksum", "--stats", "disk")
    assert result.text == f"{reference.blkhash(b'A' * 65536)}  disk\n"
    assert result.errors.startswith("imgsum: disk: read 64.0 KiB in 1 requests, skipped 0 B of zeros, ")
    assert result.errors.count("\n") == 1


def test_usage_errors_with_json_print_nothing_that_is_not_json(imgsum: Imgsum) -> None:
    usage_error(imgsum("checksum", "--json", "--nonsense"))


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [["-q", "--", "disk.raw"], ["disk.raw", "-q"], ["-q", "disk.raw", "--tag", "disk.raw"]]
)
def test_options_and_names_mix(args: list[str], disk: str, imgsum: Imgsum) -> None:
    result = imgsum("checksum", *args)
    line = "BLKHASH-SHA256 (disk.raw) = {}\n" if "--tag" in args else "{}  disk.raw\n"
    assert result == (line.format(SUM_A).encode() * args.count("disk.raw"), b"", 0)


def test_clusters_and_equals_signs(disk: str, imgsum: Imgsum) -> None:
    digest = reference.blkhash(b"A" * 512, "sha1", 4096)
    for args in (
        ["-qzasha1", "-b4k"],
        ["-z", "-q", "--algorithm=sha1", "--block-size=4k"],
        ["-qz", "-a", "sha1", "-b", "4K"],
    ):
        assert imgsum("checksum", *args, disk) == (f"{digest}  disk.raw\0".encode(), b"", 0)


def test_after_two_dashes_everything_is_a_name(here: Path, imgsum: Imgsum) -> None:
    for name in ("-f", "--json", "--"):
        (here / name).write_bytes(b"A" * 512)
    assert imgsum("checksum", "--", "-f", "--json", "--").text == "".join(
        f"{SUM_A}  {name}\n" for name in ("-f", "--json", "--")
    )


def _options() -> list[tuple[str, str, bool]]:
    return [
        (command, option, action.nargs != 0)
        for command in COMMANDS
        for action in command_parser(command)._actions
        for option in action.option_strings
    ]


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, o, takes_value in _options() if takes_value])
def test_an_option_last_without_its_value(command: str, option: str, disk: str, imgsum: Imgsum) -> None:
    usage_error(imgsum(command, disk, option), option, "needs a value")


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, o, v in _options() if not v and o.startswith("--")])
def test_an_option_with_a_value_too_many(command: str, option: str, disk: str, imgsum: Imgsum) -> None:
    usage_error(imgsum(command, f"{option}=x", disk), option)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["help", "nonsense"],
        ["-q", "disk.raw"],
        ["--nonsense"],
        ["checksum", "--nonsense", "disk.raw"],
        ["checksum", "-x", "disk.raw"],
        ["checksum", "--algo=sha1", "disk.raw"],  # no abbreviations: they break when options are added
        ["checksum", "-a", "nonsense", "disk.raw"],
        ["checksum", "-a", "", "disk.raw"],
        ["checksum", "-b", "0", "disk.raw"],
        ["checksum", "-b", "1000", "disk.raw"],
        ["checksum", "-b", "64m", "disk.raw"],
        ["checksum", "-b", "-64k", "disk.raw"],
        ["checksum", "--construction", "nonsense", "disk.raw"],
        ["checksum", "--construction", "imageio", "-a", "sha256", "disk.raw"],
        ["checksum", "-f", "nonsense", "disk.raw"],
        ["checksum", "-f", "", "disk.raw"],
        ["checksum", "-f", "RAW", "disk.raw"],
        ["checksum", "-T", "writethrough", "disk.raw"],
        ["checksum", "--request-size", "2k", "disk.raw"],
        ["checksum", "--request-size", "64m", "disk.raw"],
        ["checksum", "--request-size", "5k", "disk.raw"],
        ["checksum", "--queue-size", "x", "disk.raw"],
        ["checksum", "--offset", "-1", "disk.raw"],
        ["checksum", "--offset=-1", "disk.raw"],
        ["checksum", "--offset=1.5", "disk.raw"],
        ["checksum", "--length=9223372036854775808", "disk.raw"],
        ["checksum", "--progress-fd=99", "disk.raw"],
        ["checksum", "--progress-fd=-1", "disk.raw"],
        ["checksum", "--progress-fd=99999999999999999999", "disk.raw"],
        ["checksum", "--progress-fd=x", "disk.raw"],
        ["checksum", "--untrusted", "disk.raw"],
        ["checksum", "--max-size=x", "disk.raw"],
        ["checksum", "["],
        ["checksum", "[", "]"],
        ["algorithms", "disk.raw"],
    ],
)
def test_usage_errors(args: list[str], disk: str, imgsum: Imgsum) -> None:
    usage_error(imgsum(*args))


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["disk.raw"], "imgsum checksum disk.raw"),
        (["missing image.qcow2", "-q"], "imgsum checksum 'missing image.qcow2' -q"),
        (["nbd://localhost/"], "imgsum checksum nbd://localhost/"),
        (["[", "nbdkit", "]"], "imgsum checksum [ nbdkit ']'"),
        (["checksm", "disk.raw"], "imgsum checksum disk.raw"),
        (["chekc", "SUMS"], "imgsum check SUMS"),
        (["algorithm"], "imgsum algorithms"),
        (["-c", "SUMS"], "imgsum check SUMS"),
        (["verify", *"abcdefgh"], "imgsum check a b c d ..."),
        (["checksum", "-c", "SUMS"], "imgsum check"),
        (["checksum", "--check", "SUMS"], "imgsum check"),
    ],
)
def test_what_was_meant(args: list[str], meant: str, disk: str, imgsum: Imgsum) -> None:
    usage_error(imgsum(*args), f"did you mean {meant!r}?" if "'" not in meant else f"did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-q=1"], "-q/--quiet takes no value, and was given '1'"),
        (["--json=yes"], "--json takes no value, and was given 'yes'"),
        (["-T", "writethrough"], "-T/--cache can't be 'writethrough', only one of: "),
        (["-b", "5k"], "-b/--block-size: not a power of two from 512 to 32M: '5k'"),
        (["--length=9223372036854775808"], "--length: size is too large: '9223372036854775808'"),
        (["--ignore-malformed", "--strict"], "--strict and --ignore-malformed exclude each other"),
    ],
)
def test_options_are_explained_in_plain_english(args: list[str], told: str, disk: str, imgsum: Imgsum) -> None:
    usage_error(imgsum("check", *args, disk), f"imgsum: {told}")


def on_a_terminal(*args: str) -> str:
    """What imgsum writes to a terminal, on which Ctrl-D is pressed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "imgsum", *args]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, b"\x04" * 3)
        text = b""
        with contextlib.suppress(OSError):  # the other side has closed
            while data := os.read(ours, 65536):
                text += data
        process.wait()
    os.close(ours)
    return text.decode()


def test_on_a_terminal_it_says_that_it_waits(here: Path) -> None:
    note = "from standard input, as no name was given (Ctrl-D ends it, Ctrl-C gives up)"
    assert f"imgsum: reading the image {note}" in on_a_terminal("checksum")
    assert f"imgsum: reading checksum lines {note}" in on_a_terminal("check")
    for args in (["checksum", "-q"], ["checksum", "-"], ["check", "-"]):
        assert "reading" not in on_a_terminal(*args)


def test_control_characters_of_arguments_do_not_reach_the_terminal(imgsum: Imgsum) -> None:
    for args in (["\x1b[2K"], ["checksum", "--\x1b[2K"], ["checksum", "-f", "\x1b[2K"], ["checksum", "-a", "\x1b[2K"]):
        result = imgsum(*args)
        usage_error(result)
        assert "\x1b" not in result.errors
    usage_error(imgsum("checksum", b"--\xff\xfe", env={"LC_ALL": "C"}))


@pytest.mark.parametrize("args", [["--version"], ["-V"], ["checksum", "--version"], ["check", "-V"]])
def test_version(args: list[str], imgsum: Imgsum) -> None:
    assert imgsum(*args) == (f"imgsum {__version__}\n".encode(), b"", 0)


@pytest.mark.parametrize(
    "args", [["help"], ["help", "check"], ["--help"], ["-h"], *[[command, "--help"] for command in COMMANDS]]
)
def test_help(args: list[str], imgsum: Imgsum) -> None:
    result = imgsum(*args)
    assert result.text.startswith("usage: imgsum")
    assert (result.stderr, result.status) == (b"", 0)


def test_algorithms(imgsum: Imgsum) -> None:
    result = imgsum("algorithms")
    assert (result.stderr, result.status) == (b"", 0)
    names = [line.split()[0] for line in result.text.splitlines()]
    records = [json.loads(line) for line in imgsum("algorithms", "--json").stdout.splitlines()]
    assert [record["algorithm"] for record in records] == names
    for line, record in zip(result.text.splitlines(), records, strict=True):
        assert ("not cryptographic" in line) == (not record["cryptographic"]) == record["algorithm"].startswith("xxh")
        assert f"{record['bits']} bits" in line


WITHOUT_PACKAGES = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("blake3", "xxhash", "isal", "backports.zstd", "compression.zstd"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from imgsum.cli import main
main()
"""


def test_without_the_packages_that_distributions_lack(
    disk: str, here: Path, imgsum: Imgsum, tool: Callable[[str], str]
) -> None:
    lines = [imgsum("checksum", "--tag", "-a", name, disk).text for name in ("blake3", "sha256", "xxh64")]
    (here / "SUMS").write_text("".join(lines))
    (here / "BLAKE3").write_text(lines[0])
    for kind in ("zlib", "zstd"):
        create = [tool("qemu-img"), "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", f"compression_type={kind}"]
        subprocess.run([*create, disk, f"{kind}.qcow2"], check=True)
    imgsum.command = [*imgsum.command[:1], "-c", WITHOUT_PACKAGES]
    result = imgsum("check", "SUMS")
    assert (result.text, result.status) == ("disk.raw: OK\n", 2)
    needs = "needs a package that is not installed: pip install"
    assert result.errors.splitlines() == [
        f"imgsum: SUMS: line 1: blake3 {needs} blake3",
        f"imgsum: SUMS: line 3: xxh64 {needs} xxhash",
        "imgsum: WARNING: 2 lines are improperly formatted",
    ]
    result = imgsum("check", "BLAKE3")
    assert (result.text, result.status) == ("", 2)
    assert f"imgsum: BLAKE3: line 1: blake3 {needs} blake3\n" in result.errors
    usage_error(imgsum("checksum", "-a", "blake3", disk), f"imgsum: blake3 {needs} blake3")
    usage_error(imgsum("checksum", "-a", "xxh128", disk), f"imgsum: xxh3-128 {needs} xxhash")
    result = imgsum("algorithms")
    assert f"blake3       {needs} blake3\n" in result.text
    assert "sha256        256 bits  (default)  by " in result.text
    assert (result.stderr, result.status) == (b"", 0)
    records = [json.loads(line) for line in imgsum("algorithms", "--json").text.splitlines()]
    assert {record["algorithm"] for record in records if "error" in record} == {
        "blake3",
        "xxh3-128",
        "xxh3-64",
        "xxh64",
    }
    result = imgsum("checksum", disk, "zlib.qcow2", "zstd.qcow2")
    assert result.text == f"{SUM_A}  disk.raw\n{SUM_A}  zlib.qcow2\n"
    assert "zstd.qcow2: is compressed with zstd: install backports.zstd (`pip install backports.zstd`)" in result.errors
    assert result.status == 2


# --- what else the options do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 511, 512])
def test_max_size_that_is_too_small(size: int, disk: str, imgsum: Imgsum) -> None:
    for more in ([], ["--untrusted", "-f", "raw"]):
        result = imgsum("checksum", f"--max-size={size}", *more, disk)
        if size < 512:
            usage_error(result, "disk.raw", "512")
        else:
            assert result == (f"{SUM_A}  disk.raw\n".encode(), b"", 0)


def test_max_size_of_a_stream(imgsum: Imgsum) -> None:
    content = b"A" * 100_000
    usage_error(imgsum("checksum", "--max-size=99999", stdin=content), "-: ")
    assert imgsum("checksum", "--max-size=100000", stdin=content).status == 0


def test_untrusted_raw(disk: str, imgsum: Imgsum) -> None:
    assert imgsum("checksum", "--untrusted", "-f", "raw", disk).text == f"{SUM_A}  disk.raw\n"


def test_debug_shows_where(here: Path, imgsum: Imgsum) -> None:
    result = imgsum("checksum", "missing", env={"IMGSUM_DEBUG": "1"})
    assert "Traceback" in result.errors
    assert result.errors.endswith("imgsum: missing: no such file or directory\n")
    assert result.status == 2


def test_a_bug_of_ours_is_one_line_too(disk: str, imgsum: Imgsum) -> None:
    imgsum.command = [
        *imgsum.command[:1],
        "-c",
        "import imgsum.engine.checksum, imgsum.cli\nimgsum.engine.checksum.BlkHash = None\nimgsum.cli.main()",
    ]
    usage_error(imgsum("checksum", disk), "internal error", "TypeError", "IMGSUM_DEBUG=1")


def test_too_few_descriptors(here: Path, imgsum: Imgsum) -> None:
    import resource

    names = [f"{i}" for i in range(100)]
    for name in names:
        (here / name).write_bytes(b"A" * 512)
    result = imgsum("checksum", *names, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)))
    good, bad = result.text.splitlines(), result.errors.splitlines()
    assert len(good) + len(bad) == 100
    assert all(line.startswith(SUM_A) for line in good)
    assert all("too many open files" in line for line in bad)
    assert result.status == (2 if bad else 0)


# --- words that must never be run -----------------------------------------------------------------------------------

TOUCH = ["[", "touch", "RAN", "]"]


@pytest.mark.parametrize(
    "args",
    [
        ["checksum", "--", *TOUCH],
        ["checksum", "-q", "--", "disk.raw", *TOUCH],
        ["compare", "--", *TOUCH, "disk.raw"],
        ["compare", "--", "disk.raw", *TOUCH],
        ["check", "--", *TOUCH],
        ["checksum", "[", "--", "touch", "RAN", "]"],
        ["checksum", "[", "touch", "--", "RAN", "]"],
        ["checksum", "[", "touch", "RAN", "--", "]"],
        ["checksum", "--untrusted", "-f", "raw", *TOUCH],
        ["checksum", *TOUCH, "--untrusted", "-f", "raw"],
        ["checksum", "--untrusted", "-f", "raw", "--", *TOUCH],
        ["compare", "--untrusted", "-f", "raw", "-F", "raw", "disk.raw", *TOUCH],
        ["check", "--untrusted", "-f", "raw", *TOUCH],
    ],
)
def test_names_are_never_run(args: list[str], disk: str, here: Path, imgsum: Imgsum) -> None:
    assert imgsum(*args).status == 2
    assert not (here / "RAN").exists()


def test_a_sums_file_never_runs_a_command(disk: str, here: Path, imgsum: Imgsum) -> None:
    name = "[ touch RAN ]"
    (here / "SUMS").write_text(f"{SUM_A}  {name}\nBLKHASH-SHA256 ({name}) = {SUM_A}\n")
    assert imgsum("check", "SUMS").status == 2
    assert not (here / "RAN").exists()


def test_brackets_after_two_dashes_are_names(here: Path, imgsum: Imgsum) -> None:
    for name in ("[", "]"):
        (here / name).write_bytes(b"A" * 512)
    assert imgsum("checksum", "--", "[", "]").text == f"{SUM_A}  [\n{SUM_A}  ]\n"


@pytest.mark.parametrize("environment", [{}, {"IMGSUM_DEBUG": "1"}])
def test_debug_says_what_is_done(imgsum: Imgsum, here: Path, environment: dict[str, str]) -> None:
    reference.write("64k:A 1m:- 64k:B", here / "image\n")
    options = [] if environment else ["--debug"]
    result = imgsum("checksum", *options, "image\n", env={**os.environ, **environment})
    lines = result.errors.splitlines()
    assert all(line.startswith("imgsum: debug: ") for line in lines)
    assert "imgsum: debug: image\\n: opened as raw, 1179648 bytes" in lines
    assert "imgsum: debug: image\\n: 65536 bytes at 0: data" in lines
    assert "imgsum: debug: image\\n: 1048576 bytes at 65536: zero" in lines
    assert "imgsum: debug: image\\n: read 65536 bytes at 1114112" in lines
    assert imgsum("checksum", "image\n").stdout == result.stdout
