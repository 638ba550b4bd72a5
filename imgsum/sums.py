"""The grammar of a sums file: its bytes -> its lines -> what each asks for. docs/sums-format.md has the same rules.

The numbers in comments here are that page's. Better for a check to fail more often than it should: what no rule
allows is malformed, and named by its line's number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeVar

from imgsum import blkhash
from imgsum.blkhash import Construction
from imgsum.errors import Error, UsageError, printable
from imgsum.units import KIB, parse_power_of_two

LONGEST_LINE = 64 * KIB
"""Bytes. A path is at most 4 KiB; whatever is longer is not held in memory."""

_CHUNK = 64 * KIB
_BLANK = b" \t"
_TAGGED = re.compile(rb"([A-Za-z][A-Za-z0-9_./-]*) ?\((.*)\) ?= ?([0-9A-Fa-f]+)", re.DOTALL)
_PLAIN = re.compile(rb"([0-9A-Fa-f]+) [ *]?+(.+)", re.DOTALL)
_ESCAPED = re.compile(rb"\\(.?)", re.DOTALL)
_UNESCAPED = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}


class MalformedError(Error):
    """A line that no rule allows. `name` is that of the sums file."""

    number = 0
    """The line's, from 1."""


class Line(NamedTuple):
    """What one line says: that NAME's content has this checksum."""

    number: int
    """From 1."""
    name: str
    """As os.fsdecode() gives it."""
    hexdigest: str
    """Lower case, and as long as the algorithm's digests are."""
    how: Construction
    tagged: bool
    """The line itself says what kind of sum it is."""
    size: int | None = None
    format: str | None = None


def read_lines(fd: int, zero: bool) -> Iterator[tuple[int, bytes | None]]:
    """The lines of descriptor FD, numbered from 1, without their ends: newline, or NUL when ZERO.

    None stands for a line that is longer than LONGEST_LINE. At most that much is held. Raises OSError.
    """
    end = b"\0" if zero else b"\n"
    number, pending, too_long = 1, b"", False
    while chunk := os.read(fd, _CHUNK):
        *whole, rest = chunk.split(end)
        for part in whole:
            line = pending + part
            yield number, None if too_long or len(line) > LONGEST_LINE else line
            number, pending, too_long = number + 1, b"", False
        pending += rest
        if len(pending) > LONGEST_LINE:
            pending, too_long = b"", True
    if pending or too_long:  # 1.2: the last line may lack its end
        yield number, None if too_long else pending


def parse_line(number: int, line: bytes | None, default: Construction, zero: bool = False) -> Line | None:
    """What LINE says; None for a line without content. DEFAULT is what a plain line's sum is. Raises MalformedError."""
    try:
        return _parse(number, line, default, zero)
    except (MalformedError, UsageError) as error:
        malformed = MalformedError(f"line {number}: {error.reason}")
        malformed.number = number
        raise malformed from None


def _parse(number: int, line: bytes | None, default: Construction, zero: bool) -> Line | None:
    if line is None:
        raise MalformedError(f"line is longer than {LONGEST_LINE} bytes")
    if number == 1:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise MalformedError("text is UTF-16; it must be UTF-8")
        line = line.removeprefix(b"\xef\xbb\xbf")  # 1.3
    if not zero:
        line = line.removesuffix(b"\r")  # 1.1
    if b"\0" in line:
        raise MalformedError("line has a NUL in it (UTF-16 text, or for -z?)")
    line = line.lstrip(_BLANK)
    if not line or line.startswith(b"#"):  # 2
        return None
    if line.startswith(b"{"):
        return _parse_json(number, line)
    escaped = line.startswith(b"\\") and not zero  # 5
    if escaped:
        line = line[1:]
    if match := _PLAIN.fullmatch(line):
        hexdigest, name = match.groups()
        how, tagged = default, False
    elif match := _TAGGED.fullmatch(line):
        tag, name, hexdigest = match.groups()
        how, tagged = _tagged_construction(tag.decode()), True
    else:
        raise MalformedError("not a line of checksums")
    if escaped:
        name = _ESCAPED.sub(_unescape, name)
    return Line(number, _decode(name), _checked(hexdigest.decode(), how), how, tagged)


@lru_cache(maxsize=64)
def _tagged_construction(tag: str) -> Construction:
    """What TAG says, as in `BLKHASH-BLAKE3/1M`: the algorithm, and the block size when it is not 64 KiB."""
    if tag == "IMAGEIO":
        return blkhash.construction("imageio")
    kind, _, rest = tag.partition("-")
    if kind != "BLKHASH" or not rest:
        raise MalformedError(f"{printable(tag)} is another tool's tag: a sum of the file, not of the image's content")
    algorithm, slash, size = rest.partition("/")
    block_size = parse_power_of_two(size, blkhash.SMALLEST_BLOCK, blkhash.LARGEST_BLOCK) if slash else None
    return blkhash.construction("blkhash", algorithm, block_size)


def _checked(hexdigest: str, how: Construction) -> str:
    """HEXDIGEST in lower case. Raises MalformedError when it is not as long as HOW's are, or not hex."""
    digits = 2 * how.algorithm.digest_size
    if len(hexdigest) != digits:
        raise MalformedError(f"{len(hexdigest)} hex digits, where {how.algorithm.name} has {digits}")
    if not re.fullmatch("[0-9A-Fa-f]*", hexdigest):
        raise MalformedError("checksum is not hex")
    return hexdigest.lower()


def _unescape(match: re.Match[bytes]) -> bytes:
    try:
        return _UNESCAPED[match[1]]
    except KeyError:
        raise MalformedError(f"unknown escape in the name: {printable(os.fsdecode(match[0]))}") from None


def _decode(name: bytes) -> str:
    if not name or b"\0" in name:
        raise MalformedError("name is empty" if not name else "name has a NUL in it")
    return os.fsdecode(name)


def _parse_json(number: int, line: bytes) -> Line:
    """A line of `imgsum checksum --json`: the size and the format are part of what it says."""
    import json  # 6 ms, so only for those who need it

    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise MalformedError("not JSON") from None
    schema = record.get("schema")
    if schema != 1 or isinstance(schema, bool):
        raise MalformedError("JSON that is not of schema 1, of `imgsum checksum --json`")
    if "error" in record:
        raise MalformedError(f"records a failure, and no checksum: {printable(str(record['error']))}")
    if "status" in record:
        raise MalformedError("records a verdict of `imgsum check`, not a checksum")
    size = _field(record, "size", int)
    if size < 0:
        raise MalformedError("size is negative")
    name = _decode(_json_name(record))
    how = _json_construction(record)
    hexdigest = _checked(_field(record, "checksum", str), how)
    return Line(number, name, hexdigest, how, True, size, _field(record, "format", str))


def _json_name(record: dict[str, object]) -> bytes:
    if "name_b64" in record:
        import base64

        try:
            return base64.b64decode(_field(record, "name_b64", str), validate=True)
        except ValueError:
            raise MalformedError("name_b64 is not base64") from None
    try:
        return _field(record, "name", str).encode()
    except UnicodeEncodeError:
        raise MalformedError("name is not Unicode") from None


def _json_construction(record: dict[str, object]) -> Construction:
    if record.get("construction", "blkhash") != "blkhash":
        return blkhash.construction(_field(record, "construction", str))
    return blkhash.construction("blkhash", _field(record, "algorithm", str), _field(record, "block_size", int))


T = TypeVar("T", int, str)


def _field(record: dict[str, object], key: str, kind: type[T]) -> T:
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedError(f'"{key}" is not {"a number" if kind is int else "text"}')
    return value
