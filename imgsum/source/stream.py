"""Streams: standard input, FIFOs, /dev/fd/N, process substitution. Raw content, read once, from where it stands."""

from __future__ import annotations

import os
import re
import stat

from imgsum.errors import ChangedError, OpenError, ReadError, os_error_reason

_FD_NAMES = re.compile(r"/(?:dev|proc/self|proc/thread-self)/fd/([0-9]{1,9})")


def stream_descriptor(name: str) -> int | None:
    """The descriptor of ours that NAME stands for, or None when it is a path like any other."""
    if name in ("-", "/dev/stdin"):
        return 0
    match = _FD_NAMES.fullmatch(name)
    return int(match[1]) if match else None


class Stream:
    """Content of unknown size that is read from its beginning to its end, by one thread."""

    format = "raw"

    def __init__(self, name: str) -> None:
        """Open NAME: one that stream_descriptor() knows, or a FIFO, whose writer is waited for. Raises OpenError."""
        self.name = name
        descriptor = stream_descriptor(name)
        try:
            # A duplicate shares the position, and can be closed without harm to the caller.
            self.fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else os.dup(descriptor)
        except OSError as error:
            raise OpenError(os_error_reason(error), name=name) from error
        status = os.fstat(self.fd)
        if stat.S_ISDIR(status.st_mode):
            os.close(self.fd)
            raise OpenError("is a directory", name=name)
        self.position = 0
        self._mtime_ns = status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None

    def fill(self, buffer: memoryview) -> int:
        """Fill BUFFER with what comes next; fewer bytes, down to 0, only at the end. Raises ReadError."""
        done = 0
        while done < len(buffer):
            try:
                count = os.readv(self.fd, [buffer[done:]])
            except OSError as error:
                raise ReadError(os_error_reason(error), name=self.name, offset=self.position) from error
            if count == 0:
                break
            done += count
            self.position += count
        return done

    def check_unchanged(self) -> None:
        """Raise ChangedError if this is a file after all, and was written to while it was read."""
        if self._mtime_ns is not None and os.fstat(self.fd).st_mtime_ns != self._mtime_ns:
            raise ChangedError("the file was modified while it was read", name=self.name)

    def facts(self) -> dict[str, object]:
        """As a Source's: nothing to tell."""
        return {}

    def close(self) -> None:
        """Close our descriptor."""
        os.close(self.fd)
