"""Sizes, and the text of errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgsum import errors
from imgsum.errors import Error, ReadError, UsageError, printable
from imgsum.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64k", 65536),
        ("64K", 65536),
        ("1m", 1 << 20),
        ("5G", 5 << 30),
        ("8t", 8 << 40),
        ("007", 7),
        (str((1 << 63) - 1), (1 << 63) - 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *["", "k", "-1", "+1", "1.5k", "1kb", "1 k", " 1", "1_000", "0x10", "1e3", "1p", "\u0663", "\uff11", "1\u212a"],
        *[str(1 << 63), "8388608t", "9" * 30, "1" * 100_000],
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


@given(st.integers(0, (1 << 63) - 1))
def test_a_size_that_is_written_is_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(("size", "text"), [(0, "0"), (65536, "64K"), (1 << 40, "1T"), (1000, "1000"), (1536, "1536")])
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_names_in_messages_are_one_printable_line(name: str) -> None:
    text = str(Error("no such file or directory", name=name))
    assert text.isprintable()
    assert text.endswith("no such file or directory")


@given(st.text())
def test_reasons_too(reason: str) -> None:
    assert str(Error(reason)).isprintable()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("disk.raw", "disk.raw"),
        ("a b\N{SNOWMAN}", "a b\N{SNOWMAN}"),
        ("a\nb", "a\\nb"),
        ("\x1b[2K", "\\x1b[2K"),
        ("\udcff\udc80", "\\xff\\x80"),
        ("\u202egpj", "\\u202egpj"),
    ],
)
def test_printable(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_message_has_the_offset() -> None:
    error = ReadError("input/output error", offset=4096)
    assert str(error) == "input/output error at offset 4096"
    assert str(error.about("disk.raw")) == "disk.raw: input/output error at offset 4096"
    assert str(error.about("other.raw")) == "disk.raw: input/output error at offset 4096"


def test_offset_zero_is_an_offset() -> None:
    assert str(ReadError("no", offset=0)) == "no at offset 0"


def test_every_kind_is_trouble() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Error)]
    assert len(kinds) >= 8


@pytest.mark.parametrize(
    ("number", "reason"), [(2, "no such file or directory"), (5, "input/output error"), (13, "permission denied")]
)
def test_the_systems_words(number: int, reason: str) -> None:
    import os

    assert errors.os_error_reason(OSError(number, os.strerror(number))) == reason
    assert errors.os_error_reason(OSError(number, None)) == reason
