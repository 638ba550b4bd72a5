"""Arguments -> calls -> exit status; signals. The only module that ends the process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of which signal is made; signal imports enum, which takes ms

# Nothing is held before the command begins: until then SIGINT ends the process at once, where Python's own handler
# would print a traceback. Whoever ignores it, or has another handler, keeps that.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import contextlib
import os
import resource
import signal
import sys
from types import FrameType

from imgsum.errors import OK, TROUBLE, Error, UsageError, printable, unexpected

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from typing import NoReturn

    from imgsum.engine.content import Progress
    from imgsum.options import Arguments
    from imgsum.source import OpenOptions


class Interrupted(BaseException):
    """A signal that ends the process arrived; everything is given back on the way up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main() -> None:
    """The command: does as sys.argv says, and ends the process."""
    try:
        try:
            _occupy_standard_descriptors()
            _allow_many_descriptors()
            status = run(sys.argv[1:])
        finally:
            _release_signals()
    except Interrupted as interrupted:
        _die_by(interrupted.number)
    except BrokenPipeError:
        _die_by(signal.SIGPIPE)
    except Exception as error:  # what run() needs to report anything could not be imported
        with contextlib.suppress(OSError):
            os.write(2, f"imgsum: {unexpected(error)}\n".encode(errors="backslashreplace"))
        status = TROUBLE
    sys.exit(status)


def run(argv: list[str]) -> int:
    """Do as ARGV says, and return the exit status."""
    from imgsum import options
    from imgsum.output import report

    try:
        arguments = options.parse(argv)
        return _RUN[arguments.command](arguments)
    except SystemExit as end:  # argparse has printed the help or the version
        return end.code if isinstance(end.code, int) else TROUBLE
    except BrokenPipeError:
        raise
    except Error as error:
        _debug()
        report.warn(str(error))
        return error.exit_status
    except Exception as error:
        _debug()
        report.warn(str(unexpected(error)))
        return TROUBLE


def _checksum(arguments: Arguments) -> int:
    from imgsum.engine.checksum import Checksum, Task, checksum_tasks
    from imgsum.hash import blkhash
    from imgsum.output import report

    _catch_signals()
    how = blkhash.construction(arguments.construction, arguments.algorithm, arguments.block_size)
    names = arguments.names or ["-"]
    if not arguments.names:
        report.note_terminal("the image", arguments)
    status = OK
    watcher = _watcher(arguments, len(names))
    options = _open_options(arguments)
    tasks = [Task(name, how, options) for name in names]
    results = checksum_tasks(tasks, options, progress=watcher)
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
            _debug(result)
            if arguments.json:
                report.write(report.error_json(result))
            report.warn(str(result))
    finally:
        results.close()  # also when a signal comes while a result is printed
        if watcher:
            watcher.end()
    return status


def _check(arguments: Arguments) -> int:
    from imgsum import commands

    _catch_signals()
    return commands.check(arguments, _open_options(arguments), lambda images: _watcher(arguments, images))


def _compare(arguments: Arguments) -> int:
    from imgsum import commands

    _catch_signals()
    options = _open_options(arguments)
    second = options._replace(format=arguments.second_format)
    return commands.compare(arguments, options, second, _watcher(arguments, 1))


def _algorithms(arguments: Arguments) -> int:
    from imgsum.hash import algorithms, lanes
    from imgsum.output import report

    if arguments.names:
        raise UsageError(f"algorithms takes no name: '{arguments.names[0]}'")
    for algorithm in algorithms.available():
        by = lanes.sha256().description if algorithm.name == "sha256" else ""
        if arguments.json:
            record: dict[str, object] = {
                "schema": report.SCHEMA,
                "algorithm": algorithm.name,
                "bits": 8 * algorithm.digest_size,
                "cryptographic": algorithm.cryptographic,
            }
            if by:
                record["by"] = by
            report.write(report.to_json(record))
            continue
        remark = "" if algorithm.cryptographic else "  not cryptographic: finds accidents, not attacks"
        default = "  (default)" if algorithm.name == algorithms.DEFAULT else ""
        report.write(f"{algorithm.name:<12} {8 * algorithm.digest_size:4d} bits{default}{remark}{by and '  by ' + by}")
    for name, reason in algorithms.not_installed():
        if arguments.json:
            report.write(report.to_json({"schema": report.SCHEMA, "algorithm": name, "error": reason}))
        else:
            report.write(f"{name:<12} {reason}")
    return OK


_RUN = {"checksum": _checksum, "check": _check, "compare": _compare, "algorithms": _algorithms}


def _open_options(arguments: Arguments) -> OpenOptions:
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
        offset=arguments.offset,
        length=arguments.length,
        own_descriptors=False,
    )


def _watcher(arguments: Arguments, images: int | None) -> Progress | None:
    """Who hears of the progress of so many images (None: nobody knows how many), or None."""
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


def _occupy_standard_descriptors() -> None:
    """Where one of descriptors 0 to 2 is closed, put something there that fails, lest an image takes its place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDONLY if fd else os.O_WRONLY)


def _allow_many_descriptors() -> None:
    """Raise the soft limit: a chain may have 200 images, and a few images are open at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _catch_signals() -> None:
    """Let the signals that end the process raise Interrupted in the main thread; a second one ends it at once.

    Only after what a command needs is imported: an exception in the midst of an import may be swallowed.
    """
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and background jobs keep theirs
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _release_signals()
    raise Interrupted(number)


def _release_signals() -> None:
    """Let them end the process at once."""
    for number in _ENDING:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _die_by(number: int) -> NoReturn:
    """End the process as NUMBER would have ended it, so that shells and make know."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # whoever started us may have blocked it
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _debug(error: BaseException | None = None) -> None:
    if os.environ.get("IMGSUM_DEBUG"):
        import traceback

        if error is None:
            traceback.print_exc()
        else:
            traceback.print_exception(error)
