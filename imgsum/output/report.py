"""Results -> lines or JSON on standard output, notes and errors on standard error. Only progress.py prints besides."""

from __future__ import annotations

import contextlib
import os
import stat

from imgsum.errors import Error, printable
from imgsum.units import GIB, KIB, MIB, format_size

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from imgsum.commands.options import Arguments
    from imgsum.engine.checksum import Checksum
    from imgsum.engine.compare import AnyPair
    from imgsum.engine.content import Stats
    from imgsum.sums.check import Tally, Verdict

SCHEMA = 1

_PIPE_BUF = 4096  # as select.PIPE_BUF, whose import costs a library


class OutputError(Error):
    """Standard output can't take what it is given."""


def write(line: str, end: str = "\n") -> None:
    """LINE on standard output, now, with names as the bytes that they are. Raises OutputError, BrokenPipeError."""
    _write_out(os.fsencode(line + end))


def _write_out(text: bytes) -> None:
    try:
        _write_all(1, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError((error.strerror or str(error)).lower(), name="standard output") from error


def _write_all(fd: int, text: bytes) -> None:
    done = 0
    while done < len(text):
        try:
            done += os.write(fd, memoryview(text)[done:])
        except BlockingIOError:  # a pipe or terminal that somebody who shares it made non-blocking, and it is full
            import select

            select.select([], [fd], [])
        except OSError:
            _cut_off(fd, done - (text.rfind(b"\n", 0, done) + 1))
            raise


def _cut_off(fd: int, count: int) -> None:
    """Remove the last COUNT bytes, part of a line, of the file that FD writes to. Of anything but a file they stay."""
    with contextlib.suppress(OSError):
        status = os.fstat(fd)
        if count and stat.S_ISREG(status.st_mode) and os.lseek(fd, 0, os.SEEK_CUR) == status.st_size:
            os.ftruncate(fd, status.st_size - count)
            os.lseek(fd, -count, os.SEEK_CUR)


class LineWriter:
    """Lines on standard output, several in one write: a write for each of 26 million takes 100 s.

    No line is written twice, and none in part, also where a signal's exception or a full disk ends the program: a pipe
    takes up to PIPE_BUF bytes as a whole or not at all, and what a full file system took of a line is cut off again.
    """

    def __init__(self) -> None:
        self._pending = b""

    def add(self, line: str) -> None:
        """LINE, now or with the next flush()."""
        data = os.fsencode(line) + b"\n"
        if len(self._pending) + len(data) > _PIPE_BUF:
            self.flush()
        self._pending += data

    def flush(self) -> None:
        """Write what waits. Raises OutputError, BrokenPipeError."""
        data, self._pending = self._pending, b""  # an exception in the middle of write() must not lead to another one
        if data:
            _write_out(data)


def warn(text: str) -> None:
    """`imgsum: TEXT` on standard error. Where nobody can be told, the exit status has to do."""
    with contextlib.suppress(OSError):
        _write_all(2, f"imgsum: {text}\n".encode("utf-8", "backslashreplace"))


def note_terminal(what: str, arguments: Arguments) -> None:
    """Say that WHAT is read from standard input, where that is a terminal and somebody may wait for nothing."""
    if os.isatty(0) and not arguments.quiet:
        warn(f"reading {what} from standard input, as no name was given (Ctrl-D ends it, Ctrl-C gives up)")


def checksum_line(result: Checksum, *, tag: bool = False, zero: bool = False) -> str:
    """The line of RESULT, without its end: as sha256sum and blksum print it, or tagged.

    A name with a newline, CR or backslash is escaped, and the line begins with a backslash, as in coreutils; with
    ZERO nothing is escaped.
    """
    name = result.name if zero else escape(result.name)
    mark = "" if name == result.name else "\\"
    if tag:
        return f"{mark}{tag_name(result)} ({name}) = {result.hexdigest}"
    return f"{mark}{result.hexdigest}  {name}"


def tag_name(result: Checksum) -> str:
    """What a tagged line calls the construction: `BLKHASH-SHA256`, `BLKHASH-BLAKE3/1M`, `IMAGEIO`."""
    from imgsum.hash.blkhash import BLOCK_SIZE

    if result.construction != "blkhash":
        return result.construction.upper()
    size = "" if result.block_size == BLOCK_SIZE else f"/{format_size(result.block_size)}"
    return f"BLKHASH-{result.algorithm.upper()}{size}"


def escape(name: str) -> str:
    """NAME as coreutils escapes it in a line of checksums."""
    return name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def checksum_json(result: Checksum, offset: int = 0, length: int | None = None, *, stats: bool = False) -> str:
    """RESULT as one JSON object. OFFSET, LENGTH: the range of the content that was asked for; no keys for all of it."""
    record: dict[str, object] = {
        "schema": SCHEMA,
        **name_record(result.name),
        "checksum": result.hexdigest,
        "algorithm": result.algorithm,
        "block_size": result.block_size,
        "size": result.size,
        "format": result.format,
    }
    if result.construction != "blkhash":
        record["construction"] = result.construction
    if offset or length is not None:
        record["offset"] = offset
    if length is not None:
        record["length"] = length
    if result.reused is not None:
        record |= {"reused_bytes": result.reused.bytes, "sampled_blocks": result.reused.sampled}
    if stats:
        record["stats"] = stats_record(result.stats)
    return to_json(record)


def reuse_text(result: Checksum) -> str:
    """How much of RESULT came from an index."""
    assert result.reused is not None
    reused, sampled = result.reused
    whole = human_size(result.size)
    return f"{human_size(reused)} of {whole} came from the index ({sampled} of its blocks were read, and are the same)"


def error_json(error: Error) -> str:
    """A failure as one JSON object: it has `error`, and no `checksum`. The name is the image's, as it was given."""
    name = error.image or error.name or ""
    record: dict[str, object] = {"schema": SCHEMA, **name_record(name), "error": error_text(error)}
    if error.offset is not None:
        record["offset"] = error.offset
    return to_json(record)


def error_text(error: Error) -> str:
    """What ERROR says, without the name of the image; with that of another file, where it is about one."""
    return str(error).removeprefix(f"{printable(error.image or error.name or '')}: ")


def verdict_line(verdict: Verdict) -> str:
    """`NAME: OK` and the like, for a verdict of a line. Escaped as in coreutils, and control characters too."""
    assert verdict.line is not None
    name = escape(verdict.line.name)
    mark = "" if name == verdict.line.name else "\\"
    outcome = {"ok": "OK", "mismatch": "FAILED"}.get(verdict.status, "FAILED open or read")
    return f"{mark}{printable(name)}: {outcome}"


def verdict_json(verdict: Verdict, stats: bool = False) -> str:
    """VERDICT as one JSON object. It has `checksum` only when every byte was read."""
    record: dict[str, object] = {"schema": SCHEMA, "status": verdict.status, "sums": name_record(verdict.sums)["name"]}
    line, result = verdict.line, verdict.checksum
    if verdict.number is not None:
        record["line"] = verdict.number
    if line is not None:
        record |= {**name_record(line.name), "expected": line.hexdigest}
        record |= {"algorithm": line.construction.algorithm.name, "block_size": line.construction.block_size}
        if line.construction.name != "blkhash":
            record["construction"] = line.construction.name
        if line.range is not None:
            record["offset"], length = line.range
            if length is not None:
                record["length"] = length
    if result is not None:
        record |= {"checksum": result.hexdigest, "size": result.size, "format": result.format}
        if stats:
            record["stats"] = stats_record(result.stats)
    if verdict.error is not None and verdict.status != "missing":
        record["reason" if verdict.status == "mismatch" else "error"] = error_text(verdict.error)
    if verdict.note is not None:
        record["note"] = verdict.note
    return to_json(record)


def tally_lines(tally: Tally) -> list[str]:
    """How many lines were not as they should be, in the words of coreutils."""

    def count(number: int, one: str, many: str) -> list[str]:
        return [f"WARNING: {number} {one if number == 1 else many}"] if number else []

    return [
        *count(tally.malformed, "line is improperly formatted", "lines are improperly formatted"),
        *count(tally.error, "listed file could not be read", "listed files could not be read"),
        *count(tally.mismatch, "computed checksum did NOT match", "computed checksums did NOT match"),
    ]


def range_json(start: int, length: int) -> str:
    """A range that differs as one JSON object. json.dumps() would take ten times as long, and there may be millions."""
    return f'{{"schema": {SCHEMA}, "start": {start}, "length": {length}}}'


def comparison_json(pair: AnyPair, stats: Stats | None, **verdict: object) -> str:
    """What became of PAIR as one JSON object: VERDICT, and its images."""
    images = [
        {**name_record(name), "size": size, "format": image_format}
        for name, size, image_format in zip(pair.names, pair.sizes, pair.formats, strict=True)
    ]
    unit = {} if pair.unit == 1 else {"block_size": pair.unit}
    record = {"schema": SCHEMA, **verdict, **unit, "images": images}
    return to_json({**record, "stats": stats_record(stats)} if stats else record)


def name_record(name: str) -> dict[str, object]:
    """NAME for JSON, which is UTF-8; one that is not has its bytes too, as base64."""
    raw = os.fsencode(name)
    try:
        return {"name": raw.decode()}
    except UnicodeDecodeError:
        import base64

        return {"name": raw.decode(errors="replace"), "name_b64": base64.b64encode(raw).decode()}


def to_json(record: dict[str, object]) -> str:
    """RECORD on one line, in ASCII: JSON is UTF-8, and the locale's encoding may be another."""
    import json  # 6 ms, so only for those who ask for it

    return json.dumps(record)


def stats_record(stats: Stats) -> dict[str, object]:
    """STATS for JSON."""
    record: dict[str, object] = stats._asdict()
    del record["details"]
    return {**record, "seconds": round(stats.seconds, 6), **stats.details}


def stats_text(stats: Stats) -> str:
    """STATS for a person."""
    rate = stats.bytes_read / stats.seconds / 1e9 if stats.seconds > 0 else 0.0
    details = "".join(f", {key.replace('_', ' ')}: {value}" for key, value in stats.details.items())
    reused = f", reused {human_size(stats.reused_bytes)}" if stats.reused_bytes else ""
    return (
        f"read {human_size(stats.bytes_read)} in {stats.requests} requests, skipped {human_size(stats.zero_bytes)}"
        f" of zeros{reused}, {stats.extents} extents, {stats.seconds:.3f} s ({rate:.2f} GB/s){details}"
    )


def human_size(size: int) -> str:
    """SIZE bytes to one decimal: `3.0 GiB`."""
    for unit, word in ((GIB * KIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {word}"
    return f"{size} B"
