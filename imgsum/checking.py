"""A sums file -> a verdict for each of its lines: `imgsum check`.

Lines are read only as far ahead as the pool needs, so a sums file may be of any length. Nothing here is ever a
success by accident: what could not be verified has a verdict that says so, in the place of its line.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple

from imgsum import blkhash
from imgsum.blkhash import Construction
from imgsum.engine.checksum import Checksum, Task, checksum_tasks
from imgsum.engine.content import Progress
from imgsum.errors import Error, MismatchError, OpenError, RefusedError, os_error_reason
from imgsum.source import OpenOptions, is_nbd_uri, is_stream
from imgsum.source.stream import stream_descriptor
from imgsum.sums import Line, MalformedError, parse_line, read_lines

_PATIENCE = 1000
"""Malformed lines, and no other, after which a file is given up: an image that was named by mistake, 200 MB of random
bytes, has 780,000 of them, and to report them all took 20 s."""

OK, MISMATCH, ERROR, MISSING, MALFORMED = "ok", "mismatch", "error", "missing", "malformed"


class Verdict(NamedTuple):
    """What became of one line of a sums file."""

    status: str
    """`ok`; `mismatch`; `error`, could not be read; `missing`, and that is to be ignored; `malformed`, no checksum."""
    sums: str
    """The sums file, as it was given."""
    number: int | None
    """The line's, from 1; None when the sums file itself is what could not be read."""
    line: Line | None
    """None when it is malformed."""
    checksum: Checksum | None
    """What was computed, if anything was."""
    error: Error | None
    """What more there is to say; always there with `error` and `malformed`."""


class Tally(NamedTuple):
    """How many verdicts there are of each status."""

    ok: int = 0
    mismatch: int = 0
    error: int = 0
    missing: int = 0
    malformed: int = 0
    sums: int = 0
    """1 when the sums file itself could not be read, or has no checksums."""

    def plus(self, verdict: Verdict) -> Tally:
        """One more."""
        if verdict.number is None:
            return self._replace(sums=self.sums + 1)
        return self._replace(**{verdict.status: getattr(self, verdict.status) + 1})

    @property
    def verified(self) -> int:
        """Images that were read to the end, and compared."""
        return self.ok + self.mismatch


class Report(NamedTuple):
    """All verdicts of a sums file. True only when every line was verified, and there was one."""

    verdicts: tuple[Verdict, ...]

    def __bool__(self) -> bool:
        return bool(self.verdicts) and all(verdict.status == OK for verdict in self.verdicts)


class _Entry(NamedTuple):
    """A line that waits for its result."""

    line: Line | None
    missing: bool
    task: Task


def check(
    sums: str | os.PathLike[str],
    *,
    algorithm: str | None = None,
    block_size: int | None = None,
    construction: str = "blkhash",
    relative_to_sums: bool = False,
    options: OpenOptions | None = None,
) -> Report:
    """Verify the images that the file SUMS lists. The report is true only when all of them are as it says.

    algorithm, block_size, construction: of plain lines, as for imgsum.checksum(); tagged and JSON lines say it
    themselves. relative_to_sums: names are relative to the directory of SUMS, not to the current one. options: how
    the images are opened and read. Nothing is raised about an image: its verdict says what is wrong.
    """
    how = blkhash.construction(construction, algorithm, block_size)
    verdicts = check_sums(os.fspath(sums), how, options or OpenOptions(), relative_to_sums=relative_to_sums)
    return Report(tuple(verdicts))


def check_sums(
    sums: str,
    how: Construction,
    options: OpenOptions,
    *,
    zero: bool = False,
    relative_to_sums: bool = False,
    ignore_missing: bool = False,
    ignore_malformed: bool = False,
    progress: Progress | None = None,
) -> Generator[Verdict, None, None]:
    """A verdict for each line of the file SUMS (`-`: standard input), in order. All images share one pool.

    HOW: what plain lines are. ZERO: lines end with NUL, and nothing is escaped. IGNORE_MALFORMED: don't give up where
    line after line is malformed.
    """
    directory = os.path.dirname(sums) if relative_to_sums and sums != "-" else ""
    waiting: deque[_Entry] = deque()

    def tasks() -> Iterator[Task]:
        for line in _lines(sums, how, zero, ignore_malformed):
            entry = _entry(line, sums, directory, how, options, ignore_missing)
            waiting.append(entry)
            yield entry.task

    results = checksum_tasks(tasks(), options, progress=progress)
    try:
        for result in results:
            yield _verdict(waiting.popleft(), sums, result)
    finally:
        results.close()


