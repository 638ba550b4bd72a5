"""Results -> JSON, a Markdown table, and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.bars import MEMORY_LIMIT
from bench.images import SIZE

Record = dict[str, Any]
"""A case as it is in the JSON: see record() in __main__.py."""


def all_bars(cases: list[Record], memory: Record) -> list[Record]:
    """The bars of CASES, each with its case's name and description, and the one on MEMORY, which is of all cases."""
    bars = [{"case": case["name"], "about": case["about"], **bar} for case in cases for bar in case["bars"]]
    return [*bars, {"case": "memory", "about": "all cases but the sweeps", **memory}]


def write(results: Path, host: Record, cases: list[Record], bars: list[Record]) -> list[Path]:
    """Write bench.json, bench.md and bench.png into RESULTS. Returns those that were written."""
    results.mkdir(parents=True, exist_ok=True)
    written = [results / "bench.json", results / "bench.md"]
    written[0].write_text(json.dumps({"host": host, "bars": bars, "cases": cases}, indent=1) + "\n")
    written[1].write_text("\n".join(markdown(host, cases, bars)) + "\n")
    if plot(results / "bench.png", cases, bars):
        written.append(results / "bench.png")
    return written


def markdown(host: Record, cases: list[Record], bars: list[Record]) -> Iterator[str]:
    """All of it as tables."""
    yield "# imgsum bench"
    yield ""
    for key, value in host.items():
        text = ", ".join(f"{k}: {v or 'not installed'}" for k, v in value.items()) if isinstance(value, dict) else value
        yield f"- {key}: {text}"
    yield ""
    if host["size"] < SIZE:
        yield f"**Scaled down**: the images have {host['size'] / SIZE:.3g} of the sizes that these tables name."
        yield "The bars are for the full sizes; at small ones, ratios say how long a process takes to start."
        yield ""
    yield from _problems(cases)
    yield from _bars(bars)
    yield from _before_after(cases)
    yield from _sweeps(cases)
    yield from _everything(cases)


def summary(bars: list[Record]) -> str:
    """How many bars were met, in a line."""
    verdicts = [bar["met"] for bar in bars]
    return f"{verdicts.count(True)} bars met, {verdicts.count(False)} missed, {verdicts.count(None)} not measured"


def _problems(cases: list[Record]) -> Iterator[str]:
    lines = [f"- **{case['name']}**: {text}" for case in cases for text in case["problems"]]
    if lines:
        yield "## Not as it should be"
        yield ""
        yield from lines
        yield ""


def _bars(bars: list[Record]) -> Iterator[str]:
    yield "## Bars"
    yield ""
    yield summary(bars) + "."
    yield ""
    yield "| case | what | bar | measured | |"
    yield "|---|---|---|---|---|"
    for bar in bars:
        yield f"| {bar['case']} | {bar['about']} | {bar['bar']} | {measured_text(bar)} | {verdict_text(bar)} |"
    yield ""


def measured_text(bar: Record) -> str:
    """What was measured, as a ratio or in MiB."""
    if bar["measured"] is None:
        return "-"
    if bar["limit"] == MEMORY_LIMIT:
        return f"{bar['measured'] / (1 << 20):.1f} MiB"
    return f"{bar['measured']:.2f}"


def verdict_text(bar: Record) -> str:
    """The verdict in words."""
    return {True: "met", False: "**missed**", None: f"not measured: {bar['why']}"}[bar["met"]]


def _before_after(cases: list[Record]) -> Iterator[str]:
    """The mailing list's table: median, and half of what lies between the fastest and the slowest."""
    rows = [case for case in cases if {"before", "imgsum"} <= case["runs"].keys()]
    if not rows:
        return
    yield "## Before and after"
    yield ""
    yield "Before: the simple loop of naive.py, one thread."
    yield ""
    yield "| image and i/o | before | after | change |"
    yield "|---|---|---|---|"
    for case in rows:
        before, after = walls(case, "before"), walls(case, "imgsum")
        change = median(b / a for b, a in zip(before, after, strict=True))
        yield f"| {case['about']} | {_spread(before)} | {_spread(after)} | x{change:.2f} |"
    yield ""


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds):.3f}s ±{(max(seconds) - min(seconds)) / 2:.3f}s"


