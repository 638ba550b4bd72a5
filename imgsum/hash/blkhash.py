"""The construction: block digests, in order, into the checksum of an image. Frozen: any change is a major version.

    checksum = H( H(block 1) || H(block 2) || ... || H(block N) || size as 64-bit little endian )

A block is 64 KiB of content; the last one may be shorter and is hashed as it is. The value is that of blksum 0.11
and its library blkhash. imageio's, of oVirt, is the same without the size, by blake2b-256 over blocks of 4 MiB.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from imgsum import parameters
from imgsum.errors import UsageError
from imgsum.hash import algorithms
from imgsum.hash.algorithms import Algorithm
from imgsum.parameters import CONSTRUCTIONS, choice, require, shown
from imgsum.units import KIB, MIB

BLOCK_SIZE = 64 * KIB

_ZEROS = bytes(64 * KIB)
_ZERO_RUN = 256 * KIB  # bytes of repeated zero digests for each update: more is no faster


class Construction(NamedTuple):
    """How a checksum is made from the content. Content and construction decide the value, and nothing else."""

    name: str
    algorithm: Algorithm
    block_size: int
    size_at_end: bool


def construction(name: str = "blkhash", algorithm: str | None = None, block_size: int | None = None) -> Construction:
    """The construction NAME, `blkhash` or `imageio`. Only blkhash has a choice of algorithm and block size.

    BLOCK_SIZE: bytes, a power of two. Raises UsageError.
    """
    require(choice(CONSTRUCTIONS), construction=name)
    if name == "imageio":
        if algorithm is not None or block_size is not None:
            raise UsageError("the imageio construction has its own algorithm and block size")
        return Construction(name, algorithms.blake2b_256(), 4 * MIB, size_at_end=False)
    if block_size is None:
        block_size = BLOCK_SIZE
    if algorithm is None:
        algorithm = algorithms.DEFAULT
    require(parameters.BLOCK_SIZE, block_size=block_size)
    if not isinstance(algorithm, str):
        raise UsageError(f"algorithm: not a str: {shown(algorithm)}")
    loaded = algorithms.load(algorithm)
    return Construction(name, loaded, block_size, size_at_end=True)


@lru_cache(maxsize=16)  # 40 us for 64 KiB of sha256, 6 ms for imageio's 4 MiB: too much for each of many small images
def zero_digest(algorithm: Algorithm, length: int) -> bytes:
    """H of LENGTH zeros."""
    h = algorithm.new()
    for at in range(0, length, len(_ZEROS)):
        h.update(_ZEROS[: min(len(_ZEROS), length - at)])
    return h.digest()


class BlkHash:
    """Makes the checksum of one image from the digests of its blocks, which are given in content order."""

    def __init__(self, construction: Construction) -> None:
        self._outer = construction.algorithm.new()
        self._size_at_end = construction.size_at_end
        self.zero_digest = zero_digest(construction.algorithm, construction.block_size)
        self._zero_run = b""

    def update(self, digests: bytes) -> None:
        """Add the digests of one or more blocks, laid end to end."""
        self._outer.update(digests)

    def zero(self, count: int) -> None:
        """Add COUNT whole blocks of zeros. Only the outer hash has to be computed."""
        size = len(self.zero_digest)
        if not self._zero_run and count * size >= _ZERO_RUN:
            self._zero_run = self.zero_digest * (_ZERO_RUN // size)
        whole, rest = divmod(count, _ZERO_RUN // size)
        for _ in range(whole):
            self._outer.update(self._zero_run)
        self._outer.update(self.zero_digest * rest)

    def so_far(self) -> bytes:
        """H of the digests that were added so far."""
        return self._outer.copy().digest()

    def finish(self, size: int) -> str:
        """The checksum, as lower-case hex, of an image of SIZE bytes. Nothing may follow."""
        if self._size_at_end:
            self._outer.update(size.to_bytes(8, "little"))
        return self._outer.digest().hex()
