"""Where bytes come from: the Source protocol and the one function that opens them.

A source knows its size, which parts of it are certainly zero, and how to read the rest. It knows nothing of digests.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from imgsum.errors import Error, NotNativeError, OpenError, RefusedError, UsageError
from imgsum.extent import Extent
from imgsum.parameters import (
    COMPRESSED_FORMATS,
    CONNECTIONS,
    FLAG,
    FORMATS,
    OPERANDS,
    READERS,
    REQUEST_SIZE,
    SIZE,
    TEXT,
    TIMEOUT,
    choice,
    require,
    shown,
)
from imgsum.trace import debug
from imgsum.units import MIB, TIB

if TYPE_CHECKING:
    from imgsum.source.file import HostFile
    from imgsum.source.stream import Sequential, Stream

UNTRUSTED_MAX_SIZE = TIB
"""Bytes of content of an untrusted image, unless --max-size is given. A hole of this size takes 0.3 s, and the largest
image that a file of a few KiB can describe, 2 EiB, would take days."""

_NBD_SCHEMES = ("nbd://", "nbds://", "nbd+unix://", "nbds+unix://", "nbd+vsock://", "nbds+vsock://")

ReadBytes = Callable[[int, int], bytes]
"""read(offset, length): that many bytes of a file, fewer only where it ends."""


class _OpenOptions(NamedTuple):
    """The fields of OpenOptions."""

    format: str | None = None
    """The image's format, one of FORMATS and COMPRESSED_FORMATS; None detects it. Never overruled: with `raw` no header
    is parsed."""
    direct: bool = False
    """-T none: read with O_DIRECT where the file system can."""
    force_share: bool = False
    """Read an image that a running virtual machine has open for writing."""
    extents: bool = True
    """False: read everything, including areas reported as zero. The engine does that; sources need not."""
    untrusted: bool = False
    """Refuse an image that refers to anything but itself, or that takes work out of proportion to its file."""
    max_size: int | None = None
    """Refuse images whose content is larger, in bytes. None: there is no limit, or UNTRUSTED_MAX_SIZE."""
    reader: str = "auto"
    """Who reads images that are not raw: `native`, `qemu` (a private qemu-nbd), or `auto`."""
    request_size: int = MIB
    """Maximum bytes of one read. A power of two."""
    queue_size: int = 16 * MIB
    """Maximum bytes in flight, over all workers; a single request may be larger."""
    connections: int | None = None
    """NBD connections; None: one for each worker when the server allows it."""
    connect_timeout: float = 30.0
    """How long an NBD server may take until it is ready."""
    io_timeout: float | None = None
    """How long an NBD server may take to answer a request; None: there is no limit."""
    secret_file: str | None = None
    """A file with the secret of an encrypted image."""
    snapshot: str | None = None
    """The name or ID of an internal snapshot (qcow2) to read instead of the active layer."""
    bitmap: str | None = None
    """The name of a dirty bitmap that clean() will be asked for: NBD must know when it connects."""
    offset: int = 0
    """Where the range that is read begins, in bytes."""
    length: int | None = None
    """Bytes of that range; None: to the end."""
    max_memory: int = 256 * MIB
    """Bytes that decompressing a file (raw.xz and the like) may take for dictionaries and blocks."""
    own_descriptors: bool = True
    """/dev/fd/N may be a descriptor that this process opened. Not so in the command, where it would be an image's."""