def _sweeps(cases: list[Record]) -> Iterator[str]:
    for case in cases:
        if case["sweep"] and "best" in case["runs"]:
            best = median(walls(case, "best"))
            yield f"## {case['about']}"
            yield ""
            yield "| value | seconds | of the best |"
            yield "|---|---|---|"
            for label in values(case):
                seconds = median(walls(case, label))
                yield f"| {label} | {seconds:.3f} | {seconds / best:.2f} |"
            yield ""


def _everything(cases: list[Record]) -> Iterator[str]:
    yield "## All commands"
    yield ""
    yield "Medians of whole processes. The ratio is imgsum's time to this command's, the median of the rounds."
    yield ""
    yield "| case | command | runs | seconds | user | system | resident | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases:
        for label in values(case):
            runs = case["runs"][label]
            wall, user, system = (median(run[key] for run in runs) for key in ("wall", "user", "system"))
            resident = f"{max(run['max_rss'] for run in runs) / (1 << 20):.1f} MiB" if user or system else "-"
            ratio = "-"
            if label != "imgsum" and "imgsum" in case["runs"]:
                pairs = zip(walls(case, "imgsum"), walls(case, label), strict=True)
                ratio = f"{median(one / other if other else 0.0 for one, other in pairs):.2f}"
            yield (
                f"| {case['name']} | {label} | {len(runs)} | {wall:.3f} | {user:.3f} | {system:.3f}"
                f" | {resident} | {ratio} |"
            )


def walls(case: Record, label: str) -> list[float]:
    """The seconds of LABEL in each round."""
    return [run["wall"] for run in case["runs"][label]]


def values(case: Record) -> list[str]:
    """The labels of what was run."""
    return [label for label in case["runs"] if label != "best"]


def plot(path: Path, cases: list[Record], bars: list[Record]) -> bool:
    """Draw the bars, before and after, and the sweeps. False without matplotlib, which only development installs."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bars = [bar for bar in bars if bar["measured"] is not None]
    pairs = [case for case in cases if {"before", "imgsum"} <= case["runs"].keys()]
    sweeps = [case for case in cases if case["sweep"] and "best" in case["runs"]]
    heights = [max(2.0, 0.25 * len(bars)), max(2.0, 0.5 * len(pairs)), 4.0]
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(12, sum(heights)), height_ratios=heights, layout="constrained"
    )

    labels = [f"{bar['case']}: {bar['bar']} ({measured_text(bar)})" for bar in bars]
    colors = ["tab:green" if bar["met"] else "tab:red" for bar in bars]
    top.barh(labels, [bar["measured"] / bar["limit"] for bar in bars], color=colors)
    top.axvline(1.0, color="black", linewidth=1)
    top.set_xlim(0, 2.5)  # what is beyond is far off, and its figure is in the label
    top.invert_yaxis()
    top.set_title("Bars: measured as a part of the bar (left of the line: met)")

    rows = range(len(pairs))
    middle.barh([row - 0.2 for row in rows], [median(walls(case, "before")) for case in pairs], 0.4, label="before")
    middle.barh([row + 0.2 for row in rows], [median(walls(case, "imgsum")) for case in pairs], 0.4, label="imgsum")
    middle.set_yticks(list(rows), [case["name"] for case in pairs])
    middle.invert_yaxis()
    middle.set_title("Before (one thread, a simple loop) and after, seconds")
    if pairs:
        middle.legend()

    for case in sweeps:
        best = median(walls(case, "best"))
        steps = values(case)
        bottom.plot(range(len(steps)), [median(walls(case, step)) / best for step in steps], "o-", label=(
            f"{case['name']}: {steps[0]} .. {steps[-1]}"))  # fmt: skip
    bottom.set_title("Sweeps: time as a multiple of the best value's")
    bottom.set_xlabel("step of the sweep")
    if sweeps:
        bottom.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return True
