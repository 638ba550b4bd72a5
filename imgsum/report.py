"""Results -> lines or JSON on standard output, notes and errors on standard error. Only progress.py prints besides."""

from __future__ import annotations

import contextlib
import os
import time

from imgsum.errors import Error, printable
from imgsum.units import GIB, KIB, MIB, format_size

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imgsum.checking import Tally, Verdict
    from imgsum.engine.checksum import Checksum
    from imgsum.engine.compare import Pair
    from imgsum.engine.content import Stats

SCHEMA = 1


class OutputError(Error):
    """Standard output can't take what it is given."""


def write(line: str, end: str = "\n") -> None:
    """LINE on standard output, now, with names as the bytes that they are. Raises OutputError, BrokenPipeError."""
    try:
        _write_all(1, os.fsencode(line + end))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError((error.strerror or str(error)).lower(), name="standard output") from error


def _write_all(fd: int, text: bytes) -> None:
    data = memoryview(text)
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # a pipe or terminal that somebody who shares it made non-blocking, and it is full
            import select

            select.select([], [fd], [])


def write_lines(lines: Iterable[str]) -> None:
    """LINES as write() does, but many at once when they come fast: a write for each of 26 million takes 100 s."""
    pending: list[str] = []
    written = 0.0
    try:
        for line in lines:
            pending.append(line)
            if len(pending) >= 1000 or time.monotonic() - written > 0.1:
                write("\n".join(pending))
                pending.clear()
                written = time.monotonic()
    finally:
        if pending:
            write("\n".join(pending))


def warn(text: str) -> None:
    """`imgsum: TEXT` on standard error. Where nobody can be told, the exit status has to do."""
    with contextlib.suppress(OSError):
        _write_all(2, f"imgsum: {text}\n".encode("utf-8", "backslashreplace"))


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
    from imgsum.blkhash import BLOCK_SIZE

    if result.construction != "blkhash":
        return result.construction.upper()
    size = "" if result.block_size == BLOCK_SIZE else f"/{format_size(result.block_size)}"
    return f"BLKHASH-{result.algorithm.upper()}{size}"


def escape(name: str) -> str:
    """NAME as coreutils escapes it in a line of checksums."""
    return name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def checksum_json(result: Checksum, stats: bool = False) -> str:
    """RESULT as one JSON object."""
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
    if stats:
        record["stats"] = stats_record(result.stats)
    return to_json(record)


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
    words = {"ok": "OK", "mismatch": "FAILED"}.get(verdict.status, "FAILED open or read")
    return f"{mark}{printable(name)}: {words}"


def verdict_json(verdict: Verdict, stats: bool = False) -> str:
    """VERDICT as one JSON object. It has `checksum` only when every byte was read."""
    record: dict[str, object] = {"schema": SCHEMA, "status": verdict.status, "sums": name_record(verdict.sums)["name"]}
    line, result = verdict.line, verdict.checksum
    if verdict.number is not None:
        record["line"] = verdict.number
    if line is not None:
        record |= {**name_record(line.name), "expected": line.hexdigest}
        record |= {"algorithm": line.how.algorithm.name, "block_size": line.how.block_size}
        if line.how.name != "blkhash":
            record["construction"] = line.how.name
    if result is not None:
        record |= {"checksum": result.hexdigest, "size": result.size, "format": result.format}
        if stats:
            record["stats"] = stats_record(result.stats)
    if verdict.error is not None and verdict.status != "missing":
        record["reason" if verdict.status == "mismatch" else "error"] = error_text(verdict.error)
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


def comparison_json(pair: Pair, stats: Stats | None, **verdict: object) -> str:
    """What became of PAIR as one JSON object: VERDICT, and its images."""
    images = [
        {**name_record(name), "size": size, "format": image_format}
        for name, size, image_format in zip(pair.names, pair.sizes, pair.formats, strict=True)
    ]
    record = {"schema": SCHEMA, **verdict, "images": images}
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
    """RECORD on one line."""
    import json  # 6 ms, so only for those who ask for it

    return json.dumps(record, ensure_ascii=False)


def stats_record(stats: Stats) -> dict[str, object]:
    """STATS for JSON."""
    record: dict[str, object] = stats._asdict()
    del record["details"]
    return {**record, "seconds": round(stats.seconds, 6), **stats.details}


def stats_text(stats: Stats) -> str:
    """STATS for a person."""
    rate = stats.bytes_read / stats.seconds / 1e9 if stats.seconds > 0 else 0.0
    facts = "".join(f", {key.replace('_', ' ')}: {value}" for key, value in stats.details.items())
    return (
        f"read {human_size(stats.bytes_read)} in {stats.requests} requests, skipped {human_size(stats.zero_bytes)}"
        f" of zeros, {stats.extents} extents, {stats.seconds:.3f} s ({rate:.2f} GB/s){facts}"
    )


def human_size(size: int) -> str:
    """SIZE bytes to one decimal: `3.0 GiB`."""
    for unit, word in ((GIB * KIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {word}"
    return f"{size} B"
