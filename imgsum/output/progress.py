"""Completed content -> a bar, lines, or a descriptor. Each satisfies engine.content.Progress.

They count content that is complete in order, zeros included. The clock and the output are arguments, so that tests
compare what is written to the letter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from imgsum.errors import printable
from imgsum.output.report import human_size

PATIENCE = 0.5
"""Seconds before a bar appears by itself."""

_BAR_EVERY, _LINE_EVERY = 0.1, 10.0  # seconds

Write = Callable[[str], object]
Clock = Callable[[], float]


class Bar:
    """One line of a terminal, drawn over and over, and gone at the end."""

    def __init__(self, write: Write, columns: int, patience: float, clock: Clock = time.monotonic) -> None:
        self._write = write
        self._columns = columns
        self._clock = clock
        self._next = clock() + patience
        self._drawn = False
        self._name, self._size, self._started = "", None, 0.0  # type: tuple[str, int | None, float]

    def begin(self, name: str, size: int | None) -> None:
        """See Progress."""
        self._name, self._size, self._started = printable(name), size, self._clock()

    def advance(self, done: int) -> None:
        """See Progress."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _BAR_EVERY
        self._drawn = True
        self._write("\r" + self._line(done, now - self._started) + "\x1b[K")

    def end(self) -> None:
        """See Progress."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _line(self, done: int, seconds: float) -> str:
        rate = f"{human_size(int(done / seconds))}/s" if seconds > 0 else ""
        name = self._name if len(self._name) <= 30 else "..." + self._name[-27:]
        if not self._size:
            return f"{name}  {human_size(done)}  {rate}"[: self._columns - 1]
        left = int((self._size - done) * seconds / done) if done else 0
        end = f" {100 * done // self._size:3d}%  {rate}  {left // 60}:{left % 60:02d} left"
        width = max(0, min(40, self._columns - 1 - len(name) - len(end) - 3))
        filled = width * done // self._size
        return f"{name} [{'#' * filled}{'.' * (width - filled)}]{end}"[: self._columns - 1]


class Lines:
    """A plain line now and then, fit for a log, and one when an image is complete."""

    def __init__(self, write: Write, clock: Clock = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._next = clock() + _LINE_EVERY
        self._begun = False
        self._name, self._size, self._done = "", None, 0  # type: tuple[str, int | None, int]

    def begin(self, name: str, size: int | None) -> None:
        """See Progress."""
        self._name, self._size, self._done = printable(name), size, 0
        self._begun = True

    def advance(self, done: int) -> None:
        """See Progress."""
        self._done = done
        now = self._clock()
        if now >= self._next:
            self._next = now + _LINE_EVERY
            self._line()

    def end(self) -> None:
        """See Progress."""
        if self._begun and (self._done == self._size or (self._size is None and self._done)):
            self._line()
        self._begun = False

    def _line(self) -> None:
        if self._size is None:
            self._write(f"imgsum: {self._name}: {human_size(self._done)} done\n")
        else:
            percent = 100 * self._done // self._size if self._size else 100
            self._write(f"imgsum: {self._name}: {percent}% ({human_size(self._done)} of {human_size(self._size)})\n")


class Descriptor:
    """`N/100` lines, as nbdcopy writes them: percent of all images together, each counting the same.

    None are written when the number of images is not known.
    """

    def __init__(self, write: Write, images: int | None) -> None:
        self._write = write
        self._images = images
        self._ended = 0
        self._begun = False
        self._size: int | None = None
        self._last = -1

    def begin(self, name: str, size: int | None) -> None:
        """See Progress."""
        self._size = size
        self._begun = True
        self._percent(0, 1)

    def advance(self, done: int) -> None:
        """See Progress."""
        if self._size:
            self._percent(done, self._size)

    def end(self) -> None:
        """See Progress."""
        if self._begun:
            self._percent(1, 1)
            self._ended += 1
        self._begun = False

    def _percent(self, done: int, size: int) -> None:
        if not self._images:
            return
        # 100 only when it is all; and no more, should there be more images than were counted.
        percent = min(100, 100 * (self._ended * size + done) // (self._images * size))
        if percent > self._last:
            self._last = percent
            self._write(f"{percent}/100\n")


def to_descriptor(fd: int) -> Write:
    """A function that writes text to FD. Where nobody listens it is lost: the checksums are still wanted."""

    def write(text: str) -> None:
        with suppress(OSError):
            os.write(fd, text.encode("utf-8", "backslashreplace"))

    return write