class OpenOptions(_OpenOptions):
    """How images are opened. Sizes in bytes, times in seconds. Raises UsageError, which names the parameter."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers take the names and types from the fields

        def __new__(cls, *args, **fields):
            """Check the fields."""
            self = super().__new__(cls, *args, **fields)
            self._check()
            if isinstance(self.secret_file, os.PathLike):
                self = tuple.__new__(cls, super()._replace(secret_file=os.fspath(self.secret_file)))
            return self

        @classmethod
        def _make(cls, fields):
            return cls(*fields)

    def _check(self) -> None:
        require(FLAG, direct=self.direct, force_share=self.force_share, extents=self.extents)
        require(FLAG, untrusted=self.untrusted, own_descriptors=self.own_descriptors)
        require(choice(READERS), reader=self.reader)
        require(REQUEST_SIZE, request_size=self.request_size)
        require(SIZE, queue_size=self.queue_size, offset=self.offset, max_memory=self.max_memory)
        require(TIMEOUT, connect_timeout=self.connect_timeout)
        for rule, name in (
            (choice(FORMATS + COMPRESSED_FORMATS + OPERANDS), "format"),
            (SIZE, "max_size"),
            (CONNECTIONS, "connections"),
            (TIMEOUT, "io_timeout"),
            (TEXT, "secret_file"),
            (TEXT, "snapshot"),
            (TEXT, "bitmap"),
            (SIZE, "length"),
        ):
            value = getattr(self, name)
            if value is not None:
                require(rule, **{name: value})

    def __repr__(self) -> str:
        """The fields that are not as usual."""
        usual = self._field_defaults
        fields = (f"{name}={value!r}" for name, value in self._asdict().items() if value != usual[name])
        return f"OpenOptions({', '.join(fields)})"


class Command:
    """A program that serves NBD by socket activation: `[ PROGRAM ARG... ]` of the command line.

    Only a Command is run, never a list of strings.
    """

    __slots__ = ("argv",)

    def __init__(self, *argv: str) -> None:
        """The program, which is looked for in PATH, and its arguments. Raises UsageError."""
        self.argv = argv
        if not argv or not argv[0]:
            raise UsageError("a command needs the name of a program")
        for argument in argv:
            if not isinstance(argument, str) or "\0" in argument:
                raise UsageError(f"not an argument of a command: {shown(argument)}")

    def __str__(self) -> str:
        """What messages and checksum lines call it."""
        return f"[ {' '.join(self.argv)} ]"

    def __repr__(self) -> str:
        """As it is written in Python."""
        return f"Command({', '.join(map(repr, self.argv))})"


Image = str | os.PathLike[str] | Command
"""A path, `-` for standard input, an NBD URI, or a command that serves NBD."""


def path_or_command(value: Image, parameter: str) -> str | Command:
    """VALUE, with a path as str. Raises UsageError, which names the PARAMETER, for what is neither."""
    if isinstance(value, Command):
        return value
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(path, str):
        return path
    hint = " (a program that serves NBD is an imgsum.Command)" if isinstance(value, (list, tuple)) else ""
    raise UsageError(f"{parameter}: not a path: {shown(value)}{hint}")


def options_with(options: OpenOptions | None, **given: object) -> OpenOptions:
    """OPTIONS, or the usual ones, with the fields that are GIVEN and not None. Raises UsageError."""
    if options is None:
        options = OpenOptions()
    if not isinstance(options, OpenOptions):
        raise UsageError(f"options: not OpenOptions: {shown(options)}")
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return options._replace(**fields)


class Reader(Protocol):
    """One worker's way to read a source. A reader is used by one thread at a time."""

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill all of BUFFER with the content at OFFSET, or raise an imgsum.Error with the offset.

        It asks for at most the request size at a time.

        BUFFER is writable, begins on a page boundary, and is not empty. OFFSET..OFFSET+len(BUFFER) is inside the
        size, if that is known.
        """

    def close(self) -> None:
        """Give back what the reader holds. The source stays open."""


Evidence = list[dict[str, object]]
"""What tells an image's content from a later one: a record for each file, in the order of the chain.

A file's record has `path`, `device`, `inode`, `size` (bytes), `mtime_ns` and `ctime_ns`. Two images of one format whose
records are equal, but for the paths, have the same content, as far as timestamps can tell: see same_evidence().
"""


def same_evidence(one: Evidence, other: Evidence) -> bool:
    """Whether both are of the same files, wherever those are seen from, at the same time. Nothing is not the same."""

    def known(evidence: Evidence) -> Evidence:
        return [{key: value for key, value in record.items() if key != "path"} for record in evidence]

    return bool(one) and all("ctime_ns" in record for record in one) and known(one) == known(other)


class Source(Protocol):
    """An open image. Its methods are called by the feeding thread; its readers by the workers."""

    name: str
    """As the user gave it."""
    format: str
    """QEMU's name of the format: raw, qcow2, vmdk ..."""
    size: int
    """Bytes of content."""

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        """The extents of START..START+LENGTH: in order, not empty, exactly tiling that range.

        They come lazily: at no time is more asked of the source, or held, than a bounded stretch of it. The source
        may be read meanwhile. An extent is `zero` only when that is certain; what a source can't tell is data.
        """

    def reader(self) -> Reader:
        """A reader for one worker. May be called from that worker's thread, and may raise an imgsum.Error."""

    def check_unchanged(self) -> None:
        """Raise ChangedError if the content may have changed since the source was opened."""

    def details(self) -> dict[str, object]:
        """What --stats should say of how this source was read, e.g. that O_DIRECT was not possible."""

    def close(self) -> None:
        """Give back everything: descriptors, connections, children, directories."""

    # What a source may have besides; engine/content.py has the fallback of each.
    #
    # evidence() -> Evidence
    #
    # unchanged(image_format: str, evidence: Evidence) -> Iterator[Extent] | None
    #     The extents of the content; `zero` stands for "certainly as in the image of that format and evidence". None:
    #     that image is not a part of this one.
    #
    # clean(bitmap: str) -> Iterator[Extent]
    #     The extents of the content; `zero` stands for "not dirty in that bitmap". Raises RefusedError where the bitmap
    #     is not there, or says nothing that counts.


