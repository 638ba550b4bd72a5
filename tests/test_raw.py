"""Raw files: holes that file systems lie about, reads that fail or fall short, O_DIRECT, and changes meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from reference import KIB, MIB, TIB

from imgsum import Checksum, OpenOptions, checksum
from imgsum.errors import ChangedError, OpenError, ReadError

SPEC = "64k:A 128k:- 100k:B 300k:- 100:C 1m:-"
"""Data, holes between, and a hole at the end."""

ENXIO, EIO = OSError(errno.ENXIO, "no data"), OSError(errno.EIO, "Input/output error")

real_lseek, real_preadv, real_fstat, real_ioctl = os.lseek, os.preadv, os.fstat, fcntl.ioctl


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    reference.write(SPEC, path)
    return path


SIZE = reference.size(SPEC)


def check(path: Path, spec: str = SPEC, **options: Any) -> Checksum:
    result = checksum(path, options=OpenOptions(**options))
    assert result.hexdigest == reference.blkhash(reference.chunks(spec))
    assert result.size == reference.size(spec)
    return result


# --- extents ------------------------------------------------------------------------------------------------------

Answer = int | OSError | None


@pytest.fixture
def lseek(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """lseek(data=..., hole=...): let SEEK_DATA and SEEK_HOLE answer what these make of (offset, true answer)."""

    def patch(data: Callable[..., Answer] | None = None, hole: Callable[..., Answer] | None = None) -> list[int]:
        asked: list[int] = []

        def fake(fd: int, offset: int, whence: int) -> int:
            if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
                return real_lseek(fd, offset, whence)
            asked.append(offset)
            assert len(asked) < 1000, "a loop"
            true: Answer
            try:
                true = real_lseek(fd, offset, whence)
            except OSError as error:
                true = error
            answer = data if whence == os.SEEK_DATA else hole
            told = answer(offset, true) if answer else true
            if isinstance(told, OSError):
                raise told
            assert told is not None
            return told

        monkeypatch.setattr(os, "lseek", fake)
        return asked

    return patch


def test_holes_are_not_read(disk: Path) -> None:
    result = check(disk)
    assert result.stats.bytes_read + result.stats.zero_bytes == SIZE
    assert result.stats.bytes_read == 4 * 64 * KIB  # 64k:A is one block, 100k:B is in two, and 100:C in one


@pytest.mark.parametrize("answer", [lambda at: 0, lambda at: at - 1, lambda at: at // 2, lambda at: -1])
def test_less_than_asked_at_a_trailing_hole(answer: Callable[[int], int], disk: Path, lseek: Any) -> None:
    asked = lseek(data=lambda at, true: answer(at) if at and isinstance(true, OSError) else true)
    assert check(disk).stats.zero_bytes >= 256 * KIB  # the holes before it were found
    assert len(asked) < 10


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO, errno.ENOSYS, errno.EBADF])
@pytest.mark.parametrize("from_offset", [0, 1, 300 * KIB])
def test_seek_data_that_can_not_tell_means_data(number: int, from_offset: int, disk: Path, lseek: Any) -> None:
    asked = lseek(data=lambda at, true: OSError(number, "no") if at >= from_offset else true)
    result = check(disk)
    if not from_offset:
        assert result.stats.zero_bytes == 0
        assert len(asked) == 1  # it is not asked again


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO, errno.ENXIO])
def test_seek_hole_that_can_not_tell_means_data(number: int, disk: Path, lseek: Any) -> None:
    asked = lseek(hole=lambda at, true: OSError(number, "no"))
    assert check(disk).stats.zero_bytes == 0
    assert len(asked) == 2


@pytest.mark.parametrize(
    "hole", [lambda at, true: at, lambda at, true: 0, lambda at, true: at - 1, lambda at, true: -1]
)
def test_a_hole_that_begins_no_later_than_the_data(hole: Any, disk: Path, lseek: Any) -> None:
    lseek(hole=hole)
    assert check(disk).stats.zero_bytes == 0


def test_answers_past_the_end(disk: Path, lseek: Any) -> None:
    lseek(
        data=lambda at, true: SIZE + MIB if isinstance(true, OSError) else true,
        hole=lambda at, true: SIZE + MIB if at > 192 * KIB else true,
    )
    check(disk)


def test_enxio_means_a_hole_to_the_end(disk: Path, lseek: Any) -> None:
    asked = lseek()
    result = check(disk)
    assert result.stats.zero_bytes > MIB
    assert len(asked) == 7  # data and hole for each run of data, and one ENXIO


class TestEnxioAtOnce:
    """SEEK_DATA says that all is a hole: true of an empty disk, and said by virtiofs of files that have data."""

    @pytest.fixture(autouse=True)
    def no_blocks(self, monkeypatch: pytest.MonkeyPatch, lseek: Any) -> None:
        lseek(data=lambda at, true: ENXIO)

        def fstat(fd: int) -> os.stat_result:
            status = real_fstat(fd)
            return os.stat_result(tuple(status), {**_extras(status), "st_blocks": 0})

        monkeypatch.setattr(os, "fstat", fstat)

    def test_not_believed_where_the_map_has_extents(self, disk: Path) -> None:
        assert check(disk).stats.zero_bytes == 0

    @pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EIO])
    def test_not_believed_where_there_is_no_map(self, number: int, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def ioctl(*args: Any) -> int:
            raise OSError(number, "no")

        monkeypatch.setattr(fcntl, "ioctl", ioctl)
        assert check(disk).stats.zero_bytes == 0

    def test_no_extents_is_right_in_any_case(self, disk: Path) -> None:
        assert check(disk, extents=False).stats.zero_bytes == 0

    def test_believed_of_a_disk_that_is_empty(self, image: Callable[..., Path]) -> None:
        assert check(image("3m:-"), "3m:-").stats.zero_bytes == 3 * MIB


def _extras(status: os.stat_result) -> dict[str, Any]:
    return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_holes_in_memory(kind: str, mounted: Callable[[str], Path]) -> None:
    path = mounted(kind) / "disk.raw"
    for spec in (SPEC, "3m:-", "1:A 3m:-", "3m:- 1:A", ""):
        reference.write(spec, path)
        result = check(path, spec)
        if kind == "tmpfs" and spec == "3m:-":
            assert result.stats.zero_bytes == 3 * MIB


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, 131071, MIB - 1, MIB + 1])
@pytest.mark.parametrize("tail", ["A", "-", "0"])
@pytest.mark.parametrize("before", ["", "64k:B ", "1m:- ", "4k:B 60k:- "])
def test_odd_sizes(size: int, tail: str, before: str, image: Callable[..., Path]) -> None:
    spec = f"{before}{size}:{tail}"
    for direct in (False, True):
        result = check(image(spec), spec, direct=direct)
        assert (result.note is not None) == (reference.size(spec) % 512 != 0)


def test_thousands_of_small_extents_cost_no_more_reads(image: Callable[..., Path]) -> None:
    spec = " ".join(["4k:A 4k:-"] * 1024)
    result = check(image(spec), spec)
    assert result.stats.requests == 8
    assert result.stats.bytes_read == 8 * MIB


def test_a_huge_hole_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.raw"
    path.touch()
    os.truncate(path, TIB)
    result = checksum(path, algorithm="xxh64", block_size=32 * MIB)
    assert result.stats.bytes_read == result.stats.requests == 0
    assert result.stats.zero_bytes == TIB
    zero = reference.HASHES["xxh64"](bytes(32 * MIB)).digest()
    assert (
        result.hexdigest
        == reference.HASHES["xxh64"](zero * (TIB // (32 * MIB)) + TIB.to_bytes(8, "little")).hexdigest()
    )


def test_extents_come_lazily(disk: Path) -> None:
    from imgsum.source import open_source

    source: Any = open_source(str(disk), OpenOptions())
    extents = source.extents(0, source.size)
    with pytest.MonkeyPatch.context() as patch:
        asked: list[int] = []
        patch.setattr(os, "lseek", lambda *args: asked.append(1) or real_lseek(*args))
        next(extents)
        assert len(asked) <= 2
    source.close()


# --- reads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def preadv(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """preadv(before=None, most=None): run before(offset, length) first, and read at most most(length) bytes."""

    def patch(before: Callable[[int, int], object] | None = None, most: Callable[[int], int] = lambda n: n) -> None:
        def fake(fd: int, buffers: list[Any], offset: int, *flags: int) -> int:
            (buffer,) = buffers
            if before:
                before(offset, len(buffer))
            return real_preadv(fd, [memoryview(buffer)[: most(len(buffer))]], offset, *flags)

        monkeypatch.setattr(os, "preadv", fake)

    return patch


def test_short_reads(disk: Path, preadv: Any) -> None:
    preadv(most=lambda length: random.randint(1, length))
    check(disk)
    preadv(most=lambda length: min(length, 1000))
    check(disk)


def test_short_reads_with_o_direct(disk: Path, preadv: Any) -> None:
    preadv(most=lambda length: max(4096, length // 3 // 512 * 512))
    check(disk, direct=True)


def _failing(error: int, at: int) -> Callable[[int, int], None]:
    def before(offset: int, length: int) -> None:
        if offset <= at < offset + length:
            raise OSError(error, os.strerror(error))

    return before


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.ESTALE, errno.EREMOTEIO, errno.ENODATA])
def test_a_read_error_has_its_offset(number: int, direct: bool, image: Callable[..., Path], preadv: Any) -> None:
    path = image("3m:R")
    preadv(_failing(number, 2 * MIB + 17))
    with pytest.raises(ReadError) as caught:
        checksum(path, options=OpenOptions(direct=direct))
    assert caught.value.offset == 2 * MIB
    assert caught.value.name == str(path)
    assert caught.value.reason.lower() == os.strerror(number).lower()


def test_a_read_error_after_a_short_read(image: Callable[..., Path], preadv: Any) -> None:
    preadv(_failing(errno.EIO, 70_000), most=lambda length: min(length, 10_000))
    with pytest.raises(ReadError) as caught:
        checksum(image("3m:R"), options=OpenOptions(request_size=4 * KIB))
    assert 69_000 <= (caught.value.offset or 0) <= 70_000


def test_einval_without_o_direct_is_an_error(disk: Path, preadv: Any) -> None:
    preadv(_failing(errno.EINVAL, 0))
    with pytest.raises(ReadError, match="invalid argument at offset 0"):
        checksum(disk)


def test_probing_that_fails_is_an_error(disk: Path, preadv: Any) -> None:
    preadv(_failing(errno.EIO, SIZE - 1))
    with pytest.raises(ReadError, match="input/output error"):
        checksum(disk)
    check(disk, format="raw")  # ends with a hole, and nothing is probed


# --- O_DIRECT -----------------------------------------------------------------------------------------------------


def test_o_direct_is_used(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: set[int] = set()

    def spy(fd: int, *args: Any) -> int:
        flags.add(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return real_preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", spy)
    details = check(disk, direct=True).stats.details
    if details == {"cache": "none"}:
        assert flags == {os.O_DIRECT}
    else:
        assert "cache_note" in details  # the tests' directory is on a file system without
    flags.clear()
    assert check(disk).stats.details == {"cache": "writeback"}
    assert flags == {0}


def test_aligned_direct_reads_need_no_copy(image: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from imgsum.source.file import HostFile

    copied: list[tuple[int, int]] = []
    real = HostFile._read_unaligned

    def spy(file: HostFile, offset: int, buffer: memoryview) -> int:
        copied.append((offset, len(buffer)))
        return real(file, offset, buffer)

    monkeypatch.setattr(HostFile, "_read_unaligned", spy)
    size = 3 * MIB + 100
    check(image(f"{size}:R"), f"{size}:R", direct=True, format="raw")
    assert copied in ([(3 * MIB, 100), (size, 1)], [])  # the tail, and whether that is the end


def test_where_the_file_system_refuses_o_direct(mounted: Callable[[str], Path]) -> None:
    path = mounted("ramfs") / "disk.raw"
    reference.write(SPEC, path)
    details = check(path, direct=True).stats.details
    assert details["cache"] == "writeback"
    assert "O_DIRECT is not possible" in str(details["cache_note"])


def test_where_every_direct_read_is_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, *args: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", refuse)
    details = check(disk, direct=True).stats.details
    assert details["cache"] == "writeback"
    assert "cache_note" in details


def test_where_setting_o_direct_fails(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fcntl = fcntl.fcntl

    def refuse(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert check(disk, direct=True).stats.details["cache"] == "writeback"


@pytest.mark.parametrize("offset", [0, 1, 511, 512, 4095, 4097, 65_537, 300_000])
@pytest.mark.parametrize("length", [0, 1, 513, 4096, 65_536, 99_999])
def test_unaligned_ranges_with_o_direct(offset: int, length: int, image: Callable[..., Path]) -> None:
    spec = "200000:R 100000:- 100000:R"
    expected = reference.blkhash(reference.content(spec)[offset : offset + length])
    for direct in (False, True):
        for request_size in (4 * KIB, MIB):
            options = OpenOptions(direct=direct, request_size=request_size)
            result = checksum(image(spec), offset=offset, length=length, options=options)
            assert (result.hexdigest, result.size) == (expected, length)


# --- changes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file of 3 MiB that was written a while ago."""
    path = tmp_path / "old.raw"
    reference.write("3m:R", path)
    os.utime(path, (1_600_000_000, 1_600_000_000))
    return path


