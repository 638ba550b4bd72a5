"""The gates of CI: the Action's own script and steps, the pre-commit hook, and what docs/ci.md says of GitLab."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import yaml
from conftest import HANG

ROOT = Path(__file__).resolve().parent.parent
CONTENT = b"content".ljust(1024, b"\0")
SUM = reference.blkhash(CONTENT)


class Job(NamedTuple):
    status: int
    log: str
    summary: str
    outputs: dict[str, str]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A checkout with two images and a sums file of them."""
    directory = tmp_path / "workspace"
    directory.mkdir()
    for name in ("disk.raw", "other.raw"):
        (directory / name).write_bytes(CONTENT)
    (directory / "SUMS").write_text(f"{SUM}  disk.raw\n{SUM}  other.raw\n")
    return directory


@pytest.fixture
def action(workspace: Path, tmp_path: Path) -> Callable[..., Job]:
    """action(**inputs): run the Action's last step as a runner would, in the workspace."""
    definition = yaml.safe_load((ROOT / "action.yml").read_text())
    step = definition["runs"]["steps"][-1]
    temp = tmp_path / "temp"
    (temp / "imgsum" / "bin").mkdir(parents=True)
    python = temp / "imgsum" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def run(**inputs: str) -> Job:
        given = {name: field["default"] for name, field in definition["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        files = {name: tmp_path / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        for file in files.values():
            file.write_bytes(b"")
        expressions = {name: re.fullmatch(r"\$\{\{ inputs\.([a-z-]+) \}\}", text) for name, text in step["env"].items()}
        environment = {name: given[match[1]] for name, match in expressions.items() if match}
        assert set(environment) == set(step["env"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=workspace,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RUNNER_TEMP": str(temp),
                "GITHUB_ACTION_PATH": str(ROOT),
                **{name: str(file) for name, file in files.items()},
                **environment,
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert "Traceback" not in done.stderr
        return Job(
            done.returncode,
            done.stdout + done.stderr,
            files["GITHUB_STEP_SUMMARY"].read_text(),
            parse_outputs(files["GITHUB_OUTPUT"].read_text()),
        )

    return run


def parse_outputs(text: str) -> dict[str, str]:
    """As GitHub's runner reads them: NAME<<DELIMITER, lines, DELIMITER."""
    outputs = {}
    rest = iter(text.splitlines())
    for line in rest:
        name, delimiter = line.split("<<")
        value = []
        for following in rest:
            if following == delimiter:
                break
            value.append(following)
        outputs[name] = "\n".join(value)
    return outputs


def test_no_input_is_in_the_text_of_a_script() -> None:
    definition = yaml.safe_load((ROOT / "action.yml").read_text())
    for step in definition["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
    used = " ".join(definition["runs"]["steps"][-1]["env"].values())
    assert all(f"inputs.{name} " in used for name in definition["inputs"])


def test_all_is_well(action: Callable[..., Job]) -> None:
    job = action(sums="SUMS\n", images="disk.raw")
    assert job.status == 0
    assert job.outputs == {"status": "0", "verified": "2"}
    assert job.summary == (
        "### imgsum: 2 of 2 verified\n\n| image | verdict |  |\n|---|---|---|\n"
        "| <code>disk.raw</code> | OK |  |\n| <code>other.raw</code> | OK |  |\n"
    )
    assert "imgsum: disk.raw: 100% (1.0 KiB of 1.0 KiB)" in job.log
    assert "::error" not in job.log


def test_what_differs_or_is_missing_fails(action: Callable[..., Job], workspace: Path) -> None:
    (workspace / "other.raw").write_bytes(b"x" * 1024)
    job = action(sums="SUMS")
    assert (job.status, job.outputs) == (1, {"status": "1", "verified": "1"})
    assert "### imgsum: 1 of 2 verified" in job.summary
    assert "| <code>other.raw</code> | **FAILED** | the content differs from what the sum says |" in job.summary
    assert "::error title=imgsum::other.raw: the content is not what the sums file says\n" in job.log
    (workspace / "disk.raw").unlink()
    job = action(sums="SUMS")
    assert (job.status, job.outputs) == (2, {"status": "2", "verified": "0"})
    assert "| <code>disk.raw</code> | **could not be read** | no such file or directory |" in job.summary


def test_no_guess_is_annotated(action: Callable[..., Job], workspace: Path) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    (workspace / "SUMS").write_text(f"{digest}  disk.raw\n")
    job = action(sums="SUMS")
    assert job.status == 1
    assert "as sha256sum makes it" in job.summary
    assert "::error title=imgsum::disk.raw: the content is not what the sums file says\n" in job.log


@pytest.mark.parametrize("trouble", ["summary", "output", "stdout", "program", "locale"])
def test_troubles_of_the_gate_are_status_2(workspace: Path, tmp_path: Path, trouble: str) -> None:
    """Status 1 means that content differs, and nothing else."""
    (workspace / "é.raw").write_bytes(CONTENT)
    (workspace / "SUMS").write_text(f"{SUM}  é.raw\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IMGSUM_SUMS": "SUMS", "IMGSUM_IMAGES": "é.raw"}
    command = [sys.executable, str(ROOT / "ci" / "gate.py")]
    if trouble == "summary":
        environment["GITHUB_STEP_SUMMARY"] = "/dev/full"
    elif trouble == "output":
        environment["GITHUB_OUTPUT"] = str(tmp_path / "no such directory" / "file")
    elif trouble == "program":
        program = "import gate, sys; sys.executable = '/no/such/program'; sys.exit(gate.guarded_main())"
        command = [sys.executable, "-c", program]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "ci")])
    elif trouble == "locale":  # no trouble
        environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with open("/dev/full" if trouble == "stdout" else tmp_path / "log", "wb") as log:
        done = subprocess.run(
            command, cwd=workspace, env=environment, stdout=log, stderr=subprocess.PIPE, check=False, timeout=HANG
        )
    assert b"Traceback" not in done.stderr
    assert done.returncode == (0 if trouble == "locale" else 2)


def test_an_image_that_no_sums_file_lists_fails(action: Callable[..., Job]) -> None:
    job = action(sums="SUMS", images="disk.raw\nforgotten.raw")
    assert (job.status, job.outputs["status"]) == (2, "2")
    assert "::error title=imgsum::forgotten.raw: no sums file verified it" in job.log


@pytest.mark.parametrize("text", ["", "# nothing\n", "hello\n"])
def test_nothing_verified_fails(action: Callable[..., Job], workspace: Path, text: str) -> None:
    (workspace / "SUMS").write_text(text)
    job = action(sums="SUMS")
    assert (job.status, job.outputs) == (2, {"status": "2", "verified": "0"})
    assert "no properly formatted checksum lines found" in job.log


def test_no_inputs_and_wrong_inputs_fail(action: Callable[..., Job]) -> None:
    for inputs, message in (
        ({}, "neither sums nor images are given"),
        ({"sums": "SUMS", "untrusted": "yes"}, "untrusted is neither true nor false"),
        ({"sums": "SUMS", "algorithm": "nosuch"}, "unknown algorithm"),
        ({"sums": "SUMS", "untrusted": "true"}, "--untrusted needs -f"),
        ({"sums": "nosuch"}, "no such file or directory"),
    ):
        job = action(**inputs)
        assert job.status == 2
        assert job.outputs["status"] == "2"
        assert message in job.log


def test_checksums_that_can_be_checked(action: Callable[..., Job], workspace: Path) -> None:
    job = action(images="disk.raw\nother.raw", algorithm="blake3", block_size="4k")
    assert (job.status, job.outputs["status"]) == (0, "0")
    digest = reference.blkhash(CONTENT, "blake3", 4096)
    assert f"| <code>disk.raw</code> | <code>{digest}</code> | 1024 bytes, raw |" in job.summary
    (workspace / "NEW").write_text(job.outputs["checksums"])
    assert action(sums="NEW", images="disk.raw", untrusted="true", format="raw").status == 0
    assert action(sums="NEW", untrusted="true", format="raw", max_size="1023").status == 2
    job = action(images="disk.raw\nmissing")
    assert (job.status, job.outputs["status"]) == (2, "2")
    assert len(job.outputs["checksums"].splitlines()) == 1


def test_names_stay_names(action: Callable[..., Job], workspace: Path) -> None:
    evil = [
        "$(touch proof)",
        "`touch proof`; touch proof",
        "-f",
        "a|b<script>*_[x](y)",
        "%0A::set-output name=status::0",
    ]
    for name in evil:
        (workspace / name.replace("/", "")).write_bytes(CONTENT)
    (workspace / "SUMS").write_bytes(
        b"".join(f"{SUM}  {name}\n".encode() for name in evil) + f"\\{SUM}  a\\n::error::b\n".encode()
    )
    job = action(sums="SUMS", images="\n".join(evil))
    assert job.outputs == {"status": "2", "verified": str(len(evil))}
    assert not (workspace / "proof").exists()
    assert "<script>" not in job.summary
    assert "a&#124;b" in job.summary
    assert "::error title=imgsum::a%0A::error::b: " in job.log
    assert not [line for line in job.log.splitlines() if line.startswith("::") and "title=imgsum" not in line]


@pytest.mark.parametrize("inputs", [{}, {"untrusted": "true", "format": "raw"}, {"sums": "SUMS"}])
def test_images_are_never_run(inputs: dict[str, str], action: Callable[..., Job], workspace: Path) -> None:
    job = action(images="[\ntouch\nRAN\n]", **inputs)
    assert (job.status, job.outputs["status"]) == (2, "2")
    assert not (workspace / "RAN").exists()


def test_every_end_of_a_line_but_newline_is_part_of_a_name(action: Callable[..., Job], workspace: Path) -> None:
    names = [f"a{end}b" for end in "\u2028\u2029\x85\x0b\x0c\x1c"]
    for name in names:
        (workspace / name).write_bytes(CONTENT)
    (workspace / "SUMS").write_bytes(b"".join(f"{SUM}  {name}\n".encode() for name in names))
    job = action(sums="SUMS", images="\n".join(names))
    assert (job.status, job.outputs) == (0, {"status": "0", "verified": str(len(names))})


def test_output_that_is_not_json_fails(action: Callable[..., Job], tmp_path: Path) -> None:
    python = tmp_path / "temp" / "imgsum" / "bin" / "python"
    half = tmp_path / "half"
    half.write_text("import sys\nimport gate\nsys.executable = '/bin/echo'\nsys.exit(gate.main())\n")
    python.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT / 'ci'} exec {sys.executable} {half}\n")
    job = action(sums="SUMS")
    assert (job.status, job.outputs) == (2, {"status": "2", "verified": "0"})
    assert "::error title=imgsum::what imgsum printed is not JSON: " in job.log


def test_nothing_in_the_workspace_is_imported(action: Callable[..., Job], workspace: Path) -> None:
    (workspace / "imgsum").mkdir()
    for name in ("imgsum/__init__.py", "imgsum/__main__.py", "json.py", "subprocess.py"):
        (workspace / name).write_text("open('proof', 'w')\n")
    assert action(sums="SUMS").status == 0
    assert not (workspace / "proof").exists()


def test_a_summary_has_a_limit(action: Callable[..., Job], workspace: Path) -> None:
    (workspace / "SUMS").write_text(f"{SUM}  {'x' * 200}\n" * 6000)
    job = action(sums="SUMS")
    assert job.status == 2
    assert len(job.summary) < 1 << 20
    assert re.search(r"\| and \d+ more \|", job.summary)


def wrapper(directory: Path) -> Path:
    """A directory with a program `imgsum`, for PATH."""
    directory.mkdir()
    program = directory / "imgsum"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m imgsum "$@"\n')
    program.chmod(0o755)
    return directory


def run_script(script: str, directory: Path, bin_directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


def test_the_pre_commit_hook(workspace: Path, tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["pass_filenames"] is False
    assert hook["always_run"] is True
    programs = wrapper(tmp_path / "bin")
    elsewhere = workspace.parent
    entry = f"{hook['entry']} workspace/SUMS"
    done = run_script(entry, elsewhere, programs)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (workspace / "other.raw").write_bytes(b"changed")
    done = run_script(entry, elsewhere, programs)
    assert (done.returncode, done.stdout) == (1, "other.raw: FAILED\n")
    assert run_script(hook["entry"], elsewhere, programs).returncode == 2  # without args nothing is verified


def test_the_gitlab_job(workspace: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    (job,) = (
        yaml.safe_load(block)["verify-images"]
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        if "verify-images" in block
    )
    (workspace / "images").mkdir()
    (workspace / "images" / "SUMS").write_bytes((workspace / "SUMS").read_bytes())
    done = run_script("\n".join(job["script"]), workspace, wrapper(tmp_path / "bin"))
    assert done.returncode == 0
    assert "imgsum: disk.raw: 100%" in done.stderr
    (artifact,) = job["artifacts"]["paths"]
    assert [json.loads(line)["status"] for line in (workspace / artifact).read_text().splitlines()] == ["ok", "ok"]


def test_the_inputs_and_outputs_are_documented() -> None:
    definition: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    text = (ROOT / "docs" / "ci.md").read_text()
    for name in [*definition["inputs"], *definition["outputs"]]:
        assert f"`{name}`" in text
