"""The documents: every file that they link to, and every function that they name, exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHERS = {"preadv"}


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_that_have_what_they_name(document: Path) -> None:
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if re.match("[a-z]+:", target):
            continue
        path = document.parent / target
        assert path.exists(), target
        if path.suffix == ".py":
            assert set(re.findall(r"(\w+)\(\)", text)) <= functions_in(path), (text, target)


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_functions_that_are_named_exist(name: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", text)
    functions = {found for span in code for found in re.findall(r"(\w+)\(\)", span)}
    paths = {found for span in code for found in re.findall(r"(?:^| )((?:\w+/)*\w+(?:\.py|/))(?: |$)", span)}
    assert functions
    assert paths
    modules = list((ROOT / "imgsum").rglob("*.py"))
    assert functions <= OF_OTHERS.union(*map(functions_in, modules))
    places = (ROOT, ROOT / "imgsum", ROOT / "tests", *{module.parent for module in modules})
    assert [path for path in sorted(paths) if not any((place / path).exists() for place in places)] == []
