"""Magic numbers: which format is this? Names are QEMU's.

Rules of QEMU's own probing (the *_probe functions of its block drivers), which looks at the first 512 bytes, and two
that it leaves to the file's name or to -f: the footers of fixed VHD and of dmg. LUKS and ISO content is raw.
"""

from __future__ import annotations

import re

HEAD_SIZE = TAIL_SIZE = 512

_STARTS = (
    (b"COWD", "vmdk"),  # VMDK 3
    (b"KDMV", "vmdk"),  # VMDK 4
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vpc"),
    (b"QED\0", "qed"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "cloop"),
)

_ENDS = ((b"conectix", "vpc"), (b"koly", "dmg"))

# A VMDK descriptor is text: comments and blank lines, then its version.
_VMDK_DESCRIPTOR = re.compile(rb"(?:#[^\n]*\n|[ \r]*\n)*version=[123]\r?\n")


def detect(head: bytes, tail: bytes) -> str:
    """The format of an image that begins with HEAD and ends with TAIL, 512 bytes each or all there is. Else `raw`."""
    if head.startswith(b"QFI\xfb") and len(head) >= 8:
        version = int.from_bytes(head[4:8], "big")
        if version >= 1:
            return "qcow2" if version >= 2 else "qcow"
    for magic, name in _STARTS:
        if head.startswith(magic):
            return name
    if head[0x40:0x44] == b"\x7f\x10\xda\xbe":
        return "vdi"
    if _VMDK_DESCRIPTOR.match(head):
        return "vmdk"
    for magic, name in _ENDS:
        if tail.startswith(magic):
            return name
    return "raw"
