"""Images whose tables say where their content is: layers of runs, and a Source and a Reader over these.

Each format makes layers: an image, and what is below it in a chain of backing files or parents. A layer tells runs:
which part of which of its files holds a range of the content. What is common to all is here: which layer has a
range, holes, reading, decompressing, and what is done when a file ends too early.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from imgsum.errors import Error, RefusedError, TruncatedError
from imgsum.extent import Extent
from imgsum.source import Evidence, same_evidence
from imgsum.source.compressed import Decompress, EndsEarlyError, WholeClusters
from imgsum.source.file import DIRECT_ALIGN, Holes, HostFile, cache_details
from imgsum.source.tables import TableCache
from imgsum.units import KIB, MIB

MAX_LAYERS = 200
"""Images in a chain. Each costs a descriptor and 32 KiB of tables. QEMU has no limit; real chains have some dozens."""

UNALLOCATED, ZERO, DATA, COMPRESSED = range(4)
"""Kinds of runs. Unallocated: whatever the layer below has there, or zeros."""

_STORED = 256 * KIB  # compressed bytes that are read at once: half of what a request of 1 MiB may need
_ZEROS = memoryview(bytes(64 * KIB))


class Run(NamedTuple):
    """`length` > 0 bytes of content from `start`, all of one kind."""

    start: int
    length: int
    kind: int
    host: int = 0
    """DATA: where it is in its file. COMPRESSED: where the whole cluster's compressed bytes are."""
    stored: int = 0
    """COMPRESSED: how many bytes those are at most. The run is of one cluster, or of a part of it."""
    file: int = 0
    """DATA and COMPRESSED: which of the layer's files it is in, as an index."""

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + self.length


class Runs(Protocol):
    """What a layer says of its content. Safe from any thread."""

    @property
    def size(self) -> int:
        """Bytes of content."""

    def runs(self, start: int, end: int) -> Iterable[Run]:
        """The runs of START..END, not empty, in order, tiling it. What lies past the size is ZERO.

        Raises FormatError, and TruncatedError where a file ends before what it should hold: see check_run().
        """


class Layer(Runs, Protocol):
    """One image of a chain, with its files."""

    @property
    def files(self) -> Sequence[HostFile]:
        """The files with its data."""

    @property
    def cluster_size(self) -> int:
        """Bytes of content that are compressed together, from each multiple of it; 0 where none are compressed."""

    def decompress(self, at: int) -> Decompress:
        """What decompresses the cluster AT an offset, safe from any thread. Imported when there is one."""


class Uncompressed:
    """What layers have that never have compressed clusters."""

    cluster_size = 0

    def decompress(self, at: int) -> Decompress:
        """See Layer."""
        raise NotImplementedError


class RawLayer(Uncompressed):
    """A raw file. Satisfies Layer. As the bottom of a chain QEMU pads it with zeros, and so does a Layer."""

    format = "raw"

    def __init__(self, file: HostFile) -> None:
        self.files = [file]
        self.size = file.size

    def runs(self, start: int, end: int) -> Sequence[Run]:
        """See Runs."""
        inside = max(start, min(end, self.size))
        runs = (Run(start, inside - start, DATA, start), Run(inside, end - inside, ZERO))
        return runs[start == inside : 2 if inside < end else 1]


def resolve(layers: Sequence[Runs], start: int, end: int) -> Iterator[tuple[int, Run]]:
    """The runs of START..END, which may be empty, each with the index of the layer that has it; none is UNALLOCATED.

    What an image has not allocated is looked up in the next one, range by range, so that a short image in the middle
    hides what a longer one below it has past its end, as in QEMU. Not recursive: chains can be deep.
    """
    below = len(layers) - 1
    stack = [iter(layers[0].runs(start, end))] if start < end else []
    while stack:
        depth = len(stack) - 1
        for run in stack[-1]:
            if run.kind != UNALLOCATED:
                yield depth, run
            elif depth == below:
                yield depth, Run(run.start, run.length, ZERO)
            else:
                stack.append(iter(layers[depth + 1].runs(run.start, run.start + run.length)))
                break
        else:
            stack.pop()


def add_run(runs: list[Run], start: int, end: int, kind: int, host: int = 0, file: int = 0) -> None:
    """Add START..END to RUNS, to the last of them where both are one run. HOST means nothing if it isn't DATA."""
    if runs and runs[-1].kind == kind:
        last = runs[-1]
        if kind != DATA or (last.host + last.length == host and last.file == file):
            runs[-1] = Run(last.start, end - last.start, kind, last.host, 0, last.file)
            return
    runs.append(Run(start, end - start, kind, host, 0, file) if kind == DATA else Run(start, end - start, kind))


