"""`imgsum compare`: whether the content is the same, and where not."""

from __future__ import annotations

import argparse

from imgsum import parameters
from imgsum.commands.options import (
    IMAGE_HELP,
    SIZES,
    SOURCES,
    Arguments,
    Names,
    add_output,
    add_range,
    add_reading,
    format_name,
    open_options,
    progress_for,
    size,
)
from imgsum.engine.compare import AnyPair, open_pair
from imgsum.engine.content import Progress
from imgsum.errors import DIFFERENT, OK, Error, UsageError, printable
from imgsum.output import ranges, report
from imgsum.output.report import LineWriter
from imgsum.source import is_file, is_other_format
from imgsum.units import TIB

MAP_UNIT = 512
"""Bytes that ranges in a map are made of, unless more are asked for: a sector."""

NAMES = Names("images", "IMAGE", 2, IMAGE_HELP)
EPILOG = f"""\
{SOURCES} (one of the two at most). Either may be an index, whose name ends in .index: it stands for its image, and
blocks are compared. The first may be a bmap, a file of bmaptool's whose name ends in .bmap: then its
mapped ranges are verified by their digests, and the rest is ignored. The status is 0 when the content is the same, 1
when it differs, 2 for trouble. {SIZES}"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to PARSER."""
    comparison = parser.add_argument_group("comparison")
    comparison.add_argument(
        "--all", action="store_true", help="print every range that differs, not only the first byte"
    )
    comparison.add_argument(
        "-s", "--strict", action="store_true", help="images of different sizes differ, even if the rest is zeros"
    )
    comparison.add_argument(
        "--prefix",
        action="store_true",
        help="compare as much as the first image has: the second may be a larger device that it was written to",
    )
    comparison.add_argument(
        "-F",
        "--second-format",
        metavar="FORMAT",
        type=format_name,
        choices=(*parameters.FORMATS, *parameters.COMPRESSED_FORMATS, "index"),
        help="the second image's format, instead of detecting it",
    )
    maps = parser.add_argument_group("maps", "What differs, for tools; the last line says how many ranges and bytes.")
    maps.add_argument(
        "--map",
        metavar="FORMAT",
        choices=tuple(ranges.FORMATS),
        help="print ranges: START LENGTH (text), an object a line (json), a map file for ddrescue, or commands that"
        " copy them again (dd)",
    )
    maps.add_argument(
        "--granularity",
        metavar="SIZE",
        type=size(parameters.whole_number(1, TIB, power_of_two=True)),
        help="ranges are of whole units of SIZE (default: 512; of an index its blocks, and never less)",
    )
    maps.add_argument(
        "--from", metavar="FILE", dest="source", help="dd copies from FILE (default: the first image, where it is raw)"
    )
    add_output(parser.add_argument_group("output"), quiet="print nothing: the status says it")
    add_reading(parser)
    add_range(parser)


def run(arguments: Arguments) -> int:
    """Do as ARGUMENTS say, and return the exit status."""
    if len(arguments.names) != 2:
        raise UsageError(f"compare takes two images, not {len(arguments.names)}")
    _check_map(arguments)
    first_image, second_image = arguments.names
    options = open_options(arguments)
    second_options = options._replace(format=arguments.second_format)
    progress = progress_for(arguments, 1)
    try:
        with open_pair(first_image, second_image, options, second_options, prefix=arguments.prefix) as pair:
            if arguments.strict and not pair.sizes_count:
                raise UsageError("--strict is about sizes, and a bmap says nothing of what it does not map")
            listing = arguments.all and not arguments.quiet
            show = _print_map if arguments.map else _list_ranges if listing else _find_first
            same = show(pair, arguments, progress)
            if not arguments.quiet:
                _note_sizes(pair, same, prefix=arguments.prefix)
    except Error as error:
        if arguments.json:
            report.write(report.error_json(error))
        raise
    return OK if same else DIFFERENT


def _find_first(pair: AnyPair, arguments: Arguments, progress: Progress | None) -> bool:
    """Print the verdict, with the first byte that differs. Whether none does."""
    first, second = pair.sizes
    is_longer = arguments.prefix and first is not None and second is not None and second >= first
    if arguments.strict and first != second and None not in pair.sizes and not is_longer:
        _print_result(pair, arguments, f"images differ in size: {first} and {second} bytes", identical=False)
        return False
    offset = pair.first_difference(strict=arguments.strict, progress=progress)
    pair.check_unchanged()
    if offset is None:
        _print_result(pair, arguments, pair.same_text, identical=True)
        return True
    where = "at" if pair.unit == 1 else f"in the block of {pair.unit} bytes at"
    _print_result(pair, arguments, f"images differ {where} offset {offset}", identical=False, offset=offset)
    return False


