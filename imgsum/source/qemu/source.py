"""What other programs serve: a private, read-only qemu-nbd for the formats that only QEMU reads, or a [ COMMAND ]."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from imgsum.errors import Error, MissingError, OpenError, RefusedError, UsageError, naming, os_error_reason
from imgsum.extent import Extent
from imgsum.source import NATIVE, Command, Evidence, OpenOptions
from imgsum.source.backing import backing_file
from imgsum.source.file import HostFile, cache_details
from imgsum.source.layers import LayeredSource
from imgsum.source.nbd.source import MAX_CONNECTIONS, NbdSource
from imgsum.source.qemu.formats import inspect
from imgsum.source.qemu.formats.links import Links
from imgsum.source.qemu.server import Server
from imgsum.source.vhd import DIFFERENCING, read_footer

_FIRST_FD = 5  # where qemu-nbd finds our descriptors; those before are in use (server.py)

_MAX_FILES = 64
"""Backing files and extents of one image. Each takes a descriptor, or more."""

# qemu-nbd: Failed to blk_new_open 'json:{...}': Max Table Entries too large
_PREFIX = re.compile(r"^(?:Failed to blk_new_open 'json:.*?}': )?")

# qemu-nbd: Could not open 'NAME': Invalid argument
_REFUSED = re.compile(r"(?:Failed to blk_new_open 'json:.*': |Could not open '.*': )+Invalid argument")

# qemu-nbd: warning: dmg-lzfse module is missing, accessing lzfse compressed blocks will result in I/O errors
_MODULE = re.compile(r"dmg-(\w+) module is missing")


def open_with_qemu(file: HostFile, format_name: str, options: OpenOptions) -> ServedSource:
    """Open FILE, an image of FORMAT_NAME, with a private qemu-nbd. FILE is closed with the source, or on failure.

    Raises an imgsum.Error.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        if options.untrusted:
            raise RefusedError(
                f"is a {format_name} image, which takes QEMU to read, and --untrusted does not allow that"
            )
        if options.snapshot is not None:
            raise UsageError("a snapshot can be read by imgsum's own reader of qcow2 only")
        if shutil.which("qemu-nbd") is None:
            raise MissingError(
                f"is a {format_name} image, which takes qemu-nbd to read, and that is not installed:"
                " install qemu-utils (Debian, Ubuntu) or qemu-img (Fedora, RHEL)"
            )
        image = _Image(options, stack)
        node = image.node(file, format_name)
        direct = options.direct and all(part.direct for part in image.files)
        command = [
            "qemu-nbd",
            "--read-only",
            f"--cache={'none' if direct else 'writeback'}",
            f"--shared={min(MAX_CONNECTIONS, options.connections or MAX_CONNECTIONS)}",
            *image.objects,
            "json:" + json.dumps(node),
        ]
        server = Server(command, keep=image.descriptors)
        stack.callback(server.close)
        source = ServedSource(file.name, format_name, server, options, image.files)
        source.resources = stack.pop_all()
        source.note = image.note
        if image.size not in (None, source.size):
            source.close()
            raise RefusedError(f"has {image.size} bytes of content, of which this QEMU makes {source.size}")
        return source


def open_command(command: Command, options: OpenOptions) -> ServedSource:
    """The export of COMMAND, which gets its listening socket by socket activation, as from nbdcopy."""
    if options.format not in (None, "raw"):
        raise UsageError(f"an NBD export can't be read as {options.format}: its content is what the server makes of it")
    with contextlib.ExitStack() as stack:
        server = Server(command.argv)
        stack.callback(server.close)
        source = ServedSource(str(command), "raw", server, options, [])
        source.resources = stack.pop_all()
        return source


class ServedSource(NbdSource):
    """The export of a server that we started. Its errors have the server's last message."""

    def __init__(
        self, name: str, format_name: str, server: Server, options: OpenOptions, files: Sequence[HostFile]
    ) -> None:
        """Connect to SERVER, which reads FILES. Raises an imgsum.Error."""
        self.note: str | None = None
        """What a user should know about a checksum of this content, or None."""
        self.resources = contextlib.ExitStack()
        """Closed with the source, after the connections."""
        self._server = server
        self._files = files
        try:
            super().__init__(name, server.connect, options)
        except OpenError as error:
            # The server's message, as it ends, says more than that the connection broke.
            self.explain(error, within=0.5)
            raise
        self.format = format_name

    def clean(self, bitmap: str) -> Iterator[Extent]:
        """See Source. A command's export may have bitmaps; that of our own qemu-nbd has none."""
        if self._files:
            raise RefusedError("dirty bitmaps are read by imgsum's own reader of qcow2 only")
        return super().clean(bitmap)

    def check_unchanged(self) -> None:
        """See Source. For a command's export there is no way to tell."""
        for file in self._files:
            file.check_unchanged()

    def evidence(self) -> Evidence:
        """See Source. A command's export has what NBD has."""
        return [file.evidence() for file in self._files] or super().evidence()

    def details(self) -> dict[str, object]:
        """See Source."""
        details: dict[str, object] = {"served_by": self._server.program, **super().details()}
        return {**details, **cache_details(self._files[0])} if self._files else details

    def close(self) -> None:
        """See Source. The server has ended when this returns."""
        super().close()
        self.resources.close()

    def explain(self, error: Error, within: float = 0.0) -> None:
        """Add the server's last message to the reason of ERROR, or that it has ended, WITHIN so many seconds."""
        ended = self._server.ended(within)
        message = _PREFIX.sub("", self._server.last_message())
        for number, file in reversed(list(enumerate(self._files, _FIRST_FD))):  # 50 before 5
            message = message.replace(f"/proc/self/fd/{number}", file.name)
        if missing := _MODULE.search(message):
            message = (
                f"the dmg has {missing[1]} chunks, which this QEMU can't read without its module: install"
                " qemu-block-extra (Debian, Ubuntu) or qemu-block-dmg (Fedora), or convert the image on a Mac: hdiutil"
                " convert IMAGE -format UDZO -o NEW"
            )
        elif self._files and _REFUSED.fullmatch(message):
            message = f"it can't read this {self.format} image, and does not say why: it may be damaged"
        if isinstance(error, OpenError) and (message or ended):
            error.reason = f"{self._server.program}: {message or 'ended without serving anything'}"
        elif message or ended:
            error.reason += f" ({self._server.program}: {message or 'ended'})"


