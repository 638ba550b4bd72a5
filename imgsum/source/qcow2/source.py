"""qcow2 images as sources: a chain of layers, what they say of extents, and readers that fill buffers from them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

from imgsum.errors import Error, FormatError, RefusedError, TruncatedError
from imgsum.extent import Extent
from imgsum.source import OpenOptions, refuse_larger
from imgsum.source.backing import PROTOCOL, backing_file
from imgsum.source.file import DIRECT_ALIGN, Holes, HostFile, cache_fact
from imgsum.source.qcow2.audit import audit
from imgsum.source.qcow2.compressed import MAX_FRAMES, Decompress, EndsEarlyError, WholeClusters, decompressor
from imgsum.source.qcow2.header import Header, at_snapshot, find_snapshot, parse
from imgsum.source.qcow2.mapping import COMPRESSED, DATA, ZERO, Mapping, Run, resolve
from imgsum.source.qcow2.tables import TableCache
from imgsum.units import KIB

MAX_LAYERS = 200
"""Images in a chain. Each costs a descriptor and 32 KiB of tables. QEMU has no limit; real chains have some dozens."""

_STORED = 256 * KIB  # compressed bytes that are read at once: half of what a request of 1 MiB may need
_ZEROS = memoryview(bytes(64 * KIB))


class NotNativeError(RefusedError):
    """The image, or one that it refers to, is for QEMU to read."""


class _RawLayer:
    """A raw backing file. Satisfies Layer. QEMU pads it with zeros to whole sectors, and so does a Layer."""

    def __init__(self, file: HostFile) -> None:
        self.file = self.data = file
        self.size = file.size
        self.holes = Holes(file)

    def runs(self, start: int, end: int) -> Sequence[Run]:
        """See Layer."""
        inside = max(start, min(end, self.size))
        runs = (Run(start, inside - start, DATA, start), Run(inside, end - inside, ZERO))
        return runs[start == inside : 2 if inside < end else 1]


class _Qcow2Layer:
    """A qcow2 image of a chain, and its external data file if it has one. Satisfies Layer."""

    def __init__(
        self,
        file: HostFile,
        data: HostFile,
        header: Header,
        cache: TableCache,
        number: int,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        self.file = file
        self.data = data
        self.header = header
        self.size = header.size
        self.holes = Holes(data)
        self.number = number
        backed = header.backing_file is not None
        self.mapping = Mapping(header, file.read_bytes, file.size, data.size, cache, file.name, number, backed)
        self.runs = self.mapping.runs
        self._max_frames = max_frames
        self._decompress: Decompress | None = None

    def decompress(self) -> Decompress:
        """What decompresses this image's clusters; imported when there is one."""
        if self._decompress is None:
            self._decompress = decompressor(self.header.compression, self._max_frames)
        return self._decompress


class Qcow2Source:
    """The content of a qcow2 image with all that it refers to. Satisfies Source."""

    format = "qcow2"

    def __init__(self, file: HostFile, layers: Sequence[_Qcow2Layer | _RawLayer], others: Sequence[HostFile]) -> None:
        """Of the image in FILE, the first of LAYERS. OTHERS are the files of the rest. All are closed with this."""
        self.file = file
        self.name = file.name
        self.size = layers[0].size
        self._layers = layers
        self._files = [file, *others]
        self._whole = WholeClusters()

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        """See Source. Zero: what is marked so, what nothing is allocated for, and clusters in holes of their file."""
        for depth, run in resolve(self._layers, start, start + length):
            if run.kind == DATA:
                shift = run.start - run.host
                for extent in self._layers[depth].holes.extents(run.host, run.length):
                    yield Extent(extent.start + shift, extent.length, extent.zero)
            else:
                yield Extent(run.start, run.length, run.kind == ZERO)

    def reader(self) -> Qcow2Reader:
        """See Source."""
        return Qcow2Reader(self._layers, self._whole)

    def check_unchanged(self) -> None:
        """See Source. Each file of the chain."""
        for file in self._files:
            file.check_unchanged()

    def facts(self) -> dict[str, object]:
        """See Source."""
        facts = cache_fact(self.file)
        if len(self._files) > 1:
            facts["files"] = len(self._files)
        return facts

    def close(self) -> None:
        """See Source."""
        for file in self._files:
            file.close()


