"""Streams: standard input, FIFOs, /dev/fd/N, process substitution. Raw content, read once, from where it stands."""

from __future__ import annotations

import errno
import os
import re
import select
import stat

from imgsum.errors import OpenError, ReadError, RefusedError, os_error_reason
from imgsum.source import OpenOptions, detect
from imgsum.source.file import refuse_empty_device, refuse_if_modified
from imgsum.source.locks import refuse_if_in_use

_LOOK_UP_EVERY = 300  # milliseconds after which a wait looks whether a signal came

_FD_NAMES = re.compile(r"/(?:dev|proc/self|proc/thread-self)/fd/([0-9]{1,9})")


def stream_descriptor(name: str) -> int | None:
    """The descriptor of ours that NAME stands for, or None when it is a path like any other."""
    if name in ("-", "/dev/stdin"):
        return 0
    match = _FD_NAMES.fullmatch(name)
    return int(match[1]) if match else None


class Sequential:
    """Content of unknown size that is read from its beginning to its end, by one thread."""

    format = "raw"

    def __init__(self, name: str, options: OpenOptions, *, detect_containers: bool) -> None:
        self.name = name
        self.position = 0
        self.wanted: int | None = None
        """The most that will be read, if that is known. Bytes."""
        self._detect = detect_containers
        self._max_size = options.max_size
        self._head = b""  # read already, for detection, and not yet given out
        self._tail = b""  # the last that was given out

    def fill(self, buffer: memoryview) -> int:
        """Fill BUFFER with what comes next; fewer bytes, down to 0, only at the end.

        Raises ReadError, and RefusedError when the content begins or ends as a container does, or is too large.
        """
        if not buffer:  # nothing is read yet, and so nothing is known to be the head
            return 0
        if self._detect and self.position == 0:
            # Never more than is wanted: what follows may be for somebody else.
            head = bytearray(detect.HEAD_SIZE if self.wanted is None else min(self.wanted, detect.HEAD_SIZE))
            self._head = bytes(head[: self._read(memoryview(head))])
            self._refuse_container(detect.detect(self._head, b""))
            self._refuse_head(self._head)
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
            self._tail = (self._tail + bytes(buffer[:done][-detect.TAIL_SIZE :]))[-detect.TAIL_SIZE :]
            if done < len(buffer):
                self._refuse_container(detect.detect(b"", self._tail))
        return done

    def _read(self, buffer: memoryview) -> int:
        """Fill BUFFER with the next bytes; fewer only at the end. Raises an imgsum.Error."""
        raise NotImplementedError

    def _refuse_container(self, name: str) -> None:
        """Raise RefusedError unless NAME, the format that was found, is raw."""
        raise NotImplementedError

    def _refuse_head(self, head: bytes) -> None:
        """Raise RefusedError where content that begins with HEAD is no disk."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """As a Source's."""
        raise NotImplementedError

    def details(self) -> dict[str, object]:
        """As a Source's."""
        raise NotImplementedError

    def close(self) -> None:
        """As a Source's."""
        raise NotImplementedError


class Stream(Sequential):
    """What a descriptor gives, from its current position."""

    def __init__(self, name: str, options: OpenOptions) -> None:
        """Open NAME: one that stream_descriptor() knows, or a FIFO, whose writer is waited for.

        Content that is a container of some format is refused, unless the options say that it is raw. Raises OpenError,
        RefusedError.
        """
        super().__init__(name, options, detect_containers=options.format is None)
        descriptor = stream_descriptor(name)
        try:
            # What this process was given is inheritable, what it opened itself is not.
            if descriptor is not None and not options.own_descriptors and not os.get_inheritable(descriptor):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            # A duplicate shares the position, and can be closed without harm to the caller.
            self.fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else os.dup(descriptor)
        except OSError as error:
            raise OpenError(os_error_reason(error), name=name) from error
        status = os.fstat(self.fd)
        if stat.S_ISDIR(status.st_mode):
            os.close(self.fd)
            raise OpenError("is a directory", name=name)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._ended = False
        self._stopped = False
        self._force_share = options.force_share
        self._status = status if stat.S_ISREG(status.st_mode) else None
        try:
            if stat.S_ISBLK(status.st_mode):
                position = os.lseek(self.fd, 0, os.SEEK_CUR)
                size = os.lseek(self.fd, 0, os.SEEK_END)
                os.lseek(self.fd, position, os.SEEK_SET)
                refuse_empty_device(size, name)
            self._refuse_if_in_use()
        except BaseException:
            os.close(self.fd)
            raise

    def _read(self, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer) and not self._ended:
            # A signal that comes just before a read blocks would be seen only after it; and somebody who shares this
            # pipe or terminal may have made it non-blocking.
            while not self._poll.poll(_LOOK_UP_EVERY):
                if self._stopped:
                    return done
            try:
                count = os.readv(self.fd, [buffer[done:]])
            except BlockingIOError:  # another reader was faster
                continue
            except OSError as error:
                raise ReadError(os_error_reason(error), name=self.name, offset=self.position + done) from error
            self._ended = count == 0  # for good, also where a terminal or FIFO would have more later
            done += count
        return done

    def _refuse_container(self, name: str) -> None:
        if name != "raw":
            raise RefusedError(
                f"is a {name} image, which can't be read from a stream: give the file itself"
                " (-f raw reads the container's own bytes)",
                name=self.name,
            )

    def _refuse_head(self, head: bytes) -> None:
        if reason := detect.not_a_disk(head, "-"):
            raise RefusedError(reason, name=self.name)

    def stop(self) -> None:
        """Let a thread that waits for bytes have none."""
        self._stopped = True

    def check_unchanged(self) -> None:
        """As a Source's, if this is a file after all."""
        if self._status is not None:
            refuse_if_modified(self._status, os.fstat(self.fd), self.name)
        self._refuse_if_in_use()

    def _refuse_if_in_use(self) -> None:
        if not self._force_share:
            refuse_if_in_use(self.fd, self.name)

    def details(self) -> dict[str, object]:
        """As a Source's: nothing to tell."""
        return {}

    def close(self) -> None:
        """Close our descriptor."""
        os.close(self.fd)