class _Image:
    """Describes an image, with its backing files, to qemu-nbd, so that QEMU has nothing to detect."""

    def __init__(self, options: OpenOptions, stack: contextlib.ExitStack) -> None:
        self.files: list[HostFile] = []
        self.descriptors: dict[int, int] = {}
        """{number in qemu-nbd: our descriptor}"""
        self.objects: list[str] = []
        self.size: int | None = None
        """Bytes of content of the image itself, and what a user should know of it: see Links."""
        self.note: str | None = None
        self._options = options
        self._stack = stack

    def node(self, file: HostFile, format_name: str) -> dict[str, Any]:
        """The description of FILE as a block node, for QEMU (qapi: BlockdevOptions). Raises an imgsum.Error."""
        if any(file.identity == other.identity for other in self.files):
            raise RefusedError("is its own backing file", name=file.name)
        fd = self._keep(file)
        with naming(file.name):
            links = self._inspect(file, format_name)
            if len(self.files) == 1:
                self.size, self.note = links.size, links.note
            # Through /proc QEMU opens the file that was inspected, and takes no name for a protocol. A VMDK descriptor
            # is opened by its path, as QEMU looks for the extents in the same directory.
            name = f"/proc/self/fd/{fd}" if not links.files else self._path_beside(file, links.files)
            driver = "host_device" if file.is_block_device else "file"
            node: dict[str, Any] = {"driver": format_name, "file": {"driver": driver, "filename": name}}
            node.update(links.driver_options)
            if self._options.force_share:
                node["force-share"] = True
            if links.encryption:
                node["encrypt"] = {"format": links.encryption, "key-secret": self._secret()}
            # null: QEMU opens no backing file, even if it finds one in the image.
            node["backing"] = self._backing(file, format_name, links) if links.backing_file else None
        return node

    def _inspect(self, file: HostFile, format_name: str) -> Links:
        if format_name not in ("vdi", "vhdx", "vmdk", "vpc"):
            return inspect(file.read_bytes, file.size, format_name, _allocated(file))
        driver_options: tuple[tuple[str, str], ...] = ()
        if format_name == "vpc":
            footer = read_footer(file.read_bytes, file.size)
            if footer.kind == DIFFERENCING:
                raise RefusedError("is a differencing VHD, of which QEMU does not read the parent")
            # QEMU knows some creators, and others with each version: it is told.
            driver_options = (("force_size_calc", "chs" if footer.uses_geometry() else "current_size"),)
        source = NATIVE[format_name](file, self._options)
        assert isinstance(source, LayeredSource)
        others = tuple(source.files[1:])
        for other in others:
            self._stack.callback(other.close)
        if len(source.layers) > 1:
            raise RefusedError("has a parent, which only imgsum's own reader follows (--reader native)")
        for _ in source.extents(0, source.size):
            pass  # raises an imgsum.Error for a damaged image, which QEMU may read wrongly
        return Links(size=source.size, note=source.note, driver_options=driver_options, files=others)

    def _backing(self, file: HostFile, image_format: str, links: Links) -> dict[str, Any]:
        path, format_name = backing_file(links.backing_file or b"", links.backing_format, file, image_format)
        try:
            backing = self._open(path)
        except Error as error:
            raise OpenError(f"its backing file '{path}' can't be read: {error.reason}") from error
        return self.node(backing, format_name)

    def _path_beside(self, file: HostFile, others: Sequence[HostFile]) -> str:
        """FILE's path, for an image that has its content in OTHERS."""
        path = os.path.abspath(file.path)
        for other in others:
            self._keep(other)
        try:
            path.encode()
        except UnicodeEncodeError:
            raise OpenError("has a name that is not UTF-8, and files beside it: QEMU can't be told of those") from None
        return path

    def _open(self, path: str) -> HostFile:
        file = HostFile(path, path, self._options)
        self._stack.callback(file.close)
        return file

    def _keep(self, file: HostFile) -> int:
        """Pass FILE's descriptor to qemu-nbd. Returns its number there."""
        if len(self.files) >= _MAX_FILES:
            raise RefusedError(f"consists of more than {_MAX_FILES} files")
        fd = _FIRST_FD + len(self.files)
        self.files.append(file)
        self.descriptors[fd] = file.fd
        return fd

    def _secret(self) -> str:
        """The ID of the QEMU object with the secret. QEMU reads the file, so the secret is on no command line."""
        path = self._options.secret_file
        if path is None:
            raise RefusedError("is encrypted: --secret-file FILE says where its secret is")
        if not self.objects:
            try:
                secret = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise OpenError(f"the secret can't be read: {path}: {os_error_reason(error)}") from error
            self._stack.callback(os.close, secret)
            fd = _FIRST_FD + _MAX_FILES
            self.descriptors[fd] = secret
            self.objects = ["--object", f"secret,id=secret,file=/proc/self/fd/{fd}"]
        return "secret"


def _allocated(file: HostFile) -> int:
    """Bytes that FILE has on the disk."""
    return file.size if file.is_block_device else os.fstat(file.fd).st_blocks * 512
