"""The package as users get it: the wheel, its files, and documentation that names every option."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from conftest import find_tool, need

from imgsum.commands import COMMANDS
from imgsum.commands import parser as parsers

ROOT = Path(__file__).resolve().parent.parent


NOT_IN_THE_ARCHIVE = {".git", ".gitignore", ".ci", ".venv", "build", "dist", "results", "__pycache__"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked. It is made from a copy, as setuptools leaves files where it builds."""
    directory = tmp_path_factory.mktemp("archive")
    ignored = shutil.ignore_patterns(*NOT_IN_THE_ARCHIVE, ".*_cache", ".hypothesis", "*.egg-info", "*.so", "images")
    shutil.copytree(ROOT, directory / "copy", ignore=ignored, symlinks=True)
    build("sdist", directory / "copy", directory)
    (archive,) = directory.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", directory], check=True)
    return directory / archive.name.removesuffix(".tar.gz")


def build(kind: str, project: Path, to: Path, **environment: str) -> None:
    """What pip and build do, without fetching setuptools."""
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", program, to],
        cwd=project,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_tool("gcc")
    return build_wheel(unpacked, tmp_path_factory.mktemp("wheel"))


def build_wheel(unpacked: Path, directory: Path, **environment: str) -> Path:
    shutil.copytree(unpacked, directory / "copy")
    build("wheel", directory / "copy", directory, **environment)
    (path,) = directory.glob("*.whl")
    return path


def test_the_archive_has_all_that_the_tests_need(unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        made = re.compile(r"(^|/)\.(?!pre-commit)|\.(so|pyc|orig)$|\.egg-info(/|$)|^bench/(images|results)/")
        paths = (path.relative_to(root).as_posix() for path in walk(root))
        return {path for path in paths if not made.search(path)}

    made = {"PKG-INFO", "setup.cfg"}
    assert files(unpacked) - made == files(ROOT) - made  # ROOT may itself be an unpacked archive


def walk(root: Path) -> Iterator[Path]:
    """The files below ROOT, but for what is not in the archive."""
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in NOT_IN_THE_ARCHIVE]
        yield from (Path(directory, name) for name in names)


def test_the_wheel_has_the_extension_for_every_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "imgsum/hash/_lanes.abi3.so" in archive.namelist()
        assert "imgsum/hash/lanes.c" not in archive.namelist()
    assert "-cp311-abi3-linux_" in wheel.name


@pytest.mark.parametrize("environment", [{"CC": "false"}, {"CC": "no-such-compiler"}, {"PATH": "/nonexistent"}])
def test_the_wheel_without_a_compiler(environment: dict[str, str], unpacked: Path, tmp_path: Path) -> None:
    wheel = build_wheel(unpacked, tmp_path, **environment)
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    check_works_by_itself(wheel, tmp_path)


def test_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    check_works_by_itself(wheel, tmp_path)


def check_works_by_itself(wheel: Path, tmp_path: Path) -> None:
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
        *(f"share/man/man1/imgsum-{command}.1" for command in COMMANDS),
        "share/man/man1/imgsum.1",
        "share/bash-completion/completions/imgsum",
        "share/zsh/site-functions/_imgsum",
    ):
        assert any(name.endswith(wanted) for name in names), wanted


def option_strings() -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        for action in parsers.command_parser(command)._actions:
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
    assert len(texts) == {"man_pages": 1 + len(COMMANDS), "completions": 2}[made]
    for path, text in texts.items():
        assert path.read_text() == text, f"make docs: {path.name} is out of date"


@pytest.mark.parametrize("command", COMMANDS)
def test_man_pages_say_what_they_name(command: str) -> None:
    page = (ROOT / "docs" / "man" / f"imgsum-{command}.1").read_text()
    assert "?." not in page
    assert not re.search(r"^\.TP\n.*\n\n", page, re.MULTILINE)  # something without a word about it


@pytest.mark.parametrize("name", ["imgsum", *(f"imgsum-{command}" for command in COMMANDS)])
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
    for command in COMMANDS:
        assert f"imgsum {command}" in readme
