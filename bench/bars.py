"""The bars: what a case is to reach, as a ratio of runs made side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from bench.run import Outcome

MEMORY_LIMIT = 64 << 20


class Bar(NamedTuple):
    """At most LIMIT times the larger of OF."""

    limit: float
    of: tuple[str, ...]
    who: str = "imgsum"
    less: str | None = None
    """What is taken off WHO first: the interpreter's start, where the peer has none."""

    def __str__(self) -> str:
        who = self.who + (f" - {self.less}" if self.less else "")
        return f"{who} <= {self.limit:g} x {' or '.join(self.of)}"


class Verdict(NamedTuple):
    """A bar, and what was measured."""

    bar: str
    limit: float
    measured: float | None
    met: bool | None
    """None: it could not be measured."""
    why: str | None
    """Why not."""


def at_most(limit: float, *of: str, who: str = "imgsum", less: str | None = None) -> Bar:
    """WHO, less LESS, takes at most LIMIT times as long as the larger of OF."""
    return Bar(limit, of, who, less)


def judge(bar: Bar, outcome: Outcome) -> Verdict:
    """The median of the ratios, round by round, against the bar."""
    why = "a wrong answer" if outcome.wrong else None
    for label in (bar.who, *bar.of, *([bar.less] if bar.less else [])):
        if why is None and label not in outcome.runs:
            installed = "not installed" not in outcome.missing.get(label, "")
            why = f"{label} failed" if installed else outcome.missing[label]
    if why is not None:
        return Verdict(str(bar), bar.limit, None, None, why)
    measured = statistics.median(ratios(bar, outcome))
    return Verdict(str(bar), bar.limit, measured, measured <= bar.limit, None)


def ratios(bar: Bar, outcome: Outcome) -> list[float]:
    """The ratio in each round."""
    return [
        (run.wall - (outcome.runs[bar.less][index].wall if bar.less else 0.0))
        / max(outcome.runs[label][index].wall for label in bar.of)
        for index, run in enumerate(outcome.runs[bar.who])
    ]


def judge_memory(peaks: Mapping[str, int]) -> Verdict:
    """The most resident of PEAKS, which are bytes by case."""
    bar = f"imgsum resident <= {MEMORY_LIMIT >> 20} MiB"
    if not peaks:
        return Verdict(bar, MEMORY_LIMIT, None, None, "nothing was measured")
    case = max(peaks, key=lambda name: peaks[name])
    return Verdict(f"{bar}, most in {case}", MEMORY_LIMIT, peaks[case], peaks[case] <= MEMORY_LIMIT, None)


def peak_memory(outcome: Outcome) -> int:
    """The most that any run of imgsum had resident. 0: there were none."""
    runs = [run for label, runs in outcome.runs.items() if label.startswith("imgsum") for run in runs]
    return max((run.max_rss for run in runs), default=0)
