"""What --untrusted demands of an image's mapping: that nothing in the file is used twice.

Writers use a cluster of the file for one thing: a part of the content, a table, or some compressed clusters. Where
many entries refer to the same one, a small file stands for any amount of work; where they refer to tables, the
content is the image's own innards. Both can be read, and no writer makes either.
"""

from __future__ import annotations

from array import array

from imgsum.errors import FormatError, RefusedError
from imgsum.source.qcow2.header import Header
from imgsum.source.qcow2.mapping import COMPRESSED, DATA, Mapping
from imgsum.units import MIB

_MAX_BITMAP = 16 * MIB  # bytes: 8 TiB of file with 64 KiB clusters
_MAX_COMPRESSED = 2 << 20  # clusters, of 8 bytes each: 128 GiB of content with 64 KiB clusters
_PART = 1 << 17  # offsets in a Python set at one time: 8 MiB


def refuse_double_use(header: Header, mapping: Mapping, file_size: int) -> None:
    """Raise FormatError if a cluster of the file is used twice, RefusedError where finding out takes too much memory.

    Reads all tables that the content needs, and no data.
    """
    bits, cluster_size = header.cluster_bits, header.cluster_size
    used = _Clusters(file_size, bits)
    used.take(0, 1, 0)
    used.take(header.l1_offset >> bits, -(-header.l1_needed * 8 >> bits), 0)
    used.take(header.refcount_table_offset >> bits, header.refcount_table_clusters, 0)
    for at, offset in mapping.l2_tables():
        used.take(offset >> bits, 1, at)
    compressed = array("Q")
    data_end = 0
    for run in mapping.runs(0, header.size):
        if run.kind == DATA:
            first, end = run.host >> bits, -(-(run.host + run.length) >> bits)
            again = run.start < data_end  # the next subclusters of the cluster that was taken last
            used.take(first + again, end - first - again, run.start)
            data_end = -(-run.end >> bits) * cluster_size
        elif run.kind == COMPRESSED:
            if len(compressed) == _MAX_COMPRESSED:
                raise RefusedError(f"has more than {_MAX_COMPRESSED} compressed clusters, too many for --untrusted")
            compressed.append(run.host)
    for host in compressed:
        if used.has(host >> bits):
            raise FormatError(f"the compressed cluster at byte {host} of the file is in a cluster that is used twice")
    _refuse_duplicates(compressed)


class _Clusters:
    """A bit for each cluster of a file."""

    def __init__(self, file_size: int, cluster_bits: int) -> None:
        size = (file_size >> cluster_bits + 3) + 1
        if size > _MAX_BITMAP:
            raise RefusedError(f"has {size * 8} clusters, too many for --untrusted")
        self._bits = bytearray(size)
        self._cluster_bits = cluster_bits

    def has(self, cluster: int) -> bool:
        """Whether CLUSTER, which is in the file, was taken."""
        return bool(self._bits[cluster >> 3] >> (cluster & 7) & 1)

    def take(self, first: int, count: int, at: int) -> None:
        """Take COUNT clusters from FIRST on, for what the content needs AT an offset, or refuse.

        What is past the end of the file is nobody's: reading it will say so.
        """
        end = min(first + count, len(self._bits) * 8)
        while first < end:
            whole = (end >> 3) - (first >> 3)
            if first & 7 or not whole:
                if self.has(first):
                    self._refuse(first, at)
                self._bits[first >> 3] |= 1 << (first & 7)
                first += 1
            else:  # 8 at a time
                here = slice(first >> 3, end >> 3)
                if self._bits.count(0, here.start, here.stop) != whole:
                    self._refuse(first, at)
                self._bits[here] = b"\xff" * whole
                first += whole * 8

    def _refuse(self, cluster: int, at: int) -> None:
        host = cluster << self._cluster_bits
        raise FormatError(f"the cluster at byte {host} of the file, or one after it, is used twice", offset=at)


def _refuse_duplicates(offsets: array[int]) -> None:
    """Raise FormatError if two of OFFSETS are the same."""
    parts = len(offsets) // _PART + 1
    for part in range(parts):
        seen: set[int] = set()
        for offset in offsets:
            if hash((offset, parts)) % parts == part:
                if offset in seen:
                    raise FormatError(f"the compressed cluster at byte {offset} of the file is used twice")
                seen.add(offset)
