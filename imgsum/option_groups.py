"""Each command's options, in groups that commands share. options.py makes parsers of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from imgsum import parameters
from imgsum.errors import UsageError
from imgsum.units import MIB, parse_size


def _checksum_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--tag", action="store_true", help="print lines that say the algorithm and block size")
    output.add_argument("-z", "--zero", action="store_true", help="end lines with NUL, and escape no names")
    _add_output(output)
    _add_construction(parser)
    _add_reading(parser)
    _add_range(parser)


def _check_options(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group("sums files")
    lines.add_argument("-z", "--zero", action="store_true", help="lines end with NUL, and no names are escaped")
    lines.add_argument(
        "--relative-to-sums",
        action="store_true",
        help="names are relative to the directory of SUMS, not to the current one",
    )
    lines.add_argument("--ignore-missing", action="store_true", help="skip images that do not exist")
    strictness = lines.add_mutually_exclusive_group()
    strictness.add_argument(
        "--ignore-malformed", action="store_true", help="skip lines that are not checksums of images"
    )
    strictness.add_argument("--strict", action="store_true", help="fail for such lines, which is the default")
    lines.add_argument(
        "-w", "--warn", action="store_true", help="report each such line, also with --ignore-malformed and --status"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--status", action="store_true", help="print no verdicts and no counts: the status says it")
    _add_output(output, quiet="print no OK, no hints and no progress")
    _add_construction(parser)
    _add_reading(parser)
    _add_range(parser)


def _compare_options(parser: argparse.ArgumentParser) -> None:
    comparison = parser.add_argument_group("comparison")
    comparison.add_argument(
        "--all", action="store_true", help="print every range that differs, not only the first byte"
    )
    comparison.add_argument(
        "-s", "--strict", action="store_true", help="images of different sizes differ, even if the rest is zeros"
    )
    comparison.add_argument(
        "-F",
        "--second-format",
        metavar="FORMAT",
        choices=parameters.FORMATS,
        help="the second image's format, instead of detecting it",
    )
    _add_output(parser.add_argument_group("output"), quiet="print nothing: the status says it")
    _add_reading(parser)
    _add_range(parser)


def _algorithms_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object for each algorithm")


def _add_output(
    group: argparse._ArgumentGroup, quiet: str = "no notes and no progress, only results and errors"
) -> None:
    group.add_argument("--json", action="store_true", help="print one JSON object for each image, also for failures")
    group.add_argument("--stats", action="store_true", help="say what was read, what was skipped, and how long it took")
    group.add_argument("-q", "--quiet", action="store_true", help=quiet)
    group.add_argument("-p", "--progress", action="store_true", help="show progress at once, and off a terminal too")
    group.add_argument("--no-progress", action="store_true", help="never show progress")
    group.add_argument(
        "--progress-fd",
        metavar="N",
        type=_descriptor,
        help="write progress to descriptor N, as lines of the form N/100",
    )


def _add_construction(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checksum")
    group.add_argument("-a", "--algorithm", metavar="NAME", help="hash function (default: sha256)")
    group.add_argument(
        "-b",
        "--block-size",
        metavar="SIZE",
        type=_size(parameters.BLOCK_SIZE),
        help="block size, which is part of what the checksum means (default: 64k)",
    )
    group.add_argument(
        "--construction",
        metavar="NAME",
        choices=parameters.CONSTRUCTIONS,
        default="blkhash",
        help="blkhash, or imageio for the value that oVirt reports of an uploaded disk",
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    group.add_argument(
        "-f",
        "--format",
        metavar="FORMAT",
        choices=parameters.FORMATS,
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
    group.add_argument("--no-extents", action="store_true", help="read everything, also what is said to be zero")
    group.add_argument(
        "--request-size",
        metavar="SIZE",
        type=_size(parameters.REQUEST_SIZE),
        default=MIB,
        help="the most that one read asks for (default: 1m; of an NBD server half of that, unless SIZE is larger)",
    )
    group.add_argument(
        "--queue-size",
        metavar="SIZE",
        type=_size(parameters.SIZE),
        default=16 * MIB,
        help="the most that is in flight over all workers (default: 16m; no more than 32m is used)",
    )
    group.add_argument(
        "--reader",
        metavar="WHO",
        choices=parameters.READERS,
        default="auto",
        help="who reads qcow2: imgsum itself (native), a private qemu-nbd (qemu), or that only where it must (auto)",
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
        help="how long an NBD server may take to answer a request (default: for ever)",
    )
    trust = parser.add_argument_group("images of strangers")
    trust.add_argument(
        "--untrusted",
        action="store_true",
        help="refuse an image that refers to anything but itself, or that is not of the format of -f, which is needed",
    )
    trust.add_argument(
        "--max-size",
        metavar="SIZE",
        type=_size(parameters.SIZE),
        help="refuse an image with more content than this (with --untrusted: 1t)",
    )


def _add_range(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("range")
    group.add_argument(
        "--offset", metavar="SIZE", type=_size(parameters.SIZE), default=0, help="begin at this offset of the content"
    )
    group.add_argument(
        "--length", metavar="SIZE", type=_size(parameters.SIZE), help="stop after this many bytes of content"
    )


def _size(rule: parameters.Rule) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            size = parse_size(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(error.reason) from None
        _obey(rule, size, text)
        return size

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


ADD_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "checksum": _checksum_options,
    "check": _check_options,
    "compare": _compare_options,
    "algorithms": _algorithms_options,
}
"""What adds the options of each command to its parser."""
