"""`imgsum check` and `imgsum compare`: what they print, and their exit status."""

from __future__ import annotations

from collections.abc import Callable

from imgsum.engine.compare import Pair
from imgsum.engine.content import Progress
from imgsum.errors import DIFFERENT, OK, TROUBLE, Error, UsageError, printable
from imgsum.hash import blkhash
from imgsum.hash.blkhash import Construction
from imgsum.options import Arguments
from imgsum.output import report
from imgsum.output.report import LineWriter
from imgsum.source import Command, OpenOptions
from imgsum.sums import check as checking
from imgsum.sums.check import Tally, Verdict


def check(arguments: Arguments, options: OpenOptions, watch: Callable[[int | None], Progress | None]) -> int:
    """Verify what each sums file lists. The status is the worst of theirs."""
    names: list[str] = []
    for name in arguments.names or ["-"]:
        if isinstance(name, Command):
            raise UsageError(f"check reads files of checksums, not a command: '{printable(str(name))}'")
        names.append(name)
    if not arguments.names:
        report.note_terminal("checksum lines", arguments)
    watcher = watch(_count_verdicts(names, arguments))
    try:
        return max([_check_file(name, arguments, options, watcher) for name in names])
    finally:
        if watcher:
            watcher.end()


def _count_verdicts(names: list[str], arguments: Arguments) -> int | None:
    if arguments.progress_fd is None:  # nobody else wants to know
        return None
    how, zero, ignore = _construction(arguments), arguments.zero, arguments.ignore_malformed
    counts = [checking.count_verdicts(name, how, zero=zero, ignore_malformed=ignore) for name in names]
    return sum(count or 0 for count in counts) if None not in counts else None


def _construction(arguments: Arguments) -> Construction:
    return blkhash.construction(arguments.construction, arguments.algorithm, arguments.block_size)


def _check_file(sums: str, arguments: Arguments, options: OpenOptions, watcher: Progress | None) -> int:
    tally = Tally()
    verdicts = checking.check_sums(
        sums,
        _construction(arguments),
        options,
        zero=arguments.zero,
        relative_to_sums=arguments.relative_to_sums,
        ignore_missing=arguments.ignore_missing,
        ignore_malformed=arguments.ignore_malformed,
        hints=not (arguments.quiet or arguments.status),
        progress=watcher,
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


def compare(arguments: Arguments, options: OpenOptions, second: OpenOptions, watcher: Progress | None) -> int:
    """Compare two images."""
    if len(arguments.names) != 2:
        raise UsageError(f"compare takes two images, not {len(arguments.names)}")
    first_image, second_image = arguments.names
    try:
        with Pair(first_image, second_image, options, second) as pair:
            listing = arguments.all and not arguments.quiet
            same = (_list_ranges if listing else _find_first)(pair, arguments, watcher)
            if not arguments.quiet:
                _note_sizes(pair, same)
    except Error as error:
        if arguments.json:
            report.write(report.error_json(error))
        raise
    return OK if same else DIFFERENT


def _find_first(pair: Pair, arguments: Arguments, watcher: Progress | None) -> bool:
    """Print the verdict, with the first byte that differs. Whether none does."""
    first, second = pair.sizes
    if arguments.strict and first != second and None not in pair.sizes:
        _print_result(pair, arguments, f"images differ in size: {first} and {second} bytes", identical=False)
        return False
    offset = pair.first_difference(strict=arguments.strict, progress=watcher)
    pair.check_unchanged()
    if offset is None:
        _print_result(pair, arguments, "images are identical", identical=True)
        return True
    _print_result(pair, arguments, f"images differ at offset {offset}", identical=False, offset=offset)
    return False


def _list_ranges(pair: Pair, arguments: Arguments, watcher: Progress | None) -> bool:
    """Print every range that differs, as it is found, and then the verdict. Whether there is none."""
    count = size = 0
    offset = None
    lines = report.LineWriter()
    try:
        for start, length in pair.differences(strict=arguments.strict, progress=_Flusher(lines, watcher)):
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
        _print_result(pair, arguments, "images are identical", identical=True)
        return True
    text = f"images differ in {count} range{'s' * (count > 1)}, {size} bytes"
    _print_result(pair, arguments, text, identical=False, offset=offset, ranges=count, bytes=size)
    return False


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


def _print_result(pair: Pair, arguments: Arguments, text: str, **verdict: object) -> None:
    stats = pair.stats() if arguments.stats else None
    if not arguments.quiet:
        report.write(report.comparison_json(pair, stats, **verdict) if arguments.json else text)
    if stats and not arguments.json:
        report.warn(report.stats_text(stats))


def _note_sizes(pair: Pair, same: bool) -> None:
    """Say that the sizes are not the same, and what that means."""
    first, second = pair.sizes
    if first is None or second is None or first == second:
        return
    names = [printable(name) for name in pair.names]
    rest = "the rest is zeros" if same else f"--length {min(first, second)} compares what both have"
    report.warn(f"{names[0]} has {first} bytes, {names[1]} has {second} bytes: {rest}")
