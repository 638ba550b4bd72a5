"""imgsum.Error and its kinds. The text of a message is made here and nowhere else."""

from __future__ import annotations

import errno
import os

OK, DIFFERENT, TROUBLE = 0, 1, 2
"""Exit statuses, as cmp and diff have them."""


def printable(name: str) -> str:
    """NAME fit for a message: control and undecodable characters escaped, so that no terminal obeys them."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else _escape(c) for c in name)


def _escape(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # a byte that was not UTF-8, as os.fsdecode() keeps it
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


class Error(Exception):
    """Base of everything imgsum raises on purpose.

    reason: what is wrong, in lower case, without the name.
    name: the image it is about, as the user gave it; filled in by whoever knows it.
    image: the image that was asked for, also where `name` is a file that it refers to.
    offset: where in the image's content or file, in bytes, or None.
    """

    exit_status = TROUBLE

    def __init__(self, reason: str, *, name: str | None = None, offset: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name
        self.offset = offset
        self.image: str | None = None

    def about(self, name: str) -> Error:
        """The same error, about NAME unless it already says what it is about."""
        if self.name is None:
            self.name = name
        return self

    def message(self) -> str:
        """One printable line without the name: the reason, and the offset where there is one."""
        text = printable(" ".join(self.reason.split()) if "\n" in self.reason else self.reason)
        return text if self.offset is None else f"{text} at offset {self.offset}"

    def __str__(self) -> str:
        return self.message() if self.name is None else f"{printable(self.name)}: {self.message()}"


class UsageError(Error):
    """The call makes no sense: an option, a value, or two that exclude each other."""


class OpenError(Error):
    """The image is not there, or may not or cannot be opened."""


class RefusedError(Error):
    """The image could be read, but a rule says not to: locked, untrusted, a protocol name, a lossy format."""


class NotNativeError(RefusedError):
    """The image, or one that it refers to, is for QEMU to read."""


class FormatError(Error):
    """The image says it is of a format, and breaks that format's rules."""


class TruncatedError(FormatError):
    """The image's file ends before something that the image refers to."""


class ReadError(Error):
    """Content could not be read. `offset` is set."""


class ChangedError(Error):
    """The image changed while it was read."""


class MissingError(Error):
    """A program or library that this image needs is not installed."""


def unexpected(error: BaseException) -> Error:
    """ERROR, which nobody raised on purpose, as an Error: a lack of something that the system gives, or else a bug."""
    described = Error(f"internal error: {error!r} (IMGSUM_DEBUG=1 shows where; please report it)")
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        described = ReadError(f"there is not enough memory ({error})" if str(error) else "there is not enough memory")
    elif number in (errno.EMFILE, errno.ENFILE) or (isinstance(error, ImportError) and "Too many open" in str(error)):
        described = OpenError("too many open files: the limit is too low (ulimit -n)")
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        described = ReadError("no thread can be started: a limit on processes or on memory is too low")
    described.__cause__ = error
    return described


def os_error_reason(error: OSError) -> str:
    """What the system says of ERROR, in lower case as messages are, e.g. `no such file or directory`."""
    text = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


class MismatchError(Error):
    """The image is not what it was said to be: nothing is wrong with reading it."""


class naming:  # noqa: N801  # used like contextlib.suppress
    """`with naming(image):` errors that leave the block are about IMAGE, or about a file that it refers to."""

    def __init__(self, image: str) -> None:
        self._image = image

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, Error):
            error.image = self._image
            error.about(self._image)
