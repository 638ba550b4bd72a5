"""The package as users get it: the wheel, its files, and documentation that names every option."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from conftest import need

from imgsum import options

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory], cwd=ROOT, check=True)
    (path,) = directory.glob("*.whl")
    return path


def test_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    image = tmp_path / "disk.raw"
    reference.write("64k:A 32k:- 512:R", image)
    result = subprocess.run(
        [sys.executable, "-m", "imgsum", "checksum", "disk.raw"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout == f"{reference.blkhash(image.read_bytes())}  disk.raw\n"
    assert result.stderr == ""


def test_the_wheel_has_types_man_pages_and_completions(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "imgsum/py.typed" in names
    for wanted in (
        *(f"share/man/man1/imgsum-{command}.1" for command in options.COMMANDS),
        "share/man/man1/imgsum.1",
        "share/bash-completion/completions/imgsum",
        "share/zsh/site-functions/_imgsum",
    ):
        assert any(name.endswith(wanted) for name in names), wanted


def option_strings() -> Iterator[tuple[str, str]]:
    for command in options.COMMANDS:
        for action in options.command_parser(command)._actions:
            if action.dest != "help":  # a man page is the help
                yield from ((command, option) for option in action.option_strings)


@pytest.mark.parametrize(("command", "option"), list(option_strings()))
def test_every_option_is_in_the_man_page_and_the_completions(command: str, option: str) -> None:
    page = (ROOT / "docs" / "man" / f"imgsum-{command}.1").read_text().replace("\\-", "-")
    assert option in page
    for completion in (ROOT / "completions").iterdir():
        assert option in completion.read_text(), completion.name


@pytest.mark.parametrize("made", ["man_pages", "completions"])
def test_man_pages_and_completions_are_those_of_the_parser(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("argparse_manpage", "shtab"):
        need(importlib.util.find_spec(module), f"{module} is not installed")
    monkeypatch.setenv("COLUMNS", "80")
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    make_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_docs)
    texts = getattr(make_docs, made)()
    assert len(texts) == {"man_pages": 1 + len(options.COMMANDS), "completions": 2}[made]
    for path, text in texts.items():
        assert path.read_text() == text, f"make docs: {path.name} is out of date"


@pytest.mark.parametrize("command", options.COMMANDS)
def test_man_pages_say_what_they_name(command: str) -> None:
    page = (ROOT / "docs" / "man" / f"imgsum-{command}.1").read_text()
    assert "?." not in page
    assert not re.search(r"^\.TP\n.*\n\n", page, re.MULTILINE)  # something without a word about it


@pytest.mark.parametrize("name", ["imgsum", *(f"imgsum-{command}" for command in options.COMMANDS)])
def test_man_pages_lose_no_line(name: str) -> None:
    """roff takes lines that begin with a dot or an apostrophe for requests, and drops those that it doesn't know."""
    page = (ROOT / "docs" / "man" / f"{name}.1").read_text()
    assert set(re.findall(r"^['.]\S*", page, re.MULTILINE)) <= {".TH", ".SH", ".TP", ".B"}
    assert ".SH EXIT STATUS\n" in page
    assert ".SH EXAMPLES\n.TP\n\\fB" in page


def test_completions_offer_values() -> None:
    for completion in (ROOT / "completions").iterdir():
        text = completion.read_text()
        for value in ("qcow2", "vhdx", "sha256", "sha3-512", "blake3", "xxh3-128", "writeback"):
            assert re.search(rf"[\s'\"(]{value}[\s'\")]", text), (completion.name, value)


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in options.COMMANDS:
        assert f"imgsum {command}" in readme
