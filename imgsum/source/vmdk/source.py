"""VMDK images as sources: a chain of layers, each of extents in one or more files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from imgsum.errors import Error, FormatError, RefusedError, TruncatedError, naming
from imgsum.source import OpenOptions, Source, refuse_larger
from imgsum.source.backing import open_beside
from imgsum.source.compressed import Decompress, Stored, inflate_all
from imgsum.source.file import HostFile
from imgsum.source.layers import DATA, MAX_LAYERS, ZERO, LayeredSource, Run, Runs, bound_work
from imgsum.source.tables import TableCache
from imgsum.source.vmdk import sparse
from imgsum.source.vmdk.descriptor import LIMIT, NO_PARENT, DescribedExtent, Descriptor, check_file, parse_descriptor
from imgsum.source.vmdk.sparse import SECTOR, Grains, Shape
from imgsum.units import MIB

_MAX_FILES = 1024
"""Files of an image: 2 TiB in extents of 2 GiB. Each takes a descriptor."""

_EMBEDDED_LENGTH = 20 * SECTOR  # what QEMU reads at sector 1 to look for a parent
_MAX_COMPRESSED = MIB  # bytes of a compressed grain; writers have 64 KiB
_MARKER = 12  # bytes before a compressed grain: its first sector (8), and the length of what follows (4)
_EXTENT_FILE = "is an extent of a VMDK: name the .vmdk file that lists its extents, a text, instead"


class _Flat(NamedTuple):
    """A flat extent: a part of its file, from `offset` of it. Satisfies Runs."""

    size: int
    offset: int

    def runs(self, start: int, end: int) -> Iterable[Run]:
        """See Runs."""
        return (Run(start, end - start, DATA, self.offset + start),)


class _Extent(NamedTuple):
    """What an extent has, and which of the layer's files it is in."""

    file: int
    content: Runs
    compressed_grain: int = 0
    """Bytes; 0: none is compressed."""


class _VmdkLayer:
    """One image of a chain: its extents one after the other. Satisfies Layer."""

    def __init__(self, files: Sequence[HostFile], extents: Sequence[_Extent]) -> None:
        """Raises RefusedError where a compressed extent is not the only one: nobody makes that."""
        self.files = files
        self.cluster_size = extents[0].compressed_grain
        self._extents = extents
        self._starts = []
        self.size = 0
        for extent in extents:
            if extent.compressed_grain and len(extents) > 1:
                raise RefusedError("is a VMDK of several extents, and compressed")
            self._starts.append(self.size)
            self.size += extent.content.size

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """See Runs."""
        at, inside = start, min(end, self.size)
        while at < inside:
            number = bisect_right(self._starts, at) - 1
            extent, base = self._extents[number], self._starts[number]
            stop = min(base + extent.content.size, inside)
            try:
                for run in extent.content.runs(at - base, stop - base):
                    yield run._replace(start=run.start + base, file=extent.file) if base else run
            except Error as error:
                if error.offset is not None:
                    error.offset += base
                raise
            at = stop
        if at < end:
            yield Run(at, end - at, ZERO)

    def decompress(self, at: int) -> Decompress:
        """See Layer."""

        def decompress(stored: Stored, cluster: memoryview) -> None:
            marker = bytes(next(iter(stored()))[:_MARKER])
            sector, length = int.from_bytes(marker[:8], "little"), int.from_bytes(marker[8:], "little")
            if sector * SECTOR != at or not 0 < length <= 2 * len(cluster):
                raise FormatError("the marker of a compressed grain is not of this grain")
            done = inflate_all(lambda: _part(stored(), _MARKER, length), cluster)
            if done < min(len(cluster), self.size - at):
                raise FormatError("compressed grain: the data ends early")

        return decompress


def _part(pieces: Iterable[memoryview], skip: int, length: int) -> Iterator[memoryview]:
    """PIECES without the first SKIP bytes, all of which are in the first piece, and then at most LENGTH bytes."""
    for piece in pieces:
        yield piece[skip : skip + length]
        length -= len(piece) - skip
        skip = 0
        if length <= 0:
            return


def open_image(file: HostFile, options: OpenOptions) -> Source:
    """The VMDK in FILE, with its extents and parents. FILE is the source's from then on; after an error, the caller's.

    Raises an imgsum.Error.
    """
    opened, layers, cache = [file], [], TableCache()
    try:
        here, child = file, None
        while True:
            with naming(here.name):
                descriptor, layer = _open_layer(here, opened, options, cache)
                layers.append(layer)
                if child is None:
                    _check_image(descriptor, layer, options, cache)
                elif child.parent_id != descriptor.id:
                    raise RefusedError(f"is not as it was when it became a parent: its CID is not {child.parent_id}")
                if not descriptor.has_parent:
                    return LayeredSource("vmdk", layers, opened)
                if len(layers) == MAX_LAYERS:
                    raise RefusedError(f"has more than {MAX_LAYERS - 1} parents")
                parent = open_beside(_parent(descriptor), "parent", here, opened, options)
            opened.append(parent)
            here, child = parent, descriptor
    except BaseException:
        for other in opened[1:]:
            other.close()
        raise


