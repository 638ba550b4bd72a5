"""The command line's grammar, by argparse.

The man pages and the completions of the shells are made from docs_parser(). Options and names may be mixed, as GNU
tools allow, `--` ends options, and `[ COMMAND ARG... ]` is one name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from imgsum import __version__
from imgsum.commands import COMMANDS
from imgsum.commands.options import Arguments
from imgsum.errors import UsageError

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from imgsum.source import Command

TAKE_A_FILE = ("sums", "secret_file")
"""Where the shells complete the names of files, besides IMAGE."""


class _Bracketed(str):
    """`[ PROGRAM ARG... ]` on its way through argparse, which takes strings only."""

    command: Command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{_plain_english(message)} (try '{self.prog} --help')")

    def _print_message(self, message: str, file: object = None) -> None:
        """Help and the version: written as results are, so that a full disk is an error for them too."""
        from imgsum.output import report

        report.write(message, end="")


_PLAIN_ENGLISH = (
    (r"argument (\S+): expected one argument", r"\1 needs a value"),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value, and was given \2"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1 and \2 exclude each other"),
    (r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", r"\1 can't be \2, only one of: \3"),
    (r"argument (\S+): (.*)", r"\1: \2"),
)
"""What argparse says, and what is said instead."""


def _plain_english(message: str) -> str:
    import re  # only for errors

    for theirs, ours in _PLAIN_ENGLISH:
        if match := re.fullmatch(theirs, message, re.DOTALL):
            return match.expand(ours)
    return message


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
    if argv and argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] not in COMMANDS:
        top_parser().parse_known_args(argv[:1])  # -h and -V end here
        raise UsageError(f"{_what_was_meant(argv)} (try 'imgsum --help')")
    parser = command_parser(argv[0])
    words = list(argv[1:])
    end = words.index("--") if "--" in words else len(words)
    arguments = Arguments(command=argv[0])
    # What follows `--` is a name, whatever it looks like: a script may pass names there that somebody else chose.
    _, names = parser.parse_known_args(_group_commands(words[:end]), arguments)
    for name in names:
        if name.startswith("-") and name != "-":
            hint = ": did you mean 'imgsum check'?" if name in ("-c", "--check") and argv[0] == "checksum" else ""
            parser.error(f"unknown option '{name}'{hint}")
        if isinstance(name, _Bracketed) and getattr(arguments, "untrusted", False):
            parser.error(f"--untrusted runs no command: '{name}'")
    arguments.names = [name.command if isinstance(name, _Bracketed) else name for name in names]
    arguments.names += words[end + 1 :]
    return arguments


_OTHER_NAMES = {"-c": "check", "--check": "check", "verify": "check", "diff": "compare", "cmp": "compare"}
"""What other tools call a command of ours."""


def _what_was_meant(argv: Sequence[str]) -> str:
    """What to say of words that don't begin with a command, and what may have been meant."""
    if not argv:
        return "a command is needed"
    import difflib
    import shlex

    from imgsum.parameters import FORMATS
    from imgsum.source import is_nbd_uri

    word, rest = argv[0], [shlex.quote(word) for word in argv[1:5]]
    if len(argv) > 5:
        rest.append("...")
    near = [_OTHER_NAMES[word]] if word in _OTHER_NAMES else difflib.get_close_matches(word, COMMANDS, 1)
    is_image = os.path.lexists(word) or is_nbd_uri(word) or word == "["
    if is_image or word.lower().endswith((".img", ".iso", *(f".{name}" for name in FORMATS))):
        near, rest = ["checksum"], [shlex.quote(word) if word != "[" else word, *rest]
    elif not near and word.startswith("-"):
        return f"a command is needed before option '{word}'"
    meant = f": did you mean 'imgsum {' '.join([near[0], *rest])}'?" if near else ""
    return f"unknown command '{word}'{meant}"


def _group_commands(words: Sequence[str]) -> list[str]:
    """WORDS with each `[ ... ]` made one."""
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
                raise UsageError("'[' without ']' (what follows '--' is never part of a command)")
            if not inside:
                raise UsageError("no command between '[' and ']'")
            from imgsum.source import Command  # not for --version

            command = Command(*inside)
            bracketed = _Bracketed(command)
            bracketed.command = command
            grouped.append(bracketed)
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
    module = import_module(f"imgsum.commands.{command}")  # the others are not imported
    names = module.NAMES
    usage = f"imgsum {command} [OPTION]..."
    if names is not None:
        usage += f" {names.metavar}" * names.count if isinstance(names.count, int) else f" [{names.metavar}]..."
    parser = _Parser(
        prog=f"imgsum {command}",
        usage=usage,
        description=_sentence(COMMANDS[command]),
        epilog=module.EPILOG,
        formatter_class=_formatter,
        add_help=False,
        allow_abbrev=False,
    )
    module.add_options(parser)
    _add_information(parser)
    if for_docs and names is not None:
        parser.add_argument(names.dest, metavar=names.metavar, nargs=names.count, help=names.help)
    return parser


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


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
