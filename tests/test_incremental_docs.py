"""The recipes of docs/incremental.md, run as they are written."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference
from conftest import find_tool
from reference import KIB, MIB

ROOT = Path(__file__).resolve().parent.parent
RECIPES = dict(re.findall(r"```sh\n# (\w+)\n(.*?)```", (ROOT / "docs" / "incremental.md").read_text(), re.DOTALL))


def run(recipe: str, directory: Path) -> str:
    """What a recipe prints, run in DIRECTORY."""
    command = directory / "bin" / "imgsum"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m imgsum "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-e"],
        input=RECIPES[recipe],
        cwd=directory,
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_all_recipes_are_run() -> None:
    assert set(RECIPES) == {"nightly", "begin", "pull", "offline", "resume", "mend"}


def test_a_nightly_chain(tmp_path: Path) -> None:
    reference.write("3m:R 1m:-", tmp_path / "raw")
    qemu_img = find_tool("qemu-img")
    subprocess.run([qemu_img, "convert", "-O", "qcow2", "raw", "base.qcow2"], cwd=tmp_path, check=True)
    assert run("nightly", tmp_path) == "base.qcow2: OK\nmonday.qcow2: OK\ntuesday.qcow2: OK\n"


@pytest.mark.parametrize("size", ["64k", "64m"])
def test_an_interruption(size: str, tmp_path: Path) -> None:
    reference.write(f"{size}:R", tmp_path / "disk.raw")
    value = reference.blkhash((tmp_path / "disk.raw").read_bytes())
    assert set(run("resume", tmp_path).splitlines()) == {f"{value}  disk.raw"}
    assert sorted(os.listdir(tmp_path)) == ["bin", "disk.index", "disk.raw"]


def test_a_failed_transfer(tmp_path: Path) -> None:
    reference.write("3m:R 1m:-", tmp_path / "disk.raw")
    run("resume", tmp_path)
    data = bytearray((tmp_path / "disk.raw").read_bytes())
    data[MIB] ^= 1
    (tmp_path / "copy.raw").write_bytes(data[: 2 * MIB])
    printed = run("mend", tmp_path)
    assert printed == f"# 2 ranges, {MIB + 65536} bytes\nimages are identical\n"
    assert (tmp_path / "copy.raw").read_bytes() == (tmp_path / "disk.raw").read_bytes()[: 3 * MIB]


def test_a_running_guest(tmp_path: Path) -> None:
    for name in ("qemu-io", "qemu-nbd"):
        find_tool(name)
    reference.write("2m:A 2m:- 1m:R", tmp_path / "raw")
    subprocess.run([find_tool("qemu-img"), "convert", "-O", "qcow2", "raw", "disk.qcow2"], cwd=tmp_path, check=True)
    before = run("begin", tmp_path).split()[0]
    try:
        pulled = [line.split()[0] for line in run("pull", tmp_path).splitlines() if "nbd+unix" in line]
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((tmp_path / "nbd.pid").read_text()), 15)
    content = bytearray((tmp_path / "raw").read_bytes())
    content[MIB : MIB + 64 * KIB] = b"\7" * (64 * KIB)
    expected = reference.blkhash(bytes(content))
    assert before != expected
    assert pulled == [expected]
    assert run("offline", tmp_path).split()[0] == expected
