"""VMDK extents and descriptors, of what QEMU can't write too: COWD, seSparse, odd grains and tables, any order.

Shares no code with imgsum/. Grains are given as {number: content, or b"" for zeros}; others are not allocated.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

SECTOR = 512
Grains = Mapping[int, bytes]


def descriptor(kind: str, extents: Sequence[str], cid: int = 1, parent: tuple[int, str] | None = None) -> str:
    """The text of a descriptor. PARENT: its CID and name."""
    lines = [
        "# Disk DescriptorFile",
        "version=1",
        f"CID={cid:08x}",
        f"parentCID={parent[0] if parent else 0xFFFFFFFF:08x}",
    ]
    lines.append(f'createType="{kind}"')
    if parent:
        lines.append(f'parentFileNameHint="{parent[1]}"')
    lines += ["# Extent description", *extents, "# The Disk Data Base", "ddb.virtualHWVersion = 4", ""]
    return "\n".join(lines)


def _pad(raw: bytes, unit: int = SECTOR) -> bytes:
    return raw + bytes(-len(raw) % unit)


def _tables(count: int, per_table: int, code: str, entry: Mapping[int, int], gaps: bool) -> dict[int, bytes]:
    """The raw grain tables: those that have no entry are left out if GAPS."""
    size = struct.calcsize(code)
    tables = {}
    used = sorted({number // per_table for number in entry})
    for number in used if gaps else range(-(-count // per_table)):
        values = [entry.get(number * per_table + at, 0) for at in range(per_table)]
        if any(values) or not gaps:
            tables[number] = _pad(struct.pack(f"<{per_table}{code}", *values), SECTOR if size == 4 else 32768)
    return tables


def hosted(
    path: Path,
    sectors: int,
    grains: Grains,
    *,
    grain: int = 128,
    per_table: int = 512,
    text: str = "",
    redundant: bool = True,
    gaps: bool = False,
    rng: random.Random | None = None,
) -> dict[str, int]:
    """VMware's and QEMU's sparse extent; GRAIN in sectors. Returns where its structures begin.

    With RNG, the grains are in any order.
    """
    count = -(-sectors // grain)
    order = list(grains)
    if rng:
        rng.shuffle(order)
    directory_length = len(_pad(bytes(4 * -(-count // per_table))))
    shape = {number: 1 for number, data in grains.items()}
    tables = _tables(count, per_table, "I", shape, gaps)
    at = 21 * SECTOR
    places: dict[str, int] = {"header": 0, "descriptor": SECTOR}
    directories = []
    for copy in range(1 + redundant):
        places[f"directory {copy}"] = at
        at += directory_length
        entries = []
        for number in range(-(-count // per_table)):
            entries.append(at // SECTOR if number in tables else 0)
            if number in tables:
                places.setdefault(f"table {copy}", at)
                at += len(tables[number])
        directories.append((places[f"directory {copy}"], entries))
    at = -(-at // (grain * SECTOR)) * grain * SECTOR
    overhead = at // SECTOR
    entry = {}
    data = bytearray(at)
    for number in order:
        if grains[number]:
            entry[number] = len(data) // SECTOR
            places[f"grain {number}"] = len(data)
            data += grains[number].ljust(grain * SECTOR, b"\0")
        else:
            entry[number] = 1
    tables = _tables(count, per_table, "I", entry | {number: entry[number] for number in grains}, gaps)
    for offset, entries in directories:
        raw = struct.pack(f"<{len(entries)}I", *entries)
        data[offset : offset + len(raw)] = raw
        for number, table in tables.items():
            data[entries[number] * SECTOR : entries[number] * SECTOR + len(table)] = table
    primary = directories[-1][0]
    flags = 1 | (2 if redundant else 0) | 4
    header = struct.pack(
        "<4sIIQQQQIQQQB4sH",
        b"KDMV",
        2,
        flags,
        sectors,
        grain,
        1 if text else 0,
        20 if text else 0,
        per_table,
        directories[0][0] // SECTOR if redundant else 0,
        primary // SECTOR,
        overhead,
        0,
        b"\n \r\n",
        0,
    )
    data[: len(header)] = header
    data[SECTOR : SECTOR + len(text)] = text.encode()
    path.write_bytes(data)
    places["end"] = len(data)
    return places


def cowd(path: Path, sectors: int, grains: Grains, *, grain: int = 1) -> dict[str, int]:
    """ESX's sparse extent: tables of 4096 entries, where there is any."""
    count = -(-sectors // grain)
    groups = sorted({number // 4096 for number in grains})
    directory = 4 * SECTOR
    length = -(-count // 4096)
    at = directory + len(_pad(bytes(4 * length)))
    offsets = {group: at + index * 16384 for index, group in enumerate(groups)}
    at += 16384 * len(groups)
    entry, data = {}, bytearray()
    places = {"header": 0, "directory": directory, "tables": min(offsets.values(), default=at)}
    for number, content in grains.items():
        entry[number] = (at + len(data)) // SECTOR
        places[f"grain {number}"] = at + len(data)
        data += content.ljust(grain * SECTOR, b"\0")
    raw = bytearray(struct.pack("<4s7I", b"COWD", 1, 3, sectors, grain, 4, length, 0).ljust(directory, b"\0"))
    raw += _pad(struct.pack(f"<{length}I", *(offsets.get(group, 0) // SECTOR for group in range(length))))
    for group in groups:
        raw += struct.pack("<4096I", *(entry.get(group * 4096 + at, 0) for at in range(4096)))
    path.write_bytes(raw + data)
    return {**places, "end": len(raw) + len(data)}


def sesparse(
    path: Path, sectors: int, grains: Grains, *, dirty: int = 0, rng: random.Random | None = None
) -> dict[str, int]:
    """ESXi's: grains of 4 KiB, tables of 4096 entries of 64 bits, and a number's lower 12 bits above the others."""
    count = -(-sectors // 8)
    groups = sorted({number // 4096 for number in grains})
    length = -(-count // 4096)
    directory, tables = 8, 16
    first = tables + 64 * len(groups)
    entry, data, number = {}, bytearray(), 0
    places = {"header": 0, "second header": SECTOR, "directory": directory * SECTOR, "tables": tables * SECTOR}
    order = list(grains)
    if rng:
        rng.shuffle(order)
    for grain in order:
        if not grains[grain]:
            entry[grain] = rng.choice([1 << 60, 2 << 60]) if rng else 2 << 60
            continue
        entry[grain] = 3 << 60 | (number & 0xFFF) << 48 | number >> 12
        places[f"grain {grain}"] = first * SECTOR + number * 4096
        data += grains[grain].ljust(4096, b"\0")
        number += 1
    fields = [0xCAFEBABE, 0x200000001, sectors, 8, 64, 0, 0, 0, 0, 0, 1, 1, 2, 1, 3, 1]
    fields += [directory, 8, tables, 64 * len(groups), 0, 0, 0, 0, first, len(data) // SECTOR]
    raw = struct.pack("<26Q", *fields).ljust(SECTOR, b"\0")
    raw += struct.pack("<4Q", 0xCAFECAFE, 0, 0, dirty).ljust(SECTOR, b"\0")
    raw = raw.ljust(directory * SECTOR, b"\0")
    raw += struct.pack(f"<{length}Q", *((1 << 60) + groups.index(at) if at in groups else 0 for at in range(length)))
    raw = raw.ljust(tables * SECTOR, b"\0")
    for group in groups:
        raw += struct.pack("<4096Q", *(entry.get(group * 4096 + at, 0) for at in range(4096)))
    path.write_bytes(raw + data)
    return {**places, "end": len(raw) + len(data)}


def marker(value: int, kind: int) -> bytes:
    return struct.pack("<QII", value, 0, kind).ljust(SECTOR, b"\0")


def stream(
    path: Path,
    sectors: int,
    grains: Grains,
    *,
    text: str = "",
    grain: int = 128,
    rng: random.Random | None = None,
    footer: bool = True,
    packed: Mapping[int, bytes] | None = None,
) -> dict[str, int]:
    """streamOptimized. PACKED: markers and data that some grains have instead of what is right."""
    count = -(-sectors // grain)
    entry: dict[int, int] = {}
    data = bytearray(grain * SECTOR)
    places = {"header": 0, "descriptor": SECTOR}
    order = list(grains)
    if rng:
        rng.shuffle(order)
    for number in order:
        content = grains[number].ljust(min(grain, sectors - number * grain) * SECTOR, b"\0")
        raw = (packed or {}).get(number, b"")
        if not raw:
            raw = zlib.compress(content, rng.choice([1, 6, 9]) if rng else 6)
            raw = struct.pack("<QI", number * grain, len(raw)) + raw
        entry[number] = len(data) // SECTOR
        places[f"grain {number}"] = len(data)
        data += _pad(raw)
    offsets = {}
    for number, table in _tables(count, 512, "I", entry, True).items():
        data += marker(len(table) // SECTOR, 1)
        offsets[number] = len(data) // SECTOR
        places.setdefault("table", len(data))
        data += table
    directory = _pad(struct.pack(f"<{-(-count // 512)}I", *(offsets.get(at, 0) for at in range(-(-count // 512)))))
    data += marker(len(directory) // SECTOR, 2)
    place = len(data) // SECTOR
    places["directory"] = len(data)
    data += directory
    head = [b"KDMV", 3, 1 | 1 << 16 | 1 << 17, sectors, grain, 1, 20, 512, 0, place, grain, 0, b"\n \r\n", 1]
    header = struct.Struct("<4sIIQQQQIQQQB4sH")
    if footer:
        places["footer"] = len(data) + SECTOR
        data += marker(1, 3) + header.pack(*head).ljust(SECTOR, b"\0") + bytes(SECTOR)
        head[9] = (1 << 64) - 1
    data[: header.size] = header.pack(*head)
    data[SECTOR : SECTOR + len(text)] = text.encode()
    path.write_bytes(data)
    return {**places, "end": len(data)}


def random_content(rng: random.Random, count: int, grain: int, zeros: bool = True) -> dict[int, bytes]:
    """Runs of grains of GRAIN bytes, some of zeros, some not there."""
    grains: dict[int, bytes] = {}
    number = 0
    while number < count:
        kind = rng.choice(["data", "data", "none", "zeros" if zeros else "none"])
        for _ in range(rng.choice([1, 2, 5, 40])):
            if number < count and kind != "none":
                grains[number] = rng.randbytes(rng.choice([grain, grain, grain // 2])) if kind == "data" else b""
            number += 1
    return grains


def content_of(size: int, grain: int, grains: Grains, below: bytes = b"") -> bytes:
    """What a guest reads: GRAINS of GRAIN bytes, on what is BELOW."""
    content = bytearray(below[:size].ljust(size, b"\0"))
    for number, data in grains.items():
        start, stop = number * grain, min((number + 1) * grain, size)
        content[start:stop] = data.ljust(grain, b"\0")[: stop - start]
    return bytes(content)


def random_chain(rng: random.Random, directory: Path, odd: bool = True) -> tuple[Path, bytes]:
    """Three images, each of extents of every kind, and the content. If not ODD, each extent has whole grains."""
    content, path = b"", directory
    for depth in range(3):
        lines: list[str] = []
        parts: list[bytes] = []
        for kind in rng.sample(["SPARSE", "FLAT", "VMFS", "VMFSSPARSE", "SESPARSE"], 4):
            grain = {"SPARSE": rng.choice([8, 128]), "VMFSSPARSE": rng.choice([1, 8]), "SESPARSE": 8}.get(kind, 1)
            sectors = rng.randrange(1, 700) if odd else rng.randrange(1, 80) * grain
            name, size = f"{depth}-{len(lines)}", sectors * SECTOR
            below = content[sum(map(len, parts)) :][:size]
            line = f'RW {sectors} {kind} "{name}"'
            if kind in ("FLAT", "VMFS"):
                offset = rng.randrange(5) if kind == "FLAT" else 0
                parts.append(rng.randbytes(size))
                (directory / name).write_bytes(bytes(offset * SECTOR) + parts[-1] + b"more")
                line += f" {offset}" if kind == "FLAT" else ""
            else:
                grains = random_content(rng, -(-sectors // grain), grain * SECTOR, zeros=kind != "VMFSSPARSE")
                if kind == "SPARSE":
                    hosted(directory / name, sectors, grains, grain=grain)
                elif kind == "VMFSSPARSE":
                    cowd(directory / name, sectors, grains, grain=grain)
                else:
                    sesparse(directory / name, sectors, grains, rng=rng)
                parts.append(content_of(size, grain * SECTOR, grains, below))
            lines.append(line)
        parent = (depth, path.name) if depth else None
        path = directory / f"layer{depth}.vmdk"
        path.write_text(descriptor("twoGbMaxExtentSparse", lines, depth + 1, parent))
        content = b"".join(parts)
    return path, content


_FIELDS = (4, 8, 12, 20, 28, 36, 44, 48, 56, 64, 77)


def damage(data: bytearray, rng: random.Random) -> None:
    """Change the header, the footer, a table, a marker or the descriptor of an image of QEMU's."""
    if not data.startswith(b"KDMV"):
        data[rng.randrange(min(512, len(data)))] = rng.choice(b'\t\n\r "#=0129AFRSWamx/.')
        return
    footer = len(data) - 2 * SECTOR if data[56:64] == b"\xff" * 8 else 0
    (directory,) = struct.unpack_from("<Q", data, footer + 56)
    kind = rng.random()
    if kind < 0.3:
        field = rng.choice(_FIELDS)
        for place in {0, footer} if rng.random() < 0.7 else {footer}:
            change(data, rng, place + field, "<H" if field == 77 else "<I")
    elif kind < 0.4:
        data[SECTOR + rng.randrange(300)] = rng.choice(b'\t\n\r "#=0129AFRSWamx/.')
    elif kind < 0.5:
        change(data, rng, directory * SECTOR, "<I")
    else:
        (table,) = struct.unpack_from("<I", data, directory * SECTOR)
        at = table * SECTOR + 4 * rng.randrange(80)
        (grain,) = struct.unpack_from("<I", data, at)
        if footer and grain and rng.random() < 0.6:
            data[grain * SECTOR + rng.randrange(200)] ^= 1 << rng.randrange(8)
            return
        change(data, rng, at, "<I")
        (copy,) = struct.unpack_from("<Q", data, 48)
        if copy and rng.random() < 0.9:  # the copy of the table, too
            (other,) = struct.unpack_from("<I", data, copy * SECTOR)
            there = other * SECTOR + at - table * SECTOR
            data[there : there + 4] = data[at : at + 4]


def change(data: bytearray, rng: random.Random, at: int, code: str) -> None:
    """Give the number AT a place another value, mostly a near one."""
    bits = 8 * struct.calcsize(code)
    (value,) = struct.unpack_from(code, data, at)
    new = rng.choice(
        (value ^ 1 << rng.randrange(bits), value + rng.choice((-128, -1, 1, 128)), rng.randrange(1 << bits), 0, 1)
    )
    struct.pack_into(code, data, at, new % (1 << bits))


def said_size(data: bytes) -> int:
    """The most bytes of content that an image, damaged or not, may say that it has."""
    if not data.startswith(b"KDMV"):
        words = data.replace(b"\t", b" ").split()
        return SECTOR * sum(int(word) for word in words if word.isdigit() and len(word) < 19)
    places = (0, len(data) - 2 * SECTOR)
    return SECTOR * max(struct.unpack_from("<Q", data, at + 12)[0] for at in places if at >= 0 and len(data) >= at + 20)
