"""Runs -> verdicts, JSON, Markdown tables, and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.cases import Bar, Case
from bench.images import MIB, SIZE
from bench.run import Outcome

MEMORY_LIMIT = 64 * MIB

Record = dict[str, Any]
"""A case, a bar or a host as it is in the JSON."""

# Okabe and Ito's colours, which are told apart by everybody.
_IMGSUM, _OTHERWISE, _PEER, _LIMIT = "#0072B2", "#56B4E9", "#E69F00", "#999999"


def record(case: Case, outcome: Outcome, size: int) -> Record:
    """What is written of CASE, measured with images of SIZE: its runs, the verdicts, and what went wrong."""
    return {
        "name": case.name,
        "about": case.about,
        "runs": {label: [run._asdict() for run in runs] for label, runs in outcome.runs.items()},
        "bars": [{"case": case.name, "about": case.about, **judge(bar, outcome, size)} for bar in case.bars],
        "problems": [*outcome.wrong, *(f"{label}: {error}" for label, error in outcome.missing.items())],
        # A peer that isn't installed is no failure; anything else that couldn't be measured is.
        "failed": bool(outcome.wrong) or not all(error.absent for error in outcome.missing.values()),
    }


def judge(bar: Bar, outcome: Outcome, size: int) -> Record:
    """The median of the ratios, round by round, against the BAR."""
    missing = [label for label in ("imgsum", *bar.of) if label not in outcome.runs]
    if outcome.wrong:
        return _verdict(str(bar), bar.limit, None, "not measured: a wrong answer")
    if missing:
        return _verdict(str(bar), bar.limit, None, f"not measured: {outcome.missing.get(missing[0], 'it failed')}")
    return _verdict(str(bar), bar.limit, outcome.ratio("imgsum", *bar.of), _scaled_down(size))


def judge_memory(cases: list[Record], size: int) -> Record:
    """The most that any run of imgsum had resident. What its peers take is theirs."""
    peaks = [
        (run["max_rss"], case["name"])
        for case in cases
        for label, runs in case["runs"].items()
        if label.startswith("imgsum")
        for run in runs
    ]
    peak, name = max(peaks, default=(0, ""))
    why = _scaled_down(size) if peak else "not measured"
    bar = f"<= {MEMORY_LIMIT // MIB} MiB resident" + (f", most in {name}" if peak else "")
    verdict = _verdict(bar, MEMORY_LIMIT / MIB, peak / MIB or None, why)
    return {"case": "memory", "about": "imgsum in all cases", **verdict}


def _scaled_down(size: int) -> str | None:
    return "not judged: scaled down" if size < SIZE else None


def _verdict(bar: str, limit: float, measured: float | None, why: str | None) -> Record:
    """WHY there is no verdict, if there is none."""
    met = None if why or measured is None else measured <= limit
    return {"bar": bar, "limit": limit, "measured": measured, "met": met, "why": why}


def verdict_text(bar: Record) -> str:
    """What was measured, and the verdict in words."""
    measured = "" if bar["measured"] is None else f"{bar['measured']:.3g}, "
    return measured + {True: "met", False: "MISSED", None: bar["why"]}[bar["met"]]


def write(results: Path, host: Record, cases: list[Record]) -> list[Path]:
    """Write bench.json, bench.md and bench.png into RESULTS. Returns those that were written."""
    results.mkdir(parents=True, exist_ok=True)
    bars = [*(bar for case in cases for bar in case["bars"]), judge_memory(cases, host["size"])]
    written = [results / "bench.json", results / "bench.md"]
    written[0].write_text(json.dumps({"host": host, "bars": bars, "cases": cases}, indent=1) + "\n")
    written[1].write_text("\n".join(_markdown(host, cases, bars)) + "\n")
    if _draw(results / "bench.png", cases):
        written.append(results / "bench.png")
    return written


def _markdown(host: Record, cases: list[Record], bars: list[Record]) -> Iterator[str]:
    yield from ("# imgsum bench", "")
    for key, value in host.items():
        text = ", ".join(f"{k}: {v or 'not installed'}" for k, v in value.items()) if isinstance(value, dict) else value
        yield f"- {key}: {text}"
    if host["size"] < SIZE:
        yield from ("", f"**Scaled down**: images have {host['size'] / SIZE:.3g} of the sizes that are named here.")
    problems = [f"- **{case['name']}**: {text}" for case in cases for text in case["problems"]]
    if problems:
        yield from ("", "## Not as it should be", "", *problems)
    met = [bar["met"] for bar in bars]
    yield from ("", "## Bars", "")
    yield f"{met.count(True)} met, {met.count(False)} missed, {met.count(None)} not judged or not measured."
    yield from ("", "| case | what | bar | measured |", "|---|---|---|---|")
    for bar in bars:
        yield f"| {bar['case']} | {bar['about']} | {bar['bar']} | {verdict_text(bar)} |"
    yield from ("", "## All commands", "", "Medians. The ratio is imgsum's time to this command's, of the rounds.", "")
    yield "| case | command | runs | seconds | user | system | resident | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases:
        for label, runs in case["runs"].items():
            wall, user, system = (median(run[key] for run in runs) for key in ("wall", "user", "system"))
            resident = max(run["max_rss"] for run in runs) / MIB
            pairs = zip(case["runs"].get("imgsum", runs), runs, strict=True)
            ratio = median(one["wall"] / (other["wall"] or math.inf) for one, other in pairs)
            row = [case["name"], label, len(runs), f"{wall:.4g}", f"{user:.3f}", f"{system:.3f}"]
            yield f"| {' | '.join(map(str, row))} | {f'{resident:.1f} MiB' if resident else '-'} | {ratio:.2f} |"


def _draw(path: Path, cases: list[Record]) -> bool:
    """Draw each case that was measured: imgsum and its peers, in seconds. False without matplotlib, or any case."""
    cases = [case for case in cases if case["runs"]]
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not cases:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(2, len(cases))
    rows = -(-len(cases) // columns)
    figure = plt.figure(figsize=(8 * columns, 2.4 * rows + 0.6), layout="constrained")
    for index, case in enumerate(cases):
        axes = figure.add_subplot(rows, columns, index + 1)
        labels = list(case["runs"])
        seconds = [median(run["wall"] for run in case["runs"][label]) for label in labels]
        bars = axes.barh(labels, seconds, color=[_colour(label) for label in labels])
        axes.bar_label(bars, [f"{value:.3g} s" for value in seconds], padding=3)
        if max(seconds) > 20 * min(seconds) > 0:
            axes.set_xscale("log")
            axes.set_xlim(min(seconds) / 2, max(seconds) * 3)
        else:
            axes.set_xlim(0, max(seconds) * 1.2 or 1)
        axes.invert_yaxis()
        verdicts = [f"{bar['bar']}: {verdict_text(bar)}" for bar in case["bars"]]
        axes.set_title("\n".join([case["about"], *verdicts]), fontsize=9, loc="left")
    figure.suptitle(
        "Seconds, less is better; blue: imgsum, light blue: imgsum otherwise, orange: others, grey: limits", fontsize=11
    )
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True


def _colour(label: str) -> str:
    if label.startswith("imgsum"):
        return _IMGSUM if label == "imgsum" else _OTHERWISE
    return _LIMIT if label.startswith(("work limit", "outer hash", "1 ms")) else _PEER
