"""Compressed clusters: deflate and zstd, from the file straight into the buffer of whoever asked.

A cluster's compressed bytes are a raw deflate stream, or one or more zstd frames, and then whatever fills the last
sector (spec: `Compressed Clusters Descriptor`). The output is one whole cluster; what a stream has beyond that is
ignored, as QEMU does. A decompressor is imported when the first image needs it, and nothing is allocated from what
a stream says of itself.
"""

from __future__ import annotations

import mmap
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from imgsum.errors import FormatError, MissingError
from imgsum.units import KIB, MIB

Stored = Callable[[], Iterable[memoryview]]
"""stored(): the compressed bytes from their beginning, in pieces. May be called again."""

Decompress = Callable[[Stored, memoryview], None]
"""decompress(stored, cluster): fill all of CLUSTER. Raises FormatError, or EndsEarlyError, which is one."""

_STEP = 256 * KIB
"""Maximum output of one call of zstd, which allocates it. Clusters can have 2 MiB."""

_INFLATE_STEP = 64 * KIB
"""Maximum input and output of one call of inflate, which allocates both, as it copies the input that it does not use.
malloc keeps such blocks for each thread: with 256 KiB, 2 MiB clusters of random bytes take 64 MiB in all."""

_WINDOW_LOG = 23
"""zstd windows of up to 8 MiB, which RFC 8878 wants decoders to support and encoders not to exceed."""


MAX_FRAMES = 1024
"""zstd frames of a cluster. Each costs 20 us, also one without content. QEMU writes one."""

_KEPT = 4 * MIB  # bytes of whole clusters

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class EndsEarlyError(FormatError):
    """The compressed data ends before the cluster is full."""

    def __init__(self) -> None:
        super().__init__("compressed cluster: the data ends early")


class WholeClusters:
    """Clusters that were decompressed for a reader that asked for a part, until the other parts were asked for too.

    A cluster can have 2 MiB, and a request 4 KiB. Safe from any thread; no cluster is decompressed by two of them at
    the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clusters: OrderedDict[tuple[int, int], _Cluster] = OrderedDict()

    def copy(
        self, key: tuple[int, int], size: int, start: int, part: memoryview, fill: Callable[[memoryview], None]
    ) -> None:
        """Into PART what is at START of the cluster of KEY, which has SIZE bytes, by FILL where it isn't known.

        KEY is (number of the image, offset of the content).
        """
        with self._lock:
            cluster = self._clusters.get(key)
            if cluster is None:
                cluster = self._clusters[key] = _Cluster(size)
            cluster.wanted -= len(part)
            if cluster.wanted <= 0:
                del self._clusters[key]
            while len(self._clusters) * size > max(_KEPT, size):
                self._clusters.popitem(last=False)
        with cluster.lock:
            if cluster.content is None:
                content = memoryview(mmap.mmap(-1, size))  # malloc would keep 2 MiB for each thread
                fill(content)
                cluster.content = content
            part[:] = cluster.content[start : start + len(part)]


class _Cluster:
    __slots__ = ("content", "lock", "wanted")

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.content: memoryview | None = None
        self.wanted = size
        """Bytes that were not yet asked for, if none is asked for twice."""


def inflater(window_bits: int = -15) -> Decompress:
    """What decompresses deflate, safe from any thread. WINDOW_BITS are zlib's: negative for streams without a header.

    By ISA-L where it is installed: 64 KiB clusters of text at 780 MB/s, zlib-ng 560, zlib 350 (one core).
    """
    library = _import_inflate()

    def inflate(stored: Stored, cluster: memoryview) -> None:
        try:
            _inflate_with(library, window_bits, stored(), cluster)
        except library.error:
            # ISA-L refuses a few streams that zlib, and so QEMU, reads. So zlib decides.
            try:
                _inflate_with(zlib, window_bits, stored(), cluster)
            except zlib.error as problem:
                raise FormatError(f"compressed cluster: {problem}") from problem

    return inflate


def _inflate_with(library: Any, window_bits: int, stored: Iterable[memoryview], cluster: memoryview) -> None:
    """Fill CLUSTER from the pieces of STORED. Raises the library's error, or EndsEarlyError."""
    stream = library.decompressobj(window_bits)  # QEMU writes with a window of 12 bits, but reads what needs more
    done, size = 0, len(cluster)
    for piece in stored:
        for at in range(0, len(piece), _INFLATE_STEP):
            rest: bytes | memoryview = piece[at : at + _INFLATE_STEP]
            while True:
                want = min(size - done, _INFLATE_STEP)
                output = stream.decompress(rest, want)
                cluster[done : done + len(output)] = output
                done += len(output)
                if done == size:
                    return
                if stream.eof:
                    raise EndsEarlyError
                if len(output) < want:
                    break  # all input is used
                rest = stream.unconsumed_tail
    raise EndsEarlyError


