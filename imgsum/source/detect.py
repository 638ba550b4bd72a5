"""Magic numbers: which format is this? Names are QEMU's.

Rules of QEMU's own probing (the *_probe functions of its block drivers), which looks at the first 512 bytes, and two
that it leaves to the file's name or to -f: the footers of fixed VHD and of dmg. LUKS and ISO content is raw.
"""

from __future__ import annotations

import re
import shlex

from imgsum.errors import FormatError

HEAD_SIZE = TAIL_SIZE = 512

INDEX_MAGIC = b'{"imgsum_index": 1,'
"""What an index of an image begins with: see imgsum/index/format.py."""


def begins_as_bmap(head: bytes) -> bool:
    """Whether a file may be one of bmaptool's: XML, or signed."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"<", b"-----BEGIN PGP SIGNED MESSAGE-----"))


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


COMPRESSIONS = {
    "bz2": ((".bz2",), "bzip2 -dc"),
    "gz": ((".gz",), "gzip -dc"),
    "lz4": ((".lz4",), "lz4 -dc"),
    "lzma": ((".lzma",), "xz --format=lzma -dc"),
    "xz": ((".xz",), "xz -dc"),
    "zst": ((".zst", ".zstd"), "zstd -dc"),
}
"""Compressed data that is read as what is in it: how names end, and what writes the content to standard output."""

_COMPRESSED = (
    (b"\x1f\x8b\x08", "gz"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
    (b"\x04\x22\x4d\x18", "lz4"),
)

# Other compressed data, and what writes the decompressed data to standard output.
_OTHERS = (
    (b"\x1f\x9d", "gzip -dc"),  # compress
    (b"\x02\x21\x4c\x18", "lz4 -dc"),  # lz4's legacy format
    (b"LZIP\1", "lzip -dc"),
    (b"\x89LZO\0\r\n\x1a\n", "lzop -dc"),
)

_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")  # a first block, or the end of an empty file
_LZMA = re.compile(rb"\x5d\0\0(?!\0\0)[\0-\xff]{2}(?:\xff{8}|[\0-\xff]{5}\0{3})")
"""xz's older format has no magic, only properties (those that lzma writes), a dictionary size and the size."""

_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of zstd or lz4 that says nothing: pzstd's first

# What holds disks, but is not one, and what to do with it.
_PACKAGES = (
    (b"PK\3\4", "a zip archive", "unpack it first (unzip)"),
    (b"PK\5\6", "a zip archive", "unpack it first (unzip)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first (7z x)"),
    (b"VMA\0", "a Proxmox backup", "unpack it first (vma extract)"),
    (b"EVF\x09\r\n\xff\0", "an E01 image", "export its disk first (ewfexport -f raw)"),
    (b"EVF2\r\n\x81\0", "an Ex01 image", "export its disk first (ewfexport -f raw)"),
    (b"LVF\x09\r\n\xff\0", "an L01 archive of files", "it holds no disk"),
    (b"\x3a\xff\x26\xed", "an Android sparse image", "convert it first (simg2img)"),
    (b"sprs", "an Apple sparse image", "convert it first (hdiutil convert -format UDRO)"),
    (b"shdw", "an Apple ASIF image", "convert it first (diskutil image create from, on a Mac)"),
    (
        b"\xbe\xba\xfe\xca\0\0\0\0",
        "a VMware seSparse extent",
        "convert its disk first (vmkfstools -i -d thin, on ESXi)",
    ),
)


def not_a_disk(head: bytes, name: str) -> str | None:
    """Why a file or stream NAME that begins with HEAD isn't hashed as a raw disk, and what to do; None: it may be.

    It is not what a guest would read from its disk. What the name ends in does not count: see named_compression().
    """
    file = "" if name == "-" else f" {shlex.quote(name)}"
    kind = compression(head)
    command = COMPRESSIONS[kind][1] if kind else next((c for magic, c in _OTHERS if head.startswith(magic)), None)
    if command is not None:
        option = f", or -f raw.{kind}," if kind else ""
        return f"is compressed: `{command}{file} | imgsum checksum`{option} reads what is in it ({_OWN_BYTES})"
    if head.startswith(INDEX_MAGIC):
        return f"is an index of an image, under a name that does not end in .index: -f index reads it ({_OWN_BYTES})"
    for magic, what, advice in _PACKAGES:
        if head.startswith(magic):
            return f"is {what}, not a disk: {advice} ({_OWN_BYTES})"
    if head[257:262] == b"ustar" and head[:100].rstrip(b"\0").lower().endswith(b".ovf"):
        return f"is an OVA, an archive of disks: unpack it first (tar -xf), and name each disk ({_OWN_BYTES})"
    return None


def compression(head: bytes) -> str | None:
    """Which of COMPRESSIONS begins with HEAD, if any does."""
    for magic, kind in _COMPRESSED:
        if head.startswith(magic):
            return kind
    if _BZIP2.match(head):
        return "bz2"
    if _LZMA.match(head):
        return "lzma"
    return "zst" if _SKIPPABLE.match(head) else None


def named_compression(name: str, head: bytes) -> str | None:
    """Which of COMPRESSIONS the file NAME, which begins with HEAD, is, as both say; None: its name says nothing of it.

    Raises FormatError where they contradict each other.
    """
    for kind, (endings, _) in COMPRESSIONS.items():
        if name.lower().endswith(endings):
            found = compression(head)
            if found == kind or (kind == "lz4" and _SKIPPABLE.match(head)):
                return kind
            reason = f"is named {endings[0]}, and does not begin as {kind} data does"
            raise FormatError(f"{reason}: -f raw reads the file's own bytes")
    return None


def not_as_named(name: str, detected: str) -> str | None:
    """Why a file NAME in which the format DETECTED was found is not taken for that; None: it is.

    A guest can write the beginning of any format to its raw disk, and would choose what is read instead of it.
    """
    if detected != "raw" and name.lower().endswith(".raw"):
        return f"is named .raw, and begins or ends as {detected}: say which it is, with -f raw or -f {detected}"
    return None


_OWN_BYTES = "-f raw: the file's own bytes"


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
