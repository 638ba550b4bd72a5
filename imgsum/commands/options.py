"""The options that commands share, in groups, and what is made of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from imgsum import parameters
from imgsum.errors import UsageError
from imgsum.units import MIB, parse_size

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from imgsum.engine.content import Progress
    from imgsum.hash.blkhash import Construction
    from imgsum.source import Command, OpenOptions


class Names:
    """What a command's names are."""

    def __init__(self, dest: str, metavar: str, count: str | int, help_: str) -> None:
        self.dest = dest
        self.metavar = metavar
        self.count = count
        """`*`, or how many there must be."""
        self.help = help_


IMAGE_HELP = "a file, a block device, an NBD URI, a command in brackets, or - for standard input"

SOURCES = """\
an IMAGE is a file or block device of any format that is read, a raw image in a compressed file (.xz, .gz, .zst, .bz2,
.lz4, .lzma), an NBD URI (nbd://, nbds://, nbd+unix://, nbds+unix://, nbd+vsock://, nbds+vsock://), `[ COMMAND ARG... ]`
for a program that serves NBD by socket activation, or `-` for standard input"""

SIZES = "Sizes take k, m, g, t (1024, either case)."


class Arguments(argparse.Namespace):
    """What was asked for: each option by its long name, and the names."""

    command: str
    names: list[str | Command]


def add_output(
    group: argparse._ArgumentGroup, quiet: str = "no notes and no progress, only results and errors"
) -> None:
    """What is printed. QUIET: the help of -q."""
    group.add_argument("--json", action="store_true", help="print one JSON object for each image, also for failures")
    group.add_argument("--stats", action="store_true", help="say what was read, what was skipped, and how long it took")
    group.add_argument("-q", "--quiet", action="store_true", help=quiet)
    group.add_argument("-p", "--progress", action="store_true", help="show progress at once, and off a terminal too")
    group.add_argument("--debug", action="store_true", help="say on stderr what is opened, asked, read and decided")
    group.add_argument("--no-progress", action="store_true", help="never show progress")
    group.add_argument(
        "--progress-fd",
        metavar="N",
        type=_descriptor,
        help="write progress to descriptor N, as lines of the form N/100",
    )


