"""The obvious reference: images and their checksums, in the fewest words, sharing no code with imgsum.

An image is written down as a spec, a list of SIZE:KIND. SIZE is bytes, or takes k, m, g, t. KIND is

    -   a hole
    0   written zeros
    R   pseudo-random, a function of the offset alone: SHA-256(le64(i)) for i = 0, 1, 2 ... laid end to end
    A   that letter, repeated

so `64k:A 32k:- 100:0` is a file of 98404 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import blake3
import xxhash

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

HASHES: dict[str, Any] = {
    "sha256": hashlib.sha256,
    "sha1": hashlib.sha1,
    "sha512": hashlib.sha512,
    "sha3-256": hashlib.sha3_256,
    "md5": hashlib.md5,
    "blake2b": hashlib.blake2b,
    "blake2b512": hashlib.blake2b,
    "blake2s": hashlib.blake2s,
    "blake3": blake3.blake3,
    "xxh3-128": xxhash.xxh3_128,
    "xxh3-64": xxhash.xxh3_64,
    "xxh64": xxhash.xxh64,
}


def blkhash(content: bytes | Iterable[bytes], algorithm: str = "sha256", block_size: int = 64 * KIB) -> str:
    """H( H(block 1) || ... || H(block N) || le64(size) ) of CONTENT, which may come in chunks of any size."""
    new = HASHES[algorithm]
    outer, size = new(), 0
    for block in blocks(content, block_size):
        outer.update(_digest(algorithm, block) if block.count(0) == len(block) else new(block).digest())
        size += len(block)
    outer.update(size.to_bytes(8, "little"))
    return str(outer.hexdigest())


def imageio(content: bytes | Iterable[bytes]) -> str:
    """What oVirt's imageio reports: blake2b-256 of the blake2b-256 of each 4 MiB, without the size."""
    outer = hashlib.blake2b(digest_size=32)
    for block in blocks(content, 4 * MIB):
        outer.update(hashlib.blake2b(block, digest_size=32).digest())
    return outer.hexdigest()


@lru_cache(maxsize=16)
def _digest(algorithm: str, block: bytes) -> bytes:
    """H(block), kept, so that the reference of many gigabytes of zeros does not take minutes."""
    return bytes(HASHES[algorithm](block).digest())


def blocks(content: bytes | Iterable[bytes], block_size: int) -> Iterator[bytes]:
    """CONTENT in blocks of BLOCK_SIZE, the last one shorter if need be."""
    if isinstance(content, bytes):
        content = [content]
    pending = b""
    for chunk in content:
        pending = pending + chunk if pending else chunk
        whole = len(pending) // block_size * block_size
        for at in range(0, whole, block_size):
            yield pending[at : at + block_size]
        pending = pending[whole:]
    if pending:
        yield pending


def parse(spec: str) -> list[tuple[int, str]]:
    """[(bytes, kind)] of a SPEC."""
    parsed = []
    for word in spec.split():
        number, kind = word.split(":")
        parsed.append((parse_size(number), kind))
    return parsed


def parse_size(text: str) -> int:
    """Bytes of `4096`, `64k`, `5g` ..."""
    units = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def size(spec: str) -> int:
    """Bytes of the image that SPEC describes."""
    return sum(length for length, _ in parse(spec))


def chunks(spec: str) -> Iterator[bytes]:
    """The content that SPEC describes, 1 MiB at most at a time."""
    at = 0
    for length, kind in parse(spec):
        yield from _fill(at, length, kind)
        at += length


def content(spec: str) -> bytes:
    """The content that SPEC describes, as one string."""
    return b"".join(chunks(spec))


def write(spec: str, path: Path, *, holes: bool = True) -> None:
    """Make the raw image that SPEC describes, at PATH. Without HOLES every byte is written."""
    at = 0
    with open(path, "wb") as file:
        for length, kind in parse(spec):
            if kind == "-" and holes:
                file.seek(length, 1)
            else:
                file.writelines(_fill(at, length, kind))
            at += length
        file.truncate(at)


def _fill(at: int, length: int, kind: str) -> Iterator[bytes]:
    end = at + length
    while at < end:
        step = min(MIB, end - at)
        yield _random(at, step) if kind == "R" else _repeat(kind, step)
        at += step


@cache
def _repeat(kind: str, length: int) -> bytes:
    return (b"\0" if kind in "-0" else kind.encode()) * length


@lru_cache(maxsize=32)
def _random(at: int, length: int) -> bytes:
    first = at // 32
    words = (hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(first, (at + length) // 32 + 1))
    return bytes(islice(chain.from_iterable(words), at - 32 * first, at - 32 * first + length))
