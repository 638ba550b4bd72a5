"""bmaptool's block maps: XML that lists the mapped ranges of an image, each with its digest.

    <bmap version="2.0">
        <ImageSize> 821752 </ImageSize>                    bytes
        <BlockSize> 4096 </BlockSize>
        <BlocksCount> 201 </BlocksCount>
        <MappedBlocksCount> 117 </MappedBlocksCount>
        <ChecksumType> sha256 </ChecksumType>              version 1.3: always SHA-1; before that: no digests
        <BmapFileChecksum> 24d0 ... </BmapFileChecksum>    of this file with zeros for these digits; 1.3: BmapFileSHA1
        <BlockMap>
            <Range chksum="5b1a ..."> 0-1 </Range>         blocks, the last included; 1.3: sha1="..."
            <Range chksum="f0a4 ..."> 5 </Range>
        </BlockMap>
    </bmap>

Version 1.4 is 2.0 under the wrong number. A file of any size is read in constant memory: ranges are not kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple, Self
from xml.parsers import expat

from imgsum.errors import ChangedError, FormatError, MismatchError, OpenError, RefusedError, naming, os_error_reason
from imgsum.units import GIB, KIB, MAX_SIZE

_CHUNK = 16 * KIB
"""Bytes that are parsed at once."""
_MAX_TOKEN = 256 * KIB
"""Bytes of one tag or comment. expat keeps it until it is complete. bmaptool's longest comment has 1.5 KiB."""
_MAX_TEXT = 1024
"""Characters in one element."""
_MAX_DEPTH = 8

_MAP_PATH = ["bmap", "BlockMap"]
_RANGE_PATH = [*_MAP_PATH, "Range"]

_FIELDS = (
    "ImageSize", "BlockSize", "BlocksCount", "MappedBlocksCount", "ChecksumType", "BmapFileChecksum", "BmapFileSHA1",
)  # fmt: skip
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,19})\s*(?:-\s*([0-9]{1,19}))?", re.ASCII)
_SIGNED = b"-----BEGIN PGP SIGNED MESSAGE-----"


class MappedRange(NamedTuple):
    """`length` bytes of the image from `start`, and their digest."""

    start: int
    length: int
    digest: bytes