def once(action: Callable[[], object], at: int = 0) -> Callable[[int, int], None]:
    """For preadv(): ACTION before the first read from AT on."""
    left = [action]

    def before(offset: int, length: int) -> None:
        if offset >= at and left:
            left.pop()()

    return before


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 4096, 2 * MIB, 2 * MIB + 100, 3 * MIB - 1])
def test_a_file_that_shrinks(size: int, direct: bool, old: Path, preadv: Any) -> None:
    preadv(once(lambda: os.truncate(old, size)))
    with pytest.raises(ChangedError, match=r"shorter|changed from") as caught:
        checksum(old, options=OpenOptions(direct=direct, format="raw"))
    assert caught.value.offset in (None, size, size // 512 * 512, size // 4096 * 4096)


def test_a_file_that_shrinks_where_it_need_not_be_read(old: Path, preadv: Any) -> None:
    reference.write("64k:A 3m:-", old)
    preadv(once(lambda: os.truncate(old, 65536)))
    with pytest.raises(ChangedError, match=f"changed from {65536 + 3 * MIB} to 65536 bytes"):
        checksum(old, options=OpenOptions(format="raw"))


def test_a_file_that_grows(old: Path, preadv: Any) -> None:
    preadv(once(lambda: os.truncate(old, 3 * MIB + 4), at=MIB))
    with pytest.raises(ChangedError, match=f"changed from {3 * MIB} to {3 * MIB + 4} bytes"):
        checksum(old)


def test_a_file_that_is_modified(old: Path, preadv: Any) -> None:
    def modify() -> None:
        with open(old, "r+b") as file:
            file.write(b"new")

    preadv(once(modify, at=MIB))
    with pytest.raises(ChangedError, match="modified while it was read"):
        checksum(old)


def test_a_file_that_is_modified_and_gets_its_old_time_back(old: Path, preadv: Any) -> None:
    """As cp -p and rsync -t --inplace do."""

    def rewrite() -> None:
        with old.open("r+b") as file:
            file.write(b"other")
        os.utime(old, (1_600_000_000, 1_600_000_000))

    preadv(once(rewrite, at=MIB))
    with pytest.raises(ChangedError, match="times or attributes changed while it was read"):
        checksum(old)


def _replace(path: Path) -> None:
    path.rename(path.with_suffix(".renamed"))
    path.write_bytes(b"other")


ATTRIBUTES: dict[str, Callable[[Path], object]] = {
    "nothing else": lambda path: None,
    "mode": lambda path: path.chmod(0o600),
    "link": lambda path: os.link(path, path.with_suffix(".link")),
    "rename": lambda path: path.rename(path.with_suffix(".renamed")),
    "replace": _replace,
    "unlink": lambda path: path.unlink(),
}


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("change", ATTRIBUTES)
def test_a_moved_ctime_is_a_modification(
    change: str, streamed: bool, written: bool, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose mtime was put back shows in ctime only, and so does a change of what is not content."""
    left = [change]

    def modify(file: int) -> None:
        if not left:
            return
        left.pop()
        if written:
            os.pwrite(file, b"other", 0)
        os.utime(file, (1_600_000_000, 1_600_000_000))
        ATTRIBUTES[change](old)

    with open(old, "r+b") as file:
        for name in ("preadv", "readv"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *args, real=real: modify(file.fileno()) or real(*args))
        with pytest.raises(ChangedError, match="times or attributes changed while it was read"):
            checksum(f"/dev/fd/{file.fileno()}" if streamed else old)


def test_a_hole_that_is_filled_after_it_was_mapped(old: Path, preadv: Any) -> None:
    reference.write("64k:- 1m:A", old)
    os.utime(old, (1_600_000_000, 1_600_000_000))

    def fill() -> None:
        with open(old, "r+b") as file:
            file.write(b"B")

    preadv(once(fill, at=1))
    with pytest.raises(ChangedError, match="modified"):
        checksum(old, options=OpenOptions(format="raw"))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [0, 100, 64 * KIB, SIZE - 1])
def test_a_file_with_more_content_than_its_size(
    size: int, direct: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual file systems say 0; those of a network may not have heard of the latest."""

    def lseek(fd: int, offset: int, whence: int) -> int:
        return size if whence == os.SEEK_END else real_lseek(fd, offset, whence)

    monkeypatch.setattr(os, "lseek", lseek)
    with pytest.raises(ChangedError, match=f"more content than its size says, {size} bytes"):
        checksum(disk, options=OpenOptions(direct=direct))


# --- what is not a file -------------------------------------------------------------------------------------------


@pytest.fixture
def no_fds_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{tmp}", "is a directory"),
        ("/", "is a directory"),
        ("/dev/null", "is a character device"),
        ("/dev/zero", "is a character device"),
        ("{tmp}/missing", "no such file or directory"),
        ("{tmp}/missing/disk", "no such file or directory"),
        ("{tmp}/file/disk", "not a directory"),
        ("", "no such file or directory"),
        ("x" * 300, "file name too long"),
        ("{tmp}/loop", "too many levels of symbolic links"),
        ("{tmp}/socket", "no such device or address"),
        ("a\0b", "embedded null byte"),
    ],
)
@pytest.mark.usefixtures("no_fds_left")
def test_what_can_not_be_an_image(path: str, reason: str, tmp_path: Path) -> None:
    import socket

    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    if path.endswith("socket"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "socket"))
    path = path.format(tmp=tmp_path)
    with pytest.raises(OpenError, match=reason) as caught:
        checksum(path)
    assert caught.value.name == path


@pytest.mark.usefixtures("no_fds_left")
def test_a_file_that_may_not_be_read(disk: Path) -> None:
    check(disk)
    disk.chmod(0)
    with _as_nobody(), pytest.raises(OpenError, match="permission denied"):
        checksum(disk)


class _as_nobody:  # noqa: N801 used like a function
    """For root, whom permissions do not stop."""

    def __enter__(self) -> None:
        self.user = os.geteuid()
        if self.user == 0:
            os.seteuid(65534)

    def __exit__(self, *error: object) -> None:
        os.seteuid(self.user)


@pytest.mark.parametrize(
    "name", ["json:{}", "a:b.raw", "x,y.raw", "nbd:unix:x", "file:x", "fd:3", "-f", "~", "%s", "*"]
)
def test_a_name_is_a_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reference.write("100:A", tmp_path / name)
    result = checksum(name)
    assert result.hexdigest == reference.blkhash(b"A" * 100)
    assert result.name == name


def test_symbolic_links_are_followed(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("disk.raw")
    check(tmp_path / "link")
