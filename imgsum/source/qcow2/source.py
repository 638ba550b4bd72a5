"""Opens qcow2 images: the chain of backing files, data files, and what --untrusted demands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from imgsum.errors import FormatError, NotNativeError, RefusedError, naming
from imgsum.extent import Extent
from imgsum.source import OpenOptions, refuse_larger
from imgsum.source.backing import PROTOCOL, backing_file
from imgsum.source.compressed import MAX_FRAMES, Decompress, inflater, zstd_decompressor
from imgsum.source.file import HostFile
from imgsum.source.layers import MAX_LAYERS, Layer, LayeredSource, RawLayer, data_size
from imgsum.source.qcow2.audit import audit
from imgsum.source.qcow2.bitmaps import clean_extents, find_bitmap
from imgsum.source.qcow2.header import ZSTD, Header, at_snapshot, find_snapshot, parse
from imgsum.source.qcow2.mapping import Mapping
from imgsum.source.tables import TableCache


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
        self.files = [data]  # compressed clusters exclude an external data file
        self.header = header
        self.size = header.size
        self.cluster_size = header.cluster_size
        backed = header.backing_file is not None
        self.mapping = Mapping(header, file.read_bytes, file.size, data.size, cache, file.name, number, backed)
        self.runs = self.mapping.runs
        self._max_frames = max_frames
        self._decompress: Decompress | None = None

    def decompress(self, at: int) -> Decompress:
        """See Layer."""
        if self._decompress is None:
            zstd = self.header.compression == ZSTD
            self._decompress = zstd_decompressor(self._max_frames) if zstd else inflater()
        return self._decompress


class Qcow2Source(LayeredSource):
    """A qcow2 image with all that it refers to."""

    def __init__(self, layers: Sequence[Layer], files: Sequence[HostFile], options: OpenOptions) -> None:
        """See LayeredSource; OPTIONS: how it was opened."""
        super().__init__("qcow2", layers, files, snapshot=options.snapshot)
        self._options = options

    def clean(self, bitmap: str) -> Iterator[Extent]:
        """See Source. The bitmap is the image's own: those of its backing files say nothing of what is on top."""
        if self._options.snapshot is not None:
            raise RefusedError("a bitmap says what was written to the disk, and nothing of a snapshot")
        image = self.layers[0]
        assert isinstance(image, _Qcow2Layer)
        read, header = image.file.read_bytes, image.header
        return clean_extents(read, header, find_bitmap(read, header, os.fsencode(bitmap)))


def open_image(file: HostFile, options: OpenOptions) -> Qcow2Source:
    """The image in FILE, and all that it refers to. FILE is the source's from then on; after an error, the caller's.

    Raises NotNativeError for what QEMU must read, and else an imgsum.Error.
    """
    others: list[HostFile] = []
    try:
        layers = _open_layers(file, options, others)
        return Qcow2Source(layers, [file, *others], options)
    except BaseException:
        for other in others:
            other.close()
        raise


def _open_layers(file: HostFile, options: OpenOptions, opened: list[HostFile]) -> list[Layer]:
    """The chain from FILE down to the image that has no backing file. What is opened for it goes to OPENED."""
    cache = TableCache()
    layers: list[Layer] = []
    seen = set()
    here, format_ = file, "qcow2"
    while True:
        if here.identity in seen:
            raise RefusedError("the backing chain is a loop", name=here.name)
        seen.add(here.identity)
        if format_ == "raw":
            return [*layers, RawLayer(here)]
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
    with naming(file.name):
        header = parse(file.read_bytes)
        if header.crypt_method:
            raise NotNativeError("is encrypted")
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
    audit(layer.header, layer.mapping, layer.file.size, data_size(layer.file))


def _data_file(header: Header, image: HostFile) -> tuple[str, str]:
    """The path of IMAGE's external data file, and what to call it. QEMU takes it relative to the current directory."""
    if header.data_file is None:
        raise FormatError("has an external data file, but does not record its name", name=image.name)
    path = os.fsdecode(header.data_file)
    if PROTOCOL.match(header.data_file):
        raise RefusedError(f"the external data file '{path}' is not a plain path", name=image.name)
    return path, f"{image.name}: external data file {path}"
