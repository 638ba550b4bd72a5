"""Raw files and block devices: positional reads, O_DIRECT, holes, and the locks of a running QEMU.

HostFile is an open file or device of this host; every local format reads through it. RawSource is the source of raw
images.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator

from imgsum.errors import ChangedError, Error, OpenError, ReadError, os_error_reason
from imgsum.extent import Extent
from imgsum.source import OpenOptions
from imgsum.source.locks import refuse_if_in_use
from imgsum.trace import debug
from imgsum.units import KIB

DIRECT_ALIGN = 4096
"""What O_DIRECT offsets, lengths and addresses are aligned to, in bytes: enough for sectors of 512 and of 4096."""

_BOUNCE = 256 * KIB  # bytes that are copied at a time, for each worker beside its own buffer

_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP = struct.Struct("=QQLLLL")
_FIEMAP_FLAG_SYNC = 1
_TMPFS_MAGIC = 0x01021994


class HostFile:
    """A regular file or block device of this host, open for reading. Reads are safe from any thread."""

    def __init__(self, path: str, name: str, options: OpenOptions) -> None:
        """Open PATH. Messages call it NAME. Raises OpenError, RefusedError."""
        self.path = path
        self.name = name
        self.fd = _open(path, name)
        try:
            status = os.fstat(self.fd)
            self.is_block_device = stat.S_ISBLK(status.st_mode)
            if not (self.is_block_device or stat.S_ISREG(status.st_mode)):
                raise OpenError(f"is a {_kind(status.st_mode)}", name=name)
            self.identity = (status.st_rdev,) if self.is_block_device else (status.st_dev, status.st_ino)
            """The same for two names of one file."""
            # A block device has st_size 0; seeking to the end gives the size of both.
            self.size: int = os.lseek(self.fd, 0, os.SEEK_END)
            if self.is_block_device:
                refuse_empty_device(self.size, name)
            self._status = status
            self._force_share = options.force_share
            self._request_size = options.request_size
            self._refuse_if_in_use()
            self.direct = options.direct and self._set_direct(True)
            self.direct_refused = options.direct and not self.direct
        except OSError as error:
            os.close(self.fd)
            raise OpenError(os_error_reason(error), name=name) from error
        except Error:
            os.close(self.fd)
            raise

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill all of BUFFER from OFFSET of the file. Raises ReadError, or ChangedError where the file now ends."""
        done, length = 0, len(buffer)
        while done < length:
            try:
                count = self._read_some(offset + done, buffer[done : done + self._request_size])
            except OSError as error:
                raise ReadError(os_error_reason(error), name=self.name, offset=offset + done) from error
            debug("%s: read %s bytes at %s", self.name, count, offset + done)
            if count == 0:
                raise ChangedError("the file became shorter while it was read", name=self.name, offset=offset + done)
            done += count

    def read_bytes(self, offset: int, length: int) -> bytes:
        """LENGTH bytes from OFFSET of the file, fewer where the file ends. For headers and tables. Raises ReadError."""
        length = max(0, min(length, self.size - offset))
        buffer = bytearray(length)
        if length:
            self.read(offset, memoryview(buffer))
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """Raise ChangedError if the file was written to, or RefusedError if somebody opened it for that."""
        try:
            status = os.fstat(self.fd)
            size = os.lseek(self.fd, 0, os.SEEK_END)
            more = 0 if self.is_block_device else self._read_some(self.size, memoryview(bytearray(1)))
        except OSError as error:
            raise ReadError(os_error_reason(error), name=self.name) from error
        if size != self.size:
            raise ChangedError(f"the file changed from {self.size} to {size} bytes while it was read", name=self.name)
        if not self.is_block_device:
            refuse_if_modified(self._status, status, self.name)
        if more:  # of size 0 in some virtual file systems, or grown behind the back of a network's
            raise ChangedError(f"the file has more content than its size says, {size} bytes", name=self.name)
        self._refuse_if_in_use()

    def evidence(self) -> dict[str, object]:
        """The record of this file: see Source. A block device has none, as no time says when it was written to."""
        if self.is_block_device:
            return {"path": self.path, "block_device": True}
        status = self._status
        return {
            "path": self.path,
            "device": status.st_dev,
            "inode": status.st_ino,
            "size": self.size,
            "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns,
        }

    def _refuse_if_in_use(self) -> None:
        if not self._force_share:
            refuse_if_in_use(self.fd, self.name)

    def close(self) -> None:
        """Close the descriptor. Closing twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        """Bytes read from OFFSET into the beginning of BUFFER; 0 where the file ends."""
        if not self.direct:
            return os.preadv(self.fd, [buffer], offset)
        whole = len(buffer) // DIRECT_ALIGN * DIRECT_ALIGN
        if offset % DIRECT_ALIGN == 0 and whole:
            try:
                return os.preadv(self.fd, [buffer[:whole]], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # This device needs a larger alignment, of the address too: read into an aligned buffer, and copy.
        return self._read_unaligned(offset, buffer)

    def _read_unaligned(self, offset: int, buffer: memoryview) -> int:
        """As _read_some with O_DIRECT, for offsets, lengths and addresses that are not aligned: by a copy, in steps."""
        buffer = buffer[:_BOUNCE]
        skip = offset % DIRECT_ALIGN
        length = -(-(skip + len(buffer)) // DIRECT_ALIGN) * DIRECT_ALIGN
        with mmap.mmap(-1, length) as bounce, memoryview(bounce) as view:
            try:
                count = os.preadv(self.fd, [view], offset - skip) - skip
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._set_direct(False)
                self.direct, self.direct_refused = False, True
                return os.preadv(self.fd, [buffer], offset)
            count = max(0, min(count, len(buffer)))
            buffer[:count] = view[skip : skip + count]
        return count

    def _set_direct(self, direct: bool) -> bool:
        """Turn O_DIRECT on or off. Whether that worked."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True


