"""The benchmark at sizes that take no time: that it measures what it says, and that it catches a wrong answer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import need

from bench.cases import CASES, IMGSUM, Bar
from bench.images import BLOCK, IMAGES, SIZE, Images, data_bytes, qemu_nbd
from bench.report import judge, judge_memory
from bench.run import Command, FailedError, Outcome, Run, run_once, time_rounds

ROOT = Path(__file__).parents[1]
SMALL = 8 << 20
Tool = Callable[[str], str]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("bench-images"), SMALL)


class Bench:
    """python -m bench with images and results of its own, and only the programs in `bin` as its peers."""

    def __init__(self, directory: Path) -> None:
        self.images = directory / "images"
        self.results = directory / "results"
        self.bin = directory / "bin"
        self.bin.mkdir()

    def add(self, name: str, program: str) -> None:
        (self.bin / name).symlink_to(program)

    def fake(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def __call__(self, *cases: str, status: int = 0, runs: int = 1) -> dict[str, Any]:
        """Measure CASES: what the JSON says of each."""
        argv = [sys.executable, "-m", "bench", f"--size={SMALL}", f"--runs={runs}"]
        argv += ["--images", str(self.images), "--results", str(self.results), *(f"--only={case}" for case in cases)]
        env = {**os.environ, "PATH": str(self.bin)}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        report = json.loads((self.results / "bench.json").read_text())
        return {case["name"]: case for case in report["cases"]}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# What is measured.


def test_measures_rounds_and_bars_and_writes_a_report(bench: Bench, tool: Tool) -> None:
    bench.fake("blksum", f'for name do :; done; exec {" ".join(IMGSUM)} checksum -q "$name"')  # the last argument
    bench.add("dd", tool("dd"))
    cases = bench("raw-half", "raw-half-direct", runs=2)
    assert list(cases) == ["raw-half", "raw-half-direct"]
    half = cases["raw-half"]
    assert {label: len(runs) for label, runs in half["runs"].items()} == {"imgsum": 2, "work limit": 2, "blksum -c": 2}
    assert [bar["bar"] for bar in half["bars"]] == ["<= 0.33 x blksum -c", "<= 1.2 x work limit"]
    assert half["problems"] == []
    assert "| raw-half | blksum -c | 2 |" in (bench.results / "bench.md").read_text()
    assert not any(bench.images.iterdir()), "images are left without --keep"


def test_what_is_not_installed_is_said_and_is_no_failure(bench: Bench) -> None:
    cases = bench("start-up", "raw-half", "qcow2-half")
    text = (bench.results / "bench.md").read_text()

    # A peer: its bar is not measured. A tool that makes an image: the other cases are measured.
    blksum, limit = cases["raw-half"]["bars"]
    assert (blksum["measured"], blksum["met"]) == (None, None)
    assert "not measured: blksum is not installed" in text
    assert cases["qcow2-half"]["problems"] == ["imgsum: qemu-img is not installed"]

    # Scaled down, bars are measured but not judged, unless they are of no image.
    assert limit["measured"] > 0
    assert (limit["met"], limit["why"]) == (None, "not judged: scaled down")
    (start,) = cases["start-up"]["bars"]
    assert start["met"] == (start["measured"] <= 3)
    assert "Scaled down" in text

    # The picture has no panel for a case that has no runs.
    picture = bench.results / "bench.png"
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert not picture.exists()


def test_the_same_content_has_one_answer_over_nbd_and_in_other_formats(bench: Bench, tool: Tool) -> None:
    need(importlib.util.find_spec("nbd"), "python3-libnbd is not installed")
    for name in ("qemu-img", "qemu-nbd", "nbdcopy", "sh"):
        bench.add(name, tool(name))
    cases = bench("nbd-raw", "compare-*", "vhd-half")
    for case in cases.values():
        assert [problem for problem in case["problems"] if "not installed" not in problem] == []
    assert cases["nbd-raw"]["runs"].keys() == {"imgsum", "nbdcopy to null", "work limit"}
    assert cases["compare-raw-qcow2"]["runs"].keys() == {"imgsum", "qemu-img compare"}


def test_a_wrong_answer_fails_the_bench_and_meets_no_bar(bench: Bench) -> None:
    bench.fake("blksum", f"echo {64 * 'a'}  x")
    case = bench("raw-half", status=1)["raw-half"]
    assert [bar["met"] for bar in case["bars"]] == [None, None]
    assert case["problems"][0].startswith(f"WRONG: blksum -c in raw-half says {64 * 'a'}, imgsum in raw-half says ")
    assert "WRONG" in (bench.results / "bench.md").read_text()


def test_a_wrong_answer_for_the_same_content_in_another_case_is_caught() -> None:
    answers: dict[str, tuple[str, str]] = {}
    right, wrong = Command(["echo", "aa  one"], "content"), Command(["echo", "bb  two"], "content")
    assert time_rounds("first", {"imgsum": right}, 1, answers).wrong == []
    outcome = time_rounds("second", {"imgsum": wrong}, 1, answers)
    assert outcome.wrong[0] == "WRONG: imgsum in second says bb, imgsum in first says aa"
    assert judge(Bar(1, ("imgsum",)), outcome, SIZE)["met"] is None


def test_what_cannot_be_read_fails_visibly(bench: Bench) -> None:
    (bench.images / f"{SMALL}-hole.raw").mkdir(parents=True)  # imgsum refuses a directory
    case = bench("raw-hole-8t", status=1)["raw-hole-8t"]
    assert case["runs"] == {}
    assert "is a directory" in case["problems"][0]


def test_every_case_is_well_formed() -> None:
    for case in CASES.values():
        assert case.about
        assert "imgsum" in case.lines
        assert {label for bar in case.bars for label in bar.of} <= case.lines.keys()
        assert set(case.images) <= set(IMAGES)
    assert {image for case in CASES.values() for image in case.images} == set(IMAGES)


def test_commands_that_compute_the_same_have_one_answer() -> None:
    def answers(name: str) -> list[str | None]:
        commands = CASES[name].commands(lambda place: place).values()
        return [command.answer if isinstance(command, Command) else None for command in commands]

    assert answers("raw-full") == ["sha256 blocks full", None, "sha256 blocks full", *2 * ["sha256 whole full"]]
    assert answers("workers-xxh3-128") == 3 * ["xxh3-128 blocks full"]
    assert answers("nbd-raw") == [*2 * ["sha256 blocks half"], None, None]
    assert answers("vmdk-stream") == ["sha256 blocks text", None]
    assert answers("checksum-100") == 2 * ["sha256 blocks small"]


def test_list_says_every_case_and_bar() -> None:
    argv = [sys.executable, "-m", "bench", "--list"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for case in CASES.values():
        assert f"{case.name} " in listed
        assert all(str(bar) in listed for bar in case.bars)


def test_an_unknown_case_is_an_error(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench", "--only", "nothing", "--images", str(tmp_path)]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, check=False).returncode == 2


def test_the_table_of_cores() -> None:
    argv = [sys.executable, "-m", "bench.gil", "2m"]
    table = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = {cells[1]: cells[2:-1] for line in table.splitlines() if len(cells := line.split("|")) > 2}
    assert len(rows[" sha256 "]) == len(rows[" algorithm "]) == 7
    for name in (" sha256 ", " blake3 ", " xxh3-128 "):
        released, held, _, two, eight, many = map(float, rows[name][:6])
        assert released > 0
        assert held > 0
        assert two <= eight <= many


# Runs and bars.


def outcome(**seconds: list[float]) -> Outcome:
    return Outcome({label: [Run(wall) for wall in walls] for label, walls in seconds.items()}, {}, [])


def test_a_ratio_is_of_each_round_and_their_median_counts() -> None:
    verdict = judge(Bar(0.5, ("peer",)), outcome(imgsum=[1.0, 10.0, 3.0], peer=[4.0, 10.0, 6.0]), SIZE)
    assert (verdict["measured"], verdict["met"]) == (0.5, True)  # 0.25, 1.0, 0.5


def test_a_bar_is_of_the_larger() -> None:
    made = outcome(imgsum=[2.0, 3.0], limit=[1.0, 4.0], dd=[2.0, 1.0])
    assert judge(Bar(1.15, ("limit", "dd")), made, SIZE)["measured"] == pytest.approx((1.0 + 0.75) / 2)


@pytest.mark.parametrize(("resident", "met"), [(65, False), (63, True)])
def test_only_what_imgsum_takes_is_judged(resident: int, met: bool) -> None:
    def run(mib: int) -> dict[str, int]:
        return {"max_rss": mib << 20}

    cases = [
        {"name": "small", "runs": {"imgsum": [run(1)]}},
        {"name": "large", "runs": {"imgsum": [run(5), run(resident)], "peer": [run(99)]}},
    ]
    verdict = judge_memory(cases, SIZE)
    assert (verdict["measured"], verdict["met"]) == (resident, met)
    assert verdict["bar"] == "<= 64 MiB resident, most in large"


def test_a_run_has_the_resources_of_the_child_alone() -> None:
    run, answer = run_once(Command([sys.executable, "-c", "x = b'x' * (200 << 20); print('done', len(x))"]))
    assert answer == "done"
    assert run.max_rss > 200 << 20
    assert run.user + run.system > 0
    quiet, _ = run_once(Command([sys.executable, "-c", "pass"]))
    assert quiet.max_rss < 200 << 20


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Command(["no-such-program-anywhere"]), "not installed"),
        (Command(["sh", "-c", "echo said >&2; exit 3"]), "status 3: said"),
        (Command(["echo", "differs"], says="identical"), "does not say 'identical'"),
    ],
)
def test_a_command_that_does_not_end_as_it_must_is_not_measured(command: Command, reason: str) -> None:
    with pytest.raises(FailedError, match=reason):
        run_once(command)


# Images.


def test_half_is_half_data_and_the_same_every_time(images: Images, tmp_path: Path) -> None:
    images.make(["half.raw", "text.raw"])
    again = Images(tmp_path, SMALL)
    again.make(["half.raw", "text.raw"])
    for name in ("half.raw", "text.raw"):
        path = images.path(name)
        assert path.read_bytes() == again.path(name).read_bytes()
        assert 0.45 < data_bytes(path) / path.stat().st_size < 0.55
    content = images.path("half.raw").read_bytes()
    data = [block for at in range(0, SMALL, BLOCK) if (block := content[at : at + BLOCK]).strip(b"\0")]
    assert len(set(data)) == len(data), "no two blocks of data are alike"


def test_every_form_of_an_image_has_its_content(images: Images, tool: Tool, tmp_path: Path) -> None:
    qemu_img = tool("qemu-img")
    forms = [name for name in IMAGES if IMAGES[name].base]
    images.make(forms)
    for name in forms:
        content = images.path(re.split("[-.]", name)[0] + ".raw").read_bytes()
        subprocess.run([qemu_img, "convert", "-O", "raw", str(images.path(name)), str(tmp_path / name)], check=True)
        assert (tmp_path / name).read_bytes() == content, name


def test_a_server_that_does_not_start_is_said(tool: Tool, tmp_path: Path) -> None:
    tool("qemu-nbd")
    with pytest.raises(FailedError, match=r"qemu-nbd: .*no-such-file"), qemu_nbd(tmp_path / "no-such-file"):
        pass


def test_an_image_that_does_not_fit_is_an_error_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="GiB are free"):
        Images(tmp_path, 1 << 60).make(["half.raw"])
    assert not any(tmp_path.iterdir())
