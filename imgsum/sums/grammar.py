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

from imgsum.errors import Error, OpenError, UsageError, printable
from imgsum.hash import blkhash
from imgsum.hash.algorithms import NotInstalledError
from imgsum.hash.blkhash import Construction
from imgsum.units import KIB, MAX_SIZE, MIB, parse_size

LONGEST_LINE = 64 * KIB
"""Bytes. A path is at most 4 KiB; whatever is longer is not held in memory."""

LONGEST_SKIP = 64 * MIB
"""Bytes without the end of a line after which reading ends: a sparse disk image would take hours."""

CHUNK = 64 * KIB
_BLANK = b" \t"
_TAGGED = re.compile(rb"([A-Za-z][A-Za-z0-9_./-]*) ?\((.*)\) ?= ?([0-9A-Fa-f]+)", re.DOTALL)
_PLAIN = re.compile(rb"([0-9A-Fa-f]+) [ *]?+(.+)", re.DOTALL)
_ESCAPED = re.compile(rb"\\(.?)", re.DOTALL)
_UNESCAPED = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}


class MalformedError(Error):
    """A line that no rule allows. `name` is that of the sums file."""

    number = 0
    """The line's, from 1."""
    well_formed = False
    """The line is well formed, only its algorithm is not installed."""
    advice = ""
    """What to do about it: worth saying once for a file."""


class Line(NamedTuple):
    """What one line says: that NAME's content has this checksum."""

    number: int
    """From 1."""
    name: str
    """As os.fsdecode() gives it."""
    hexdigest: str
    """Lower case, and as long as the algorithm's digests are."""
    construction: Construction
    tagged: bool
    """The line itself says what kind of sum it is."""
    size: int | None = None
    format: str | None = None
    range: tuple[int, int | None] | None = None
    """Offset and length (None: to the end), in bytes of the content, of what the sum is of; None: it doesn't say."""


def read_lines(fd: int, zero: bool, begun: bytes = b"") -> Iterator[tuple[int, bytes | None]]:
    """The lines of BEGUN, which was read already, and descriptor FD, numbered from 1, without their ends.

    A line ends with a newline, or with NUL when ZERO. None stands for one that is longer than LONGEST_LINE. At most
    that much is held. Raises OSError, and OpenError after LONGEST_SKIP bytes without an end of a line.
    """
    end = b"\0" if zero else b"\n"
    number, pending, too_long, skipped = 1, b"", False, 0
    chunk = begun
    while chunk or (chunk := os.read(fd, CHUNK)):
        *whole, rest = chunk.split(end)
        skipped = 0 if whole else skipped + len(chunk)
        if skipped > LONGEST_SKIP:
            raise OpenError(f"line {number} has no end within {LONGEST_SKIP} bytes: reading ends there")
        for part in whole:
            line = pending + part
            yield number, None if too_long or len(line) > LONGEST_LINE else line
            number, pending, too_long = number + 1, b"", False
        pending += rest
        if len(pending) > LONGEST_LINE:
            pending, too_long = b"", True
        chunk = b""
    if pending or too_long:  # 1.2: the last line may lack its end
        yield number, None if too_long else pending


def parse_line(number: int, line: bytes | None, default: Construction, zero: bool = False) -> Line | None:
    """What LINE says; None for a line without content. DEFAULT is what a plain line's sum is. Raises MalformedError."""
    try:
        return _parse(number, line, default, zero)
    except (MalformedError, UsageError) as error:
        malformed = MalformedError(f"line {number}: {error.reason}")
        malformed.number = number
        malformed.well_formed = isinstance(error, NotInstalledError)
        malformed.advice = getattr(error, "advice", "")
        raise malformed from None


def _parse(number: int, line: bytes | None, default: Construction, zero: bool) -> Line | None:
    if line is None:
        raise MalformedError(f"line is longer than {LONGEST_LINE} bytes")
    if number == 1:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")) or _is_utf_16(line):
            raise _malformed("text is UTF-16; it must be UTF-8", "`iconv -f UTF-16 -t UTF-8` converts it")
        line = line.removeprefix(b"\xef\xbb\xbf")  # 1.3
    if not zero:
        line = line.removesuffix(b"\r")  # 1.1
    if b"\0" in line:
        raise _malformed("line has a NUL in it", _advice_on_nul(number, line, default))
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
        construction, tagged = default, False
    elif match := _TAGGED.fullmatch(line):
        tag, name, hexdigest = match.groups()
        construction, tagged = _tagged_construction(tag.decode()), True
    else:
        raise _malformed("not a line of checksums", _advice_on_digest(line))
    if escaped:
        name = _ESCAPED.sub(_unescape, name)
    return Line(number, _decode(name), _checked(hexdigest.decode(), construction), construction, tagged)