class Holes:
    """The holes of a HostFile, by SEEK_DATA and SEEK_HOLE, unless the answers are implausible.

    Used by one thread at a time.
    """

    def __init__(self, file: HostFile) -> None:
        self.file = file
        self._ask = True
        self._proven = False
        self._data = (0, 0)  # the last run of data: a fragmented image asks about the same run many times

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        """The extents of START..START+LENGTH, which is inside the file: in order, exactly tiling it. Holes are zero.

        All is data if the file system does not support holes, or contradicts itself.
        """
        at, end = start, start + length
        while at < end:
            if not self._ask or (self._data[0] <= at and end <= self._data[1]):
                yield Extent(at, end - at, False)
                return
            data, hole = self._next_data(at, end)
            if data > at:
                yield Extent(at, data - at, True)
            if hole > data:
                yield Extent(data, hole - data, False)
            at = hole

    def _next_data(self, at: int, end: int) -> tuple[int, int]:
        """The first data in AT..END, and the hole after it: AT <= data <= hole <= END, and AT < hole."""
        fd = self.file.fd
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            # Only ENXIO means "no data from here on"; EINVAL, EOPNOTSUPP, EIO mean "I can't tell".
            if error.errno == errno.ENXIO and (self._proven or self._is_really_a_hole()):
                return end, end
            self._ask = False
            return at, end
        if data < at:  # zfs and gluster have answered less than asked for at a trailing hole
            self._ask = False
            return at, end
        if data >= end:
            return end, end
        try:
            hole = os.lseek(fd, data, os.SEEK_HOLE)
        except OSError:
            hole = data
        if hole <= data:
            self._ask = False
            return data, end
        self._proven = True
        self._data = data, hole
        return data, min(hole, end)

    def _is_really_a_hole(self) -> bool:
        """Whether all of the file is one hole, as SEEK_DATA says.

        virtiofs, and file systems with delayed allocation, have reported a hole for files with data, while st_blocks
        was 0. So one of these must confirm it: st_blocks is not 0, so the blocks are allocated and unwritten; FIEMAP
        finds no extents after a flush; or the file system is tmpfs, which allocates at once.
        """
        if os.fstat(self.file.fd).st_blocks:
            return True
        request = bytearray(_FIEMAP.pack(0, self.file.size, _FIEMAP_FLAG_SYNC, 0, 0, 0))
        try:
            fcntl.ioctl(self.file.fd, _FS_IOC_FIEMAP, request)
        except OSError:
            return _is_tmpfs(self.file.fd)
        return bool(_FIEMAP.unpack(request)[3] == 0)