class Bmap:
    """An open bmap, which was checked from its first byte to its last. Use as a context manager."""

    def __init__(self, path: str) -> None:
        """Open it. Raises OpenError, FormatError, RefusedError for what says nothing that could be verified."""
        self.name = path
        with naming(path):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise OpenError(os_error_reason(error)) from error
            except ValueError:
                raise OpenError("has a NUL in its name") from None
            try:
                self._status = os.fstat(self._fd)
                if not stat.S_ISREG(self._status.st_mode):
                    raise OpenError("is not a regular file")
                self._open()
            except BaseException:
                self.close()
                raise

    def _open(self) -> None:
        if os.pread(self._fd, len(_SIGNED), 0) == _SIGNED:
            raise RefusedError("is signed: `gpg --decrypt` verifies it, and gives the bmap that is in it")
        parser = _Parser()
        for _ in self._parse(parser):
            if parser.in_map:
                break
        version, fields = parser.version, parser.fields
        self.image_size = _number(fields, "ImageSize", 0, MAX_SIZE)
        """Bytes."""
        self.block_size = _number(fields, "BlockSize", 1, GIB)
        self._blocks = _number(fields, "BlocksCount", 0, MAX_SIZE)
        if self._blocks != -(-self.image_size // self.block_size):
            raise FormatError(f"BlocksCount is {self._blocks}, which is not the number of blocks in ImageSize")
        self._mapped = _number(fields, "MappedBlocksCount", 0, self._blocks)
        if version < (1, 3):
            raise RefusedError(
                f"is of version {version[0]}.{version[1]}, which has no digests: nothing can be verified"
            )
        named = version >= (1, 4)
        algorithm = _text(fields, "ChecksumType").lower() if named else "sha1"
        if (
            algorithm not in hashlib.algorithms_guaranteed
            or not hashlib.new(algorithm, usedforsecurity=False).digest_size
        ):
            raise RefusedError(f"has digests of {algorithm}, which is not known")
        self.algorithm = algorithm
        """hashlib's name of what the digests are made with."""
        self._attribute = "chksum" if named else "sha1"
        field = "BmapFileChecksum" if named else "BmapFileSHA1"
        self._check_file(_text(fields, field), parser.positions[field])
        self.mapped_size = sum(mapped.length for mapped in self.ranges())
        """Bytes of all ranges."""
        if not self.mapped_size:
            raise RefusedError("maps no blocks: nothing can be verified")

    def new_hash(self) -> Any:
        """A hash object that makes a range's digest."""
        return hashlib.new(self.algorithm, usedforsecurity=False)

    def ranges(self) -> Iterator[MappedRange]:
        """The ranges, in order, none overlapping another. Raises FormatError."""
        with naming(self.name):
            yield from self._ranges()

    def _ranges(self) -> Iterator[MappedRange]:
        parser = _Parser()
        digest_size = self.new_hash().digest_size
        done = mapped = 0  # blocks
        for found in self._parse(parser):
            for text, attributes in found:
                match = _RANGE.fullmatch(text.strip())
                if match is None:
                    raise FormatError(f"a range is '{text.strip()}'")
                first, last = int(match[1]), int(match[2] or match[1])
                if not done <= first <= last < self._blocks:
                    raise FormatError(f"the range {first}-{last} is not in order, or beyond the image")
                digest = _hexadecimal(attributes.get(self._attribute, ""), digest_size)
                if digest is None:
                    raise FormatError(f"the range {first}-{last} has no {self.algorithm} digest")
                done = last + 1
                mapped += done - first
                start = first * self.block_size
                yield MappedRange(start, min(done * self.block_size, self.image_size) - start, digest)
        if mapped != self._mapped:
            raise FormatError(f"MappedBlocksCount is {self._mapped}, and the ranges have {mapped} blocks")

    def check_unchanged(self) -> None:
        """Raise ChangedError if the file was written to since it was opened."""
        then, now = self._status, os.fstat(self._fd)
        if (then.st_size, then.st_mtime_ns, then.st_ctime_ns) != (now.st_size, now.st_mtime_ns, now.st_ctime_ns):
            raise ChangedError("the file was modified while it was read", name=self.name)

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunks(self) -> Iterator[bytes]:
        at = 0
        while chunk := os.pread(self._fd, _CHUNK, at):
            yield chunk
            at += len(chunk)

    def _parse(self, parser: _Parser) -> Iterator[list[tuple[str, dict[str, str]]]]:
        """Parse the file; after each piece the ranges that were complete in it, as text and attributes."""
        for chunk in self._chunks():
            yield parser.feed(chunk)
        yield parser.feed(b"", last=True)

    def _check_file(self, expected: str, position: int) -> None:
        """Verify the file's own checksum, whose text is at POSITION, or soon after: zeros stand for it."""
        digest = _hexadecimal(expected, self.new_hash().digest_size)
        digits = expected.encode()
        at = os.pread(self._fd, len(digits) + _MAX_TEXT, position).find(digits)
        if digest is None or at < 0:
            raise FormatError(f"its own checksum is not the {self.algorithm} digest of a file")
        start = position + at
        hashed, offset = self.new_hash(), 0
        for chunk in self._chunks():
            piece = bytearray(chunk)
            low, high = max(start - offset, 0), min(start + len(digits) - offset, len(piece))
            if low < high:
                piece[low:high] = b"0" * (high - low)
            hashed.update(piece)
            offset += len(piece)
        if hashed.digest() != digest:
            raise MismatchError("is damaged: its own checksum is not that of the file")


class _Parser:
    """expat with what it must not do: no document type, no entities, no deep nesting, no large tokens."""

    def __init__(self) -> None:
        self.version = (0, 0)
        self.fields: dict[str, str] = {}
        self.positions: dict[str, int] = {}
        """Where the text of each begins in the file, in bytes."""
        self.in_map = False
        """The ranges begin: all fields are known."""
        self._path: list[str] = []
        self._known = False  # the innermost element is a field, or a range
        self._text = ""
        self._attributes: dict[str, str] = {}
        self._found: list[tuple[str, dict[str, str]]] = []
        self._silent = 0  # bytes since expat said something
        self._expat = expat.ParserCreate()
        self._expat.StartDoctypeDeclHandler = self._refuse
        self._expat.EntityDeclHandler = self._refuse
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.CharacterDataHandler = self._characters
        self._expat.CommentHandler = self._heard
        self._expat.ProcessingInstructionHandler = self._heard

    def feed(self, chunk: bytes, *, last: bool = False) -> list[tuple[str, dict[str, str]]]:
        """Parse CHUNK; the ranges that end in it."""
        self._found = []
        self._silent += len(chunk)
        try:
            self._expat.Parse(chunk, last)
        except expat.ExpatError as error:
            raise FormatError(f"is not well-formed XML: {error}") from None
        if self._silent > _MAX_TOKEN:
            raise FormatError(f"has a tag or a comment of more than {_MAX_TOKEN} bytes")
        return self._found

    def _heard(self, *_: object) -> None:
        self._silent = 0

    def _refuse(self, *_: object) -> None:
        raise FormatError("has a document type or entities, which no bmap has")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._silent = 0
        path = self._path
        if self._known:
            raise FormatError(f"has elements in a {path[-1]}")
        path.append(name)
        if name == "Range" and path == _RANGE_PATH:
            self._known = True
        elif len(path) == 1:
            self._root(name, attributes)
        elif len(path) > _MAX_DEPTH:
            raise FormatError(f"has elements nested more than {_MAX_DEPTH} deep")
        elif path == _MAP_PATH:
            if self.in_map:
                raise FormatError("has two block maps")
            self.in_map = True
        else:
            self._known = len(path) == 2 and name in _FIELDS
        self._text = ""
        self._attributes = attributes

    def _root(self, name: str, attributes: dict[str, str]) -> None:
        version = attributes.get("version", "")[:_MAX_TEXT]
        match = _VERSION.fullmatch(version)
        if name != "bmap" or match is None:
            raise FormatError("is not a bmap: its root is not bmap with a version")
        self.version = int(match[1]), int(match[2])
        if not 1 <= self.version[0] <= 2:
            raise FormatError(f"is of version {version}, which is not known")

    def _end(self, name: str) -> None:
        self._silent = 0
        self._path.pop()
        if not self._known:
            return
        self._known = False
        if name == "Range":
            self._found.append((self._text, self._attributes))
        elif name in self.fields:
            raise FormatError(f"has two elements {name}")
        else:
            self.fields[name] = self._text.strip()

    def _characters(self, data: str) -> None:
        self._silent = 0
        if not self._known:
            return
        if not self._text:
            self.positions[self._path[-1]] = self._expat.CurrentByteIndex
        self._text += data
        if len(self._text) > _MAX_TEXT:
            raise FormatError(f"the {self._path[-1]} has more than {_MAX_TEXT} characters")


def _text(fields: dict[str, str], name: str) -> str:
    if name not in fields:
        raise FormatError(f"has no {name}")
    return fields[name]


def _number(fields: dict[str, str], name: str, minimum: int, maximum: int) -> int:
    text = _text(fields, name)
    if not _NUMBER.fullmatch(text) or not minimum <= int(text) <= maximum:
        raise FormatError(f"{name} is '{text}': not a number from {minimum} to {maximum}")
    return int(text)


def _hexadecimal(text: str, size: int) -> bytes | None:
    """The SIZE bytes that TEXT writes in hexadecimal; None: it doesn't."""
    if len(text) != 2 * size or not re.fullmatch("[0-9a-fA-F]*", text, re.ASCII):
        return None
    return bytes.fromhex(text)
