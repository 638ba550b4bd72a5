"""qcow2 images as sources: chains, data files, snapshots, compressed clusters, refusals, and what is read of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import find_tool
from qcow2_build import BACKING_FORMAT, COPIED, DATA_FILE, compressed_entry, deflate, header, image
from qcow2_images import raw_content, run
from reference import blkhash

import imgsum
from imgsum import OpenOptions
from imgsum.errors import ChangedError, Error, FormatError, OpenError, RefusedError, TruncatedError, UsageError
from imgsum.source import compressed, open_source
from imgsum.source.file import HostFile
from imgsum.source.layers import MAX_LAYERS

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
CLUSTER = 64 * KIB


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def qemu() -> Callable[..., str]:
    """qemu(WORD, ...): run a command of QEMU's, in the test's directory."""
    find_tool("qemu-img")
    find_tool("qemu-io")
    return run


def create(qemu: Callable[..., str], name: str, size: int, *options: str) -> None:
    qemu("qemu-img", "create", "-q", "-f", "qcow2", *options, name, size)


def write(qemu: Callable[..., str], name: str, *commands: str) -> None:
    qemu("qemu-io", "-f", "qcow2", *(word for command in commands for word in ("-c", command)), name)


def checksum(name: str | Path, **options: object) -> str:
    return imgsum.checksum(name, options=OpenOptions(**options)).hexdigest  # type: ignore[arg-type]


def same_as_qemu(name: str) -> None:
    assert checksum(name) == blkhash(raw_content(Path(name)))


def refusal(name: str | Path, kind: type[Error], **options: object) -> str:
    with pytest.raises(kind) as caught:
        checksum(name, **options)
    return str(caught.value)


class TestChains:
    def test_sizes_that_differ(self, qemu: Callable[..., str]) -> None:
        Path("base").write_bytes(b"b" * (3 * MIB + 700))
        create(qemu, "middle", 1 * MIB + 512, "-b", "base", "-F", "raw")
        create(qemu, "top", 4 * MIB, "-b", "middle", "-F", "qcow2")
        write(qemu, "top", "write -P 1 2M 64k")
        same_as_qemu("top")
        same_as_qemu("middle")

    def test_a_base_that_ends_inside_a_sector(self, qemu: Callable[..., str]) -> None:
        Path("base").write_bytes(b"b" * (1 * MIB + 1))
        create(qemu, "top", 3 * MIB, "-b", "base", "-F", "raw")
        same_as_qemu("top")

    def test_relative_to_the_image_that_names_it(self, qemu: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        create(qemu, "a/b/base", MIB)
        write(qemu, "a/b/base", "write -P 7 0 64k")
        create(qemu, "a/middle", MIB, "-b", "b/base", "-F", "qcow2")
        create(qemu, "top", MIB, "-b", "a/middle", "-F", "qcow2")
        content = blkhash(b"\7" * CLUSTER + bytes(MIB - CLUSTER))
        assert checksum("top") == content
        os.symlink(tmp_path / "top", "a/b/link")
        assert "no such file" in refusal("a/b/link", OpenError)  # as in QEMU: by the path it was opened with

    def test_a_missing_base_is_named(self, qemu: Callable[..., str], tmp_path: Path) -> None:
        create(qemu, "base", MIB)
        create(qemu, "top", MIB, "-b", str(tmp_path / "base"), "-F", "qcow2")
        (tmp_path / "base").unlink()
        assert refusal("top", OpenError) == f"top: backing file {tmp_path}/base: no such file or directory"

    def test_a_broken_base_is_named(self, qemu: Callable[..., str]) -> None:
        create(qemu, "base", MIB)
        write(qemu, "base", "write -P 7 0 1M")
        create(qemu, "top", MIB, "-b", "base", "-F", "qcow2")
        os.truncate("base", 6 * CLUSTER)
        said = refusal("top", TruncatedError)
        assert said == (
            "top: backing file base: truncated: the file ends at byte 393216, before the data of the content"
            " at offset 65536"
        )

    def test_a_changed_base(self, qemu: Callable[..., str]) -> None:
        Path("base").write_bytes(b"b" * MIB)
        create(qemu, "top", MIB, "-b", "base", "-F", "raw")
        source = open_source("top", OpenOptions())
        try:
            source.check_unchanged()
            Path("base").write_bytes(b"c" * MIB)
            with pytest.raises(ChangedError, match="top: backing file base: the file was modified"):
                source.check_unchanged()
        finally:
            source.close()

    def test_loops(self, qemu: Callable[..., str]) -> None:
        create(qemu, "a", MIB)
        create(qemu, "b", MIB, "-b", "a", "-F", "qcow2")
        qemu("qemu-img", "rebase", "-u", "-b", "b", "-F", "qcow2", "a")
        assert "the backing chain is a loop" in refusal("a", RefusedError)
        create(qemu, "self", MIB)
        os.link("self", "itself")
        qemu("qemu-img", "rebase", "-u", "-b", "itself", "-F", "raw", "self")
        assert "the backing chain is a loop" in refusal("self", RefusedError)

    @pytest.mark.usefixtures("no_leak")
    def test_depth(self) -> None:
        def chain(depth: int) -> None:
            for number in range(depth):
                base = {"backing": b"%d" % (number - 1), "extensions": [(BACKING_FORMAT, b"qcow2")]} if number else {}
                raw = image([] if number else [5 << 9 | COPIED], {5: b"x" * 512}, 9, size=512, **base)
                Path(str(number)).write_bytes(raw)

        chain(MAX_LAYERS + 1)
        assert checksum(str(MAX_LAYERS - 1)) == blkhash(b"x" * 512)
        assert f"the backing chain has more than {MAX_LAYERS} images" in refusal(str(MAX_LAYERS), RefusedError)

    @pytest.mark.parametrize("name", [b"json:{}", b"nbd://localhost/x", b"file:base", b"http://h/x", b"a:b", b":"])
    def test_protocols_are_refused(self, name: bytes) -> None:
        raw = image([], backing=name, extensions=[(BACKING_FORMAT, b"raw")])
        Path("top").write_bytes(raw)
        said = refusal("top", RefusedError)
        assert f"the backing file '{name.decode()}' is not a plain path" in said
        assert "qemu-img rebase" in said

    def test_a_colon_after_a_slash_is_a_path(self) -> None:
        Path("a:b").write_bytes(b"b" * MIB)
        Path("top").write_bytes(image([], backing=b"./a:b", extensions=[(BACKING_FORMAT, b"raw")]))
        assert checksum("top") == blkhash(b"b" * MIB)

    def test_an_unrecorded_format_is_refused(self) -> None:
        Path("base").write_bytes(b"b" * MIB)
        Path("top").write_bytes(image([], backing=b"base"))
        said = refusal("top", RefusedError)
        assert "the format of the backing file 'base' is not recorded" in said
        assert "qemu-img rebase -u -F FORMAT -b base" in said

    def test_the_recorded_format_is_not_overruled(self, qemu: Callable[..., str]) -> None:
        create(qemu, "base", MIB)
        create(qemu, "top", MIB, "-b", "base", "-F", "qcow2")
        qemu("qemu-img", "rebase", "-u", "-b", "base", "-F", "raw", "top")
        size = os.path.getsize("base")
        content = (Path("base").read_bytes() + bytes(MIB))[:MIB]
        assert size < MIB
        assert checksum("top") == blkhash(content)

    def test_other_formats_are_for_qemu(self, qemu: Callable[..., str]) -> None:
        qemu("qemu-img", "create", "-q", "-f", "vmdk", "base", MIB)
        create(qemu, "top", MIB, "-b", "base", "-F", "vmdk")
        assert "the backing file 'base' is of the format vmdk" in refusal("top", RefusedError, reader="native")

    def test_directories_and_fifos(self, tmp_path: Path) -> None:
        (tmp_path / "directory").mkdir()
        os.mkfifo("fifo")
        for name in ("directory", "fifo"):
            raw = image([], backing=name.encode(), extensions=[(BACKING_FORMAT, b"raw")])
            Path("top").write_bytes(raw)
            assert f"backing file {name}: is a " in refusal("top", OpenError)

    def test_zero_length_name_is_none(self) -> None:
        Path("top").write_bytes(image([], backing_file_offset=1024, backing_file_size=0))
        assert checksum("top") == blkhash(bytes(MIB))

    def test_a_file_that_is_in_use_is_named(self, qemu: Callable[..., str]) -> None:
        create(qemu, "base", MIB)
        create(qemu, "top", MIB, "-b", "base", "-F", "qcow2")
        with subprocess.Popen(
            [find_tool("qemu-io"), "-f", "qcow2", "base"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as user:
            assert user.stdin is not None
            assert user.stdout is not None
            user.stdin.write(b"read 0 512\n")
            user.stdin.flush()
            user.stdout.readline()  # so it is open
            assert "top: backing file base: is in use" in refusal("top", RefusedError)
            assert checksum("top", force_share=True) == blkhash(bytes(MIB))
            user.stdin.write(b"quit\n")


class TestDataFiles:
    def test_data(self, qemu: Callable[..., str]) -> None:
        create(qemu, "image", 3 * MIB, "-o", "data_file=data")
        write(qemu, "image", "write -P 1 0 64k", "write -P 2 1M 100k", "write -z 1M 64k")
        same_as_qemu("image")
        os.truncate("data", MIB + 10)
        assert refusal("image", TruncatedError).startswith("image: truncated: the file ends at byte 1048586")

    def test_a_missing_data_file_is_named(self) -> None:
        Path("image").write_bytes(image([], incompatible_features=4, extensions=[(DATA_FILE, b"data")]))
        assert refusal("image", OpenError) == "image: external data file data: no such file or directory"

    def test_no_name(self) -> None:
        Path("image").write_bytes(image([], incompatible_features=4))
        assert "does not record its name" in refusal("image", FormatError)

    def test_protocols_are_refused(self) -> None:
        Path("image").write_bytes(image([], incompatible_features=4, extensions=[(DATA_FILE, b"json:{}")]))
        assert "the external data file 'json:{}' is not a plain path" in refusal("image", RefusedError)


class TestSnapshots:
    def test_each_is_what_it_was(self, qemu: Callable[..., str]) -> None:
        create(qemu, "image", 2 * MIB)
        now = []
        for number in (1, 2, 3):
            write(qemu, "image", f"write -P {number} {number * 64}k 200k")
            now.append(checksum("image"))
            qemu("qemu-img", "snapshot", "-c", f"name{number}", "image")
        qemu("qemu-img", "resize", "-q", "image", "3M")
        write(qemu, "image", "write -P 9 0 3M")
        assert [checksum("image", snapshot=f"name{number}") for number in (1, 2, 3)] == now
        assert [checksum("image", snapshot=str(number)) for number in (1, 2, 3)] == now
        same_as_qemu("image")
        # What was recorded of the size counts, as when the snapshot is applied.
        qemu("qemu-img", "snapshot", "-a", "name1", "image")
        assert checksum("image") == now[0]

    def test_as_qemu_exports_it(self, qemu: Callable[..., str]) -> None:
        create(qemu, "image", 2 * MIB)
        write(qemu, "image", "write -P 1 0 1M")
        qemu("qemu-img", "snapshot", "-c", "s", "image")
        write(qemu, "image", "write -P 2 512k 1M")
        assert checksum("image", snapshot="s") == blkhash(raw_content(Path("image"), "qcow2", "-l", "s"))

    def test_one_that_is_not_there(self, qemu: Callable[..., str]) -> None:
        create(qemu, "image", MIB)
        assert "has no snapshot 'x\\x1b'" in refusal("image", OpenError, snapshot="x\x1b")
        Path("raw").write_bytes(b"r" * 512)
        assert "a raw image has no snapshots" in refusal("raw", UsageError, snapshot="x")


def one_compressed(data: bytes, size: int = CLUSTER, cut: int | None = None, **fields: object) -> bytes:
    """An image of one compressed cluster, whose compressed bytes are DATA."""
    return image([compressed_entry(5 * CLUSTER, len(data))], {5: data}, size=size, file_size=cut, **fields)


TEXT = b"".join(b"line %d of a text\n" % number for number in range(9999))[:CLUSTER]


class TestCompressed:
    @pytest.mark.parametrize("kind", ["zlib", "zstd"])
    @pytest.mark.parametrize("cluster_size", ["512", "64k", "2M"])
    @pytest.mark.parametrize("request_size", [4096, MIB])
    def test_by_qemu(self, kind: str, cluster_size: str, request_size: int, qemu: Callable[..., str]) -> None:
        content = (TEXT + os.urandom(50000) + bytes(90000)) * 16 + b"end" * 1000
        Path("raw").write_bytes(content[: len(content) // 512 * 512])
        options = f"cluster_size={cluster_size},compression_type={kind}"
        qemu("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "raw", "image")
        assert checksum("image", request_size=request_size) == checksum("raw")
        assert checksum("image", request_size=request_size, direct=True) == checksum("raw")

    def test_a_cluster_is_decompressed_once_for_many_requests(
        self, qemu: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("raw").write_bytes(TEXT * 64)
        qemu("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=2M", "raw", "image")
        made = []
        original = compressed._inflate_with
        monkeypatch.setattr(compressed, "_inflate_with", lambda *args: made.append(1) or original(*args))  # type: ignore[func-returns-value]
        assert checksum("image", request_size=64 * KIB) == checksum("raw")
        assert len(made) == 2  # 4 MiB in clusters of 2

    @pytest.mark.parametrize("window", [9, 12, 15])
    def test_deflate_windows(self, window: int) -> None:
        Path("image").write_bytes(one_compressed(deflate(TEXT, window)))
        assert checksum("image") == blkhash(TEXT)

    def test_trailing_garbage_and_longer_output(self) -> None:
        for data in (deflate(TEXT) + b"garbage" * 99, deflate(TEXT + TEXT)):
            Path("image").write_bytes(one_compressed(data))
            assert checksum("image") == blkhash(TEXT)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (deflate(TEXT[:-1]), "compressed cluster: the data ends early"),
            (b"\xff" * 600, "compressed cluster: Error -3 while decompressing data"),
            (deflate(TEXT)[:300], "compressed cluster: "),
        ],
    )
    def test_bad_deflate(self, data: bytes, message: str) -> None:
        Path("image").write_bytes(one_compressed(data.ljust(512, b"\xff")))
        said = refusal("image", FormatError)
        assert said.startswith(f"image: {message}")
        assert said.endswith("at offset 0")

    def test_only_the_padding_is_missing(self) -> None:
        data = deflate(TEXT)
        Path("image").write_bytes(one_compressed(data, cut=5 * CLUSTER + len(data)))
        assert checksum("image") == blkhash(TEXT)
        Path("image").write_bytes(one_compressed(data, cut=5 * CLUSTER + len(data) - 20))
        assert "truncated: the file ends at byte" in refusal("image", TruncatedError)

    def test_the_whole_last_cluster_must_be_good(self) -> None:
        Path("image").write_bytes(one_compressed(deflate(TEXT), size=1024))
        assert checksum("image") == blkhash(TEXT[:1024])
        Path("image").write_bytes(one_compressed(deflate(TEXT[:1024]), size=1024))
        assert "the data ends early" in refusal("image", FormatError)

    def test_a_bomb_costs_a_cluster(self) -> None:
        bomb = deflate(bytes(100 * MIB))
        assert len(bomb) > 100000
        Path("image").write_bytes(one_compressed(bomb))
        assert checksum("image") == blkhash(bytes(CLUSTER))

    def test_without_isal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "isal", None)
        assert compressed._import_inflate() is zlib
        Path("image").write_bytes(one_compressed(deflate(TEXT)))
        assert checksum("image") == blkhash(TEXT)


class TestZstd:
    @pytest.fixture(autouse=True)
    def _zstd(self) -> None:
        self.zstd = compressed.import_zstd()

    def written(self, data: bytes, cut: int | None = None) -> Path:
        fields = {"incompatible_features": 8, "header_length": 112, "tail": b"\1" + bytes(7)}
        Path("image").write_bytes(one_compressed(data, cut=cut, **fields))
        return Path("image")

    def frame(self, content: bytes, **options: int) -> bytes:
        parameters = {getattr(self.zstd.CompressionParameter, name): value for name, value in options.items()}
        return bytes(self.zstd.compress(content, options=parameters))

    def test_frames(self) -> None:
        one, two = self.frame(TEXT[:1000]), self.frame(TEXT[1000:], checksum_flag=1)
        for data in (
            self.frame(TEXT),
            one + two,
            self.frame(b"") + one + self.frame(b"") + two,
            self.frame(TEXT) + b"x",
        ):
            assert checksum(self.written(data)) == blkhash(TEXT)

    @pytest.mark.parametrize("what", ["short", "long", "garbage", "between", "checksum", "window"])
    def test_bad_frames(self, what: str) -> None:
        whole = self.frame(TEXT, checksum_flag=1)
        stream = self.zstd.ZstdCompressor(options={self.zstd.CompressionParameter.window_log: 24})
        data, message = {
            "short": (self.frame(TEXT[:-1]), "compressed cluster: "),
            "long": (self.frame(TEXT + b"x"), "longer than a cluster"),
            "garbage": (b"\xff" * 600, "compressed cluster: "),
            "between": (self.frame(TEXT[:1000]) + b"xxxx" + self.frame(TEXT[1000:]), "compressed cluster: "),
            "checksum": (whole[:-1] + bytes([whole[-1] ^ 1]), "compressed cluster: "),
            "window": (stream.compress(TEXT) + stream.flush(), "compressed cluster: "),
        }[what]
        assert message in refusal(self.written(data), FormatError)

    def test_thousands_of_frames(self) -> None:
        none = self.frame(b"")
        assert checksum(self.written(none * 1000 + self.frame(TEXT))) == blkhash(TEXT)
        assert "more than 1024 zstd frames" in refusal(self.written(none * 2000 + self.frame(TEXT)), FormatError)

    def test_cut_off(self) -> None:
        data = self.frame(TEXT, checksum_flag=1)
        assert checksum(self.written(data, cut=5 * CLUSTER + len(data))) == blkhash(TEXT)
        assert "truncated" in refusal(self.written(data, cut=5 * CLUSTER + len(data) - 1), TruncatedError)


class TestUntrusted:
    def gate(self, raw: bytes, kind: type[Error], **options: object) -> str:
        Path("image").write_bytes(raw)
        return refusal("image", kind, format="qcow2", untrusted=True, **options)

    def test_what_is_let_through(self, qemu: Callable[..., str]) -> None:
        for options in ("preallocation=metadata", "extended_l2=on", "cluster_size=512", "compat=0.10"):
            create(qemu, "image", 3 * MIB, "-o", options)
            write(qemu, "image", "write -P 1 0 70k", "write -P 2 1M 1k", "write -P 3 1030k 1k", "discard 2M 64k")
            assert checksum("image", format="qcow2", untrusted=True) == checksum("image")
            qemu("qemu-img", "convert", "-c", "-O", "qcow2", "image", "packed")
            assert checksum("packed", format="qcow2", untrusted=True) == checksum("image")

    def test_what_refers_to_other_files(self) -> None:
        raw = image([], backing=b"/etc/passwd", extensions=[(BACKING_FORMAT, b"raw")])
        assert "backing file, which --untrusted does not allow" in self.gate(raw, RefusedError)
        raw = image([], incompatible_features=4, extensions=[(DATA_FILE, b"/etc/passwd")])
        assert "external data file, which --untrusted does not allow" in self.gate(raw, RefusedError)
        assert "encrypted" in self.gate(image([], crypt_method=2), RefusedError)
        assert "marked as corrupt" in self.gate(image([], incompatible_features=2), RefusedError)

    def test_max_size(self) -> None:
        assert "more than the 1048575 of --max-size" in self.gate(image([]), RefusedError, max_size=MIB - 1)
        Path("image").write_bytes(image([]))
        assert checksum("image", format="qcow2", untrusted=True, max_size=MIB) == blkhash(bytes(MIB))

    @pytest.mark.parametrize(
        ("words", "l1"),
        [
            ([5 << 16, 5 << 16], None),
            ([5 << 16, 6 << 16, 7 << 16, 6 << 16 | COPIED], None),
            ([4 << 16], None),  # the L2 table
            ([3 << 16], None),  # the L1 table
            ([1 << 16], None),  # the refcount table
            ([5 << 16], [4 << 16, 4 << 16]),
            ([], [3 << 16]),
            ([compressed_entry((5 << 16) + 7, 100)] * 2, None),
            ([5 << 16, compressed_entry((5 << 16) + 7, 100)], None),
        ],
    )
    def test_double_use(self, words: list[int], l1: list[int] | None) -> None:
        data = {5: b"seven b" + deflate(bytes(CLUSTER)), 6: b"6", 7: b"7"}
        raw = image(words, data, l1=l1, size=GIB if l1 else MIB, l1_size=2)
        assert "used twice" in self.gate(raw, FormatError)
        if l1 is None:
            checksum("image")  # which is all right without

    def test_neighbours_share_sectors(self) -> None:
        first, second = deflate(TEXT), deflate(TEXT[::-1])
        words = [compressed_entry(5 << 16, len(first)), compressed_entry((5 << 16) + len(first), len(second))]
        Path("image").write_bytes(image(words, {5: first + second}, size=2 * CLUSTER))
        assert checksum("image", format="qcow2", untrusted=True) == blkhash(TEXT + TEXT[::-1])


class TestHostile:
    """A second and 64 MiB are what a hostile image may cost. The limit here is for a busy machine."""

    def cost(self, path: Path, *words: str) -> tuple[str, int]:
        """What imgsum says, and its peak resident size in bytes."""
        script = (
            "import re, sys, imgsum\n"
            "try: print(imgsum.checksum(sys.argv[1], options=imgsum.OpenOptions(**eval(sys.argv[2]))).hexdigest)\n"
            "except imgsum.Error as error: print(error)\n"
            "print(1024 * int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(path), *words], capture_output=True, text=True, timeout=60, check=True
        )
        said, peak = done.stdout.splitlines()
        return said, int(peak)

    def test_many_snapshots_in_the_header(self) -> None:
        raw = image([], nb_snapshots=65536, snapshots_offset=0)
        Path("image").write_bytes(raw)
        assert checksum("image") == blkhash(bytes(MIB))
        said, peak = self.cost(Path("image"), repr({"snapshot": "x"}))
        assert "snapshot" in said
        assert peak < 64 * MIB

    def test_the_largest_l1_table(self) -> None:
        """32 MiB of it, each entry the same L2 table: refused at once where that counts."""
        count = 0x400000
        with Path("image").open("wb") as file:
            file.write(header(size=count << 29, l1_size=count).ljust(CLUSTER, b"\0"))
            file.seek(3 * CLUSTER)
            file.writelines((520 << 16 | COPIED).to_bytes(8, "big") * (MIB // 8) for _ in range(count * 8 // MIB))
            file.truncate(600 * CLUSTER)
        said, peak = self.cost(Path("image"), repr({"format": "qcow2", "untrusted": True, "max_size": 1 << 60}))
        assert "is used twice" in said
        assert peak < 64 * MIB
        said, peak = self.cost(Path("image"), repr({"max_size": TIB}))
        assert "more than the 1099511627776 of --max-size" in said
        assert peak < 64 * MIB

    def test_a_header_that_is_all_extensions(self) -> None:
        raw = header(cluster_bits=21, tail=b"\x11\x11\x11\x11\0\0\0\0" * ((2 << 20) // 8 - 13))
        Path("image").write_bytes(raw.ljust(4 << 21, b"\0"))
        said, peak = self.cost(Path("image"), "{}")
        assert "the number of header extensions is 1025: too many" in said
        assert peak < 64 * MIB

    @pytest.mark.parametrize("untrusted", [False, True])
    def test_memory_with_the_largest_clusters(self, untrusted: bool, qemu: Callable[..., str]) -> None:
        with Path("raw").open("wb") as file:
            file.writelines((b"%d" % number + TEXT)[:CLUSTER] * 16 + os.urandom(CLUSTER) for number in range(64))
        options = "cluster_size=2M,compression_type=zstd"
        qemu("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, "raw", "image")
        said, peak = self.cost(Path("image"), repr({"format": "qcow2", "untrusted": untrusted}))
        assert said == checksum("raw")
        assert peak < 64 * MIB

    def test_memory_over_a_tebibyte_of_tables(self, qemu: Callable[..., str]) -> None:
        create(qemu, "image", TIB // 4, "-o", "preallocation=metadata")
        said, peak = self.cost(Path("image"), "{}")
        with open("zeros", "wb") as file:
            file.truncate(TIB // 4)
        assert said == checksum("zeros")
        assert peak < 64 * MIB


class TestWhatIsRead:
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        reads: list[tuple[int, int]] = []
        original = HostFile.read

        def read(self: HostFile, offset: int, buffer: memoryview) -> None:
            reads.append((offset, len(buffer)))
            original(self, offset, buffer)

        monkeypatch.setattr(HostFile, "read", read)
        return reads

    def test_zero_clusters_are_not(self, qemu: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        create(qemu, "image", 64 * MIB, "-o", "preallocation=metadata")
        write(qemu, "image", "write -z 8M 8M", "write -P 1 32M 64k")
        reads = self.counted(monkeypatch)
        result = imgsum.checksum("image")
        assert result.stats.bytes_read == CLUSTER
        assert sum(length for _, length in reads) < CLUSTER + 256 * KIB  # the rest is metadata
        assert result.hexdigest == blkhash(raw_content(Path("image")))

    def test_data_goes_straight_into_the_buffer(
        self, qemu: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Contiguous clusters are one read of a whole request."""
        Path("raw").write_bytes(os.urandom(16 * MIB))
        qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "raw", "image")
        want = checksum("raw")
        reads = self.counted(monkeypatch)
        assert checksum("image") == want
        assert len([length for _, length in reads if length == MIB]) >= 15

    def test_eight_readers_at_once(self, qemu: Callable[..., str]) -> None:
        create(qemu, "image", 64 * MIB, "-o", "cluster_size=4k")
        commands = [f"write -P {at % 251 + 1} {at * 20 % 65536 * 1024} 4k" for at in range(0, 4000, 7)]
        write(qemu, "image", *commands)
        content = raw_content(Path("image"))
        source = open_source("image", OpenOptions())
        wrong = []

        def work(number: int) -> None:
            reader = source.reader()
            buffer = memoryview(bytearray(300_000))
            for at in range(number * 1000 * 512, len(content) - len(buffer), 8 * 999 * 512):
                reader.read(at, buffer)
                if buffer != content[at : at + len(buffer)]:
                    wrong.append(at)
            reader.close()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for extent in source.extents(0, source.size):
            zero = not any(content[extent.start : extent.end])
            assert zero or not extent.zero
        for thread in threads:
            thread.join()
        source.close()
        assert wrong == []


