"""python -m bench: make the images, time the cases, say which bars are met."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from bench import host, report
from bench.cases import CASES, IMGSUM, Case
from bench.images import SIZE, Images, closure, qemu_nbd
from bench.run import FailedError, Outcome, time_rounds
from imgsum.errors import UsageError
from imgsum.units import parse_size

_HERE = Path(__file__).parent


def main() -> int:
    """0 when all could be measured, whether or not bars are met; 1 for a wrong answer or what failed."""
    arguments = _parse()
    chosen = [case for case in CASES.values() if any(fnmatch(case.name, pattern) for pattern in arguments.only or "*")]
    if arguments.list:
        for case in chosen:
            print(f"{case.name:<22} {case.about}", *(f"\n{'':<24}{bar}" for bar in case.bars), sep="")
        return 0
    if not chosen:
        print("bench: no case of that name (--list shows them)", file=sys.stderr)
        return 2
    images = Images(arguments.images, arguments.size)
    images.directory.mkdir(parents=True, exist_ok=True)
    about = host.describe(images.directory, images.size)
    records = run_cases(chosen, images, arguments.runs, arguments.keep)
    written = report.write(arguments.results, about, records)
    print(*written, sep="\n")
    failed = [record["name"] for record in records if record["failed"]]
    if failed:
        print(f"bench: failed, or a wrong answer: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_cases(cases: list[Case], images: Images, runs: int, keep: bool) -> list[report.Record]:
    """Measure CASES in turn. An image goes with the last case that needs it, unless KEPT."""
    answers: dict[str, tuple[str, str]] = {}
    records = []
    needs = [set(closure(case.images)) for case in cases]
    try:
        for index, case in enumerate(cases):
            records.append(run_case(case, images, runs, answers))
            if not keep:
                images.remove(needs[index].difference(*needs[index + 1 :]))
    except KeyboardInterrupt:
        _say("interrupted: what was measured so far is reported")
    finally:
        if not keep:
            images.remove(set().union(*needs))
    return records


def run_case(case: Case, images: Images, runs: int, answers: dict[str, tuple[str, str]]) -> report.Record:
    """Measure CASE. What fails is in the record, and the next case can be measured."""
    with contextlib.ExitStack() as stack:
        places = {
            "imgsum": shlex.join(IMGSUM),
            "scratch": stack.enter_context(tempfile.TemporaryDirectory(prefix="imgsum-bench-")),
        }

        def fill(place: str) -> str:
            if place not in places:
                kind, _, name = place.rpartition(":")
                path = images.path(name)
                if kind == "nbd":
                    places[place] = stack.enter_context(qemu_nbd(path))
                else:
                    places[place] = str(path.stat().st_size if kind == "size" else path)
            return places[place]

        try:
            images.make(case.images)
            outcome = time_rounds(case.name, case.commands(fill), runs, answers)
        except FailedError as error:
            outcome = Outcome({}, {"imgsum": error}, [])
    record = report.record(case, outcome, images.size if case.images else SIZE)
    _say(f"{case.name}: {case.about}")
    for label, measured in outcome.runs.items():
        _say(f"    {label}: " + " ".join(f"{run.wall:.3f}" for run in measured))
    for bar in record["bars"]:
        _say(f"    {bar['bar']}: {report.verdict_text(bar)}")
    for problem in record["problems"]:
        _say(f"    {problem}")
    return record


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="imgsum against its peers")
    parser.add_argument("--list", action="store_true", help="list the cases and their bars")
    parser.add_argument("--only", metavar="NAME", action="append", help="these cases; * and ? match, may be repeated")
    parser.add_argument("--runs", metavar="N", type=int, default=5, help="rounds of each case, after a warm-up (5)")
    parser.add_argument("--size", metavar="SIZE", type=_size, default=SIZE, help="size of the largest content (6g)")
    parser.add_argument("--images", metavar="DIR", type=Path, default=_HERE / "images", help="for images")
    parser.add_argument("--results", metavar="DIR", type=Path, default=_HERE / "results", help="for results")
    parser.add_argument("--keep", action="store_true", help="keep the images, for the next time")
    return parser.parse_args()


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.reason) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
