"""VHDX images of what QEMU can't write: parents, sector bitmaps, 4 KiB sectors, any state of a block, changes in a log.

Shares no code with imgsum/. Layout: headers, log at 1 MiB, metadata at 2 MiB, BAT at 3 MiB, then all blocks.
"""

from __future__ import annotations

import os
import random
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
LOG, METADATA, BAT = MIB, 2 * MIB, 3 * MIB
ABSENT, UNDEFINED, ZERO, UNMAPPED, PRESENT, PARTIAL = 0, 1, 2, 3, 6, 7
LOG_GUID = bytes(range(16))


class Block(NamedTuple):
    """A block's state, its data by offset in it, and the sectors that its bitmap says are there."""

    state: int
    data: Mapping[int, bytes] = {}
    sectors: Sequence[int] = ()


def crc32c(raw: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in raw:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _step(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 * (value & 1))
    return value


TABLE = [_step(value) for value in range(256)]


def sealed(raw: bytes, length: int) -> bytes:
    """RAW, padded to LENGTH, with its checksum at byte 4."""
    raw = raw.ljust(length, b"\0")
    return raw[:4] + struct.pack("<I", crc32c(raw[:4] + bytes(4) + raw[8:])) + raw[8:]


def guid(text: str) -> bytes:
    return uuid.UUID(text).bytes_le


def header(sequence: int, data_guid: bytes, log_guid: bytes = bytes(16), log_length: int = MIB) -> bytes:
    raw = struct.pack("<4sIQ16s16s16sHHIQ", b"head", 0, sequence, bytes(16), data_guid, log_guid, 0, 1, log_length, LOG)
    return sealed(raw, 4 * KIB)


def region_table(*regions: tuple[bytes, int, int, int]) -> bytes:
    raw = struct.pack("<4sIII", b"regi", 0, len(regions), 0)
    return sealed(raw + b"".join(struct.pack("<16sQII", *region) for region in regions), 64 * KIB)


def regions(bat_length: int) -> list[tuple[bytes, int, int, int]]:
    return [
        (guid("2dc27766-f623-4200-9d64-115e9bfd4a08"), BAT, bat_length, 1),
        (guid("8b7ca206-4790-4b9a-b8fe-575f050f886e"), METADATA, MIB, 1),
    ]


def locator(pairs: Mapping[str, str]) -> bytes:
    entries, text = b"", b""
    base = 20 + 12 * len(pairs)
    for key, value in pairs.items():
        k, v = key.encode("utf-16-le"), value.encode("utf-16-le")
        entries += struct.pack("<IIHH", base + len(text), base + len(text) + len(k), len(k), len(v))
        text += k + v
    return struct.pack("<16sHH", guid("b04aefb7-d19e-4a81-b789-25b8e9445913"), 0, len(pairs)) + entries + text


def metadata(size: int, block_size: int, sector: int, parent: bytes | None, more: Sequence[tuple[str, bytes]]) -> bytes:
    items = [
        ("caa16737-fa36-4d43-b3b6-33f0aa44e76b", struct.pack("<II", block_size, 2 if parent is not None else 0)),
        ("2fa54224-cd1b-4876-b211-5dbed83bf4b8", struct.pack("<Q", size)),
        ("beca12ab-b2e6-4523-93ef-c309e000c746", bytes(16)),
        ("8141bf1d-a96f-4709-ba47-f233a8faab5f", struct.pack("<I", sector)),
        ("cda348c7-445d-4471-9cc9-e9885251c556", struct.pack("<I", 4096)),
        *([("a8d35f2d-b30b-454d-abf7-d3d84834ab0c", parent)] if parent is not None else []),
        *more,
    ]
    table, data = struct.pack("<8sHHIIIII", b"metadata", 0, len(items), 0, 0, 0, 0, 0), b""
    for name, value in items:
        table += struct.pack("<16sIIII", guid(name), 64 * KIB + len(data), len(value), 4, 0)
        data += value
    return table.ljust(64 * KIB, b"\0") + data


def log_entry(number: int, changes: Sequence[tuple[int, bytes | int]], flushed: int = 0, tail: int = 0) -> bytes:
    """An entry that writes 4 KiB, or that many zeros, at each offset of the file."""
    descriptors, sectors = b"", b""
    for offset, change in changes:
        if isinstance(change, int):
            descriptors += struct.pack("<4sIQQQ", b"zero", 0, change, offset, number)
        else:
            descriptors += struct.pack("<4s4s8sQQ", b"desc", change[-4:], change[:8], offset, number)
            sectors += struct.pack("<4sI4084sI", b"data", number >> 32, change[8:-4], number & 0xFFFFFFFF)
    length = -(-(64 + len(descriptors)) // 4096) * 4096
    head = struct.pack(
        "<4sIIIQII16sQQ", b"loge", 0, length + len(sectors), tail, number, len(changes), 0, LOG_GUID, flushed, flushed
    )
    return sealed((head + descriptors).ljust(length, b"\0") + sectors, length + len(sectors))


def build(
    path: Path,
    size: int,
    blocks: Mapping[int, Block],
    *,
    block_size: int = MIB,
    sector: int = 512,
    parent: Mapping[str, str] | None = None,
    data_guid: bytes = bytes(16),
    more: Sequence[tuple[str, bytes]] = (),
) -> dict[str, int]:
    """Write an image. Returns where its structures are: {name: offset}, and `end`."""
    ratio = (sector << 23) // block_size
    count = -(-size // block_size)
    chunks = -(-count // ratio)
    bat_length = -(-chunks * (ratio + 1) * 8 // MIB) * MIB
    end = BAT + bat_length
    bat = {}
    places = {"headers": 64 * KIB, "regions": 192 * KIB, "log": LOG, "metadata": METADATA, "bat": BAT}
    with open(path, "wb") as file:

        def put(offset: int, raw: bytes) -> None:
            file.seek(offset)
            file.write(raw)

        put(0, b"vhdxfile")
        put(64 * KIB, header(7, data_guid))
        put(128 * KIB, header(6, data_guid))
        put(192 * KIB, region_table(*regions(bat_length)) * 2)
        pairs = None if parent is None else locator(parent)
        put(METADATA, metadata(size, block_size, sector, pairs, more))
        for number, block in blocks.items():
            place = 0
            if block.state in (PRESENT, PARTIAL):
                place, end = end, end + block_size
                for offset, data in block.data.items():
                    put(place + offset, data)
                places[f"block {number}"] = place
            bat[number + number // ratio] = place | block.state
            if block.state == PARTIAL:
                chunk = number // ratio
                index = chunk * (ratio + 1) + ratio
                if index not in bat:
                    bat[index] = end | PRESENT
                    places[f"bitmap {chunk}"] = end
                    end += MIB
                bits = sum(1 << bit for bit in set(block.sectors))
                length = block_size // sector // 8
                put((bat[index] & ~7) + number % ratio * length, bits.to_bytes(length, "little"))
        for index, entry in bat.items():
            put(BAT + index * 8, struct.pack("<Q", entry))
    os.truncate(path, end)
    return {**places, "end": end}


def random_chain(rng: random.Random, directory: Path) -> tuple[Path, bytes]:
    """A chain of one to three images, and its content. Blocks are in any state; bitmaps have runs and single bits."""
    sector = rng.choice([512, 4096])
    block_size = rng.choice([MIB, 2 * MIB, 4 * MIB])
    size = rng.randrange(1, 5) * MIB + rng.randrange(3) * sector
    data_guid = rng.randbytes(16)
    link = "{" + str(uuid.UUID(bytes_le=data_guid)).upper() + "}"
    expected = bytearray(size)
    depth = rng.randrange(1, 4)
    path = directory
    for number in range(depth):
        blocks = {}
        for index in range(-(-size // block_size)):
            state = rng.choice([ABSENT, ZERO, PRESENT, PARTIAL] if number else [ABSENT, ZERO, PRESENT, UNMAPPED])
            start, data, sectors = index * block_size, {}, set()
            if state == PARTIAL:
                at = 0
                while at < block_size // sector:
                    length = rng.choice([1, 2, 63, 64, 65, 700])
                    if rng.random() < 0.5:
                        sectors.update(range(at, min(at + length, block_size // sector)))
                    at += length
                data = {at * sector: rng.randbytes(sector) for at in sectors}
            elif state == PRESENT:
                data = {0: rng.randbytes(block_size)}
            elif state in (ZERO, UNMAPPED):
                data = {0: b""}
                expected[start : start + block_size] = bytes(len(expected[start : start + block_size]))
            for offset, piece in data.items():
                there = slice(start + offset, start + offset + len(piece))
                expected[there] = piece[: len(expected[there])]
            blocks[index] = Block(state, data, sorted(sectors))
        parent = {"parent_linkage": link, "relative_path": f".\\{path.name}"} if number else None
        path = directory / f"layer{number}.vhdx"
        build(path, size, blocks, block_size=block_size, sector=sector, parent=parent, data_guid=data_guid)
    return path, bytes(expected)


def damage(data: bytearray, rng: random.Random) -> None:
    """Change a header, a region table, the metadata or the BAT of an image of QEMU's, mostly with its checksum."""
    (count,) = struct.unpack_from("<I", data, 192 * KIB + 8)
    found = dict(struct.unpack_from("<16sQ", data, 192 * KIB + 16 + 32 * at) for at in range(count))
    bat, tables = (found[region[0]] for region in regions(0))
    kind = rng.random()
    if kind < 0.25:
        place = rng.choice((64 * KIB, 128 * KIB))
        field, code = rng.choice(
            ((8, "<Q"), (16, "<Q"), (32, "<Q"), (48, "<Q"), (64, "<H"), (66, "<H"), (68, "<I"), (72, "<Q"))
        )
        change(data, rng, place + field, code)
        if rng.random() < 0.9:
            data[place : place + 4 * KIB] = sealed(bytes(data[place : place + 4 * KIB]), 4 * KIB)
    elif kind < 0.4:
        change(data, rng, 192 * KIB + rng.choice((8, 16, 32, 40, 44, 48, 64, 72, 76)), "<I")
        if rng.random() < 0.9:
            data[192 * KIB : 256 * KIB] = sealed(bytes(data[192 * KIB : 256 * KIB]), 64 * KIB)
        if rng.random() < 0.9:
            data[256 * KIB : 320 * KIB] = data[192 * KIB : 256 * KIB]
    elif kind < 0.6:
        change(data, rng, tables + rng.choice((10, 32 + 32 * rng.randrange(5) + rng.choice((0, 16, 20, 24)))), "<H")
    elif kind < 0.75:
        change(data, rng, tables + 64 * KIB + 4 * rng.randrange(11), "<I")
    else:
        for _ in range(rng.choice((1, 1, 3))):
            at = bat + 8 * rng.randrange(8)
            if rng.random() < 0.5:
                data[at] = data[at] & 0xF8 | rng.randrange(8)
            else:
                change(data, rng, at, "<Q")


def change(data: bytearray, rng: random.Random, at: int, code: str) -> None:
    """Give the number AT a place another value, mostly a near one."""
    bits = 8 * struct.calcsize(code)
    (value,) = struct.unpack_from(code, data, at)
    new = rng.choice(
        (value ^ 1 << rng.randrange(bits), value + rng.choice((-MIB, -1, 1, MIB)), rng.randrange(1 << bits), 0)
    )
    struct.pack_into(code, data, at, new % (1 << bits))


def said_size(data: bytes) -> int:
    """The bytes of content that an image, damaged or not, says that it has."""
    at = data.find(guid("2fa54224-cd1b-4876-b211-5dbed83bf4b8"))
    if at < 0 or len(data) < at + 20:
        return 0
    place = data.find(b"metadata", MIB) + int(struct.unpack_from("<I", data, at + 16)[0])
    return int.from_bytes(data[place : place + 8], "little")
