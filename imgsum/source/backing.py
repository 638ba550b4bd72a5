"""Which backing file an image may have: the same rules whoever reads the image."""

from __future__ import annotations

import os
import re

from imgsum.errors import RefusedError
from imgsum.source import FORMATS
from imgsum.source.file import HostFile

PROTOCOL = re.compile(rb"[^:/]*:")
"""How QEMU knows a name of a protocol: `a:b` is b by the protocol a, and ./a:b a file."""


def backing_file(recorded: bytes, format_: str | None, image: HostFile) -> tuple[str, str]:
    """The path and format of the backing file that IMAGE has RECORDED, relative to the directory that IMAGE is in.

    Raises RefusedError for anything but a plain path, and without a format: nothing is guessed.
    """
    name = os.fsdecode(recorded)
    if PROTOCOL.match(recorded):
        raise RefusedError(
            f"the backing file '{name}' is not a plain path (`qemu-img rebase -u -F FORMAT -b PATH IMAGE` changes it)",
            name=image.name,
        )
    if not format_:
        raise RefusedError(
            f"the format of the backing file '{name}' is not recorded, and guessing it would leave it to whoever wrote"
            f" that file (`qemu-img rebase -u -F FORMAT -b {name} IMAGE` records it)",
            name=image.name,
        )
    if format_ not in FORMATS:  # a driver's name, which could be that of a protocol
        raise RefusedError(
            f"the format of the backing file '{name}' is not one that is read here: {format_}", name=image.name
        )
    return os.path.join(os.path.dirname(image.path), name), format_
