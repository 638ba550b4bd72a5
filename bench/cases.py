"""cases.toml: a case is a few commands on the same content, and the bars that their ratios are to reach."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.rates import MEASURES
from bench.run import Command, Measure

_HERE = Path(__file__).parent
_SCRIPT = Path(sys.executable).with_name("imgsum")
IMGSUM = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "imgsum"]
_PROGRAMS = {
    "imgsum": IMGSUM,
    "python3": [sys.executable],
    "workers": [sys.executable, str(_HERE / "workers.py")],
}
_PLACE = re.compile(r"\{([^}]+)\}")


class Bar(NamedTuple):
    """Imgsum takes at most LIMIT times as long as the longest of OF."""

    limit: float
    of: tuple[str, ...]

    def __str__(self) -> str:
        return f"<= {self.limit:g} x {' or '.join(self.of)}"


class Case(NamedTuple):
    """One thing that is measured."""

    name: str
    about: str
    bars: list[Bar]
    lines: dict[str, str]
    """The commands by their labels. `imgsum` is what the bars are of."""

    @property
    def images(self) -> list[str]:
        """The images that its commands need."""
        places = [place for line in self.lines.values() for place in _PLACE.findall(line)]
        return sorted({place.rpartition(":")[2] for place in places} - {"scratch", "imgsum"})

    def commands(self, fill: Callable[[str], str]) -> dict[str, Command | Measure]:
        """The commands, with fill(PLACE) for each {PLACE}."""
        return {label: _command(line, fill) for label, line in self.lines.items()}


def _command(line: str, fill: Callable[[str], str]) -> Command | Measure:
    words, env = shlex.split(line), {}
    while "=" in words[0]:
        variable, _, env[variable] = words.pop(0).partition("=")
    program, *arguments = (_PLACE.sub(lambda place: fill(place[1]), word) for word in words)
    if program in MEASURES:
        return partial(MEASURES[program], *arguments, **({"env": env} if env else {}))
    argv = [*_PROGRAMS.get(program, [program]), *arguments]
    return Command(argv, _answer(line), "identical" if "compare" in words else "", env)


def _answer(line: str) -> str | None:
    """What the lines that must print the same have in common: function and content. None: LINE prints no checksum."""
    kind = re.search(r"checksum|blksum|workers|openssl|sha256sum", line)
    content = re.search(r"\{(?!imgsum)(?:nbd:)?(\w+)", line)  # {text-zlib.qcow2} is `text`, as {text.raw} is
    if kind is None or content is None:
        return None
    algorithm = re.search(r"(?:-a|workers \d) (\S+)", line)
    blocks = "whole" if kind[0] in ("openssl", "sha256sum") else "blocks"
    return f"{algorithm[1] if algorithm else 'sha256'} {blocks} {content[1]}"


def _load() -> dict[str, Case]:
    cases = {}
    for name, table in tomllib.loads((_HERE / "cases.toml").read_text()).items():
        about = table.pop("about")
        bars = [Bar(limit, tuple(of.split(" or "))) for of, limit in table.pop("bars").items()]
        cases[name] = Case(name, about, bars, table)
    return cases


CASES = _load()
