"""python -m bench: make the images, time the cases, say which bars are met."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from bench import host, report
from bench.bars import judge, judge_memory, peak_memory
from bench.case import Case, Setup
from bench.cases import CASES
from bench.images import SIZE, Images, NoSpaceError, closure
from bench.run import Answers, FailedError, Outcome, time_rounds
from imgsum.errors import UsageError
from imgsum.units import parse_size

_HERE = Path(__file__).parent


def main() -> int:
    """0 when all could be measured, whether or not bars are met; 1 for a wrong answer or what failed."""
    arguments = _parse()
    chosen = [case for case in CASES.values() if any(fnmatch(case.name, pattern) for pattern in arguments.only)]
    if arguments.list:
        for case in chosen:
            print(f"{case.name:<22} {case.about}", *(f"\n{'':<22}   {bar}" for bar in case.bars), sep="")
        return 0
    if not chosen:
        print("bench: no case of that name (--list shows them)", file=sys.stderr)
        return 2
    images = Images(arguments.images, arguments.size)
    try:
        images.check_space([case.images for case in chosen], arguments.keep)
    except NoSpaceError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    details = host.details(arguments.images)
    details["size"] = arguments.size
    records = run_cases(chosen, images, arguments.runs, arguments.keep)
    peaks = {made["name"]: made["peak_memory"] for made in records if made["peak_memory"]}
    bars = report.all_bars(records, judge_memory(peaks)._asdict())
    written = report.write(arguments.results, details, records, bars)
    print(f"{report.summary(bars)}; {', '.join(map(str, written))}")
    failed = [record["name"] for record in records if record["failed"]]
    if failed:
        print(f"bench: failed, or a wrong answer: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_cases(cases: list[Case], images: Images, most: int, keep: bool) -> list[report.Record]:
    """Measure CASES in turn. Each finds its images, which go with the last one that needs them, unless KEPT."""
    answers = Answers()
    records = []
    needs = [set(closure(case.images)) for case in cases]
    try:
        for index, case in enumerate(cases):
            records.append(run_case(case, images, most, answers))
            if not keep:
                images.remove(needs[index].difference(*needs[index + 1 :]))
    except KeyboardInterrupt:
        _say("interrupted: what was measured so far is reported")
    finally:
        if not keep:
            images.remove(set().union(*needs))
    return records


def run_case(case: Case, images: Images, most: int, answers: Answers) -> report.Record:
    """Measure CASE. What fails is in the record, and the next case can be measured."""
    began = time.monotonic()
    outcome = Outcome({}, {}, [])
    runs = min(most, case.runs or most)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="imgsum-bench-"))
        try:
            images.make(case.images)
            commands = case.commands(Setup(images, stack, Path(scratch)))
            outcome = time_rounds(case.name, commands, runs, answers)
        except FailedError as error:
            outcome.missing["imgsum"] = str(error)
    if case.sweep and outcome.runs:
        best = min(outcome.runs, key=outcome.median)
        outcome.runs["best"] = outcome.runs[best]
    made = record(case, outcome)
    medians = ", ".join(f"{label} {outcome.median(label):.3f}" for label in outcome.runs)
    _say(f"{case.name}: {medians or 'nothing measured'} ({time.monotonic() - began:.0f} s in all)")
    for bar in made["bars"]:
        _say(f"    {bar['bar']}: {report.measured_text(bar)}, {report.verdict_text(bar)}")
    for problem in made["problems"]:
        _say(f"    {problem}")
    return made


def record(case: Case, outcome: Outcome) -> report.Record:
    """What is written of CASE: its runs, the verdict on each bar, and what went wrong."""
    # A peer that isn't installed is no failure; anything else that couldn't be measured is.
    failed = any("not installed" not in why for why in outcome.missing.values())
    return {
        "name": case.name,
        "about": case.about,
        "sweep": case.sweep,
        "runs": {label: [run._asdict() for run in runs] for label, runs in outcome.runs.items()},
        "bars": [judge(bar, outcome)._asdict() for bar in case.bars],
        "peak_memory": 0 if case.sweep else peak_memory(outcome),  # sweeps go beyond what the defaults promise
        "problems": [*outcome.wrong, *(f"{label}: {why}" for label, why in outcome.missing.items())],
        "failed": failed or bool(outcome.wrong),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="imgsum against its peers")
    parser.add_argument("--list", action="store_true", help="list the cases and their bars")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="only these cases; * and ? match, may be repeated"
    )
    parser.add_argument("--runs", metavar="N", type=int, default=5, help="rounds of each case, after a warm-up (5)")
    parser.add_argument("--size", metavar="SIZE", type=_size, default=SIZE, help="size of the largest content (6g)")
    parser.add_argument(
        "--images", metavar="DIR", type=Path, default=_HERE / "images", help="where images are made (bench/images)"
    )
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=_HERE / "results", help="where results go (bench/results)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the images, for the next time")
    arguments = parser.parse_args()
    arguments.only = arguments.only or ["*"]
    return arguments


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.reason) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
