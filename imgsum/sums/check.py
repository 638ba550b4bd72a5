"""A sums file -> a verdict for each of its lines: `imgsum check`.

Lines are read only as far ahead as the pool needs, so a sums file may be of any length. Nothing here is ever a
success by accident: what could not be verified has a verdict that says so, in the place of its line.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple

from imgsum.engine.checksum import Checksum, Task, checksum_tasks
from imgsum.engine.content import Progress
from imgsum.errors import Error, MismatchError, OpenError, RefusedError, UsageError, os_error_reason
from imgsum.hash import blkhash
from imgsum.hash.blkhash import Construction
from imgsum.parameters import FLAG, require, shown
from imgsum.source import OpenOptions, detect, is_index, is_nbd_uri, is_stream, options_with, path_or_command
from imgsum.source.stream import stream_descriptor
from imgsum.sums.grammar import CHUNK, Line, MalformedError, parse_line, read_lines, tool_of
from imgsum.units import MIB

_MAX_MALFORMED = 1000
"""Malformed lines, and no other, after which a file is given up: an image that was named by mistake, 200 MB of random
bytes, has 780,000 of them, and to report them all took 20 s."""

_COST_OF_LONG = 100
"""Malformed lines that one which is too long counts for: up to LONGEST_SKIP bytes were read to find its end."""

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
    """What more there is to say; always there with `error`, `malformed` and `mismatch`."""
    note: str | None = None
    """What a user may want to know, though it changes nothing."""


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

    def __repr__(self) -> str:
        """How many verdicts there are of each kind."""
        tally = Tally()
        for verdict in self.verdicts:
            tally = tally.plus(verdict)
        return f"<Report {', '.join(f'{name} {count}' for name, count in tally._asdict().items() if count) or 'empty'}>"


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
    format: str | None = None,  # noqa: A002  # as in -f
    options: OpenOptions | None = None,
) -> Report:
    """Verify the images that the file SUMS lists. The report is true only when all of them are as it says.

    algorithm, block_size, construction: of plain lines, as for imgsum.checksum(); tagged and JSON lines say it
    themselves. relative_to_sums: names are relative to the directory of SUMS, not to the current one. format: of all
    images; None detects it. options: how the images are opened and read. Nothing is raised about an image: its
    verdict says what is wrong.
    """
    chosen = blkhash.construction(construction, algorithm, block_size)
    options = options_with(options, format=format)
    require(FLAG, relative_to_sums=relative_to_sums)
    path = path_or_command(sums, "sums")
    if not isinstance(path, str):
        raise UsageError(f"sums: not a path: {shown(sums)}")
    verdicts = check_sums(path, chosen, options, relative_to_sums=relative_to_sums)
    return Report(tuple(verdicts))


def check_sums(
    sums: str,
    construction: Construction,
    options: OpenOptions,
    *,
    zero: bool = False,
    relative_to_sums: bool = False,
    ignore_missing: bool = False,
    ignore_malformed: bool = False,
    hints: bool = True,
    progress: Progress | None = None,
) -> Generator[Verdict, None, None]:
    """A verdict for each line of the file SUMS (`-`: standard input), in order. All images share one pool.

    CONSTRUCTION: that of plain lines. ZERO: lines end with NUL, and nothing is escaped. IGNORE_MALFORMED: don't give up
    where line after line is malformed. HINTS: find out whether a sum that does not match is of the file.
    """
    directory = os.path.dirname(sums) if relative_to_sums and sums != "-" else ""
    waiting: deque[_Entry] = deque()
    told = False  # that a sum is of the file: once is enough

    def tasks() -> Iterator[Task]:
        for line in _lines(sums, construction, zero, ignore_malformed):
            entry = _entry(line, sums, directory, construction, options, ignore_missing)
            waiting.append(entry)
            yield entry.task

    results = checksum_tasks(tasks(), options, progress=progress)
    try:
        for result in results:
            verdict = _verdict(waiting.popleft(), sums, result)
            if hints and not told and _is_of_the_file(verdict):
                told = True
                _explain_sum_of_file(verdict)
            yield verdict
    finally:
        results.close()


def _lines(sums: str, construction: Construction, zero: bool, ignore_malformed: bool) -> Iterator[Line | Error]:
    """The lines of SUMS that have content, and errors in the place of those that can't be taken.

    Errors about single lines only where another line is well formed: else one error about the file takes their place.
    """
    try:
        fd = 0 if sums == "-" else os.open(sums, os.O_RDONLY | os.O_CLOEXEC)
        try:
            begun = os.read(fd, CHUNK)
            if detect.detect(begun[: detect.HEAD_SIZE], b"") != "raw":
                yield OpenError(_is_an_image(sums), name=sums)
            else:
                yield from _lines_of_text(sums, fd, begun, construction, zero, ignore_malformed)
        finally:
            if fd:
                os.close(fd)
    except (OSError, ValueError) as error:
        reason = os_error_reason(error) if isinstance(error, OSError) else str(error)
        yield OpenError(reason, name=sums)


def _lines_of_text(
    sums: str, fd: int, begun: bytes, construction: Construction, zero: bool, ignore_malformed: bool
) -> Iterator[Line | Error]:
    """As _lines(), of what FD has after BEGUN, its first bytes. Raises OSError."""
    found = False
    pending: list[MalformedError] = []  # before the first line that is well formed
    cost = 0
    advice: set[str] = set()
    try:
        for number, text in read_lines(fd, zero, begun):
            try:
                line: Line | Error | None = parse_line(number, text, construction, zero)
            except MalformedError as error:
                if error.advice and error.advice not in advice:  # said once
                    advice.add(error.advice)
                    error.reason += f"; {error.advice}"
                line = error.about(sums)
                found = found or error.well_formed
                cost += 1 if text is not None else _COST_OF_LONG
                if not found:
                    pending.append(error)
                    if cost >= _MAX_MALFORMED:
                        if not ignore_malformed or (b"\0" in begun and not zero):
                            break
                        found = True  # whatever it is, it is to be read to its end
                    else:
                        continue
            if line is not None:
                found = True
                yield from (error for error in pending if error is not line)
                pending.clear()
                yield line
    except OpenError as error:
        if found:
            yield error.about(sums)
            return
    if not found:
        yield OpenError(_without_lines(sums, fd, begun, pending[0] if pending else None), name=sums)


def _without_lines(sums: str, fd: int, begun: bytes, first: MalformedError | None) -> str:
    """What to say of a file without a line of checksums, whose FIRST malformed line is this one."""
    if first is None or first.advice or len(begun) < 512 or b"\0" not in begun:
        return "no properly formatted checksum lines found" + (f" ({first.reason})" if first else "")
    return _is_an_image(sums)


def _is_an_image(sums: str) -> str:
    name = "-" if sums == "-" else shlex.quote(sums)
    return f"is a disk image, not a checksum file; did you mean: imgsum checksum {name}"


def _entry(
    line: Line | Error,
    sums: str,
    directory: str,
    construction: Construction,
    options: OpenOptions,
    ignore_missing: bool,
) -> _Entry:
    if isinstance(line, Error):
        return _Entry(None, False, Task(sums, construction, options, error=line))
    path = line.name
    if not (path == "-" or is_nbd_uri(path)):
        path = os.path.join(directory, path)
    missing = ignore_missing and _is_missing(path)
    refusal = OpenError("is missing", name=path) if missing else _refusal(path, sums, options)
    if line.range is not None:
        options = options._replace(offset=line.range[0], length=line.range[1])
    return _Entry(line, missing, Task(path, line.construction, options, line.size, refusal))


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
            if status == MISMATCH:
                result.reason = f"{_DIFFERS}: it {result.reason}"
            _explain_command(line, result)
        return Verdict(status, sums, line.number, line, None, result)
    assert line is not None
    if result.hexdigest == line.hexdigest and line.size in (None, result.size):
        note = None
        if line.format not in (None, result.format):
            note = f"the format is {result.format}, and the sum was made of {line.format}: the content is the same"
        return Verdict(OK, sums, line.number, line, result, None, note)
    return Verdict(MISMATCH, sums, line.number, line, result, _explain_mismatch(line, result, sums))


def _explain_command(line: Line, error: Error) -> None:
    """Say why a name that `imgsum checksum [ COMMAND ]` printed is only looked for as a file."""
    if line.name.startswith("[ ") and isinstance(error.__cause__, FileNotFoundError):
        error.reason += " (a sums file never runs a command)"


def _explain_mismatch(line: Line, result: Checksum, sums: str) -> Error:
    """That the content differs, and what may have led to that."""
    reasons = [_DIFFERS]
    if line.size not in (None, result.size):  # a stream's size is known only at its end
        reasons.append(f"it has {result.size} bytes, and the sum is of {line.size} bytes")
    if line.size is None and _is_block_device(result.name):
        reasons.append(f"the device has {result.size} bytes: for a smaller image, give its size as --length")
    if result.note:
        reasons.append(result.note)
    if line.range is None and result.format != "index" and (index := _index_beside(result.name, sums)):
        reasons.append(f"`imgsum compare {shlex.quote(index)} {shlex.quote(result.name)} --all` shows where")
    return MismatchError("; ".join(reasons), name=result.name)


def _index_beside(image: str, sums: str) -> str | None:
    """The index of the file IMAGE that lies beside it, or beside the file SUMS; None: there is none."""
    if is_nbd_uri(image) or is_stream(image):
        return None
    name = f"{image}.index"
    beside_sums = os.path.join(os.path.dirname(sums), os.path.basename(name))
    for path in (name, beside_sums) if sums != "-" else (name,):
        with contextlib.suppress(OSError, Error, ValueError):
            if os.path.isfile(path) and is_index(path, OpenOptions()):
                return path
    return None


def _is_of_the_file(verdict: Verdict) -> bool:
    """Whether the sum of a plain line that did not match is one of the file's own bytes, as sha256sum makes it.

    Found out by hashing the file, where that takes about as long as its content took: a sparse file may have exabytes.
    """
    line, result = verdict.line, verdict.checksum
    if verdict.status != MISMATCH or line is None or result is None or line.tagged:
        return False
    if tool_of(line.construction.algorithm.name) is None or not _is_file(result.name):
        return False
    try:
        with open(result.name, "rb", buffering=0, opener=_open_file) as file:
            if os.fstat(file.fileno()).st_size > result.stats.bytes_read + _SMALL:
                return False
            digest = line.construction.algorithm.new()
            while data := file.read(MIB):
                digest.update(data)
    except OSError:
        return False
    return digest.digest().hex() == line.hexdigest


def _open_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a FIFO


def _explain_sum_of_file(verdict: Verdict) -> None:
    assert verdict.line is not None
    assert verdict.error is not None
    tool = tool_of(verdict.line.construction.algorithm.name)
    verdict.error.reason = (
        f"the content differs from the sum, which is of the file itself, as {tool} makes it: `{tool} -c` verifies that"
    )


_DIFFERS = "the content differs from what the sum says"
_SMALL = 16 * MIB  # of a file: a fraction of a second


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


def count_verdicts(sums: str, construction: Construction, *, zero: bool, ignore_malformed: bool) -> int | None:
    """How many verdicts check_sums() will give, for the progress; None when SUMS can't be read twice."""
    if sums == "-" or not _is_file(sums):
        return None
    return sum(1 for _ in _lines(sums, construction, zero, ignore_malformed))
