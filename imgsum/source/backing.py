"""Which other files an image may have: the same rules whoever reads the image."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from imgsum.errors import OpenError, RefusedError
from imgsum.parameters import FORMATS
from imgsum.source import OpenOptions
from imgsum.source.file import HostFile

PROTOCOL = re.compile(rb"[^:/]*:")
"""How QEMU knows a name of a protocol: `a:b` is b by the protocol a, and ./a:b a file."""


def backing_file(recorded: bytes, format_: str | None, image: HostFile, image_format: str = "qcow2") -> tuple[str, str]:
    """The path and format of the backing file that IMAGE has RECORDED, relative to the directory that IMAGE is in.

    Raises RefusedError for anything but a plain path, and without a format: nothing is guessed.
    """
    name = os.fsdecode(recorded)
    if image_format == "qcow2":
        change, record = (f"qemu-img rebase -u -F FORMAT -b {path} IMAGE" for path in ("PATH", name))
    else:  # qcow has no place for a format, and qed only for raw; in neither can rebase write one
        change = record = f"qemu-img convert -f {image_format} -O qcow2 IMAGE COPY"
    if PROTOCOL.match(recorded):
        raise RefusedError(
            f"the backing file '{name}' is not a plain path (`{change}` makes an image without one)"
            if image_format != "qcow2"
            else f"the backing file '{name}' is not a plain path (`{change}` changes it)",
            name=image.name,
        )
    if not format_:
        raise RefusedError(
            f"the format of the backing file '{name}' is not recorded, and guessing it would leave it to whoever wrote"
            f" that file (`{record}` {'records it' if image_format == 'qcow2' else 'makes one image of both'})",
            name=image.name,
        )
    if format_ not in FORMATS:  # a driver's name, which could be that of a protocol
        raise RefusedError(
            f"the format of the backing file '{name}' is not one that is read here: {format_}", name=image.name
        )
    return os.path.join(os.path.dirname(image.path), name), format_


def open_beside(name: str, role: str, image: HostFile, opened: Sequence[HostFile], options: OpenOptions) -> HostFile:
    """The file NAME in IMAGE's directory, which is the ROLE of IMAGE: `extent` or `parent`. It is none of OPENED.

    Raises RefusedError for any other place: it may be any file of this host (CVE-2022-47951). OpenError.
    """
    if not name or "/" in name or "\\" in name or ":" in name or "\0" in name or name in (".", ".."):
        raise RefusedError(f"its {role} is in another place: '{name}' (only a file beside it is read)")
    path = os.path.join(os.path.dirname(image.path), name)
    if os.path.islink(path):
        raise RefusedError(f"its {role} is in another place: '{name}' is a symbolic link")
    try:
        file = HostFile(path, f"{opened[0].name}: {role} {name}", options)
    except OpenError as error:
        raise OpenError(f"its {role} '{name}' can't be read: {error.reason}") from error
    if any(file.identity == other.identity for other in opened):
        file.close()
        raise RefusedError(f"its {role} '{name}' is one of its own files")
    return file
