"""QEMU's image locks: byte-range locks that show how a running QEMU uses an image."""

from __future__ import annotations

import fcntl
import os
import struct

from imgsum.errors import RefusedError

# In block/file-posix.c, a process locks byte 100 + i to use permission i, and byte 200 + i to keep others from it.
# Permissions: 0 consistent read, 1 write, 3 resize.
_LOCK_WRITE, _LOCK_RESIZE, _LOCK_READ_NOT_SHARED = 101, 103, 200
_FLOCK = struct.Struct("hhqqi4x")


def refuse_if_in_use(fd: int, name: str) -> None:
    """Raise RefusedError while a QEMU process has the image of FD open for writing, as qemu-img does."""
    for byte in (_LOCK_WRITE, _LOCK_RESIZE, _LOCK_READ_NOT_SHARED):
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
        except OSError:
            return  # the file system has no such locks, or this is not a file: QEMU has none either
        # A QEMU that only reads, and keeps writers out, locks bytes 100, 201 and 203.
        if _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK:
            raise RefusedError(
                "is in use: a running virtual machine or QEMU tool has it open for writing"
                " (-U reads it anyway, and what is read may be inconsistent)",
                name=name,
            )