def open_source(image: str | Command, options: OpenOptions) -> Source | Sequential:
    """Open IMAGE: a path, `-`, an NBD URI, or a command that serves NBD. Raises an imgsum.Error.

    A path is a path, whatever it looks like: only the six schemes of NBD URIs are taken for anything else.
    """
    try:
        if options.untrusted and options.format is None:
            raise UsageError("--untrusted needs -f: what an image says of itself does not count")
        if options.untrusted and options.max_size is None:
            options = options._replace(max_size=UNTRUSTED_MAX_SIZE)
        source = _open(image, options)
        try:
            refuse_larger(getattr(source, "size", 0), options)  # a stream has no size, and counts as it goes
        except BaseException:
            source.close()
            raise
    except Error as error:
        error.about(str(image))
        raise
    debug("%s: opened as %s, %s bytes", image, source.format, getattr(source, "size", "an unknown number of"))
    return source


def refuse_larger(size: int, options: OpenOptions) -> None:
    """Raise RefusedError when SIZE bytes of content are more than OPTIONS allow."""
    if options.max_size is not None and size > options.max_size:
        raise RefusedError(f"has {size} bytes of content, more than the {options.max_size} of --max-size")


def _open(image: str | Command, options: OpenOptions) -> Source | Sequential:
    if isinstance(image, Command):
        from imgsum.source.qemu.source import open_command

        if options.untrusted:
            raise RefusedError("is a command, and --untrusted runs none")
        return open_command(image, options)
    if is_nbd_uri(image):
        from imgsum.source.nbd.source import open_nbd

        return open_nbd(image, options)
    if image.startswith(("nbd:", "nbds:", "nbd+", "nbds+")) and not os.path.lexists(image):
        from imgsum.source.nbd.source import not_a_uri

        raise OpenError(not_a_uri(image))
    advice = _remote_advice(image)
    if advice is not None and not os.path.lexists(image):
        raise OpenError(advice)
    if is_stream(image):
        from imgsum.source.stream import Stream

        if options.format is not None and options.format in COMPRESSED_FORMATS:
            stream = Stream(image, options._replace(max_size=None))
            try:
                return _decompress(stream, options, options.format)
            except BaseException:
                stream.close()
                raise
        if options.format not in (None, "raw"):
            raise UsageError(f"a stream can't be read as {options.format}: only a file or device can")
        return Stream(image, options)
    return _open_file(image, options)


def _remote_advice(image: str) -> str | None:
    """What to do when IMAGE is written like a URL, or as QEMU writes what is not a file; None for other names."""
    scheme, colon, rest = image.partition(":")
    scheme = scheme.lower()
    local = "imgsum reads local files, block devices and NBD exports, and this is none"
    if scheme == "file" and rest.startswith("//"):
        return "no such file: write the path without file://"
    if scheme in ("http", "https", "ftp", "ftps") and rest.startswith("//"):
        return f"{local}: serve the URL with nbdkit: imgsum checksum [ nbdkit -r curl {image} ]; or download it"
    if scheme in ("ssh", "sftp", "scp") and rest.startswith("//"):
        host, _, path = rest[2:].partition("/")
        user, _, host = host.rpartition("@")
        login = f"user={user} " if user else ""
        return f"{local}: imgsum checksum [ nbdkit -r ssh host={host} {login}/{path} ]; or run imgsum on that host"
    if scheme in ("rbd", "iscsi", "nfs", "gluster", "gluster+tcp", "sheepdog", "json") and colon:
        return f"{local}: serve it with QEMU: qemu-nbd -r -t -k SOCKET NAME, and read nbd+unix:///?socket=SOCKET"
    if rest.startswith("//") and scheme.replace("+", "").replace("-", "").isalnum():
        return f"{local}: download it first, or mount it"
    return None


def is_nbd_uri(image: str) -> bool:
    """Whether IMAGE is taken for an NBD URI, and not for a path."""
    return image.startswith(_NBD_SCHEMES)


def is_stream(image: str) -> bool:
    """Whether IMAGE is read from its current position to its end: `-`, /dev/fd/N and the like, or a FIFO."""
    from imgsum.source.stream import stream_descriptor

    if stream_descriptor(image) is not None:
        return True
    try:
        return stat.S_ISFIFO(os.stat(image).st_mode)
    except (OSError, ValueError):
        return False  # opening it will say why


def is_bmap(image: str | Command, options: OpenOptions) -> bool:
    """Whether IMAGE is a bmap, and no image: see is_index()."""
    from imgsum.source.detect import begins_as_bmap

    return _is_operand(image, options, "bmap", begins_as_bmap)


