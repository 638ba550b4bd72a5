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
from imgsum.engine.checksum import Checksum, Task, checksum_tasks, index_tasks
from imgsum.errors import OK, TROUBLE, Error, printable
from imgsum.output import report
from imgsum.source import OpenOptions

NAMES = Names("images", "IMAGE", "*", IMAGE_HELP)
EPILOG = f"{SOURCES}. With no IMAGE, or -, read standard input. {SIZES}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to PARSER."""
    output = parser.add_argument_group("output")
    output.add_argument("--tag", action="store_true", help="print lines that say the algorithm and block size")
    output.add_argument("-z", "--zero", action="store_true", help="end lines with NUL, and escape no names")
    add_output(output)
    add_construction(parser)
    _add_index(parser)
    add_reading(parser)
    add_range(parser)


def _add_index(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "index",
        "An index holds the digests of an image's blocks. --since gives the value of a full read, in proportion to what"
        " changed: it is a statement about changes made through software. A medium that rots under an unchanged file is"
        " found by a full read only.",
    )
    group.add_argument("--index", metavar="FILE", help="write the image's index, in the same read (name it .index)")
    group.add_argument(
        "--since",
        metavar="OLD",
        help="don't read blocks that certainly are as in this index, of an earlier state or of an interrupted run",
    )
    group.add_argument(
        "--bitmap", metavar="NAME", help="the dirty bitmap that says which, begun when OLD was made: your word counts"
    )
    group.add_argument(
        "--sample",
        metavar="N",
        type=_sample,
        help="read so many of these blocks all the same, and compare them (default: 256)",
    )


def _sample(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"not a number of blocks: '{text}'")
    return int(text)


def run(arguments: Arguments) -> int:
    """Do as ARGUMENTS say, and return the exit status."""
    chosen = construction(arguments)
    names = arguments.names or ["-"]
    if not arguments.names:
        report.note_terminal("the image", arguments)
    options = open_options(arguments)
    asked = (arguments.construction, arguments.algorithm, arguments.block_size)
    try:
        with index_tasks(
            names,
            options,
            chosen,
            is_chosen=asked != ("blkhash", None, None),
            index=arguments.index,
            since=arguments.since,
            bitmap=arguments.bitmap,
            sample=arguments.sample,
        ) as tasks:
            return _print(tasks, arguments, options)
    except Error as error:
        if arguments.json and arguments.since is not None:
            report.write(report.error_json(error))
        raise


def _print(tasks: list[Task], arguments: Arguments, options: OpenOptions) -> int:
    status = OK
    progress = progress_for(arguments, len(tasks))
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
                if result.reused is not None and not arguments.quiet:
                    report.warn(f"{printable(result.name)}: {report.reuse_text(result)}")
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
