"""What is looked at in an image before QEMU may open it: what QEMU would read wrongly, or follow to other files.

QEMU's drivers skip what they don't understand of some formats, and take what a file lacks for zeros, without an error:
a checksum of that would be wrong. One module for each format. Where a container says its size twice, docs/formats.md
has the rules.
"""

from __future__ import annotations

from importlib import import_module

from imgsum.errors import FormatError, TruncatedError
from imgsum.source import ReadBytes, detect
from imgsum.source.qemu.formats.links import Links
from imgsum.source.qemu.formats.tables import bounded_read

FORMATS = ("bochs", "cloop", "dmg", "parallels", "qcow", "qcow2", "qed")
"""Each is a module here. Its inspect(read, size) -> Links says what the image refers to, and its needed(read, size) how
far into the file its tables do, in bytes; a module may lack either. Both raise an imgsum.Error."""


def inspect(read: ReadBytes, size: int, format_name: str, allocated: int | None = None) -> Links:
    """What the image of SIZE bytes that READ reads refers to.

    ALLOCATED: bytes that the file has on the disk, as tables in holes cost nothing to make; None: all.
    Raises RefusedError, FormatError or TruncatedError.
    """
    if format_name not in FORMATS:
        return Links()
    if format_name != "dmg" and detect.detect(read(0, detect.HEAD_SIZE), b"") != format_name:
        raise FormatError(f"is not a {format_name} image: it does not begin as one")
    module = import_module(f"{__name__}.{format_name}")
    links: Links = module.inspect(read, size) if hasattr(module, "inspect") else Links()
    if hasattr(module, "needed"):
        needed = module.needed(bounded_read(read, size if allocated is None else allocated), size)
        if needed > size:
            raise TruncatedError(f"truncated or damaged: the file has {size} of at least {needed} bytes")
    return links
