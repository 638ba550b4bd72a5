"""`imgsum checksum`: print a checksum for each image."""

from __future__ import annotations

import argparse

from imgsum import trace
from imgsum.commands.options import (
    IMAGE_HELP,
    SIZES,
    SOURCES,
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
from imgsum.engine.checksum import Checksum, Task, checksum_tasks
from imgsum.errors import OK, TROUBLE, printable
from imgsum.output import report

NAMES = Names("images", "IMAGE", "*", IMAGE_HELP)
EPILOG = f"{SOURCES}. With no IMAGE, or -, read standard input. {SIZES}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to PARSER."""
    output = parser.add_argument_group("output")
    output.add_argument("--tag", action="store_true", help="print lines that say the algorithm and block size")
    output.add_argument("-z", "--zero", action="store_true", help="end lines with NUL, and escape no names")
    add_output(output)
    add_construction(parser)
    add_reading(parser)
    add_range(parser)


def run(arguments: Arguments) -> int:
    """Do as ARGUMENTS say, and return the exit status."""
    chosen = construction(arguments)
    names = arguments.names or ["-"]
    if not arguments.names:
        report.note_terminal("the image", arguments)
    status = OK
    progress = progress_for(arguments, len(names))
    options = open_options(arguments)
    tasks = [Task(name, chosen, options) for name in names]
    results = checksum_tasks(tasks, options, progress=progress)
    try:
        for result in results:
            if isinstance(result, Checksum):
                if arguments.json:
                    line = report.checksum_json(result, arguments.offset, arguments.length, stats=arguments.stats)
                    report.write(line)
                else:
                    line = report.checksum_line(result, tag=arguments.tag, zero=arguments.zero)
                    report.write(line, end="\0" if arguments.zero else "\n")
                    if arguments.stats:
                        report.warn(f"{printable(result.name)}: {report.stats_text(result.stats)}")
                if result.note and not arguments.quiet:
                    report.warn(f"{printable(result.name)}: {result.note}")
                continue
            status = TROUBLE
            trace.exception(result)
            if arguments.json:
                report.write(report.error_json(result))
            report.warn(str(result))
    finally:
        results.close()  # also when a signal comes while a result is printed
        if progress:
            progress.end()
    return status