def _lines(sums: str, how: Construction, zero: bool, ignore_malformed: bool) -> Iterator[Line | Error]:
    """The lines of SUMS that have content, and errors in the place of those that can't be taken."""
    found = False
    malformed = 0
    try:
        fd = 0 if sums == "-" else os.open(sums, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for number, text in read_lines(fd, zero):
                try:
                    line = parse_line(number, text, how, zero)
                except MalformedError as error:
                    malformed += 1
                    yield error.about(sums)
                    if malformed == _PATIENCE and not (found or ignore_malformed):
                        reason = f"is no file of checksums: its first {malformed} lines are malformed"
                        yield OpenError(reason, name=sums)
                        return
                    continue
                if line is not None:
                    found = True
                    yield line
        finally:
            if fd:
                os.close(fd)
    except (OSError, ValueError) as error:
        reason = os_error_reason(error) if isinstance(error, OSError) else str(error)
        yield OpenError(reason, name=sums)
    else:
        if not found:
            yield OpenError("no properly formatted checksum lines found", name=sums)


def _entry(
    line: Line | Error, sums: str, directory: str, how: Construction, options: OpenOptions, ignore_missing: bool
) -> _Entry:
    if isinstance(line, Error):
        return _Entry(None, False, Task(sums, how, options, error=line))
    path = line.name
    if not (path == "-" or is_nbd_uri(path)):
        path = os.path.join(directory, path)
    missing = ignore_missing and _is_missing(path)
    refusal = OpenError("is missing", name=path) if missing else _refusal(path, sums, options)
    return _Entry(line, missing, Task(path, line.how, options, line.size, refusal))


def _refusal(path: str, sums: str, options: OpenOptions) -> Error | None:
    """Why PATH, which a sums file names, is not opened; or None."""
    if stream_descriptor(path) == stream_descriptor(sums) == 0:
        return OpenError("standard input is the sums file", name=path)
    if options.untrusted and is_nbd_uri(path):
        return RefusedError("is an NBD URI in a sums file, and --untrusted connects to nothing", name=path)
    if options.untrusted and is_stream(path):
        return RefusedError("is a stream, and --untrusted reads only files and devices", name=path)
    return None


def _is_missing(path: str) -> bool:
    if path == "-" or is_nbd_uri(path):
        return False
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False  # opening it will say why
    return False


def _verdict(entry: _Entry, sums: str, result: Checksum | Error) -> Verdict:
    line = entry.line
    if isinstance(result, Error):
        if isinstance(result, MalformedError):
            return Verdict(MALFORMED, sums, result.number, None, None, result)
        if line is None:
            return Verdict(ERROR, sums, None, None, None, result)
        if entry.missing:
            status = MISSING
        else:
            status = MISMATCH if isinstance(result, MismatchError) else ERROR
            _explain_command(line, result)
        return Verdict(status, sums, line.number, line, None, result)
    assert line is not None
    if result.hexdigest == line.hexdigest and line.size in (None, result.size):
        return Verdict(OK, sums, line.number, line, result, None)
    return Verdict(MISMATCH, sums, line.number, line, result, _explain_mismatch(line, result))


def _explain_command(line: Line, error: Error) -> None:
    """Say why a name that `imgsum checksum [ COMMAND ]` printed is only looked for as a file."""
    if line.name.startswith("[ ") and isinstance(error.__cause__, FileNotFoundError):
        error.reason += " (a sums file never runs a command)"


def _explain_mismatch(line: Line, result: Checksum) -> Error | None:
    """What may have led to another checksum, or None."""
    reasons = []
    if line.size not in (None, result.size):  # a stream's size is known only at its end
        reasons.append(f"has {result.size} bytes, and the sum is of {line.size} bytes")
    if not line.tagged and _is_file(result.name):
        reasons.append("the sum may be of the file, as sha256sum makes it, not of the image's content")
    if line.size is None and _is_block_device(result.name):
        reasons.append(f"the device has {result.size} bytes: for a smaller image, give its size as --length")
    if result.note:
        reasons.append(result.note)
    return MismatchError("; ".join(reasons), name=result.name) if reasons else None


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_block_device(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def count_verdicts(sums: str, how: Construction, *, zero: bool, ignore_malformed: bool) -> int | None:
    """How many verdicts check_sums() will give, for the progress; None when SUMS can't be read twice."""
    if sums == "-" or not _is_file(sums):
        return None
    return sum(1 for _ in _lines(sums, how, zero, ignore_malformed))
