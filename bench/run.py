"""Times whole processes, in rounds: A B C, A B C, ... so that a ratio is of two runs made side by side.

A benchmark of a wrong answer is worthless: whatever computes the same must print the same, in every run.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, NamedTuple

TIMEOUT = 300.0
"""Seconds after which a command is killed: a benchmark must not hang on what it measures."""


class Command(NamedTuple):
    """A process to be timed."""

    argv: list[str]
    answer: str | None = None
    """What its lines begin with: all commands of all cases that have the same `answer` must print the same."""
    says: str = ""
    """What must be in its output."""
    env: Mapping[str, str] = {}


Measure = Callable[[], float]
"""What is measured otherwise, in the same rounds: seconds. Raises FailedError."""


class Run(NamedTuple):
    """One run. Seconds, and bytes."""

    wall: float
    user: float = 0.0
    system: float = 0.0
    max_rss: int = 0
    """At least that of this process, from which it is forked."""


class Outcome(NamedTuple):
    """What came of the commands of one case, by their labels."""

    runs: dict[str, list[Run]]
    missing: dict[str, FailedError]
    """Why there are no runs of a command."""
    wrong: list[str]
    """Answers that contradict each other."""

    def ratio(self, label: str, *of: str) -> float:
        """LABEL's seconds as a multiple of the larger of OF: the median over the rounds."""
        rounds = zip(*(self.runs[name] for name in (label, *of)), strict=True)
        return statistics.median(one.wall / max(*(run.wall for run in others), 1e-9) for one, *others in rounds)


class FailedError(Exception):
    """A command can't be measured."""

    def __init__(self, reason: str, *, absent: bool = False) -> None:
        """ABSENT: it isn't installed, or this CPU hasn't got it. That is no failure."""
        super().__init__(reason)
        self.absent = absent


def time_rounds(
    case: str, commands: Mapping[str, Command | Measure], count: int, answers: dict[str, tuple[str, str]]
) -> Outcome:
    """COUNT rounds of COMMANDS, after one that is not counted. What fails is left out from then on.

    ANSWERS has what was answered so far, in all cases, and by whom.
    """
    outcome = Outcome({}, {}, [])
    for number in range(count + 1):
        for label, command in commands.items():
            if label in outcome.missing or "imgsum" in outcome.missing:  # the peers alone are worth no time
                continue
            try:
                run, answer = run_once(command) if isinstance(command, Command) else (Run(command()), "")
            except FailedError as error:
                outcome.missing[label] = error
                outcome.runs.pop(label, None)
                continue
            if number:
                outcome.runs.setdefault(label, []).append(run)
            if isinstance(command, Command) and command.answer:
                known, first = answers.setdefault(command.answer, (answer, f"{label} in {case}"))
                if answer != known:
                    outcome.wrong.append(f"WRONG: {label} in {case} says {answer[:64]}, {first} says {known[:64]}")
    return outcome


def run_once(command: Command) -> tuple[Run, str]:
    """One run of COMMAND, and the first words of the lines that it printed. Raises FailedError."""
    if shutil.which(command.argv[0]) is None:
        raise FailedError(f"{command.argv[0]} is not installed", absent=True)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        env = {**os.environ, **command.env}
        start = time.perf_counter()
        process = subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env)
        timer = threading.Timer(TIMEOUT, os.kill, (process.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()
        # wait4 gives the resources of this child and of those that it waited for, and of no other.
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            timer.cancel()
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        printed, said = _lines(stdout), _lines(stderr)
    if process.returncode:
        raise FailedError(f"status {process.returncode}" + (f": {said[-1][:200]}" if said else ""))
    if command.says not in "\n".join(printed):
        raise FailedError(f"does not say '{command.says}'")
    answer = " ".join(line.split()[0] for line in printed)
    return Run(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024), answer


def _lines(file: IO[bytes]) -> list[str]:
    """The lines of FILE that aren't blank."""
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