class Qcow2Reader:
    """Fills one worker's buffers: data straight from its file, or by decompressing. Satisfies Reader."""

    def __init__(self, layers: Sequence[_Qcow2Layer | _RawLayer], whole: WholeClusters) -> None:
        self._layers = layers
        self._whole = whole
        self._stored_buffer: memoryview | None = None

    def read(self, offset: int, buffer: memoryview) -> None:
        """See Reader."""
        for depth, runs in self._batches(offset, offset + len(buffer)):
            layer, run = self._layers[depth], runs[0]
            part = buffer[run.start - offset : runs[-1].end - offset]
            if run.kind == DATA:
                layer.data.read(run.host, part)
            elif run.kind == ZERO:
                for at in range(0, len(part), len(_ZEROS)):
                    part[at : at + len(_ZEROS)] = _ZEROS[: len(part) - at]
            else:
                assert isinstance(layer, _Qcow2Layer)
                self._decompress(layer, runs, part)

    def _batches(self, start: int, end: int) -> Iterator[tuple[int, list[Run]]]:
        """The runs of START..END one by one, but whole compressed clusters that touch in a file together, in any order.

        They are read at once: with O_DIRECT, as neighbours share sectors, that halves the time for clusters of 4 KiB.
        The file may have them in another order than the content: `qemu-img convert -W` writes what is done first.
        """
        batch: list[Run] = []
        layer = low = high = 0  # LOW..HIGH of the layer's file has all compressed bytes of the batch
        open_ = False  # whether another cluster may join it
        for depth, run in resolve(self._layers, start, end):
            whole = run.kind == COMPRESSED and run.length == self._cluster_size(depth)
            if open_ and whole and depth == layer:
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

    def _cluster_size(self, depth: int) -> int:
        layer = self._layers[depth]
        assert isinstance(layer, _Qcow2Layer)  # only those have compressed clusters
        return layer.header.cluster_size

    def _decompress(self, layer: _Qcow2Layer, runs: Sequence[Run], part: memoryview) -> None:
        """RUNS, whole compressed clusters of one batch or a part of one, into PART. All of a cluster must be good."""
        size = layer.header.cluster_size
        first = runs[0]
        if len(runs) == 1 and first.length < size:
            skip = first.start % size
            key = (layer.number, first.start - skip)
            self._whole.copy(key, size, skip, part, lambda cluster: self._decompress_clusters(layer, runs, cluster))
        else:
            self._decompress_clusters(layer, runs, part)

    def _decompress_clusters(self, layer: _Qcow2Layer, runs: Sequence[Run], clusters: memoryview) -> None:
        """All of the clusters of RUNS, whose compressed bytes are in any order, and may overlap."""
        file, size = layer.file, layer.header.cluster_size
        low = min(run.host for run in runs)
        high = min(max(run.host + run.stored for run in runs), file.size)
        at_once = None if high - low > _STORED else next(self._stored(file, low, high))
        for number, run in enumerate(runs):

            def stored(run: Run = run) -> Iterable[memoryview]:
                if at_once is None:  # one large cluster
                    return self._stored(file, run.host, high)
                return (at_once[run.host - low : run.host - low + run.stored],)

            try:
                layer.decompress()(stored, clusters[number * size : (number + 1) * size])
            except Error as error:
                if isinstance(error, EndsEarlyError) and run.host + run.stored > file.size:
                    error = TruncatedError(f"truncated: the file ends at byte {file.size}, in a compressed cluster")
                if error.offset is None:
                    error.offset = run.start
                raise error.about(file.name) from error.__cause__

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


