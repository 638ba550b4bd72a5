"""What numbers and names may be: the same rules for the command line and the Python API.

A rule says of a value why it is not allowed, in a few words that the value can follow, or None when it is.
"""

from __future__ import annotations

from collections.abc import Callable

from imgsum.errors import UsageError
from imgsum.units import KIB, MAX_SIZE, MIB, format_size

Rule = Callable[[object], str | None]


def whole_number(smallest: int, largest: int = MAX_SIZE, *, power_of_two: bool = False) -> Rule:
    """A number from SMALLEST to LARGEST."""

    def fault(value: object) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return "not a whole number"
        if smallest <= value <= largest and not (power_of_two and value & (value - 1)):
            return None
        if power_of_two:
            return f"not a power of two from {format_size(smallest)} to {format_size(largest)}"
        if largest == MAX_SIZE:
            return "too large" if value > largest else f"less than {smallest}"
        return f"not a number from {smallest} to {largest}"

    return fault


def choice(names: tuple[str, ...]) -> Rule:
    """One of NAMES."""

    def fault(value: object) -> str | None:
        return None if isinstance(value, str) and value in names else f"not one of {', '.join(names)}"

    return fault


def _seconds(value: object) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9:
        return None
    return "not a number of seconds"


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "neither True nor False"


def _text(value: object) -> str | None:
    if not isinstance(value, str):
        return "not a str"
    return "not a name" if not value or "\0" in value else None


FORMATS = ("raw", "qcow2", "bochs", "cloop", "dmg", "parallels", "qcow", "qed", "vdi", "vhdx", "vmdk", "vpc")
"""QEMU's names. `luks` is not one of them: its content for us is the container, as raw."""

OPERANDS = ("bmap", "index")
"""What -f takes besides: what stands for an image, and has no content of its own. Never a backing file's format."""

COMPRESSED_FORMATS = ("raw.bz2", "raw.gz", "raw.lz4", "raw.lzma", "raw.xz", "raw.zst")
"""Raw images in compressed files."""

CONSTRUCTIONS = ("blkhash", "imageio")
READERS = ("auto", "native", "qemu")

SIZE = whole_number(0)
BLOCK_SIZE = whole_number(512, 32 * MIB, power_of_two=True)
REQUEST_SIZE = whole_number(4 * KIB, 32 * MIB, power_of_two=True)
CONNECTIONS = whole_number(1, 1024)
LIMIT = whole_number(1)
TIMEOUT: Rule = _seconds
FLAG: Rule = _flag
TEXT: Rule = _text


def require(rule: Rule, **values: object) -> None:
    """Raise UsageError, which names the parameter, unless RULE allows all VALUES."""
    for name, value in values.items():
        fault = rule(value)
        if fault is not None:
            raise UsageError(f"{name}: {fault}: {shown(value)}")


def shown(value: object) -> str:
    """VALUE for a message, however large it is."""
    try:
        text = repr(value)
    except Exception:  # of an int of more than 4300 digits, or of somebody else's class
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."
