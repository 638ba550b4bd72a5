"""qcow2 as QEMU reads it: encrypted images, and --reader qemu."""

from __future__ import annotations

from imgsum.errors import RefusedError
from imgsum.source import ReadBytes
from imgsum.source.qcow2.header import parse
from imgsum.source.qcow2.mapping import Mapping
from imgsum.source.qemu.formats.links import Links
from imgsum.source.tables import TableCache


def inspect(read: ReadBytes, size: int) -> Links:
    """What QEMU reads of qcow2: mostly encrypted images. QEMU takes what a file lacks at its end for zeros."""
    header = parse(read)
    if header.has_data_file:
        raise RefusedError("has its data in another file, which only imgsum's own reader follows (--reader native)")
    for _ in Mapping(header, read, size, size, TableCache(), "").runs(0, header.size):
        pass  # raises TruncatedError
    return Links(header.backing_file, header.backing_format, {0: None, 1: "aes", 2: "luks"}[header.crypt_method])