def test_on_a_block_device(loop_device: Callable[..., str], qemu: Callable[..., str]) -> None:
    create(qemu, "image", 3 * MIB)
    write(qemu, "image", "write -P 1 0 1M", "write -c -P 2 2M 64k")
    want = checksum("image")
    os.truncate("image", 16 * MIB)  # a device is larger than the image that was written to it
    device = loop_device(Path("image"))
    assert checksum(device) == want
    assert checksum(device, direct=True) == want


def test_format_and_size(qemu: Callable[..., str]) -> None:
    create(qemu, "image", 5 * MIB)
    create(qemu, "top", 5 * MIB, "-b", "image", "-F", "qcow2")
    result = imgsum.checksum("top")
    assert (result.format, result.size, result.note) == ("qcow2", 5 * MIB, None)
    assert result.stats.details == {"cache": "writeback", "files": 2}


def test_ranges(qemu: Callable[..., str]) -> None:
    create(qemu, "image", 3 * MIB, "-o", "cluster_size=4k")
    write(qemu, "image", "write -P 1 100k 1M", "write -c -P 2 2M 4k")
    content = raw_content(Path("image"))
    for offset, length in (
        (0, 0),
        (512, 0),
        (3 * MIB, 0),
        (1, 1),
        (100_001, 5000),
        (2 * MIB - 1, 4098),
        (7, 3 * MIB - 7),
    ):
        got = imgsum.checksum("image", offset=offset, length=length)
        assert got.hexdigest == blkhash(content[offset : offset + length]), (offset, length)


