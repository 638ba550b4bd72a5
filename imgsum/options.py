"""The command line's grammar: each command's options, as argparse parsers.

The man pages and the completions of the shells are made from docs_parser(). Options and names may be mixed, as GNU
tools allow, `--` ends options, and `[ COMMAND ARG... ]` is one name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from imgsum import __version__
from imgsum.errors import UsageError
from imgsum.units import KIB, MIB, parse_power_of_two, parse_size

COMMANDS = {
    "checksum": "print a checksum for each image",
    "check": "verify images against checksums",
    "compare": "is the content the same, and where not?",
    "algorithms": "list the algorithms that -a takes",
}

_NAMES: dict[str, tuple[str | None, str, str | int]] = {
    "checksum": ("images", "IMAGE", "*"),
    "check": ("sums", "SUMS", "*"),
    "compare": ("images", "IMAGE", 2),
    "algorithms": (None, "", 0),
}

_SOURCES = """\
an IMAGE is a file or block device of any format that is read, an NBD URI (nbd://, nbds://, nbd+unix://, nbds+unix://,
nbd+vsock://, nbds+vsock://), `[ COMMAND ARG... ]` for a program that serves NBD by socket activation, or `-` for
standard input"""

_SIZES = "Sizes take k, m, g, t (1024, either case)."

_EPILOGS = {
    "checksum": f"{_SOURCES}, which is what no IMAGE stands for. {_SIZES}",
    "check": f"""\
a SUMS file has lines as `imgsum checksum` prints them, plain, tagged or JSON; `-`, or no SUMS, is standard input. The
status is 0 when every line was verified, and there was one; 1 when content differs; 2 when anything could not be
verified. {_SIZES}""",
    "compare": f"""\
{_SOURCES} (one of the two at most). The status is 0 when the content is the same, 1 when it differs, 2 for trouble.
{_SIZES}""",
    "algorithms": None,
}

TAKE_A_FILE = ("sums", "secret_file")
"""Where the shells complete the names of files, besides IMAGE."""


class Command(str):
    """A name that is `[ COMMAND ARG... ]`; the string is what messages call it."""

    words: tuple[str, ...]


class Arguments(argparse.Namespace):
    """What was asked for. `names` holds strings, and Commands."""

    command: str
    names: list[str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (try '{self.prog} --help')")

    def _print_message(self, message: str, file: object = None) -> None:
        """Help and the version: written as results are, so that a full disk is an error for them too."""
        from imgsum import report

        report.write(message, end="")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=_columns() - 2)


def _raw_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=_columns() - 2)


def _columns() -> int:
    """The terminal's, as shutil.get_terminal_size(), which argparse would import, 2 ms, even where no help is asked."""
    try:
        return int(os.environ.get("COLUMNS", "")) or 80
    except ValueError:
        pass
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def parse(argv: Sequence[str]) -> Arguments:
    """The arguments ARGV, without the program's name. Raises UsageError; -h and -V print and raise SystemExit."""
    if not argv or argv[0] not in COMMANDS:
        top = top_parser()
        top.parse_known_args(argv[:1])  # -h, -V, and unknown options end here
        raise UsageError(f"unknown command '{argv[0]}'" if argv else "a command is needed" + " (try 'imgsum --help')")
    parser = command_parser(argv[0])
    words = _group_commands(argv[1:])
    end = words.index("--") if "--" in words else len(words)
    arguments = Arguments(command=argv[0])
    _, names = parser.parse_known_args(words[:end], arguments)
    for name in names:
        if name.startswith("-") and name != "-":
            parser.error(f"unknown option '{name}'")
    arguments.names = names + words[end + 1 :]
    return arguments


def _group_commands(words: Sequence[str]) -> list[str]:
    """WORDS with each `[ ... ]` made one Command."""
    grouped: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "[":
            inside: list[str] = []
            for argument in rest:
                if argument == "]":
                    break
                inside.append(argument)
            else:
                raise UsageError("'[' without ']'")
            if not inside:
                raise UsageError("no command between '[' and ']'")
            command = Command(f"[ {' '.join(inside)} ]")
            command.words = tuple(inside)
            grouped.append(command)
        else:
            grouped.append(word)
    return grouped


def top_parser() -> _Parser:
    """The parser of what comes before a command."""
    parser = _Parser(
        prog="imgsum",
        usage="imgsum COMMAND [OPTION]... [NAME]...",
        description="The checksum for disk images: of what the guest would read, whatever the format.",
        epilog="commands:\n"
        + "".join(f"  {name:<11} {text}\n" for name, text in COMMANDS.items())
        + "\n'imgsum COMMAND --help' lists a command's options.",
        formatter_class=_raw_formatter,
        add_help=False,
        allow_abbrev=False,
    )
    _add_information(parser)
    return parser


def command_parser(command: str, for_docs: bool = False) -> _Parser:
    """The parser of COMMAND's options. FOR_DOCS: its names too, which parse() takes care of itself."""
    dest, metavar, count = _NAMES[command]
    parser = _Parser(
        prog=f"imgsum {command}",
        usage=f"imgsum {command} [OPTION]..."
        + (f" {metavar}" * count if isinstance(count, int) else f" [{metavar}]..."),
        description=COMMANDS[command][0].upper() + COMMANDS[command][1:] + ".",
        epilog=_EPILOGS[command],
        formatter_class=_formatter,
        add_help=False,
        allow_abbrev=False,
    )
    _ADD_OPTIONS[command](parser)
    _add_information(parser)
    if for_docs and dest:
        parser.add_argument(dest, metavar=metavar, nargs=count)
    return parser


def docs_parser() -> argparse.ArgumentParser:
    """All commands in one parser, for argparse-manpage and shtab."""
    top = top_parser()
    top.epilog = None
    commands = top.add_subparsers(metavar="COMMAND", dest="command", parser_class=_Parser)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, parents=[command_parser(name, for_docs=True)], add_help=False)
    return top


