"""Compressed clusters: deflate and zstd, from the file straight into the buffer of whoever asked.

A cluster's compressed bytes are a raw deflate stream, or one or more zstd frames, and then whatever fills the last
sector (spec: `Compressed Clusters Descriptor`). The output is one whole cluster; what a stream has beyond that is
ignored, as QEMU does. A decompressor is imported when the first image needs it, and nothing is allocated from what
a stream says of itself.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from imgsum.errors import FormatError, MissingError
from imgsum.source.qcow2.header import ZSTD
from imgsum.units import KIB, MIB

Stored = Callable[[], Iterable[memoryview]]
"""stored(): the compressed bytes from their beginning, in pieces. May be called again."""

Decompress = Callable[[Stored, memoryview], None]
"""decompress(stored, cluster): fill all of CLUSTER. Raises FormatError, or EndsEarlyError, which is one."""

_STEP = 256 * KIB
"""The most output that is asked for at once, as it is a new object each time, and clusters can have 2 MiB."""

_WINDOW_LOG = 23
"""zstd windows of up to 8 MiB, which RFC 8878 wants decoders to support and encoders not to exceed."""


_KEPT = 4 * MIB  # bytes of whole clusters


class EndsEarlyError(FormatError):
    """The compressed data ends before the cluster is full."""

    def __init__(self) -> None:
        super().__init__("compressed cluster: the data ends early")


def decompressor(compression: int) -> Decompress:
    """What decompresses clusters of this compression type, safe from any thread. Raises MissingError."""
    return _zstd() if compression == ZSTD else _inflate()


class WholeClusters:
    """The last few clusters that were decompressed for a reader that asked for a part.

    Its neighbours ask for the rest: a cluster can have 2 MiB, and a request 4 KiB. Safe from any thread; no cluster is
    decompressed by two of them at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clusters: OrderedDict[tuple[int, int], _Cluster] = OrderedDict()

    def get(self, key: tuple[int, int], size: int, fill: Callable[[memoryview], None]) -> memoryview:
        """The cluster of KEY, (number of the image, offset), of SIZE bytes, by FILL where it isn't known."""
        with self._lock:
            cluster = self._clusters.setdefault(key, _Cluster())
            self._clusters.move_to_end(key)
            while len(self._clusters) * size > max(_KEPT, size):
                self._clusters.popitem(last=False)
        with cluster.lock:
            if cluster.content is None:
                content = memoryview(bytearray(size))
                fill(content)
                cluster.content = content
            return cluster.content


class _Cluster:
    __slots__ = ("content", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.content: memoryview | None = None


def _inflate() -> Decompress:
    """By ISA-L where it is installed: 64 KiB clusters of text at 780 MB/s, zlib-ng 560, zlib 350 (one core)."""
    library = _import_inflate()

    def inflate(stored: Stored, cluster: memoryview) -> None:
        try:
            _inflate_with(library, stored(), cluster)
        except library.error:
            # It refuses a few streams that zlib, and so QEMU, reads: zlib has the last word.
            try:
                _inflate_with(zlib, stored(), cluster)
            except zlib.error as problem:
                raise FormatError(f"compressed cluster: {problem}") from problem

    return inflate


def _inflate_with(library: Any, stored: Iterable[memoryview], cluster: memoryview) -> None:
    """Fill CLUSTER from the pieces of STORED. Raises the library's error, or EndsEarlyError."""
    stream = library.decompressobj(-15)  # QEMU writes with a window of 12 bits, but reads what needs more
    done, size = 0, len(cluster)
    for piece in stored:
        rest: bytes | memoryview = piece
        while True:
            want = min(size - done, _STEP)
            output = stream.decompress(rest, want)
            cluster[done : done + len(output)] = output
            done += len(output)
            if done == size:
                return
            if stream.eof:
                raise EndsEarlyError
            if len(output) < want:
                break  # it has eaten this piece
            rest = stream.unconsumed_tail
    raise EndsEarlyError


def _zstd() -> Decompress:
    zstd = _import_zstd()
    options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    # A decompressor has blocks of more than 128 KiB, which glibc maps, faults in and unmaps for each cluster until one
    # larger was freed (mallopt(3), M_MMAP_THRESHOLD): 48 us for 64 KiB of text after this, and 130 without.
    freed = bytearray(MIB)
    del freed

    def decompress(stored: Stored, cluster: memoryview) -> None:
        stream = zstd.ZstdDecompressor(options=options)
        done, size = 0, len(cluster)
        for piece in stored():
            rest: bytes | memoryview = piece
            while True:
                # One byte more than fits, at the end, so that the last frame is complete, or seen to be too long.
                want = min(size - done, _STEP) or 1
                try:
                    output = stream.decompress(rest, want)
                except zstd.ZstdError as problem:
                    raise FormatError(f"compressed cluster: {problem}") from problem
                if len(output) > size - done:
                    raise FormatError("compressed cluster: the data is longer than a cluster")
                cluster[done : done + len(output)] = output
                done += len(output)
                if stream.eof:
                    if done == size:
                        return
                    rest = stream.unused_data
                    stream = zstd.ZstdDecompressor(options=options)
                    if not rest:
                        break
                elif stream.needs_input or not output:
                    break
                else:
                    rest = b""  # it has kept what it has not eaten
        raise EndsEarlyError

    return decompress


def _import_inflate() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def _import_zstd() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise MissingError("is compressed with zstd: install backports.zstd (`pip install backports.zstd`)") from error
    return zstd
