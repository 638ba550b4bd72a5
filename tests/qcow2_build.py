"""qcow2 files made by hand, byte by byte: what qemu-img would not write. Shares no code with imgsum."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

COPIED, COMPRESSED, ZERO = 1 << 63, 1 << 62, 1
BACKING_FORMAT, FEATURE_NAMES, DATA_FILE = 0xE2792ACA, 0x6803F857, 0x44415441


def header(
    version: int = 3,
    cluster_bits: int = 16,
    size: int = 1 << 20,
    backing: bytes = b"",
    extensions: Sequence[tuple[int, bytes]] = (),
    tail: bytes = b"",
    **fields: int,
) -> bytes:
    """The header with its extensions and the backing file's name. FIELDS overrule what follows from the rest."""
    values: dict[str, int] = {
        "magic": 0x514649FB,
        "version": version,
        "backing_file_offset": 0,
        "backing_file_size": len(backing),
        "cluster_bits": cluster_bits,
        "size": size,
        "crypt_method": 0,
        "l1_size": 1,
        "l1_table_offset": 3 << min(cluster_bits, 21),
        "refcount_table_offset": 1 << min(cluster_bits, 21),
        "refcount_table_clusters": 1,
        "nb_snapshots": 0,
        "snapshots_offset": 0,
        "incompatible_features": 0,
        "compatible_features": 0,
        "autoclear_features": 0,
        "refcount_order": 4,
        "header_length": 104,
    }
    extended = b"".join(struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8) for kind, data in extensions)
    length = 72 if version == 2 else fields.get("header_length", 104)
    if extensions or backing:
        extended += bytes(8)
    if backing:
        values["backing_file_offset"] = min(length, 1 << 12) + len(extended)
    values.update(fields)
    packed = struct.pack(">IIQIIQIIQQIIQ", *list(values.values())[:13])
    if version != 2:
        packed += struct.pack(">QQQII", *list(values.values())[13:])
    return packed + tail + extended + backing


def image(
    entries: Sequence[int] | Mapping[int, int],
    clusters: Mapping[int, bytes] | None = None,
    cluster_bits: int = 16,
    l1: Sequence[int] | None = None,
    head: bytes | None = None,
    file_size: int | None = None,
    **fields: object,
) -> bytes:
    """A file: header, refcount table (empty), L1 table in cluster 3, L2 table of ENTRIES in cluster 4, CLUSTERS.

    ENTRIES are 64-bit words (of an extended table two for each cluster), from 0 or by index. CLUSTERS are contents by
    the index of the cluster of the file. The virtual size, unless given, is that of one L2 table or 1 MiB.
    """
    cluster_size = 1 << cluster_bits
    fields.setdefault("size", min(1 << 20, cluster_size * cluster_size // 8))
    start = header(cluster_bits=cluster_bits, **fields) if head is None else head  # type: ignore[arg-type]
    table = bytearray(cluster_size)
    for index, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
        struct.pack_into(">Q", table, index * 8, entry)
    l1_table = [4 * cluster_size | COPIED] if l1 is None else l1
    content = {0: start, 3: struct.pack(f">{len(l1_table)}Q", *l1_table), 4: bytes(table), **(clusters or {})}
    file = bytearray((max(content) + 1) * cluster_size)
    for index, data in content.items():
        file[index * cluster_size : index * cluster_size + len(data)] = data
    return bytes(file if file_size is None else file[:file_size])


def compressed_entry(host: int, length: int, cluster_bits: int = 16) -> int:
    """The L2 entry of LENGTH compressed bytes at HOST."""
    sectors = (host + length - 1) // 512 - host // 512
    return COMPRESSED | sectors << (62 - (cluster_bits - 8)) | host


def deflate(content: bytes, bits: int = 12) -> bytes:
    """CONTENT as a raw deflate stream."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -bits)
    return stream.compress(content) + stream.flush()