def _add_information(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument(
        "-V", "--version", action="version", version=f"imgsum {__version__}", help="show the version and exit"
    )


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
        "-F", "--second-format", metavar="FORMAT", help="the second image's format, instead of detecting it"
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
        type=_power_of_two(512, 32 * MIB),
        help="block size, which is part of what the checksum means (default: 64k)",
    )
    group.add_argument(
        "--construction",
        metavar="NAME",
        choices=("blkhash", "imageio"),
        default="blkhash",
        help="blkhash, or imageio for the value that oVirt reports of an uploaded disk",
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    group.add_argument(
        "-f", "--format", metavar="FORMAT", help="the image's format, instead of detecting it; raw parses no header"
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
        type=_power_of_two(4 * KIB, 32 * MIB),
        default=MIB,
        help="the most that one read asks for (default: 1m)",
    )
    group.add_argument(
        "--queue-size",
        metavar="SIZE",
        type=_size,
        default=16 * MIB,
        help="the most that is in flight over all workers (default: 16m; no more than 32m is used)",
    )
    group.add_argument(
        "--reader",
        metavar="WHO",
        choices=("auto", "native", "qemu"),
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
    trust.add_argument("--max-size", metavar="SIZE", type=_size, help="refuse an image with more content than this")


def _add_range(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("range")
    group.add_argument("--offset", metavar="SIZE", type=_size, default=0, help="begin at this offset of the content")
    group.add_argument("--length", metavar="SIZE", type=_size, help="stop after this many bytes of content")


_ADD_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "checksum": _checksum_options,
    "check": _check_options,
    "compare": _compare_options,
    "algorithms": _algorithms_options,
}


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.reason) from None


def _power_of_two(smallest: int, largest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            return parse_power_of_two(text, smallest, largest)
        except UsageError as error:
            raise argparse.ArgumentTypeError(error.reason) from None

    return convert


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"not a number from 1 to 1024: '{text}'")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"not a number of seconds: '{text}'")
    return seconds


def _descriptor(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a descriptor: '{text}'")
    return int(text)