def open_qcow2(file: HostFile, options: OpenOptions) -> Qcow2Source:
    """The image in FILE, and all that it refers to. FILE is the source's from then on; after an error, the caller's.

    Raises NotNativeError for what QEMU must read, and else an imgsum.Error.
    """
    others: list[HostFile] = []
    try:
        layers = _open_layers(file, options, others)
        return Qcow2Source(file, layers, others)
    except BaseException:
        for other in others:
            other.close()
        raise


def _open_layers(file: HostFile, options: OpenOptions, opened: list[HostFile]) -> list[_Qcow2Layer | _RawLayer]:
    """The chain from FILE down to the image that has no backing file. What is opened for it goes to OPENED."""
    cache = TableCache()
    layers: list[_Qcow2Layer | _RawLayer] = []
    seen = set()
    here, format_ = file, "qcow2"
    while True:
        if here.identity in seen:
            raise RefusedError("the backing chain is a loop", name=here.name)
        seen.add(here.identity)
        if format_ == "raw":
            return [*layers, _RawLayer(here)]
        header = _read_header(here)
        if here is file:
            header = _checked(header, file, options)
        data = here
        if header.has_data_file:
            data = HostFile(*_data_file(header, here), options)
            opened.append(data)
        max_frames = 1 if options.untrusted else MAX_FRAMES  # many frames of 9 bytes, or many bytes in each
        layer = _Qcow2Layer(here, data, header, cache, len(layers), max_frames)
        layers.append(layer)
        if options.untrusted:
            _audit(layer)
        if header.backing_file is None:
            return layers
        if len(layers) == MAX_LAYERS:
            raise RefusedError(f"the backing chain has more than {MAX_LAYERS} images", name=file.name)
        path, format_ = backing_file(header.backing_file, header.backing_format, here)
        if format_ not in ("raw", "qcow2"):
            backing = os.fsdecode(header.backing_file)
            raise NotNativeError(f"the backing file '{backing}' is of the format {format_}", name=here.name)
        here = HostFile(path, f"{file.name}: backing file {path}", options)
        opened.append(here)


def _read_header(file: HostFile) -> Header:
    try:
        header = parse(file.read_bytes)
        if header.crypt_method:
            raise NotNativeError("is encrypted")
    except Error as error:
        raise error.about(file.name) from None
    return header


def _checked(header: Header, file: HostFile, options: OpenOptions) -> Header:
    """HEADER of the image itself, in FILE, if OPTIONS allow what it says; of the snapshot that they ask for."""
    if options.snapshot is not None:
        header = at_snapshot(header, find_snapshot(file.read_bytes, header, os.fsencode(options.snapshot)))
    refuse_larger(header.size, options)  # before the passes over the tables, which are as long as the size says
    if options.untrusted:
        for refused, what in (
            (header.backing_file, "refers to a backing file"),
            (header.has_data_file, "has an external data file"),
            (header.corrupt, "is marked as corrupt"),
        ):
            if refused:
                raise RefusedError(f"{what}, which --untrusted does not allow")
    return header


def _audit(layer: _Qcow2Layer) -> None:
    file_size = layer.file.size
    data_size = sum(extent.length for extent in layer.holes.extents(0, file_size) if not extent.zero)
    audit(layer.header, layer.mapping, file_size, data_size)


def _data_file(header: Header, image: HostFile) -> tuple[str, str]:
    """The path of IMAGE's external data file, and what to call it. QEMU takes it relative to the current directory."""
    if header.data_file is None:
        raise FormatError("has an external data file, but does not record its name", name=image.name)
    path = os.fsdecode(header.data_file)
    if PROTOCOL.match(header.data_file):
        raise RefusedError(f"the external data file '{path}' is not a plain path", name=image.name)
    return path, f"{image.name}: external data file {path}"
