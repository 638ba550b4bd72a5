"""The benchmark at sizes that take no time: that it measures what it says, and that it catches a wrong answer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from conftest import need

from bench.bars import at_most, judge, judge_memory, peak_memory
from bench.cases import CASES
from bench.images import BLOCK, IMAGES, LAYERS, Images, NoSpaceError, data_bytes
from bench.run import Answers, Command, FailedError, Outcome, Run, run_once, time_rounds
from bench.servers import nbdkit

ROOT = Path(__file__).parents[1]
SIZE = 8 << 20
Tool = Callable[[str], str]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("bench-images"), SIZE)


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

    def __call__(self, *cases: str, status: int = 0) -> dict[str, Any]:
        """Measure CASES: what the JSON says of each."""
        argv = [sys.executable, "-m", "bench", "--size", f"{SIZE}", "--runs", "2"]
        argv += ["--images", str(self.images), "--results", str(self.results), *(f"--only={case}" for case in cases)]
        done = subprocess.run(
            argv, cwd=ROOT, env={**os.environ, "PATH": str(self.bin)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        report = json.loads((self.results / "bench.json").read_text())
        return {case["name"]: case for case in report["cases"]}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def checksum_of(path: Path) -> str:
    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    return reference.blkhash(chunks())


# What is measured.


def test_measures_rounds_and_bars_and_writes_a_report(bench: Bench, tool: Tool) -> None:
    naive = f"{sys.executable} {ROOT / 'bench' / 'naive.py'}"
    bench.fake("blksum", f'for name do :; done; exec {naive} "$name"')  # the last argument
    bench.add("dd", tool("dd"))
    cases = bench("raw-half-*", "workers-sha256", "start-up")

    assert list(cases) == ["start-up", "raw-half-cached", "raw-half-direct", "workers-sha256"]
    cached = cases["raw-half-cached"]
    assert {label: len(runs) for label, runs in cached["runs"].items()} == {
        "imgsum": 2, "work limit": 2, "blksum -c": 2, "before": 2,
    }  # fmt: skip
    assert [bar["bar"] for bar in cached["bars"]] == [
        "imgsum <= 1.15 x work limit",
        "imgsum <= 0.5 x blksum -c",
    ]
    for bar in cached["bars"]:
        assert bar["measured"] > 0
        assert bar["met"] == (bar["measured"] <= bar["limit"])
    assert len(cases["workers-sha256"]["runs"]) == 8 + 1  # and the best
    text = (bench.results / "bench.md").read_text()
    assert "| 16 workers |" in text
    assert "| memory | all cases but the sweeps | imgsum resident <= 64 MiB, most in raw-half-" in text
    assert "Scaled down" in text
    assert "| 6 GiB raw, half of it data, O_DIRECT |" in text  # before and after
    assert not any(bench.images.iterdir()), "images are left without --keep"


def test_the_same_content_has_one_answer_over_nbd_and_as_qcow2(bench: Bench, tool: Tool) -> None:
    need(importlib.util.find_spec("nbd"), "python3-libnbd is not installed")
    for name in ("qemu-img", "qemu-io", "qemu-nbd", "nbdkit", "nbdcopy"):
        bench.add(name, tool(name))
    cases = bench("raw-half-cached", "nbd-raw", "nbd-nbdkit", "qcow2-half", "connections-nbd", "compare-*", "check-one")
    for case in cases.values():
        assert [problem for problem in case["problems"] if "not installed" not in problem] == []
    assert {"imgsum", "nbdcopy", "work limit", "before"} <= cases["nbd-raw"]["runs"].keys()
    assert "4 connections" in cases["connections-nbd"]["runs"]
    assert cases["compare-different"]["runs"].keys() == {"imgsum", "qemu-img compare"}


def test_a_plot_is_drawn_where_matplotlib_is_installed(bench: Bench) -> None:
    bench("raw-zeros-cached", "workers-xxh3")
    assert (bench.results / "bench.md").exists()
    plot = bench.results / "bench.png"
    if importlib.util.find_spec("matplotlib"):
        assert plot.read_bytes().startswith(b"\x89PNG")
    else:
        assert not plot.exists()


def test_a_peer_that_is_not_installed_is_said_and_is_no_failure(bench: Bench) -> None:
    case = bench("raw-half-cached")["raw-half-cached"]
    limit, blksum = case["bars"]
    assert limit["met"] is not None
    assert (blksum["measured"], blksum["met"], blksum["why"]) == (None, None, "blksum is not installed")
    assert "not measured: blksum is not installed" in (bench.results / "bench.md").read_text()


def test_an_image_that_cannot_be_made_for_want_of_a_tool_leaves_the_other_cases(bench: Bench) -> None:
    cases = bench("raw-empty", "qcow2-half")
    assert cases["raw-empty"]["runs"]["imgsum"]
    assert cases["qcow2-half"]["problems"] == ["imgsum: no half.raw half.qcow2: qemu-img is not installed"]


def test_a_wrong_answer_fails_the_bench_and_meets_no_bar(bench: Bench) -> None:
    bench.fake("blksum", f"echo {64 * 'a'}  x")
    case = bench("raw-half-cached", "raw-empty", status=1)["raw-half-cached"]
    assert [bar["met"] for bar in case["bars"]] == [None, None]
    assert len(case["problems"]) == 1
    assert case["problems"][0].startswith(f"WRONG: blksum -c in raw-half-cached says {64 * 'a'}, imgsum in")
    assert "WRONG" in (bench.results / "bench.md").read_text()


def test_a_wrong_answer_for_the_same_content_in_another_case_is_caught(tmp_path: Path) -> None:
    answers = Answers()
    right, wrong = Command(["echo", "aa  one"], "content"), Command(["echo", "bb  two"], "content")
    assert time_rounds("first", {"imgsum": right}, 1, answers).wrong == []
    outcome = time_rounds("second", {"imgsum": wrong}, 2, answers)
    assert outcome.wrong == ["WRONG: imgsum in second says bb, imgsum in first says aa (content)"]
    assert judge(at_most(1, "imgsum"), outcome).met is None


def test_what_cannot_be_read_fails_visibly(bench: Bench, images: Images, tool: Tool) -> None:
    del images, tool
    bench.images.mkdir()
    (bench.images / f"{SIZE}-empty.raw").mkdir()  # imgsum refuses a directory
    case = bench("raw-empty", status=1)["raw-empty"]
    assert case["runs"] == {}
    assert "is a directory" in case["problems"][0]


def test_every_case_has_a_description_and_knows_its_images() -> None:
    assert len(CASES) >= 40
    for case in CASES.values():
        assert case.about
        assert set(case.images) <= set(IMAGES)


def test_list_says_every_case_and_bar() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for case in CASES.values():
        assert f"{case.name} " in done.stdout
        for bar in case.bars:
            assert str(bar) in done.stdout


def test_an_unknown_case_is_an_error(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench", "--only", "nothing", "--images", str(tmp_path)]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, check=False).returncode == 2


# Runs and bars.


def outcome(**seconds: list[float]) -> Outcome:
    return Outcome({label: [Run(wall) for wall in walls] for label, walls in seconds.items()}, {}, [])


def test_a_ratio_is_of_each_round_and_their_median_counts() -> None:
    verdict = judge(at_most(0.5, "peer"), outcome(imgsum=[1.0, 10.0, 3.0], peer=[4.0, 10.0, 6.0]))
    assert (verdict.measured, verdict.met) == (0.5, True)  # 0.25, 1.0, 0.5


def test_a_bar_is_of_the_larger() -> None:
    verdict = judge(at_most(1.15, "limit", "dd"), outcome(imgsum=[2.0, 3.0], limit=[1.0, 4.0], dd=[2.0, 1.0]))
    assert verdict.measured == pytest.approx((1.0 + 0.75) / 2)


def test_a_start_can_be_taken_off() -> None:
    verdict = judge(at_most(1.5, "peer", less="start"), outcome(imgsum=[2.0], peer=[1.0], start=[0.25]))
    assert (verdict.measured, verdict.met) == (1.75, False)


def test_the_most_resident_of_any_run_counts() -> None:
    runs = {"imgsum": [Run(1.0, 1.0, 0.0, 65 << 20), Run(1.0, 1.0, 0.0, 5)], "peer": [Run(1.0, 1.0, 0.0, 99 << 20)]}
    peak = peak_memory(Outcome(runs, {}, []))
    assert peak == 65 << 20
    verdict = judge_memory({"small": 1, "large": peak, "other": 2})
    assert (verdict.measured, verdict.met) == (peak, False)
    assert "most in large" in verdict.bar


def test_a_run_has_the_resources_of_the_child_alone() -> None:
    ballast = "x = b'x' * (200 << 20); print('done', len(x))"
    run, answer = run_once(Command([sys.executable, "-c", ballast]))
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
        (Command(["true"], status=1), "status 0"),
        (Command(["sh", "-c", "echo differs; exit 1"], status=1, says="offset 5"), "does not say 'offset 5'"),
    ],
)
def test_a_command_that_does_not_end_as_it_must_is_not_measured(command: Command, reason: str) -> None:
    with pytest.raises(FailedError, match=reason):
        run_once(command)


# Images.


def test_half_is_half_data_and_the_same_every_time(images: Images, tmp_path: Path) -> None:
    images.make(["half.raw", "text.raw"])
    again = Images(tmp_path, SIZE)
    again.make(["half.raw", "text.raw"])
    for name in ("half.raw", "text.raw"):
        path = images.path(name)
        assert path.read_bytes() == again.path(name).read_bytes()
        assert 0.45 < data_bytes(path) / path.stat().st_size < 0.55
    content = images.path("half.raw").read_bytes()
    blocks = [content[at : at + BLOCK] for at in range(0, SIZE, BLOCK)]
    data = [block for block in blocks if block.strip(b"\0")]
    assert len(set(data)) == len(data), "no two blocks of data are alike"


def test_every_form_of_an_image_has_its_content(images: Images, tool: Tool, tmp_path: Path) -> None:
    qemu_img = tool("qemu-img")
    tool("qemu-io")
    forms = [name for name in IMAGES if name.startswith(("half", "part", "text")) and name != "half-changed.qcow2"]
    images.make(forms)
    for name in forms:
        path = images.path(name)
        content = images.path(re.split("[-.]", name)[0] + ".raw").read_bytes()
        copy = tmp_path / name
        image = path / f"{LAYERS - 1}.qcow2" if path.is_dir() else path
        subprocess.run([qemu_img, "convert", "-O", "raw", str(image), str(copy)], check=True)
        assert copy.read_bytes() == content, name


@pytest.mark.parametrize("image", ["half.raw", "zeros.raw", "empty.raw", "text.raw"])
@pytest.mark.parametrize("options", [[], ["--direct"]])
def test_the_simple_loop_is_right(images: Images, image: str, options: list[str]) -> None:
    images.make([image])
    path = images.path(image)
    argv = [sys.executable, str(ROOT / "bench" / "naive.py"), *options, str(path)]
    assert subprocess.check_output(argv, text=True) == f"{checksum_of(path)}  {path}\n"


def test_the_simple_loop_is_right_over_nbd(images: Images, tool: Tool) -> None:
    tool("nbdkit")
    need(importlib.util.find_spec("nbd"), "python3-libnbd is not installed")
    images.make(["half.raw"])
    path = images.path("half.raw")
    with nbdkit("file", str(path)) as uri:
        output = subprocess.check_output([sys.executable, str(ROOT / "bench" / "naive.py"), uri], text=True)
    assert output == f"{checksum_of(path)}  {uri}\n"


def test_a_server_that_does_not_start_is_said(tool: Tool) -> None:
    tool("nbdkit")
    with pytest.raises(FailedError, match=r"nbdkit: status 1: .*no-such-file"), nbdkit("file", "/no-such-file"):
        pass


def test_images_that_do_not_fit_are_an_error_before_the_first_is_made(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match="GiB needed"):
        Images(tmp_path, 1 << 60).check_space([["empty.raw"], ["half.raw"]], keep=False)
    assert not any(tmp_path.iterdir())


def test_room_is_needed_for_what_is_there_at_one_time(tmp_path: Path) -> None:
    images = Images(tmp_path, int(shutil.disk_usage(tmp_path).free / 0.8))
    images.check_space([["half.raw"], ["full.raw"], ["text.raw"]], keep=False)
    with pytest.raises(NoSpaceError, match="GiB needed"):
        images.check_space([["half.raw"], ["full.raw"], ["text.raw"]], keep=True)