class RawSource:
    """A file or device whose content is exactly its bytes. Satisfies Source."""

    format = "raw"

    def __init__(self, file: HostFile) -> None:
        self.file = file
        self.name = file.name
        self.size = file.size
        self._holes = Holes(file)

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        """See Source."""
        return self._holes.extents(start, length)

    def reader(self) -> RawReader:
        """See Source."""
        return RawReader(self.file)

    def check_unchanged(self) -> None:
        """See Source."""
        self.file.check_unchanged()

    def evidence(self) -> list[dict[str, object]]:
        """See Source."""
        return [self.file.evidence()]

    def details(self) -> dict[str, object]:
        """See Source."""
        return cache_details(self.file)

    def close(self) -> None:
        """See Source."""
        self.file.close()


class RawReader:
    """Reads a HostFile for one worker: positional reads have no state, so it holds nothing. Satisfies Reader."""

    def __init__(self, file: HostFile) -> None:
        self.read = file.read

    def close(self) -> None:
        """See Reader."""


def refuse_empty_device(size: int, name: str) -> None:
    """Raise OpenError for a block device of SIZE 0: it has no medium, and a checksum would mean nothing."""
    if size == 0:
        raise OpenError("is a block device of 0 bytes: it has no medium, or is not connected", name=name)


def refuse_if_modified(before: os.stat_result, now: os.stat_result, name: str) -> None:
    """Raise ChangedError if a regular file may have been written to between two calls of stat().

    cp -p and rsync -t --inplace set the old mtime again after a write, but nobody can set ctime. ctime also changes on
    chown, chmod, link, rename and unlink; these look the same as a write with the old mtime set again.
    """
    if now.st_mtime_ns != before.st_mtime_ns:
        raise ChangedError("the file was modified while it was read", name=name)
    if now.st_ctime_ns != before.st_ctime_ns:
        raise ChangedError(
            "the file's times or attributes changed while it was read, so it may have been modified", name=name
        )


def cache_details(file: HostFile) -> dict[str, object]:
    """FILE's cache mode for --stats, with a note if O_DIRECT was asked for and is not possible."""
    details: dict[str, object] = {"cache": "none" if file.direct else "writeback"}
    if file.direct_refused:
        details["cache_note"] = "O_DIRECT is not possible here: read through the page cache"
    return details


def _open(path: str, name: str) -> int:
    """A descriptor for PATH. O_NONBLOCK, so that a FIFO that took the file's place can't hang us."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = os_error_reason(error) if isinstance(error, OSError) else str(error)
        raise OpenError(reason, name=name) from error


def _kind(mode: int) -> str:
    for test, kind in (
        (stat.S_ISDIR, "directory"),
        (stat.S_ISCHR, "character device"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISFIFO, "named pipe"),
    ):
        if test(mode):
            return kind
    return "special file"


def _is_tmpfs(fd: int) -> bool:
    import ctypes  # 3 ms, and hardly ever needed

    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; its first word is f_type
    if ctypes.CDLL(None, use_errno=True).fstatfs(fd, buffer) != 0:
        return False
    return int(ctypes.c_long.from_buffer(buffer).value) == _TMPFS_MAGIC
