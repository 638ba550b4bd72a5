"""main(): signals and the exit status. It knows no command, and is the only module that ends the process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part of signal, which imports enum: that takes ms

# Until the command begins there is nothing to clean up. So SIGINT ends the process at once: Python's own handler would
# print a traceback. A caller's choice to ignore SIGINT is kept.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import contextlib
import os
import resource
import signal
import sys
from importlib import import_module
from types import FrameType

from imgsum.errors import TROUBLE, Error, unexpected

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from imgsum.commands.options import Arguments


class Interrupted(BaseException):
    """A signal to end the process arrived. Raised in the main thread, so that everything is closed on the way up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main() -> None:
    """Run the command of sys.argv, and end the process with its exit status."""
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
    """Run the command of ARGV, without the program's name, and return the exit status."""
    from imgsum import trace
    from imgsum.commands import parser
    from imgsum.output import report

    try:
        arguments = parser.parse(argv)
        if os.environ.get("IMGSUM_DEBUG") or getattr(arguments, "debug", False):
            trace.enable()
        run_command: Callable[[Arguments], int] = import_module(f"imgsum.commands.{arguments.command}").run
        _catch_signals()
        return run_command(arguments)
    except SystemExit as end:  # argparse has printed the help or the version
        return end.code if isinstance(end.code, int) else TROUBLE
    except BrokenPipeError:
        raise
    except Error as error:
        trace.exception(error)
        report.warn(str(error))
        return TROUBLE
    except Exception as error:
        trace.exception(error)
        report.warn(str(unexpected(error)))
        return TROUBLE


def _occupy_standard_descriptors() -> None:
    """Open /dev/null for each of descriptors 0 to 2 that is closed: an image that is opened would get its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDONLY if fd else os.O_WRONLY)


def _allow_many_descriptors() -> None:
    """Raise the soft limit of open files: a backing chain may have 200 images, and several chains are open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _catch_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP raise Interrupted in the main thread. A second one ends the process at once.

    Called after all imports, as an exception raised during an import may be swallowed.
    """
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and background jobs keep theirs
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _release_signals()
    raise Interrupted(number)


def _release_signals() -> None:
    """Let the signals end the process at once."""
    for number in _ENDING:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _die_by(number: int) -> NoReturn:
    """End the process by signal NUMBER, so that shells and make see why it ended."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # whoever started us may have blocked it
    os.kill(os.getpid(), number)
    os._exit(128 + number)
