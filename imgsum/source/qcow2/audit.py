"""The checks of --untrusted on an image's tables: no cluster is used twice, and the work is in proportion to the file.

A writer uses each cluster of the file once: for content, for a table, or for compressed data. In a crafted image, many
entries can refer to the same cluster, so a small file makes any amount of work; or to a table, so that the image's
metadata is read as content.

Clusters that are used once can also cost a lot: an L2 table for each few bytes of data, tables and data in holes of the
file, compressed data that overlaps. So each kind of work has a limit in proportion to the file's data. Holes don't
count, as they cost an attacker nothing.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

from imgsum.errors import FormatError, RefusedError
from imgsum.source.layers import COMPRESSED, DATA, Limit
from imgsum.source.qcow2.header import Header
from imgsum.source.qcow2.mapping import Mapping
from imgsum.units import KIB, MIB

_MAX_BITMAP = 16 * MIB  # bytes: 8 TiB of file with 64 KiB clusters
_MAX_COMPRESSED = 2 << 20  # clusters, of 8 bytes each: 128 GiB of content with 64 KiB clusters
_PART = 1 << 15  # offsets that are sorted at one time, as Python's integers: 1 MiB
_FILL = bytes([255]) * (64 * KIB)


def audit(header: Header, mapping: Mapping, file_size: int, data_size: int) -> None:
    """Raise FormatError if a cluster of the file is used twice, RefusedError if the work is out of proportion.

    The file has FILE_SIZE bytes, and DATA_SIZE without its holes. Reads all tables that the content needs, and no
    data, in memory of 32 MiB at most.
    """
    bits, cluster_size = header.cluster_bits, header.cluster_size
    used = _Clusters(file_size, bits)
    # An L2 table or a run costs 10 to 20 us. Real images have at least 512 bytes in the file for each: a cluster, or
    # compressed data. The limit allows one for each 256 bytes, and 65536 in any file.
    steps = Limit("L2 tables and pieces of content", (1 << 16) + data_size // 256)
    # A table of 64 KiB with one entry has 4 KiB of data after a copy that makes holes of zeros.
    tables = Limit("bytes of tables", 64 * MIB + 16 * data_size)
    # The last sector of compressed data is shared with the next cluster's, so only the others are counted.
    stored = Limit("bytes of compressed data", MIB + 2 * data_size)
    # Deflate makes up to 1032 bytes of one, zstd 32768. Real disks are compressed to a half or a tenth.
    unpacked = Limit("bytes of decompressed data", 512 * MIB + 64 * data_size)

    used.add(0, 1, 0)
    used.add(header.l1_offset >> bits, -(-header.l1_needed * 8 >> bits), 0)
    used.add(header.refcount_table_offset >> bits, header.refcount_table_clusters, 0)
    for at, offset in mapping.l2_tables():
        steps.add(1)
        tables.add(cluster_size)
        used.add(offset >> bits, 1, at)
    compressed = array("Q")
    data_end = 0
    for run in mapping.runs(0, header.size):
        steps.add(1)
        if run.kind == DATA:
            first, end = run.host >> bits, -(-(run.host + run.length) >> bits)
            again = run.start < data_end  # more subclusters of the last cluster
            used.add(first + again, end - first - again, run.start)
            data_end = -(-run.end >> bits) * cluster_size
        elif run.kind == COMPRESSED:
            stored.add((run.stored - 1) // 512 * 512)
            unpacked.add(cluster_size)
            if len(compressed) == _MAX_COMPRESSED:
                raise RefusedError(f"has more than {_MAX_COMPRESSED} compressed clusters, too many for --untrusted")
            compressed.append(run.host)
    last = -1
    for host in _sorted(compressed):
        if host == last or used.has(host >> bits):
            raise FormatError(f"the compressed cluster at byte {host} of the file is in a cluster that is used twice")
        last = host


class _Clusters:
    """The clusters of a file that are used: a bitmap."""

    def __init__(self, file_size: int, cluster_bits: int) -> None:
        size = (file_size >> cluster_bits + 3) + 1
        if size > _MAX_BITMAP:
            raise RefusedError(f"has {size * 8} clusters, too many for --untrusted")
        self._bits = bytearray(size)
        self._cluster_bits = cluster_bits

    def has(self, cluster: int) -> bool:
        """Whether CLUSTER, which is inside the file, is used already."""
        return bool(self._bits[cluster >> 3] >> (cluster & 7) & 1)

    def add(self, first: int, count: int, at: int) -> None:
        """Mark COUNT clusters from FIRST on as used by the content AT an offset. Raises FormatError if one is used.

        Clusters past the end of the file are ignored: reading them fails.
        """
        end = min(first + count, len(self._bits) * 8)
        while first < end:
            whole = min((end >> 3) - (first >> 3), len(_FILL))
            if first & 7 or not whole:
                if self.has(first):
                    self._refuse(first, at)
                self._bits[first >> 3] |= 1 << (first & 7)
                first += 1
            else:  # 8 at a time
                here = slice(first >> 3, (first >> 3) + whole)
                if self._bits.count(0, here.start, here.stop) != whole:
                    self._refuse(first, at)
                self._bits[here] = _FILL[:whole]
                first += whole * 8

    def _refuse(self, cluster: int, at: int) -> None:
        host = cluster << self._cluster_bits
        raise FormatError(f"the cluster at byte {host} of the file, or one after it, is used twice", offset=at)


def _sorted(offsets: array[int]) -> Iterator[int]:
    """OFFSETS in order. Sorts in place, in parts, and merges: a sorted list would take 40 bytes for each offset."""
    parts = []
    for start in range(0, len(offsets), _PART):
        part = slice(start, start + _PART)
        offsets[part] = array("Q", sorted(offsets[part]))
        parts.append(memoryview(offsets)[part])
    return iter(heapq.merge(*parts))