def test_a_size_that_is_no_multiple_of_512() -> None:
    Path("image").write_bytes(image([5 << 16], {5: b"x" * CLUSTER}, size=1000))
    assert imgsum.checksum("image").size == 512


@pytest.mark.usefixtures("no_leak")
def test_nothing_is_left_open_after_an_error(qemu: Callable[..., str]) -> None:
    create(qemu, "base", MIB)
    create(qemu, "middle", MIB, "-b", "base", "-F", "qcow2", "-o", "data_file=data")
    create(qemu, "top", MIB, "-b", "middle", "-F", "qcow2")
    checksum("top")
    Path("base").unlink()
    refusal("top", OpenError)


@pytest.mark.parametrize("cluster_size", [512, 4096, CLUSTER, 2 * MIB])
def test_real_images_are_not_taken_for_truncated(cluster_size: int, qemu: Callable[..., str]) -> None:
    """QEMU leaves the last cluster of a file short where it can."""
    for size in (512, 1024, 65536 - 512, 65536 + 512, MIB + 3584):
        create(qemu, "image", size, "-o", f"cluster_size={cluster_size}")
        write(qemu, "image", f"write -P 5 {size - 512} 512")
        same_as_qemu("image")
        for compress in ([], ["-c"]):
            qemu("qemu-img", "convert", *compress, "-O", "qcow2", "-o", f"cluster_size={cluster_size}", "image", "copy")
            same_as_qemu("copy")


def test_every_cut_of_a_small_image(qemu: Callable[..., str]) -> None:
    """Cut at any byte: "truncated", or the right checksum where nothing that is needed is missing."""
    create(qemu, "image", 20 * KIB, "-o", "cluster_size=512")
    write(qemu, "image", "write -P 1 0 2k", "write -P 2 9k 1k", "write -c -P 3 5k 512")
    whole = Path("image").read_bytes()
    want = checksum("image")
    outcomes = set()
    for length in [*range(0, len(whole), 61), len(whole)]:
        Path("cut").write_bytes(whole[:length])
        try:
            outcomes.add(checksum("cut", format="qcow2"))
        except FormatError as error:
            outcomes.add(error.reason.split(":")[0])
    assert outcomes == {want, "truncated", "is not a qcow2 image"}
