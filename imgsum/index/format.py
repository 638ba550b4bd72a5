"""The file format of an index: docs/index-format.md has it byte by byte.

    header       one line of JSON
    records      8 bytes each, little endian: the kind in the highest byte, a count in the others
      ZEROS      count whole blocks of zeros
      DATA       count digests follow
      CHECKPOINT the hash of all digests so far, and that of the header, follow
      END        the image's checksum, and the hash of the header, follow

Records are in content order. An index that was not finished has no END, and counts up to its last CHECKPOINT.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from imgsum.errors import (
    ChangedError,
    Error,
    FormatError,
    OpenError,
    RefusedError,
    TruncatedError,
    UsageError,
    naming,
    os_error_reason,
)
from imgsum.hash import blkhash
from imgsum.hash.blkhash import BlkHash, Construction
from imgsum.source.detect import INDEX_MAGIC
from imgsum.units import KIB, MAX_SIZE, MIB

_RECORD = struct.Struct("<Q")
_COUNT_BITS = 56
_ZEROS, _DATA, _CHECKPOINT, _END = range(4)

_MAX_HEADER = MIB
"""Bytes. A chain of 200 files takes some 60 KiB."""

_MAX_DATA = 1024
"""Digests in one record: what a reader must hold at a time."""

_CHECKPOINT_EVERY = 64
"""Full data records between two checkpoints: 4 GiB of data in blocks of 64 KiB. A killed run loses no more."""

_PLACE_EVERY = 256
"""Records between two places that a reader remembers: 16 bytes for each."""

_SIZE_DIGITS = 20  # room in the header for a stream's size, which is known only at the end


class Blocks(NamedTuple):
    """A run of blocks of an image, in content order."""

    number: int
    digests: bytes | None
    """Laid end to end; None: whole blocks of zeros."""


class Writer:
    """Makes an image's checksum, as BlkHash does, and writes its index. In constant memory.

    Until finish() everything is in a temporary file beside PATH. close() keeps what an interrupted run wrote as
    PATH.partial.
    """

    def __init__(
        self,
        path: str,
        construction: Construction,
        *,
        size: int | None,
        image_format: str,
        evidence: list[dict[str, object]],
    ) -> None:
        """Begin the index of an image of SIZE bytes (None: a stream). EVIDENCE: see Source. Raises OpenError."""
        self._path = path
        self._construction = construction
        self._is_stream = size is None
        self._hash = BlkHash(construction)
        self.zero_digest = self._hash.zero_digest
        directory = os.path.dirname(os.path.abspath(path))
        self._header: dict[str, object] = {
            "imgsum_index": 1,
            "algorithm": construction.algorithm.name,
            "block_size": construction.block_size,
            **({} if construction.name == "blkhash" else {"construction": construction.name}),
            "size": size,
            "format": image_format,
            "evidence": [_relative(record, directory) for record in evidence],
        }
        self._data = bytearray()
        """Digests of data blocks that are not written yet: less than a full record."""
        self._zeros = 0
        """Zero blocks that are not written yet. Never both."""
        self._since_checkpoint = 0
        """Full data records since the last checkpoint."""
        self._finished = False
        self._temporary = f"{path}.{os.urandom(4).hex()}.partial"
        with _errors_of(path):
            _refuse_other(path)
            fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._file = open(fd, "wb", buffering=256 * KIB)  # noqa: SIM115  # close() closes it
            self._file.write(self._header_line())

    def update(self, digests: bytes) -> None:
        """Add blocks with DIGESTS, laid end to end. Raises OpenError."""
        zero, size = self.zero_digest, len(self.zero_digest)
        if zero not in digests:
            self._add_data(digests)
            return
        for at in range(0, len(digests), size):
            if digests[at : at + size] == zero:
                self.zero(1)
            else:
                self._add_data(digests[at : at + size])

    def zero(self, count: int) -> None:
        """Add COUNT whole blocks of zeros. Raises OpenError."""
        self._hash.zero(count)
        if self._data:
            self._flush()
        self._zeros += count

    def finish(self, size: int) -> str:
        """The checksum of an image of SIZE bytes, whose index is then complete and in its place. Raises OpenError."""
        with _errors_of(self._path):
            self._flush()
            checksum = self._hash.finish(size)
            if self._header["size"] is None:
                self._header["size"] = size
                self._file.seek(0)
                self._file.write(self._header_line())
                self._file.seek(0, os.SEEK_END)
            self._record(_END, 0, bytes.fromhex(checksum) + _hash_of(self._construction, self._header_line()))
            self._sync()
            os.replace(self._temporary, self._path)
            self._finished = True
            self._file.close()
        with suppress(OSError, OpenError):
            _refuse_other(self._path + ".partial")
            os.unlink(self._path + ".partial")  # nobody needs it any more
        return checksum

    def close(self, *, keep: bool) -> None:
        """Give back the file. What is not finished is kept as PATH.partial if KEEP, and else removed."""
        if self._finished:
            return
        with suppress(OSError, Error):
            if keep and not self._is_stream:
                self._flush()
                self._checkpoint()
                self._sync()
                _refuse_other(self._path + ".partial")
                os.replace(self._temporary, self._path + ".partial")
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.unlink(self._temporary)

    def _add_data(self, digests: bytes) -> None:
        self._hash.update(digests)
        if self._zeros:
            self._flush()
        self._data += digests
        full = _MAX_DATA * len(self.zero_digest)
        while len(self._data) >= full:
            self._record(_DATA, _MAX_DATA, self._data[:full])
            del self._data[:full]
            self._since_checkpoint += 1
        if self._since_checkpoint >= _CHECKPOINT_EVERY:
            self._flush()
            self._checkpoint()

    def _flush(self) -> None:
        if self._zeros:
            self._record(_ZEROS, self._zeros)
            self._zeros = 0
        if self._data:
            self._record(_DATA, len(self._data) // len(self.zero_digest), self._data)
            self._data.clear()

    def _checkpoint(self) -> None:
        self._record(_CHECKPOINT, 0, self._hash.so_far() + _hash_of(self._construction, self._header_line()))
        self._since_checkpoint = 0

    def _record(self, kind: int, count: int, rest: bytes | bytearray = b"") -> None:
        with _errors_of(self._path):
            self._file.write(_RECORD.pack(kind << _COUNT_BITS | count) + rest)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header_line(self) -> bytes:
        import json

        size = json.dumps(self._header["size"])
        text = json.dumps(self._header)
        if self._is_stream:  # its size is known only at the end: there is room for it
            text = text.replace(f'"size": {size},', f'"size": {size:>{_SIZE_DIGITS}},', 1)
        return text.encode() + b"\n"


class Index:
    """A verified index: its digests, folded, gave the checksum that it states."""

    size: int
    """Bytes of the image's content."""
    algorithm: str
    block_size: int
    """Bytes."""
    format: str
    """The image's format, as QEMU names it."""
    checksum: str | None
    """Lower-case hex; None: the index is of a run that did not finish."""
    blocks: int
    """Blocks that the index has, from the first on: all of them, or up to the last checkpoint."""
    data_blocks: int
    """How many of them are not zero."""

    def __init__(self, path: str, *, partial: bool = False, max_size: int | None = None) -> None:
        """Open and verify PATH; use Index.open(). PARTIAL: one that was not finished will do."""
        self.path = path
        with _errors_of(path, "can't be read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._status = os.fstat(fd)
            if not stat.S_ISREG(self._status.st_mode):
                os.close(fd)
                raise OpenError("is not a regular file", name=path)
            self._file = open(fd, "rb", buffering=256 * KIB)  # noqa: SIM115  # close() closes it
        try:
            with naming(path), _errors_of(path, "can't be read"):
                self._read_header()
                if max_size is not None and self.size > max_size:
                    raise RefusedError(f"has {self.size} bytes of content, more than the {max_size} of --max-size")
                self._verify(partial)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the index at PATH, and verify that it proves its checksum. Use as a context manager.

        Takes as long as hashing its digests. Raises an imgsum.Error: FormatError when it is damaged or edited,
        TruncatedError when it is cut.
        """
        return cls(os.fspath(path))

    def runs(self, first: int = 0) -> Iterator[Blocks]:
        """The blocks from number FIRST on, in order, in runs of at most 1024 data blocks."""
        place = bisect_right(self._starts, first) - 1
        self._file.seek(self._places[place])
        at = self._starts[place]
        while at < self.blocks:
            kind, count, digests = self._next()
            if kind == _CHECKPOINT:
                continue
            skip = max(0, first - at)
            at += count
            if skip < count:
                rest = digests[skip * self.digest_size :] if kind == _DATA else None
                yield Blocks(count - skip, rest)

    def digests(self, start: int, length: int) -> bytes:
        """The digests of the blocks that hold LENGTH bytes of content from START, laid end to end.

        Raises UsageError when the range is not inside the content.
        """
        if start < 0 or length < 0 or start + length > self.size:
            raise UsageError(f"there is no range of {length} bytes from {start} in {self.size} bytes of content")
        first, end = start // self.block_size, -(-(start + length) // self.block_size)
        found = bytearray()
        for number, digests in self.runs(first) if length else ():
            found += self.zero_digest * number if digests is None else digests
            if len(found) >= (end - first) * self.digest_size:
                break
        return bytes(found[: (end - first) * self.digest_size])

    def check_unchanged(self) -> None:
        """Raise ChangedError if the index was written to since it was verified."""
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns, status.st_ctime_ns) != (
            self._status.st_size,
            self._status.st_mtime_ns,
            self._status.st_ctime_ns,
        ):
            raise ChangedError("the index was modified while it was read", name=self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Index({self.path!r}, size={self.size}, algorithm={self.algorithm!r}, checksum={self.checksum!r})"

    def _read_header(self) -> None:
        line = self._file.readline(_MAX_HEADER)
        if not line.startswith(INDEX_MAGIC):
            raise FormatError("is not an index")
        if not line.endswith(b"\n"):
            raise TruncatedError("truncated: the index ends in its header")
        import json

        self._header_line = line
        try:
            header = json.loads(line)
            self.size = _number(header, "size", MAX_SIZE)
            self.block_size = _number(header, "block_size", MAX_SIZE)
            self.algorithm = _text(header, "algorithm")
            self.format = _text(header, "format")
            construction = _text({"construction": "blkhash", **header}, "construction")
            evidence = header["evidence"]
            if not (isinstance(evidence, list) and all(isinstance(record, dict) for record in evidence)):
                raise ValueError("evidence is not a list of objects")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"damaged: the index's header is not as it should be ({error})") from error
        self.evidence: list[dict[str, object]] = evidence
        try:
            chosen = (self.algorithm, self.block_size) if construction == "blkhash" else ()
            self.construction = blkhash.construction(construction, *chosen)
        except UsageError as error:
            raise FormatError(f"the index is made in a way that is not known here: {error.reason}") from error
        self.zero_digest = blkhash.zero_digest(self.construction.algorithm, self.block_size)
        self.digest_size = len(self.zero_digest)

    def _verify(self, partial: bool) -> None:
        """Walk all records, and compare what they fold to with what the index states."""
        hash_ = BlkHash(self.construction)
        header_digest = _hash_of(self.construction, self._header_line)
        total, whole = -(-self.size // self.block_size), self.size // self.block_size
        self._starts, self._places = array("q"), array("q")
        self.checksum, self.blocks, self.data_blocks = None, 0, 0
        at = records = data = 0
        try:
            while True:
                if records % _PLACE_EVERY == 0:
                    self._starts.append(at)
                    self._places.append(self._file.tell())
                records += 1
                kind, count, rest = self._next()
                if kind == _ZEROS and 0 < count <= whole - at:
                    hash_.zero(count)
                elif kind == _DATA and 0 < count <= total - at:
                    hash_.update(rest)
                    data += count
                elif kind == _CHECKPOINT and count == 0 and rest == hash_.so_far() + header_digest:
                    self.blocks, self.data_blocks = at, data
                elif kind == _END and count == 0 and at == total:
                    checksum = hash_.finish(self.size)
                    if rest != bytes.fromhex(checksum) + header_digest or self._file.read(1):
                        raise FormatError("damaged: the index does not prove the checksum that it states")
                    self.checksum, self.blocks, self.data_blocks = checksum, total, data
                    return
                else:
                    raise FormatError(f"damaged: record {records} of the index is not as it should be")
                at += count
        except TruncatedError:
            if not (partial and self.blocks):
                raise

    def _next(self) -> tuple[int, int, bytes]:
        """The next record: its kind, its count, and what follows it. Raises FormatError, TruncatedError."""
        head = self._file.read(8)
        (word,) = _RECORD.unpack(head.ljust(8, b"\0"))
        kind, count = word >> _COUNT_BITS, word & (1 << _COUNT_BITS) - 1
        if len(head) == 8 and (kind > _END or (kind == _DATA and count > _MAX_DATA)):
            raise FormatError("damaged: the index has a record of an unknown kind or size")
        length = 0 if kind == _ZEROS else self.digest_size * (count if kind == _DATA else 2)
        rest = self._file.read(length)
        if len(head) < 8 or len(rest) < length:
            raise TruncatedError("truncated: the index was not finished, or is cut")
        return kind, count, rest


class _errors_of:  # noqa: N801  # used like contextlib.suppress
    """`with _errors_of(path):` what the system says against the index at PATH is an OpenError."""

    def __init__(self, path: str, problem: str = "can't be written") -> None:
        self._path, self._problem = path, problem

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, OSError):
            raise OpenError(f"the index {self._problem}: {os_error_reason(error)}", name=self._path) from error


def _refuse_other(path: str) -> None:
    """Raise OpenError if PATH is anything but an index, which may be replaced: it could be the image."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OpenError("is not a regular file, so no index is written there", name=path)
        if os.pread(fd, len(INDEX_MAGIC), 0) not in (INDEX_MAGIC, b""):
            raise OpenError("is there, and is no index: it is not overwritten", name=path)
    finally:
        os.close(fd)


def _number(header: dict[str, object], key: str, limit: int) -> int:
    value = header[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ValueError(f"{key} is not a number")
    return value


def _text(header: dict[str, object], key: str) -> str:
    value = header[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is not text")
    return value


def _hash_of(construction: Construction, content: bytes) -> bytes:
    return construction.algorithm.new(content).digest()


def _relative(record: dict[str, object], directory: str) -> dict[str, object]:
    """RECORD of evidence with its path, if it has one, relative to DIRECTORY."""
    path = record.get("path")
    if not isinstance(path, str):
        return record
    return {**record, "path": os.path.relpath(os.path.realpath(path), os.path.realpath(directory))}
