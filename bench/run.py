"""Times whole processes, in rounds: A B C, A B C, ... so that a ratio is of two runs made side by side.

A benchmark of a wrong answer is worthless: whatever computes the same thing must print the same, in every run.
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
    status: int = 0
    """The exit status that it must have."""
    says: str | None = None
    """What must be in its output. A status alone says little: that of a difference is that of a crash too."""


Limit = Callable[[], float]
"""What is not a process but measured in the same rounds: its seconds."""


class Run(NamedTuple):
    """One run. Seconds, and bytes."""

    wall: float
    user: float = 0.0
    system: float = 0.0
    max_rss: int = 0
    """At least that of this process, from which it is forked: what measures must stay small."""


class Outcome(NamedTuple):
    """What came of the commands of one case, by their labels."""

    runs: dict[str, list[Run]]
    missing: dict[str, str]
    """Why there are no runs of a command."""
    wrong: list[str]
    """Answers that contradict each other."""

    def median(self, label: str) -> float:
        """The median seconds of LABEL."""
        return statistics.median(run.wall for run in self.runs[label])


class Answers:
    """What has been answered so far, in all cases."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}

    def contradiction(self, key: str, answer: str, who: str) -> str | None:
        """Note that WHO answered KEY with ANSWER. What is wrong with that, or None."""
        known, first = self._known.setdefault(key, (answer, who))
        if answer == known:
            return None
        return f"WRONG: {who} says {answer[:64] or 'nothing'}, {first} says {known[:64] or 'nothing'} ({key})"


class FailedError(Exception):
    """A command can't be measured."""


def time_rounds(
    case: str, commands: Mapping[str, Command | Limit], count: int, answers: Answers, warm_up: bool = True
) -> Outcome:
    """COUNT rounds of COMMANDS, after one that is not counted. What fails is left out from then on.

    The peers are worth no time where imgsum fails.
    """
    outcome = Outcome({}, {}, [])
    for number in range(count + warm_up):
        for label, command in commands.items():
            if label in outcome.missing or "imgsum" in outcome.missing:
                continue
            if not isinstance(command, Command):
                outcome.runs.setdefault(label, []).append(Run(command()))
                continue
            try:
                run, answer = run_once(command)
            except FailedError as error:
                outcome.missing[label] = str(error)
                outcome.runs.pop(label, None)
                continue
            outcome.runs.setdefault(label, []).append(run)
            wrong = answers.contradiction(command.answer, answer, f"{label} in {case}") if command.answer else None
            if wrong and wrong not in outcome.wrong:
                outcome.wrong.append(wrong)
        if warm_up and number == 0:
            for runs in outcome.runs.values():
                runs.clear()
    return outcome


def run_once(command: Command) -> tuple[Run, str]:
    """One run of COMMAND, and the first words of the lines that it printed. Raises FailedError."""
    if shutil.which(command.argv[0]) is None:
        raise FailedError(f"{command.argv[0]} is not installed")
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
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
    if process.returncode != command.status:
        raise FailedError(f"status {process.returncode}" + (f": {said[-1][:200]}" if said else ""))
    if command.says is not None and command.says not in "\n".join(printed):
        raise FailedError(f"does not say '{command.says}'")
    answer = " ".join(line.split()[0] for line in printed)
    return Run(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024), answer


def _lines(file: IO[bytes]) -> list[str]:
    """The lines of FILE that aren't blank."""
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