def check_run(run: Run, file_size: int, name: str) -> None:
    """Raise TruncatedError if the file NAME, of FILE_SIZE bytes, ends before the data of RUN does.

    A compressed cluster may be cut off, as its last sector has padding: decompressing it shows.
    """
    if run.kind == DATA and run.host + run.length > file_size:
        raise truncated(file_size, "before the data", run.start + max(0, file_size - run.host), name)
    if run.kind == COMPRESSED and run.host >= file_size:
        raise truncated(file_size, "before the compressed cluster", run.start, name)


def truncated(file_end: int, where: str, at: int, name: str) -> TruncatedError:
    """The error that the file NAME ends at byte FILE_END, WHERE what the content AT an offset needs should be."""
    return TruncatedError(f"truncated: the file ends at byte {file_end}, {where} of the content", name=name, offset=at)


class LayeredSource:
    """The content of an image with all that it refers to. Satisfies Source."""

    def __init__(
        self,
        format_name: str,
        layers: Sequence[Layer],
        files: Sequence[HostFile],
        note: str | None = None,
        *,
        snapshot: str | None = None,
    ) -> None:
        """LAYERS, the first is the image. FILES are all that were opened, in that order: they are closed with this.

        SNAPSHOT: the internal snapshot of the image that is read.
        """
        self.format = format_name
        self.name = files[0].name
        self.size = layers[0].size
        self.note = note
        """What a user should know of the value."""
        self.layers = layers
        self.files = files
        self._snapshot = snapshot
        self._holes = [[Holes(file) for file in layer.files] for layer in layers]
        self._whole = WholeClusters()

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        """See Source. Zero: what is marked so, what nothing is allocated for, and data in holes of its file."""
        for depth, run in resolve(self.layers, start, start + length):
            if run.kind == DATA:
                shift = run.start - run.host
                for extent in self._holes[depth][run.file].extents(run.host, run.length):
                    yield Extent(extent.start + shift, extent.length, extent.zero)
            else:
                yield Extent(run.start, run.length, run.kind == ZERO)

    def reader(self) -> LayeredReader:
        """See Source."""
        return LayeredReader(self.layers, self._whole)

    def check_unchanged(self) -> None:
        """See Source. Each file of the chain."""
        for file in self.files:
            file.check_unchanged()

    def evidence(self) -> Evidence:
        """See Source. The files of the chain in its order, each image's external data file after it."""
        records = [file.evidence() for file in self.files]
        if self._snapshot is not None:
            records[0]["snapshot"] = self._snapshot
        return records

    def unchanged(self, image_format: str, evidence: Evidence) -> Iterator[Extent] | None:
        """See Source. What no layer above the image of that evidence has: neither data nor zeros."""
        records = self.evidence()
        for depth, layer in enumerate(self.layers[1:], 1):
            own_file = getattr(layer, "file", None) or next(iter(layer.files), None)
            if getattr(layer, "format", self.format) != image_format or own_file not in self.files:
                continue
            if same_evidence(evidence, records[self.files.index(own_file) :]):
                return self._not_above(depth)
        return None

    def _not_above(self, layer: int) -> Iterator[Extent]:
        for depth, run in resolve(self.layers, 0, self.size):
            yield Extent(run.start, run.length, depth >= layer)

    def details(self) -> dict[str, object]:
        """See Source."""
        details = cache_details(self.files[0])
        if len(self.files) > 1:
            details["files"] = len(self.files)
        return details

    def close(self) -> None:
        """See Source."""
        for file in self.files:
            file.close()


