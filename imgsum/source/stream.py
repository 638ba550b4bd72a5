"""Streams: standard input, FIFOs, /dev/fd/N, process substitution. Raw content, read once, from where it stands."""

from __future__ import annotations

import errno
import os
import re
import select
import stat

from imgsum.errors import ChangedError, OpenError, ReadError, RefusedError, os_error_reason
from imgsum.source import probe

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

    def __init__(self, name: str, detect: bool = True, own: bool = True, max_size: int | None = None) -> None:
        """Open NAME: one that stream_descriptor() knows, or a FIFO, whose writer is waited for. Raises OpenError.

        DETECT: refuse content that is a container of some format. OWN: as OpenOptions.own_descriptors. MAX_SIZE: refuse
        more bytes than that.
        """
        self.name = name
        descriptor = stream_descriptor(name)
        try:
            # What this process was given is inheritable, what it opened itself is not.
            if descriptor is not None and not own and not os.get_inheritable(descriptor):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            # A duplicate shares the position, and can be closed without harm to the caller.
            self.fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else os.dup(descriptor)
        except OSError as error:
            raise OpenError(os_error_reason(error), name=name) from error
        status = os.fstat(self.fd)
        if stat.S_ISDIR(status.st_mode):
            os.close(self.fd)
            raise OpenError("is a directory", name=name)
        self.position = 0
        self._detect = detect
        self._max_size = max_size
        self._head = b""  # read already, for detection, and not yet given out
        self._tail = b""  # the last that was given out
        self._mtime_ns = status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None

    def fill(self, buffer: memoryview) -> int:
        """Fill BUFFER with what comes next; fewer bytes, down to 0, only at the end.

        Raises ReadError, and RefusedError when the content begins or ends as a container does, or is too large.
        """
        if self._detect and self.position == 0:
            head = bytearray(probe.HEAD_SIZE)
            self._head = bytes(head[: self._read(memoryview(head))])
            self._refuse_container(probe.detect(self._head, b""))
        done = min(len(self._head), len(buffer))
        buffer[:done] = self._head[:done]
        self._head = self._head[done:]
        self.position += done
        if not self._head:
            count = self._read(buffer[done:])
            self.position += count
            done += count
        if self._max_size is not None and self.position > self._max_size:
            raise RefusedError(f"has more bytes of content than the {self._max_size} of --max-size", name=self.name)
        if self._detect:
            self._tail = (self._tail + bytes(buffer[:done][-probe.TAIL_SIZE :]))[-probe.TAIL_SIZE :]
            if done < len(buffer):
                self._refuse_container(probe.detect(b"", self._tail))
        return done

    def _read(self, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            try:
                count = os.readv(self.fd, [buffer[done:]])
            except BlockingIOError:  # a pipe or terminal that somebody who shares it made non-blocking
                select.select([self.fd], [], [])
                continue
            except OSError as error:
                raise ReadError(os_error_reason(error), name=self.name, offset=self.position + done) from error
            if count == 0:
                break
            done += count
        return done

    def _refuse_container(self, name: str) -> None:
        if name != "raw":
            raise RefusedError(
                f"is a {name} image, which can't be read from a stream: give the file itself"
                " (-f raw reads the container's own bytes)",
                name=self.name,
            )

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