def _malformed(reason: str, advice: str) -> MalformedError:
    error = MalformedError(reason)
    error.advice = advice
    return error


_TOOLS = {
    **{name: f"{name}sum" for name in ("md5", "sha1", "sha224", "sha256", "sha384", "sha512")},
    "blake2b": "b2sum",
    "blake3": "b3sum",
}
_BY_LENGTH = {32: "md5", 40: "sha1", 56: "sha224", 64: "sha256", 96: "sha384", 128: "sha512"}


def tool_of(algorithm: str) -> str | None:
    """The program that makes and verifies ALGORITHM's sums of files, as sha256sum does."""
    return _TOOLS.get(algorithm)


def _advice_on_length(digits: int) -> str:
    name = _BY_LENGTH.get(digits)
    if name is None:
        return ""
    return f"for the sum of a file use `{tool_of(name)} -c`, for that of an image's content say -a {name}"


def _advice_on_digest(line: bytes) -> str:
    """What to do where LINE is a digest without a name."""
    if re.fullmatch(rb"[0-9A-Fa-f]{16,128}[ \t]*", line):
        return "it is a digest without a name: `echo 'DIGEST  NAME' | imgsum check`"
    return ""


def _advice_on_nul(number: int, line: bytes, default: Construction) -> str:
    """What to do where LINE has a NUL: -z, if what comes before it is a line."""
    try:
        return "-z reads lines that end with NUL" if _parse(number, line.split(b"\0")[0], default, True) else ""
    except (MalformedError, UsageError):
        return ""


def _is_utf_16(line: bytes) -> bool:
    """Whether LINE is ASCII in UTF-16 without a byte order mark: every second byte is NUL, and no other."""
    for first in (0, 1):
        text, nuls = line[first::2], line[1 - first :: 2]
        if len(nuls) > 4 and not any(nuls) and text.isascii() and b"\0" not in text:
            return True
    return False


@lru_cache(maxsize=64)
def _tagged_construction(tag: str) -> Construction:
    """What TAG says, as in `BLKHASH-BLAKE3/1M`: the algorithm, and the block size when it is not 64 KiB."""
    if tag == "IMAGEIO":
        return blkhash.construction("imageio")
    kind, _, rest = tag.partition("-")
    if kind != "BLKHASH" or not rest:
        raise _malformed(
            f"{printable(tag)} is another tool's tag: a sum of the file, not of the image's content",
            f"`{_TOOLS[tag.lower()]} -c` verifies those" if tag.lower() in _TOOLS else "",
        )
    algorithm, slash, size = rest.partition("/")
    block_size = parse_size(size) if slash else None
    return blkhash.construction("blkhash", algorithm, block_size)


def _checked(hexdigest: str, construction: Construction) -> str:
    """HEXDIGEST in lower case. Raises MalformedError when it is not as long as CONSTRUCTION's are, or not hex."""
    digits = 2 * construction.algorithm.digest_size
    if len(hexdigest) != digits:
        raise _malformed(
            f"{len(hexdigest)} hex digits, where {construction.algorithm.name} has {digits}",
            _advice_on_length(len(hexdigest)),
        )
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
    """A line of `imgsum checksum --json`: the size, and the range if there is one, are part of what it says."""
    import json  # 6 ms, so only for those who need it

    try:
        record = json.loads(line.decode(), object_pairs_hook=_once)
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
    construction = _json_construction(record)
    hexdigest = _checked(_field(record, "checksum", str), construction)
    image_format = _field(record, "format", str)
    return Line(number, name, hexdigest, construction, True, size, image_format, _json_range(record, size))


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Of a name that is there twice, other programs may take the other value."""
    record = dict(pairs)
    if len(record) != len(pairs):
        raise MalformedError("JSON with a name that is there twice")
    return record


def _json_range(record: dict[str, object], size: int) -> tuple[int, int | None] | None:
    """The range of the content that the sum is of; None: the record says none."""
    if record.get("offset") is None and record.get("length") is None:
        return None
    offset = 0 if record.get("offset") is None else _field(record, "offset", int)
    length = None if record.get("length") is None else _field(record, "length", int)
    if not 0 <= offset <= MAX_SIZE or length not in (None, size):
        raise MalformedError("offset or length is not that of a range")
    return offset, length


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