def is_index(image: str | Command, options: OpenOptions) -> bool:
    """Whether IMAGE is an index, and no image: -f says so, or its name and its first bytes do.

    Never the bytes alone: a guest may write an index to its raw disk, and would choose what is read instead of it.
    Raises RefusedError for a file that is named like an index, and begins like none.
    """
    from imgsum.source.detect import INDEX_MAGIC

    return _is_operand(image, options, "index", lambda head: head.startswith(INDEX_MAGIC))


def _is_operand(image: str | Command, options: OpenOptions, kind: str, begins_so: Callable[[bytes], bool]) -> bool:
    if options.format is not None:
        return options.format == kind
    if not isinstance(image, str) or not image.lower().endswith(f".{kind}") or is_nbd_uri(image) or is_stream(image):
        return False
    try:
        fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            begins = os.pread(fd, 64, 0)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return False  # opening it will say why
    if not begins_so(begins):
        raise RefusedError(f"is named .{kind}, and does not begin as one: it is damaged, or say -f raw", name=image)
    return True


def is_file(image: str) -> bool:
    """Whether IMAGE is the name of a file or device whose bytes can be read anywhere."""
    return not is_nbd_uri(image) and not is_stream(image) and not image.startswith("[ ")


def is_other_format(path: str) -> bool:
    """Whether the file PATH, which need not be there, is of a format that is not raw."""
    from imgsum.source.file import HostFile

    try:
        file = HostFile(path, path, OpenOptions(force_share=True))
    except Error:
        return False
    try:
        return _detect(path, file) != "raw"
    except RefusedError:
        return True
    finally:
        file.close()


def _decompress(file: HostFile | Stream, options: OpenOptions, name: str) -> Sequential:
    """What is in FILE, of the format NAME, one of COMPRESSED_FORMATS. Leaves FILE to the caller when it raises."""
    from imgsum.source.decompress import Decompressed

    return Decompressed(file, options, name.removeprefix("raw."), given=options.format is not None)


def _detect(path: str, file: HostFile) -> str:
    """The format of FILE. Raises an imgsum.Error for what is not to be read without -f."""
    from imgsum.source import detect

    head = file.read_bytes(0, detect.HEAD_SIZE)
    if compression := detect.named_compression(path, head):
        return f"raw.{compression}"
    name = detect.detect(head, file.read_bytes(max(0, file.size - detect.TAIL_SIZE), detect.TAIL_SIZE))
    reason = detect.not_as_named(path, name) if name != "raw" else detect.not_a_disk(head, path)
    if reason is not None:
        raise RefusedError(reason)
    return name


def _open_file(path: str, options: OpenOptions) -> Source | Sequential:
    from imgsum.source.file import HostFile, RawSource

    if is_bmap(path, options):
        raise UsageError("is a bmap, which has digests of parts of an image: `imgsum compare` verifies an image by it")
    if is_index(path, options):
        raise UsageError("is an index, and an image is needed")
    file = HostFile(path, path, options)
    try:
        name = options.format or _detect(path, file)
        if name == "raw" or name in COMPRESSED_FORMATS:
            if options.snapshot is not None:
                raise UsageError("a raw image has no snapshots")
            return RawSource(file) if name == "raw" else _decompress(file, options, name)
        if options.snapshot is not None and name != "qcow2":
            raise UsageError("a snapshot can be read by imgsum's own reader of qcow2 only")
        if name in NATIVE and options.reader != "qemu":
            try:
                return NATIVE[name](file, options)
            except NotNativeError as error:
                if options.untrusted or options.reader == "native":
                    raise
                debug("%s: %s, so QEMU reads it", path, error)
        elif options.reader == "native":
            raise NotNativeError(f"is a {name} image, which takes QEMU to read, and that is not the native reader")
        from imgsum.source.qemu.source import open_with_qemu

        return open_with_qemu(file, name, options)
    except BaseException:
        file.close()
        raise


def _qcow2(file: HostFile, options: OpenOptions) -> Source:
    from imgsum.source.qcow2.source import open_image

    return open_image(file, options)


def _vdi(file: HostFile, options: OpenOptions) -> Source:
    from imgsum.source.vdi import open_image

    return open_image(file, options)


def _vhd(file: HostFile, options: OpenOptions) -> Source:
    from imgsum.source.vhd import open_image

    return open_image(file, options)


def _vhdx(file: HostFile, options: OpenOptions) -> Source:
    from imgsum.source.vhdx.source import open_image

    return open_image(file, options)


def _vmdk(file: HostFile, options: OpenOptions) -> Source:
    from imgsum.source.vmdk.source import open_image

    return open_image(file, options)


NATIVE: dict[str, Callable[[HostFile, OpenOptions], Source]] = {
    "qcow2": _qcow2,
    "vdi": _vdi,
    "vhdx": _vhdx,
    "vmdk": _vmdk,
    "vpc": _vhd,
}
"""Formats that are read without QEMU. An opener takes FILE, and leaves it to the caller when it raises an imgsum.Error:
NotNativeError for what QEMU must read."""
