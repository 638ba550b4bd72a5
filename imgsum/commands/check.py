"""`imgsum check`: verify images against checksums."""

from __future__ import annotations

import argparse

from imgsum.commands.options import (
    SIZES,
    Arguments,
    Names,
    add_construction,
    add_output,
    add_range,
    add_reading,
    construction,
    open_options,
    progress_for,
)
from imgsum.engine.content import Progress
from imgsum.errors import DIFFERENT, OK, TROUBLE, UsageError, printable
from imgsum.output import report
from imgsum.source import Command, OpenOptions
from imgsum.sums import check as checking
from imgsum.sums.check import Tally, Verdict

NAMES = Names("sums", "SUMS", "*", "a file of checksums, or - for standard input")
EPILOG = f"""\
a SUMS file has lines as `imgsum checksum` prints them, plain, tagged or JSON; with no SUMS, or -, read standard input.
The status is 0 when every line was verified, and there was one; 1 when content differs; 2 when anything could not be
verified. {SIZES}"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to PARSER."""
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
    add_output(output, quiet="print no OK, no hints and no progress")
    add_construction(parser)
    add_reading(parser)
    add_range(parser)


def run(arguments: Arguments) -> int:
    """Verify what each sums file lists, and return the worst exit status of theirs."""
    names: list[str] = []
    for name in arguments.names or ["-"]:
        if isinstance(name, Command):
            raise UsageError(f"check reads files of checksums, not a command: '{printable(str(name))}'")
        names.append(name)
    if not arguments.names:
        report.note_terminal("checksum lines", arguments)
    options = open_options(arguments)
    progress = progress_for(arguments, _count_verdicts(names, arguments))
    try:
        return max([_check_file(name, arguments, options, progress) for name in names])
    finally:
        if progress:
            progress.end()


def _count_verdicts(names: list[str], arguments: Arguments) -> int | None:
    if arguments.progress_fd is None:  # nobody else wants to know
        return None
    chosen, zero, ignore = construction(arguments), arguments.zero, arguments.ignore_malformed
    counts = [checking.count_verdicts(name, chosen, zero=zero, ignore_malformed=ignore) for name in names]
    return sum(count or 0 for count in counts) if None not in counts else None


def _check_file(sums: str, arguments: Arguments, options: OpenOptions, progress: Progress | None) -> int:
    tally = Tally()
    verdicts = checking.check_sums(
        sums,
        construction(arguments),
        options,
        zero=arguments.zero,
        relative_to_sums=arguments.relative_to_sums,
        ignore_missing=arguments.ignore_missing,
        ignore_malformed=arguments.ignore_malformed,
        hints=not (arguments.quiet or arguments.status),
        progress=progress,
    )
    try:
        for verdict in verdicts:
            tally = tally.plus(verdict)
            _print_verdict(verdict, arguments)
    finally:
        verdicts.close()  # also when a signal comes while a verdict is printed
    if not arguments.status:
        for line in report.tally_lines(tally):
            report.warn(line)
    if not (tally.verified or tally.error or tally.sums):
        report.warn(f"{printable(sums)}: no file was verified")
    malformed = tally.malformed and not arguments.ignore_malformed
    if tally.error or tally.sums or malformed or not tally.verified:
        return TROUBLE
    return DIFFERENT if tally.mismatch else OK


def _print_verdict(verdict: Verdict, arguments: Arguments) -> None:
    """On standard output what became of the line; on standard error what more there is to say."""
    passed = verdict.status in (checking.OK, checking.MISSING)
    if not arguments.status and not (passed and arguments.quiet):
        if arguments.json:
            report.write(report.verdict_json(verdict, stats=arguments.stats))
        elif verdict.line is not None and verdict.status != checking.MISSING:
            report.write(report.verdict_line(verdict))
    if arguments.stats and verdict.checksum is not None and not arguments.json:
        report.warn(f"{printable(verdict.checksum.name)}: {report.stats_text(verdict.checksum.stats)}")
    if verdict.error is not None and _is_told(verdict.status, arguments):
        report.warn(str(verdict.error))
    if verdict.note is not None and not (arguments.status or arguments.quiet):
        report.warn(f"{printable(verdict.line.name) if verdict.line else verdict.sums}: {verdict.note}")


def _is_told(status: str, arguments: Arguments) -> bool:
    """Whether what more there is to say of a verdict of STATUS is said."""
    if status == checking.MALFORMED:
        return arguments.warn or not (arguments.status or arguments.ignore_malformed)
    if status == checking.MISMATCH:  # a hint
        return not (arguments.status or arguments.quiet)
    return status == checking.ERROR