def inflate_all(stored: Stored, cluster: memoryview) -> int:
    """A whole zlib stream, with its checksum, into CLUSTER. Returns how many bytes that are. Raises FormatError.

    It may not be longer than CLUSTER. Safe from any thread.
    """
    library = _import_inflate()
    try:
        return _inflate_all_with(library, stored(), cluster)
    except library.error:  # as in inflater()
        try:
            return _inflate_all_with(zlib, stored(), cluster)
        except zlib.error as problem:
            raise FormatError(f"compressed grain: {problem}") from problem


def _inflate_all_with(library: Any, stored: Iterable[memoryview], cluster: memoryview) -> int:
    stream = library.decompressobj(15)
    done, size = 0, len(cluster)
    for piece in stored:
        for at in range(0, len(piece), _INFLATE_STEP):
            rest: bytes | memoryview = piece[at : at + _INFLATE_STEP]
            while True:
                want = min(size - done, _INFLATE_STEP) or 1  # one more than fits shows that it is too long
                output = stream.decompress(rest, want)
                if len(output) > size - done:
                    raise FormatError("compressed grain: the data is longer than a grain")
                cluster[done : done + len(output)] = output
                done += len(output)
                if stream.eof:
                    return done
                if len(output) < want:
                    break  # all input is used
                rest = stream.unconsumed_tail
    raise EndsEarlyError


def zstd_decompressor(max_frames: int = MAX_FRAMES) -> Decompress:
    """What decompresses zstd, at most MAX_FRAMES frames for a cluster, safe from any thread. Raises MissingError."""
    zstd = import_zstd()
    options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    _keep_freed_blocks()

    def decompress(stored: Stored, cluster: memoryview) -> None:
        stream = zstd.ZstdDecompressor(options=options)
        done, size, frames = 0, len(cluster), 1
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
                    frames += 1
                    if frames > max_frames:
                        raise FormatError(f"compressed cluster: more than {max_frames} zstd frames")
                    rest = stream.unused_data
                    stream = zstd.ZstdDecompressor(options=options)
                    if not rest:
                        break
                elif stream.needs_input or not output:
                    break
                else:
                    rest = b""  # zstd has kept the unused input
        raise EndsEarlyError

    return decompress


def _keep_freed_blocks() -> None:
    """Have glibc keep freed blocks of up to 1 MiB for the next that asks, and give larger ones back at once.

    A zstd decompressor has blocks of more than 128 KiB. At first, glibc maps, faults in and unmaps those for each
    cluster: 130 us for 64 KiB of text, and 48 after this. Its thresholds follow what is freed, until each worker keeps
    the 2 MiB of the largest clusters: 65 MiB resident in all, and 53 after this (mallopt(3)).
    """
    import ctypes  # 3 ms, and only for images with zstd

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    mallopt(_M_TRIM_THRESHOLD, 2 * MIB)
    mallopt(_M_MMAP_THRESHOLD, MIB)


def _import_inflate() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def import_zstd() -> Any:
    """The library. Raises MissingError."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise MissingError("is compressed with zstd: install backports.zstd (`pip install backports.zstd`)") from error
    return zstd
