"""What an image that QEMU reads needs besides its own file."""

from __future__ import annotations

from typing import NamedTuple

from imgsum.source.file import HostFile


class Links(NamedTuple):
    """What an image needs besides its own file, and what QEMU must be told."""

    backing_file: bytes | None = None
    backing_format: str | None = None
    encryption: str | None = None
    """None, `aes` or `luks`."""
    files: tuple[HostFile, ...] = ()
    """Other files that have its content, beside it."""
    size: int | None = None
    """Bytes of content, where QEMU might have another opinion."""
    note: str | None = None
    """What a user should know of the value, or None."""
    driver_options: tuple[tuple[str, str], ...] = ()
    """Options of QEMU's driver."""
