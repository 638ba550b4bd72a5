"""Content -> the digests of its blocks."""

from __future__ import annotations

from collections.abc import Iterable

from imgsum.hash.algorithms import Hash
from imgsum.hash.blkhash import Construction
from imgsum.units import KIB

_ZEROS = bytearray(64 * KIB)  # bytearray.startswith(memoryview) is memcmp; memoryview == bytes is 70 times slower


def block_digests(content: memoryview, construction: Construction, zero_digest: bytes) -> bytes:
    """The digests of CONTENT's blocks, laid end to end. A whole block of zeros has ZERO_DIGEST, without hashing."""
    block_size, algorithm = construction.block_size, construction.algorithm
    if algorithm.hash_blocks is not None and len(content) > block_size:  # nothing is gained for a single block
        return algorithm.hash_blocks(content, block_size, zero_digest)
    digests = []
    for at in range(0, len(content), block_size):
        block = content[at : at + block_size]
        if len(block) == block_size and is_zero(block):
            digests.append(zero_digest)
        else:
            digests.append(algorithm.new(block).digest())
    return b"".join(digests)


def digest_of_block(pieces: Iterable[memoryview], construction: Construction, zero_digest: bytes) -> bytes:
    """The digest of one block that comes in PIECES. Zeros at its beginning are hashed only once data follows."""
    hash_ = construction.algorithm.new()
    zeros, hashed = 0, False
    for piece in pieces:
        if not hashed and is_zero(piece):
            zeros += len(piece)
            continue
        if not hashed:
            _update_zeros(hash_, zeros)
            hashed = True
        hash_.update(piece)
    if hashed:
        return hash_.digest()
    if zeros == construction.block_size:
        return zero_digest
    _update_zeros(hash_, zeros)  # the last block of the content, which is shorter
    return hash_.digest()


def _update_zeros(hash_: Hash, count: int) -> None:
    for at in range(0, count, len(_ZEROS)):
        hash_.update(_ZEROS[: count - at])


def is_zero(content: memoryview) -> bool:
    """Whether CONTENT is all zeros. For most data, comparing the first bytes is enough."""
    step = len(_ZEROS)
    if len(content) <= step:
        return _ZEROS.startswith(content)
    return all(_ZEROS.startswith(content[at : at + step]) for at in range(0, len(content), step))