def add_construction(parser: argparse.ArgumentParser) -> None:
    """What decides the value of a checksum, besides the content."""
    group = parser.add_argument_group("checksum")
    group.add_argument("-a", "--algorithm", metavar="NAME", help="hash function (default: sha256)")
    group.add_argument(
        "-b",
        "--block-size",
        metavar="SIZE",
        type=size(parameters.BLOCK_SIZE),
        help="block size, which is part of what the checksum means (default: 64k)",
    )
    group.add_argument(
        "--construction",
        metavar="NAME",
        choices=parameters.CONSTRUCTIONS,
        default="blkhash",
        help="blkhash, or imageio for the value that oVirt reports of an uploaded disk",
    )


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How images are opened and read: the fields of OpenOptions."""
    group = parser.add_argument_group("reading")
    group.add_argument(
        "-f",
        "--format",
        metavar="FORMAT",
        type=format_name,
        choices=parameters.FORMATS + parameters.COMPRESSED_FORMATS + parameters.OPERANDS,
        help="the image's format, instead of detecting it; raw parses no header",
    )
    group.add_argument(
        "-T",
        "--cache",
        metavar="MODE",
        choices=("writeback", "none"),
        default="writeback",
        help="writeback reads through the page cache (default), none with O_DIRECT",
    )
    group.add_argument(
        "-U", "--force-share", action="store_true", help="read an image that a running virtual machine writes to"
    )
    group.add_argument("--no-extents", action="store_true", help="read everything, including areas reported as zero")
    group.add_argument(
        "--request-size",
        metavar="SIZE",
        type=size(parameters.REQUEST_SIZE),
        default=MIB,
        help="the most that one read asks for (default: 1m; of an NBD server half of that, unless SIZE is larger)",
    )
    group.add_argument(
        "--queue-size",
        metavar="SIZE",
        type=size(parameters.SIZE),
        default=16 * MIB,
        help="the most that is in flight over all workers (default: 16m; no more is used)",
    )
    group.add_argument(
        "--reader",
        metavar="WHO",
        choices=parameters.READERS,
        default="auto",
        help="who reads images: imgsum itself (native), a private qemu-nbd (qemu), or that only where it must (auto)",
    )
    group.add_argument("--snapshot", metavar="NAME", help="read this internal snapshot (name or ID) of a qcow2 image")
    group.add_argument("--secret-file", metavar="FILE", help="the secret of an encrypted image")
    group.add_argument("--connections", metavar="N", type=_count, help="NBD connections (default: one for each worker)")
    group.add_argument(
        "--connect-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="how long an NBD server may take until it is ready (default: 30)",
    )
    group.add_argument(
        "--io-timeout",
        metavar="SECONDS",
        type=_seconds,
        help="how long an NBD server may take to answer a request (default: forever)",
    )
    group.add_argument(
        "--max-memory",
        metavar="SIZE",
        type=size(parameters.SIZE),
        default=256 * MIB,
        help="what decompressing a file may take for dictionaries and blocks (default: 256m)",
    )
    trust = parser.add_argument_group("untrusted images")
    trust.add_argument(
        "--untrusted",
        action="store_true",
        help="refuse an image that refers to anything but itself, or that is not of the format of -f, which is needed",
    )
    trust.add_argument(
        "--max-size",
        metavar="SIZE",
        type=size(parameters.SIZE),
        help="refuse an image with more content than this (with --untrusted: 1t)",
    )


def add_range(parser: argparse.ArgumentParser) -> None:
    """Which part of the content is read."""
    group = parser.add_argument_group("range")
    group.add_argument(
        "--offset", metavar="SIZE", type=size(parameters.SIZE), default=0, help="begin at this offset of the content"
    )
    group.add_argument(
        "--length", metavar="SIZE", type=size(parameters.SIZE), help="stop after this many bytes of content"
    )


def open_options(arguments: Arguments) -> OpenOptions:
    """The options of reading, in one record. Raises UsageError."""
    from imgsum.source import OpenOptions

    return OpenOptions(
        format=arguments.format,
        direct=arguments.cache == "none",
        force_share=arguments.force_share,
        extents=not arguments.no_extents,
        request_size=arguments.request_size,
        queue_size=arguments.queue_size,
        reader=arguments.reader,
        snapshot=arguments.snapshot,
        secret_file=arguments.secret_file,
        connections=arguments.connections,
        connect_timeout=arguments.connect_timeout,
        io_timeout=arguments.io_timeout,
        untrusted=arguments.untrusted,
        max_size=arguments.max_size,
        max_memory=arguments.max_memory,
        offset=arguments.offset,
        length=arguments.length,
        own_descriptors=False,
    )


def construction(arguments: Arguments) -> Construction:
    """What decides the value of a checksum, besides the content. Raises UsageError."""
    from imgsum.hash import blkhash

    return blkhash.construction(arguments.construction, arguments.algorithm, arguments.block_size)


def progress_for(arguments: Arguments, images: int | None) -> Progress | None:
    """What is told about the progress of so many images (None: nobody knows how many), if anything is."""
    from imgsum.output import progress

    if arguments.progress_fd is not None:
        try:
            os.fstat(arguments.progress_fd)
        except (OSError, OverflowError):
            raise UsageError(f"--progress-fd: descriptor {arguments.progress_fd} is not open") from None
        return progress.Descriptor(progress.to_descriptor(arguments.progress_fd), images)
    if arguments.no_progress or (arguments.quiet and not arguments.progress):
        return None
    write = progress.to_descriptor(2)
    if os.isatty(2):
        return progress.Bar(
            write, os.get_terminal_size(2).columns or 80, 0.0 if arguments.progress else progress.PATIENCE
        )
    return progress.Lines(write) if arguments.progress else None


def format_name(name: str) -> str:
    """QEMU's name of the format that everybody else calls NAME."""
    return "vpc" if name == "vhd" else name


def size(rule: parameters.Rule) -> Callable[[str], int]:
    """What makes bytes of a text that RULE allows, for argparse."""

    def convert(text: str) -> int:
        try:
            number = parse_size(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(error.reason) from None
        _obey(rule, number, text)
        return number

    return convert


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    _obey(parameters.CONNECTIONS, count, text)
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    _obey(parameters.TIMEOUT, seconds, text)
    return seconds


def _obey(rule: parameters.Rule, value: object, text: str) -> None:
    fault = rule(value)
    if fault is not None:
        raise argparse.ArgumentTypeError(f"{fault}: '{text}'")


def _descriptor(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a descriptor: '{text}'")
    return int(text)
