"""The construction and the algorithms, against the obvious reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference import GIB, KIB, MIB

from imgsum import OpenOptions, checksum
from imgsum.errors import UsageError
from imgsum.hash import algorithms, blkhash

SPECS = ("", "1:A", "64k:A 32k:- 100:0", "40k:0 24k:A 64k:- 64k:0 64k:B 1:-", "3m:R 9m:- 1m:R 123:-", "4m:0", "5m:-")
NEW = ("blake3", "xxh3-128", "xxh3-64", "xxh64", "md5", "blake2s")


@pytest.mark.parametrize("algorithm", NEW)
@pytest.mark.parametrize("spec", SPECS)
def test_algorithms_without_vectors(algorithm: str, spec: str, image: Callable[..., Path]) -> None:
    result = checksum(image(spec), algorithm=algorithm)
    assert result.hexdigest == reference.blkhash(reference.content(spec), algorithm)
    assert result.algorithm == algorithm


@pytest.mark.parametrize("extents", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, "4m:R", "8m:R 1:R", "12m:- 4m:R 12m:-", f"{4 * MIB - 1}:R"])
def test_imageio(spec: str, extents: bool, image: Callable[..., Path]) -> None:
    result = checksum(image(spec), construction="imageio", options=OpenOptions(extents=extents))
    assert result.hexdigest == reference.imageio(reference.content(spec))
    assert (result.construction, result.block_size) == ("imageio", 4 * MIB)


def test_empty_image_is_the_hash_of_its_size(image: Callable[..., Path]) -> None:
    expected = hashlib.sha256(bytes(8)).hexdigest()
    assert expected.startswith("af5570f5a181")
    assert checksum(image("")).hexdigest == expected


@pytest.mark.parametrize("block_size", [512, 4 * KIB, 128 * KIB, 2 * MIB, 32 * MIB])
@pytest.mark.parametrize("spec", ["3m:R 29m:- 100:A", "64k:0 1m:A 511:-"])
def test_block_sizes(block_size: int, spec: str, image: Callable[..., Path]) -> None:
    expected = reference.blkhash(reference.content(spec), "sha256", block_size)
    assert checksum(image(spec), block_size=block_size).hexdigest == expected


@pytest.mark.parametrize("block_size", [0, 1, 256, 1000, 65535, 64 * MIB])
def test_refused_block_sizes(block_size: int) -> None:
    with pytest.raises(UsageError, match="block_size"):
        blkhash.construction(block_size=block_size)


@pytest.mark.parametrize("arguments", [("imageio", "sha256", None), ("imageio", None, 65536), ("other", None, None)])
def test_refused_constructions(arguments: tuple[str, str | None, int | None]) -> None:
    with pytest.raises(UsageError):
        blkhash.construction(*arguments)


@pytest.mark.parametrize(
    "name", ["", " ", "sha-3", "shake_128", "SHAKE-256", "crc32", "sha256 ", "new", "blake2b-256", "\0"]
)
def test_unknown_algorithms(name: str) -> None:
    with pytest.raises(UsageError, match="unknown algorithm"):
        blkhash.construction(algorithm=name)


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("SHA256", "sha256"),
        ("sha3_256", "sha3-256"),
        ("blake2b512", "blake2b"),
        ("blake2s256", "blake2s"),
        ("sha512-256", "sha512-256"),
        ("SHA512/256", "sha512-256"),
        ("BLAKE3", "blake3"),
        ("xxh128", "xxh3-128"),
    ],
)
def test_spellings(spelling: str, canonical: str) -> None:
    assert algorithms.load(spelling).name == canonical


def test_every_listed_algorithm_works() -> None:
    listed = algorithms.available()
    names = [algorithm.name for algorithm in listed]
    assert len(set(names)) == len(names)
    assert {"sha256", "sha512", "sha3-256", "blake2b", "blake3", "sha512-256", *algorithms.NOT_CRYPTOGRAPHIC} <= set(
        names
    )
    for algorithm in listed:
        assert algorithms.load(algorithm.name) == algorithm or algorithms.load(algorithm.name).name == algorithm.name
        in_one_go = algorithm.new(b"abc" * 1000).digest()
        by_parts = algorithm.new()
        for _ in range(1000):
            by_parts.update(memoryview(b"abc"))
        assert by_parts.digest() == in_one_go
        assert len(in_one_go) == algorithm.digest_size
        assert algorithm.cryptographic == (not algorithm.name.startswith("xxh"))
        if algorithm.name.replace("-", "_") in hashlib.algorithms_guaranteed:
            assert in_one_go == hashlib.new(algorithm.name.replace("-", "_"), b"abc" * 1000).digest()


def test_every_fixed_length_algorithm_of_hashlib_is_listed() -> None:
    listed = {algorithm.name for algorithm in algorithms.available()}
    for name in hashlib.algorithms_available:
        if name.startswith("shake"):
            continue
        try:
            hashlib.new(name)
        except ValueError:
            continue  # disabled in this OpenSSL
        assert algorithms.canonical(name) in listed


@given(st.lists(st.one_of(st.integers(0, 40000), st.binary(min_size=4096, max_size=4096)), max_size=8))
def test_zero_runs_are_the_same_as_zero_blocks(parts: list[int | bytes]) -> None:
    how = blkhash.construction("blkhash", "sha1", 4096)
    state = blkhash.BlkHash(how)
    expected = hashlib.sha1()
    zero = hashlib.sha1(bytes(4096)).digest()
    size = 0
    for part in parts:
        if isinstance(part, int):
            state.zero(part)
            expected.update(zero * part)
            size += part * 4096
        else:
            state.update(hashlib.sha1(part).digest())
            expected.update(hashlib.sha1(part).digest())
            size += 4096
    expected.update(size.to_bytes(8, "little"))
    assert state.finish(size) == expected.hexdigest()


def test_a_huge_zero_run_allocates_little() -> None:
    import tracemalloc

    size = 1024 * GIB
    state = blkhash.BlkHash(blkhash.construction("blkhash", "xxh64"))
    tracemalloc.start()
    try:
        state.zero(size // (64 * KIB))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    new = reference.HASHES["xxh64"]
    digests = new(bytes(64 * KIB)).digest() * (size // (64 * KIB))
    assert state.finish(size) == new(digests + size.to_bytes(8, "little")).hexdigest()
