"""Ranges that differ -> what tools take: `compare --map`. Each format is a function from ranges to lines.

The last line of each says how many ranges and bytes there are: a map without it is not whole.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from imgsum.output.report import SCHEMA, range_json, to_json

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from imgsum.engine.mask import Range


class Place(NamedTuple):
    """What a map is of."""

    size: int
    """Bytes of content of the longer side."""
    source: str
    """Where the content is right: a path. Only `dd` needs it."""
    source_size: int
    """Bytes of content there. After that there are zeros."""
    target: str
    """What is to be as the source is."""


Lines = Iterator[tuple[str, int]]
"""Lines, each with the bytes of the range that it is about: 0 when it is about none."""


def rounded(ranges: Iterable[Range], unit: int, size: int) -> Iterator[tuple[int, int]]:
    """RANGES as start and length, made larger to whole units of UNIT bytes, but not over SIZE; neighbours merged."""
    start = end = 0
    for first, length in ranges:
        begins, ends = first // unit * unit, min(-(-(first + length) // unit) * unit, size)
        if begins > end:
            if end > start:
                yield start, end - start
            start = begins
        end = max(end, ends)
    if end > start:
        yield start, end - start


def text(ranges: Iterable[tuple[int, int]], place: Place) -> Lines:
    """`START LENGTH`, in bytes."""
    for start, length in ranges:
        yield f"{start} {length}", length


def json_lines(ranges: Iterable[tuple[int, int]], place: Place) -> Lines:
    """An object a line."""
    for start, length in ranges:
        yield range_json(start, length), length


def ddrescue(ranges: Iterable[tuple[int, int]], place: Place) -> Lines:
    """A map file of GNU ddrescue, in which what differs is not tried yet, and all else is finished."""
    yield "# Mapfile. Created by imgsum: `ddrescue SOURCE TARGET MAPFILE` copies what differs", 0
    yield "# current_pos  current_status  current_pass", 0
    yield "0x00000000     ?               1", 0
    yield "#      pos        size  status", 0
    at = 0
    for start, length in ranges:
        if start > at:
            yield f"0x{at:08X}  0x{start - at:08X}  +", 0
        yield f"0x{start:08X}  0x{length:08X}  ?", length
        at = start + length
    if place.size > at:
        yield f"0x{at:08X}  0x{place.size - at:08X}  +", 0


def dd(ranges: Iterable[tuple[int, int]], place: Place) -> Lines:
    """Commands that copy the ranges from the source to the target, and zeros where the source has ended. GNU dd's."""
    for start, length in ranges:
        from_source = max(0, min(length, place.source_size - start))
        if from_source:
            yield _dd(place.source, start, start, from_source, place.target), from_source
        if from_source < length:
            at = start + from_source
            yield _dd("/dev/zero", 0, at, length - from_source, place.target), length - from_source


def _dd(source: str, skip: int, seek: int, count: int, target: str) -> str:
    files = f"{shlex.quote('if=' + source)} {shlex.quote('of=' + target)}"
    flags = "bs=1M conv=notrunc iflag=skip_bytes,count_bytes,fullblock oflag=seek_bytes"
    return f"dd {files} {flags} skip={skip} seek={seek} count={count} status=none"


def _total(count: int, size: int) -> str:
    return f"{count} range{'s' * (count != 1)}, {size} bytes"


FORMATS: dict[str, Callable[[Iterable[tuple[int, int]], Place], Lines]] = {
    "text": text,
    "json": json_lines,
    "ddrescue": ddrescue,
    "dd": dd,
}


def last_line(name: str, count: int, size: int) -> str:
    """The last line of a map of the format NAME, of COUNT ranges with SIZE bytes."""
    if name == "json":
        return to_json({"schema": SCHEMA, "ranges": count, "bytes": size})
    return _total(count, size) if name == "text" else f"# {_total(count, size)}"
