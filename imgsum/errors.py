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
    name: the file or export that it is about. It may be one that the image refers to.
    image: the image, as the user gave it.
    offset: the offset in the image's content, in bytes, or None.
    """

    def __init__(self, reason: str, *, name: str | None = None, offset: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name
        self.offset = offset
        self.image: str | None = None

    def about(self, name: str) -> Error:
        """Set the name, unless there is one. Returns the same error."""
        if self.name is None:
            self.name = name
        return self

    def message(self) -> str:
        """The reason and the offset, in one printable line, without the name."""
        text = printable(" ".join(self.reason.split()) if "\n" in self.reason else self.reason)
        return text if self.offset is None else f"{text} at offset {self.offset}"

    def __str__(self) -> str:
        return self.message() if self.name is None else f"{printable(self.name)}: {self.message()}"


class UsageError(Error):
    """An option or value is not allowed, or two of them exclude each other."""


class OpenError(Error):
    """The image does not exist, or cannot be opened."""


class RefusedError(Error):
    """The image is not read because of a rule: it is in use, untrusted, or would be read wrongly."""


class NotNativeError(RefusedError):
    """QEMU is needed to read the image, or one that it refers to."""


class FormatError(Error):
    """The image breaks the rules of its format."""


class TruncatedError(FormatError):
    """The image's file ends before something that the image refers to."""


class ReadError(Error):
    """Content could not be read. `offset` is set."""


class ChangedError(Error):
    """The image changed while it was read."""


class MissingError(Error):
    """A program or library that this image needs is not installed."""


def unexpected(error: BaseException) -> Error:
    """An Error for the exception ERROR, which was not raised on purpose: a resource is short, or there is a bug."""
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
    """The image can be read, but is not the expected one."""


class naming:  # noqa: N801  # used like contextlib.suppress
    """`with naming(image):` sets the image of errors that leave the block, and their name if they have none."""

    def __init__(self, image: str) -> None:
        self._image = image

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, Error):
            error.image = self._image
            error.about(self._image)