def _check_image(descriptor: Descriptor, layer: _VmdkLayer, options: OpenOptions, cache: TableCache) -> None:
    """Raise RefusedError if OPTIONS don't allow what the image itself says."""
    refuse_larger(layer.size, options)
    if options.untrusted:
        if descriptor.has_parent:
            raise RefusedError("has a parent, which --untrusted does not allow")
        bound_work(layer, cache)


def _parent(descriptor: Descriptor) -> str:
    """The name of the parent of an image that has one."""
    if descriptor.parent is None:
        raise RefusedError("is a VMDK with a parent, and does not record its name")
    if descriptor.parent_id in (NO_PARENT, ""):
        raise RefusedError(f"is a VMDK with a parent '{descriptor.parent}', and says that it has none")
    return descriptor.parent


def _open_layer(
    file: HostFile, opened: list[HostFile], options: OpenOptions, cache: TableCache
) -> tuple[Descriptor, _VmdkLayer]:
    """The image in FILE. What is opened for it goes to OPENED."""
    magic = file.read_bytes(0, 8)
    if magic.startswith((sparse.COWD, sparse.SESPARSE)):
        raise RefusedError(_EXTENT_FILE)
    if magic.startswith(sparse.KDMV):
        shape = sparse.parse(file.read_bytes, file.size)
        descriptor = _embedded(file, shape)
        return descriptor, _VmdkLayer([file], [_extent(0, file, shape, cache, len(opened))])
    descriptor = parse_descriptor(file.read_bytes(0, LIMIT))
    check_file(descriptor)
    if options.untrusted:
        raise RefusedError("has its content in other files, which --untrusted does not allow")
    files: dict[str, HostFile] = {}
    extents = []
    for number, described in enumerate(descriptor.extents, 1):
        if described.name not in files:
            if len(opened) == _MAX_FILES:
                raise RefusedError(f"consists of more than {_MAX_FILES} files")
            files[described.name] = open_beside(described.name, "extent", file, opened, options)
            opened.append(files[described.name])
        index, part = list(files).index(described.name), files[described.name]
        if described.is_flat():
            extents.append(_flat(index, part, described))
            continue
        try:
            shape = sparse.parse(part.read_bytes, part.size)
            if (described.kind == "SESPARSE") != (shape.entry_size == 8):
                raise FormatError(f"is not of the kind {described.kind}")
            if described.offset is not None:  # QEMU does not take such a line
                raise FormatError(f"begins at sector {described.offset} of its file, as only a flat one can")
            _check_capacity(described.sectors, shape, is_last=number == len(descriptor.extents))
        except Error as error:
            error.reason = f"its extent '{described.name}' {error.reason}"
            raise
        extents.append(_extent(index, part, shape, cache, len(opened)))
    return descriptor, _VmdkLayer(list(files.values()), extents)


def _extent(index: int, file: HostFile, shape: Shape, cache: TableCache, number: int) -> _Extent:
    """A sparse extent in FILE. NUMBER tells the files that share CACHE apart."""
    if shape.is_compressed and shape.grain > _MAX_COMPRESSED:
        raise RefusedError(f"has compressed grains of {shape.grain} bytes, more than {_MAX_COMPRESSED}")
    return _Extent(index, Grains(file, shape, cache, number), shape.grain if shape.is_compressed else 0)


def _flat(index: int, file: HostFile, described: DescribedExtent) -> _Extent:
    offset, size = (described.offset or 0) * SECTOR, described.sectors * SECTOR
    if file.size < offset + size:
        raise TruncatedError(f"truncated: '{described.name}' has {file.size} of {offset + size} bytes")
    return _Extent(index, _Flat(size, offset))


def _check_capacity(said: int, shape: Shape, *, is_last: bool) -> None:
    """Raise FormatError unless the SAID sectors of an extent line are those of SHAPE, which count.

    VirtualBox rounds the capacity up, so in the last extent it may be up to 64 KiB, or a grain, larger.
    """
    more = shape.size // SECTOR - said
    if more and not (is_last and 0 < more < max(shape.grain // SECTOR, 128)):
        raise FormatError(
            f"is a VMDK that says its size twice, and differently: {said} sectors in its descriptor and"
            f" {shape.size // SECTOR} in its header"
        )


def _embedded(file: HostFile, shape: Shape) -> Descriptor:
    """The descriptor in FILE, of which only the parent and the CID count. Without one, the file is of a split image."""
    if not shape.descriptor or file.read_bytes(shape.descriptor, 1) in (b"", b"\0"):
        raise RefusedError(_EXTENT_FILE)
    # QEMU reads it at sector 1, wherever the header says that it is.
    places = {(SECTOR, _EMBEDDED_LENGTH), (shape.descriptor, min(shape.descriptor_length, LIMIT))}
    first, *others = (parse_descriptor(file.read_bytes(*place)) for place in places)
    if others and others != [first]:
        raise FormatError("is a VMDK with two descriptors that disagree")
    if len(first.extents) > 1:
        raise RefusedError("is a VMDK of several extents, of which this file is one")
    for extent in first.extents:
        _check_capacity(extent.sectors, shape, is_last=True)
    return first
