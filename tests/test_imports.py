"""What imports what, read from the source, and what a start of the command imports for real."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "imgsum"

LAYERS = [
    {"imgsum.errors", "imgsum.extent", "imgsum.units", "imgsum.parameters", "imgsum.trace"},
    {"imgsum.hash"},
    {"imgsum.source", "imgsum.index"},
    {"imgsum.engine"},
    {"imgsum.sums"},
    {"imgsum.api"},
    {"imgsum.output"},
    {"imgsum.commands", "imgsum.cli", "imgsum.__main__"},
]
"""The floors. Each may import what is above it here, and its own modules."""

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that the one at PATH imports at run time, at its top or in a function."""
    tree = ast.parse(path.read_text())
    only_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "imgsum")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "imgsum":
            assert node.level == 0
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


def layer(module: str) -> int:
    module = ".".join(module.split(".")[:2])
    for number, names in enumerate(LAYERS):
        if module in names:
            return number
    raise AssertionError(f"{module} has no place in the order of imports")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_one_way(module: str) -> None:
    if module == "imgsum":  # the map of the package: everything, when asked for
        return
    for imported in imports(MODULES[module]):
        if imported == "imgsum":  # __version__
            continue
        assert layer(imported) <= layer(module), f"{module} imports {imported}"


def test_leaves() -> None:
    for module in ("imgsum.errors", "imgsum.extent"):
        assert list(imports(MODULES[module])) == []
    assert set(imports(MODULES["imgsum.units"])) <= {"imgsum.errors"}
    assert list(imports(MODULES["imgsum.engine.pool"])) == ["imgsum.trace", "imgsum.units"]


def test_sources_know_no_digest_and_no_pipeline() -> None:
    for module, path in MODULES.items():
        if module.startswith("imgsum.source"):
            allowed = (
                "imgsum.source",
                "imgsum.errors",
                "imgsum.extent",
                "imgsum.trace",
                "imgsum.units",
                "imgsum.parameters",
            )
            assert all(imported.startswith(allowed) for imported in imports(path)), module


def loaded(*argv: str) -> set[str]:
    """The modules that a run of the command imports."""
    program = (
        "import sys\n"
        f"sys.argv = ['imgsum', *{list(argv)!r}]\n"
        "import imgsum.cli\n"
        "try:\n"
        "    imgsum.cli.main()\n"
        "finally:\n"
        "    print(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split())


SLOW = {
    *["nbd", "json", "subprocess", "tqdm", "dataclasses", "logging", "concurrent.futures", "importlib.metadata"],
    *["asyncio", "ctypes", "zlib_ng", "isal", "zstandard", "backports.zstd", "email", "http", "socket", "tempfile"],
    *["blake3", "xxhash", "inspect", "shutil"],
}


def test_version_imports_next_to_nothing() -> None:
    modules = loaded("--version")
    assert not modules & (SLOW - {"shutil"})  # argparse asks shutil for the terminal's width
    assert not modules & {"hashlib", "threading", "typing", "imgsum.engine", "imgsum.source", "mmap"}


def test_a_raw_image_imports_only_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "disk.raw").write_bytes(b"A" * 100_000)
    modules = loaded("checksum", "-q", str(tmp_path / "disk.raw"))
    assert not modules & (SLOW - {"shutil"})
    assert not {module for module in modules if module.startswith("imgsum.source.") and "qcow2" in module}


def test_the_package_imports_nothing_by_itself() -> None:
    program = "import sys, imgsum; print(*[m for m in sys.modules if m.startswith(('imgsum.', 'nbd', 'hashlib'))])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
