"""Results -> lines or JSON on standard output, notes and errors on standard error. The only module that prints."""

from __future__ import annotations

import contextlib
import os

from imgsum import blkhash
from imgsum.checksums import Checksum, Stats
from imgsum.errors import Error
from imgsum.units import GIB, KIB, MIB, format_size

SCHEMA = 1


class OutputError(Error):
    """Standard output can't take what it is given."""


def write(line: str, end: str = "\n") -> None:
    """LINE on standard output, now, with names as the bytes that they are. Raises OutputError, BrokenPipeError."""
    try:
        data = memoryview(os.fsencode(line + end))
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError((error.strerror or str(error)).lower(), name="standard output") from error


def warn(text: str) -> None:
    """`imgsum: TEXT` on standard error. Where nobody can be told, the exit status has to do."""
    with contextlib.suppress(OSError):
        os.write(2, f"imgsum: {text}\n".encode("utf-8", "backslashreplace"))


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
    if result.construction != "blkhash":
        return result.construction.upper()
    size = "" if result.block_size == blkhash.BLOCK_SIZE else f"/{format_size(result.block_size)}"
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
    """A failure as one JSON object: it has `error`, and no `checksum`."""
    record: dict[str, object] = {"schema": SCHEMA, **name_record(error.name or ""), "error": error.message()}
    if error.offset is not None:
        record["offset"] = error.offset
    return to_json(record)


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
    record["seconds"] = round(stats.seconds, 6)
    return {**record, **record.pop("facts")}  # type: ignore[dict-item]


def stats_text(stats: Stats) -> str:
    """STATS for a person."""
    rate = stats.bytes_read / stats.seconds / 1e9 if stats.seconds > 0 else 0.0
    facts = "".join(f", {key.replace('_', ' ')}: {value}" for key, value in stats.facts.items())
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