class LayeredReader:
    """Fills one worker's buffers: data straight from its file, or by decompressing. Satisfies Reader."""

    def __init__(self, layers: Sequence[Layer], whole: WholeClusters) -> None:
        self._layers = layers
        self._whole = whole
        self._stored_buffer: memoryview | None = None

    def read(self, offset: int, buffer: memoryview) -> None:
        """See Reader."""
        for depth, runs in self._batches(offset, offset + len(buffer)):
            run = runs[0]
            part = buffer[run.start - offset : runs[-1].end - offset]
            if run.kind == DATA:
                self._layers[depth].files[run.file].read(run.host, part)
            elif run.kind == ZERO:
                for at in range(0, len(part), len(_ZEROS)):
                    part[at : at + len(_ZEROS)] = _ZEROS[: len(part) - at]
            else:
                self._decompress(depth, runs, part)

    def _batches(self, start: int, end: int) -> Iterator[tuple[int, list[Run]]]:
        """The runs of START..END one by one, but whole compressed clusters that touch in a file together, in any order.

        They are read at once: with O_DIRECT, as neighbours share sectors, that halves the time for clusters of 4 KiB.
        The file may have them in another order than the content: `qemu-img convert -W` writes what is done first.
        """
        batch: list[Run] = []
        layer = low = high = 0  # LOW..HIGH of the layer's file has all compressed bytes of the batch
        open_ = False  # whether another cluster may join it
        for depth, run in resolve(self._layers, start, end):
            whole = run.kind == COMPRESSED and run.length == self._layers[depth].cluster_size
            if open_ and whole and depth == layer and run.file == batch[0].file:
                new_low, new_high = min(low, run.host), max(high, run.host + run.stored)
                touches = run.host <= high + DIRECT_ALIGN and run.host + run.stored >= low - DIRECT_ALIGN
                if touches and new_high - new_low <= _STORED:
                    batch.append(run)
                    low, high = new_low, new_high
                    continue
            if batch:
                yield layer, batch
            batch, layer, open_ = [run], depth, whole
            low, high = run.host, run.host + run.stored
        if batch:
            yield layer, batch

    def _decompress(self, depth: int, runs: Sequence[Run], part: memoryview) -> None:
        """RUNS, whole compressed clusters of one batch or a part of one, into PART. All of a cluster must be good."""
        layer = self._layers[depth]
        size = layer.cluster_size
        first = runs[0]
        if len(runs) == 1 and first.length < size:
            skip = first.start % size
            key = (depth, first.start - skip)
            self._whole.copy(key, size, skip, part, lambda cluster: self._decompress_clusters(layer, runs, cluster))
        else:
            self._decompress_clusters(layer, runs, part)

    def _decompress_clusters(self, layer: Layer, runs: Sequence[Run], clusters: memoryview) -> None:
        """All of the clusters of RUNS, whose compressed bytes are in any order, and may overlap."""
        file, size = layer.files[runs[0].file], layer.cluster_size
        low = min(run.host for run in runs)
        high = min(max(run.host + run.stored for run in runs), file.size)
        at_once = None if high - low > _STORED else next(self._stored(file, low, high))
        for number, run in enumerate(runs):

            def stored(run: Run = run) -> Iterable[memoryview]:
                if at_once is None:  # one large cluster
                    return self._stored(file, run.host, high)
                return (at_once[run.host - low : run.host - low + run.stored],)

            try:
                layer.decompress(run.start // size * size)(stored, clusters[number * size : (number + 1) * size])
            except Error as error:
                if isinstance(error, EndsEarlyError) and run.host + run.stored > file.size:
                    reason = f"truncated: the file ends at byte {file.size}, in a compressed cluster"
                    raise TruncatedError(reason, name=file.name, offset=run.start) from None
                if error.offset is None:
                    error.offset = run.start
                error.about(file.name)
                raise

    def _stored(self, file: HostFile, begin: int, end: int) -> Iterator[memoryview]:
        """BEGIN..END of FILE, which is not empty, in pieces that are overwritten by the next."""
        if self._stored_buffer is None:
            self._stored_buffer = memoryview(mmap.mmap(-1, _STORED + 2 * DIRECT_ALIGN))
        align = DIRECT_ALIGN if file.direct else 1  # aligned, they are read without a copy
        for at in range(begin, end, _STORED):
            stop = min(end, at + _STORED)
            start = at // align * align
            piece = self._stored_buffer[: min(-(-stop // align) * align, file.size) - start]
            file.read(start, piece)
            yield piece[at - start : stop - start]

    def close(self) -> None:
        """See Reader."""


class Limit:
    """So much of something that costs work, and no more."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = self._left = limit

    def add(self, amount: int) -> None:
        """Count AMOUNT, or raise RefusedError."""
        self._left -= amount
        if self._left < 0:
            raise RefusedError(f"has more than {self._limit} {self._what}, too many for its size with --untrusted")


def data_size(file: HostFile) -> int:
    """Bytes of FILE that are in no hole of it. Holes cost an attacker nothing."""
    return sum(extent.length for extent in Holes(file).extents(0, file.size) if not extent.zero)


def bound_work(layer: Layer, cache: TableCache) -> None:
    """What --untrusted demands of the runs of LAYER, of one file, whose tables come through CACHE: see untrusted.md.

    The file's data is read once at most: tables that refer to the same data many times would stand for any amount.
    Reads all tables, and no data. Raises RefusedError.
    """
    (file,) = layer.files
    size = data_size(file)
    holes = Holes(file)
    steps = Limit("pieces of content", (1 << 16) + size // 256)
    tables = Limit("bytes of tables", 64 * MIB + 16 * size)
    data = Limit("bytes of data in all", size)
    stored = Limit("bytes of compressed data", MIB + 2 * size)
    unpacked = Limit("bytes of decompressed data", 512 * MIB + 64 * size)
    counted = 0
    for run in layer.runs(0, layer.size):
        steps.add(1)
        tables.add(cache.loaded - counted)
        counted = cache.loaded
        if run.kind == DATA:
            for extent in holes.extents(run.host, run.length):
                steps.add(1)
                if not extent.zero:
                    data.add(extent.length)
        elif run.kind == COMPRESSED:
            stored.add(run.stored)
            unpacked.add(layer.cluster_size)
