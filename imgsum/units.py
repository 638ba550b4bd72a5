"""Sizes as people write them: 4096, 64k, 1M, 8T."""

from __future__ import annotations

from imgsum.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_SIZE = (1 << 63) - 1
"""The largest size or offset, in bytes: what an off_t holds."""

_UNITS = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}


def parse_size(text: str) -> int:
    """Bytes of TEXT: decimal digits and at most one of k, m, g, t (powers of 1024, either case).

    Raises UsageError.
    """
    digits, unit = (text[:-1], _UNITS.get(text[-1:].lower())) if text[-1:].isalpha() else (text, 1)
    if unit is None or not (text.isascii() and digits.isdigit()):
        raise UsageError(f"not a size: '{text}' (a number of bytes, or with k, m, g or t)")
    if len(digits) > 19 or int(digits) * unit > MAX_SIZE:
        raise UsageError(f"size is too large: '{text}'")
    return int(digits) * unit


def format_size(size: int) -> str:
    """SIZE bytes in the largest unit that loses nothing: 65536 is `64K`, 1000 is `1000`."""
    for unit, letter in ((TIB, "T"), (GIB, "G"), (MIB, "M"), (KIB, "K")):
        if size and size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)