def _list_ranges(pair: AnyPair, arguments: Arguments, progress: Progress | None) -> bool:
    """Print every range that differs, as it is found, and then the verdict. Whether there is none."""
    count = size = 0
    offset = None
    lines = report.LineWriter()
    try:
        for start, length in pair.differences(strict=arguments.strict, progress=_Flusher(lines, progress)):
            offset = start if offset is None else offset
            count, size = count + 1, size + length
            if arguments.json:
                lines.add(report.range_json(start, length))
            else:
                lines.add(f"differs: offset {start}, {length} bytes")
    except Error as error:  # not a signal's: nobody may be reading
        if not isinstance(error, report.OutputError):
            lines.flush()
        raise
    lines.flush()
    pair.check_unchanged()
    if not count:
        _print_result(pair, arguments, pair.same_text, identical=True)
        return True
    text = f"images differ in {count} range{'s' * (count > 1)}, {size} bytes"
    _print_result(pair, arguments, text, identical=False, offset=offset, ranges=count, bytes=size)
    return False


def _check_map(arguments: Arguments) -> None:
    """Raise UsageError where the options of a map make no sense together."""
    if arguments.map is None and (arguments.granularity is not None or arguments.source is not None):
        raise UsageError("--granularity and --from are about a map, and there is no --map")
    if arguments.map and (arguments.json or arguments.quiet):
        raise UsageError("--map prints its own lines: not with --json (--map json is JSON) or --quiet")
    if arguments.source is not None and arguments.map != "dd":
        raise UsageError("--from is where `--map dd` copies from")


def _print_map(pair: AnyPair, arguments: Arguments, progress: Progress | None) -> bool:
    """Print the ranges that differ as a tool takes them. Whether there is none."""
    sizes = [size for size in pair.sizes if size is not None]
    if len(sizes) < 2:
        raise UsageError("a map needs the size of both, and one is a stream")
    end = arguments.offset + max(sizes)
    place = ranges.Place(end, "", 0, "")
    if arguments.map == "dd":
        place = _place_for_dd(pair, arguments, end)
    count = size = 0
    lines = report.LineWriter()
    unit = max(pair.unit, arguments.granularity or MAP_UNIT)
    found = pair.differences(strict=arguments.strict, progress=_Flusher(lines, progress))
    for line, length in ranges.FORMATS[arguments.map](ranges.rounded(found, unit, end), place):
        lines.add(line)
        count, size = count + (length > 0), size + length
    pair.check_unchanged()
    lines.add(ranges.last_line(arguments.map, count, size))
    lines.flush()
    if arguments.stats:
        report.warn(report.stats_text(pair.stats()))
    return not count


def _place_for_dd(pair: AnyPair, arguments: Arguments, end: int) -> ranges.Place:
    """What dd copies from and to, which takes the bytes of files: the second image is mended, or the only one."""
    target = 0 if pair.formats[1] == "index" else 1
    good = 1 - target
    if pair.formats[target] != "raw" or not is_file(pair.names[target]):
        raise UsageError(
            f"dd mends the bytes of a raw file or device, and this is none: '{printable(pair.names[target])}'"
        )
    source = pair.names[good] if arguments.source is None else arguments.source
    if arguments.source is None and (pair.formats[good] != "raw" or not is_file(source)):
        raise UsageError("--map dd needs --from FILE: a raw file or device with the right content")
    if is_other_format(source):
        raise UsageError(f"dd copies the bytes of a raw file or device, and this is none: '{printable(source)}'")
    known = pair.sizes[good]
    assert known is not None
    return ranges.Place(end, source, arguments.offset + known, pair.names[target])


class _Flusher:
    """A Progress that writes what is known whenever a piece of the content is done, and tells another one."""

    def __init__(self, lines: LineWriter, progress: Progress | None) -> None:
        self._lines = lines
        self._progress = progress

    def begin(self, name: str, size: int | None) -> None:
        """See Progress."""
        if self._progress:
            self._progress.begin(name, size)

    def advance(self, done: int) -> None:
        """See Progress."""
        self._lines.flush()
        if self._progress:
            self._progress.advance(done)

    def end(self) -> None:
        """See Progress."""
        if self._progress:
            self._progress.end()


def _print_result(pair: AnyPair, arguments: Arguments, text: str, **verdict: object) -> None:
    stats = pair.stats() if arguments.stats else None
    if not arguments.quiet:
        report.write(report.comparison_json(pair, stats, **verdict) if arguments.json else text)
    if stats and not arguments.json:
        report.warn(report.stats_text(stats))


def _note_sizes(pair: AnyPair, same: bool, *, prefix: bool) -> None:
    """Say that the sizes are not the same, and what that means."""
    first, second = pair.sizes
    if first is None or second is None or first == second or not pair.sizes_count:
        return
    names = [printable(name) for name in pair.names]
    if prefix and first < second:
        report.warn(f"{names[0]} has {first} bytes, and no more of {names[1]} was compared")
        return
    both = min(first, second)
    rest = "the rest is zeros" if same else f"--length {both // pair.unit * pair.unit or both} compares what both have"
    report.warn(f"{names[0]} has {first} bytes, {names[1]} has {second} bytes: {rest}")
