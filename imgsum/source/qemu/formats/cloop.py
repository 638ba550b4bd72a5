"""cloop: compressed loop images. Source: QEMU's block/cloop.c."""

from __future__ import annotations

from imgsum.source import ReadBytes
from imgsum.source.qemu.formats.tables import header_of, parts


def needed(read: ReadBytes, size: int) -> int:
    """See formats.FORMATS."""
    entries = int.from_bytes(header_of(read, 136)[132:], "big") + 1
    for _ in parts(read, 136, entries, "Q", "big"):
        pass  # raises what it raises
    table_end = 136 + 8 * entries
    return max(table_end, int.from_bytes(read(table_end - 8, 8), "big"))
