"""sha256 of many blocks at once: every variant against hashlib, wrong arguments, the choice, other CPUs, sanitizers."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Imgsum, find_tool, need
from hypothesis import given, settings
from hypothesis import strategies as st

from imgsum.hash import lanes

ROOT = Path(__file__).resolve().parent.parent
ZERO_DIGEST = b"z" * 32
"""Not the digest of zeros: so it shows whether a block was hashed."""
KIB, MIB = 1 << 10, 1 << 20

try:
    from imgsum.hash import _lanes
except ImportError:
    VARIANTS = []
else:
    VARIANTS = [name for name, _ in _lanes.variants()]


@pytest.fixture
def extension() -> None:
    need(VARIANTS, "the extension was not built, or this CPU has no variant of it")


def expected(content: bytes | memoryview, block_size: int) -> bytes:
    blocks = [content[at : at + block_size] for at in range(0, len(content), block_size)]
    return b"".join(
        ZERO_DIGEST if bytes(block) == bytes(block_size) else hashlib.sha256(block).digest() for block in blocks
    )


def content_of(blocks: str, block_size: int, last: int = 0) -> bytes:
    """A block for each letter: 0 is zeros, 1 zeros but for the last byte, anything else data. LAST bytes more."""
    data = random.Random(f"{blocks} {block_size}")
    kinds: dict[str, Callable[[], bytes]] = {
        "0": lambda: bytes(block_size),
        "1": lambda: bytes(block_size - 1) + b"\1",
    }
    made = [kinds.get(kind, lambda: data.randbytes(block_size))() for kind in blocks]
    return b"".join(made) + data.randbytes(last)


def check_variants(content: bytes, block_size: int, offset: int = 0) -> None:
    buffer = memoryview(bytearray(offset) + content)[offset:]
    wanted = expected(content, block_size)
    for variant in VARIANTS:
        digests = bytearray(len(wanted) + 1)
        digests[-1] = 77
        _lanes.sha256_blocks(buffer, block_size, ZERO_DIGEST, digests, variant)
        assert digests == wanted + b"\x4d", variant


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("count", range(41))
def test_any_number_of_blocks(count: int) -> None:
    check_variants(content_of("x" * count, 512), 512)
    check_variants(content_of("x" * count, 512, last=count + 1), 512)


@pytest.mark.usefixtures("extension")
@settings(max_examples=150, deadline=None)
@given(
    st.text("01xx", max_size=40),
    st.sampled_from([512, 512, 1 * KIB, 4 * KIB, 16 * KIB]),
    st.integers(0, 511),
    st.integers(0, 65),
)
def test_zeros_short_ends_and_unaligned_buffers(blocks: str, block_size: int, last: int, offset: int) -> None:
    check_variants(content_of(blocks, block_size, last), block_size, offset)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("block_size", [1, 2, 55, 56, 63, 64, 65, 119, 120, 127, 128, 129, 1000])
def test_every_place_of_the_padding(block_size: int) -> None:
    check_variants(content_of("xxx01xx0xxxxxxxxx", block_size), block_size)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    ("blocks", "block_size"), [("xx0xxx1xx", 64 * KIB), ("x0x1x", 1 * MIB), ("0x", 32 * MIB), ("x", 32 * MIB)]
)
def test_large_blocks(blocks: str, block_size: int) -> None:
    check_variants(content_of(blocks, block_size, last=1), block_size, offset=1)


@pytest.mark.usefixtures("extension")
def test_a_block_with_one_bit_anywhere_is_not_zero() -> None:
    for at in [*range(70), 255, 256, 495, 496, 510, 511]:
        content = bytearray(512)
        content[at] = 0x80
        check_variants(bytes(content), 512)


@pytest.mark.usefixtures("extension")
def test_unfit_arguments() -> None:
    data, digests, variant = bytes(2048), bytearray(4 * 32), VARIANTS[0]
    not_contiguous = memoryview(bytearray(4096))[::2]
    for arguments, error in [
        ((data, 0, ZERO_DIGEST, digests, variant), ValueError),
        ((data, -512, ZERO_DIGEST, digests, variant), ValueError),
        ((data, 1 << 64, ZERO_DIGEST, digests, variant), OverflowError),
        ((data, 512.0, ZERO_DIGEST, digests, variant), TypeError),
        ((data, 512, ZERO_DIGEST[1:], digests, variant), ValueError),
        ((data, 512, ZERO_DIGEST, digests[1:], variant), ValueError),
        ((data + b"x", 512, ZERO_DIGEST, digests, variant), ValueError),
        ((data, 512, ZERO_DIGEST, bytearray(), variant), ValueError),
        ((data, 512, ZERO_DIGEST, bytes(digests), variant), TypeError),
        ((data, 512, ZERO_DIGEST, memoryview(digests).toreadonly(), variant), TypeError),
        ((not_contiguous, 512, ZERO_DIGEST, digests, variant), BufferError),
        ((data, 512, ZERO_DIGEST, not_contiguous, variant), TypeError),
        (("text", 512, ZERO_DIGEST, digests, variant), TypeError),
        ((data, 512, ZERO_DIGEST, digests, "MMX"), ValueError),
        ((data, 512, ZERO_DIGEST, digests, None), TypeError),
        ((data, 512, ZERO_DIGEST), TypeError),
    ]:
        with pytest.raises(error):
            _lanes.sha256_blocks(*arguments)  # type: ignore[call-arg, arg-type]
        assert digests == bytes(4 * 32)
    digests.append(0)  # no buffer is held: this would be a BufferError


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], lanes.Choice]]:
    def choice(wanted: str) -> lanes.Choice:
        monkeypatch.setenv("IMGSUM_LANES", wanted)
        lanes.sha256.cache_clear()
        return lanes.sha256()

    yield choice
    lanes.sha256.cache_clear()


@pytest.mark.usefixtures("extension")
def test_the_environment_decides(choose: Callable[[str], lanes.Choice]) -> None:
    assert choose("").description.startswith(VARIANTS[0])
    content = memoryview(content_of("x0xxx", 512, last=7))
    for variant in VARIANTS:
        choice = choose(variant.lower())
        assert choice.description.startswith(f"{variant}, ")
        assert choice.hash_blocks is not None
        assert choice.hash_blocks(content, 512, ZERO_DIGEST) == expected(content, 512)
    assert choose("off") == (None, "hashlib, as IMGSUM_LANES=off says")
    assert choose("mmx") == (None, "hashlib, as this CPU has no variant IMGSUM_LANES=mmx")


@pytest.mark.usefixtures("extension")
def test_a_variant_that_fails_its_self_test_is_not_used(
    choose: Callable[[str], lanes.Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _lanes.sha256_blocks
    broken = [VARIANTS[0]]

    def sha256_blocks(data: memoryview, block_size: int, zero_digest: bytes, digests: bytearray, variant: str) -> None:
        real(data, block_size, zero_digest, digests, variant)
        if variant in broken and len(digests) > 32:
            digests[-1] ^= 1

    monkeypatch.setattr(_lanes, "sha256_blocks", sha256_blocks)
    assert choose("").description.endswith(f"({VARIANTS[0]} failed its self-test)")
    assert choose(broken[0].lower()) == (None, f"hashlib ({broken[0]} failed its self-test)")
    broken[:] = VARIANTS
    choice = choose("")
    assert choice.hash_blocks is None
    assert all(f"({variant} failed its self-test)" in choice.description for variant in VARIANTS)


def test_without_the_extension(choose: Callable[[str], lanes.Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    import imgsum.hash

    monkeypatch.delattr(imgsum.hash, "_lanes", raising=False)
    monkeypatch.setitem(sys.modules, "imgsum.hash._lanes", None)
    assert choose("") == (None, "hashlib, as the extension was not built")


def test_the_command_gives_the_same_value_and_says_what_it_uses(imgsum: Imgsum, tmp_path: Path) -> None:
    image = tmp_path / "disk.raw"
    image.write_bytes(content_of("xx0x1xxxxxx0xxxxxxxxxxx", 64 * KIB, last=100))
    values = set()
    for wanted in ["", "off", *(variant.lower() for variant in VARIANTS)]:
        environment = {**os.environ, "IMGSUM_LANES": wanted}
        values.add(imgsum("checksum", "-q", str(image), env=environment).text)
        (line,) = [line for line in imgsum("algorithms", env=environment).text.splitlines() if "(default)" in line]
        assert line.startswith("sha256 ")
        assert ("hashlib" in line) == (wanted == "off" or not VARIANTS)
        assert ("at once" in line) == (wanted != "off" and bool(VARIANTS))
    assert len(values) == 1


# --- without Python -------------------------------------------------------------------------------------------------


CASES = [
    *[(content_of("x" * count, 512, last=count), 512, count) for count in (0, 1, 2, 3, 4, 5, 7, 9, 16, 17, 31)],
    (content_of("xx0x1xxxxxx0xxxxxxxxxxx", 1000, last=999), 1000, 3),
    (content_of("x0xx", 64, last=55), 64, 1),
    (content_of("0", 16), 16, 0),
    (content_of("1xxxxxxxx00", 7, last=1), 7, 5),
]


def run_harness(compiler: str, flags: list[str], runner: list[str], directory: Path) -> set[str]:
    """Compile the harness, run it by RUNNER on every case, compare the digests. Returns the variants it had."""
    program = directory / "harness"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([compiler, *flags, ROOT / "tests" / "lanes_harness.c", "-o", program], check=True)
    ran = set()
    for content, block_size, offset in CASES:
        result = subprocess.run(
            [*runner, program, str(block_size), str(offset)], input=content, capture_output=True, check=False
        )
        assert result.returncode == 0, result.stderr
        for line in result.stdout.decode().splitlines():
            variant, digests = line.split(" ")
            assert digests == expected(content, block_size).hex(), (variant, block_size, offset)
            ran.add(variant)
    return ran


def test_under_sanitizers(tmp_path: Path) -> None:
    flags = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    assert set(VARIANTS) <= run_harness(find_tool("gcc"), flags, [], tmp_path)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the widths of vectors are x86's")
def test_every_width_of_vectors_without_its_cpu(tmp_path: Path) -> None:
    flags = ["-DPORTABLE", "-Wno-psabi", "-O0"]
    assert run_harness(find_tool("gcc"), flags, [], tmp_path) == {"AVX-512", "AVX2", "SSE4.1"}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("machine", "cpu", "variants"),
    [
        ("aarch64", "max", {"ARMv8"}),
        ("aarch64", "cortex-a53", {"ARMv8"}),
        ("x86_64", "Nehalem", {"SSE4.1"}),
        ("x86_64", "Haswell", {"AVX2", "SSE4.1"}),
        ("x86_64", "Conroe", set()),
    ],
)
def test_on_other_cpus(machine: str, cpu: str, variants: set[str], tmp_path: Path) -> None:
    compiler = find_tool(f"{machine}-linux-gnu-gcc")
    emulator = [find_tool(f"qemu-{machine}-static"), "-cpu", cpu]
    assert run_harness(compiler, ["-O3", "-static"], emulator, tmp_path) == variants
