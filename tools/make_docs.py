"""Man pages and the shells' completions, made from the parser: `python tools/make_docs.py man|completions`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from imgsum import __version__, options

ROOT = Path(__file__).resolve().parent.parent


def man_pages() -> dict[Path, str]:
    """Each page's path and text: imgsum(1), and one for each command, of the name that git and others would give it."""
    os.environ["COLUMNS"] = "80"  # not the terminal's: the same parser gives the same page
    pages: dict[str, argparse.ArgumentParser] = {"imgsum": options.top_parser()}
    for command in options.COMMANDS:
        pages[f"imgsum-{command}"] = options.command_parser(command, for_docs=True)
    return {ROOT / "docs" / "man" / f"{name}.1": _man_page(name, parser) for name, parser in pages.items()}


def _man_page(name: str, parser: argparse.ArgumentParser) -> str:
    description = options.COMMANDS.get(name.removeprefix("imgsum-"), "the checksum for disk images")
    parser.prog = name
    data = {
        "project_name": "imgsum",
        "prog": name,
        "version": __version__,
        "manual_title": "imgsum manual",
        "description": description,
        "date": f"imgsum {__version__}",  # not the day of the build: the same parser gives the same page
    }
    page = Manpage(parser, _data=data)
    others = [f"imgsum{command}(1)" for command in ("", *(f"-{c}" for c in options.COMMANDS))]
    see_also = ", ".join(other for other in others if other != f"{name}(1)")
    return f"{str(page).rstrip()}\n\n.SH SEE ALSO\n{see_also}\n"


def completions() -> dict[Path, str]:
    """Each completion file's path and text."""
    names = {"bash": "imgsum.bash", "zsh": "_imgsum"}
    texts = {}
    for shell, name in names.items():
        parser = options.docs_parser()
        _complete_names_as_files(parser)
        texts[ROOT / "completions" / name] = shtab.complete(parser, shell=shell)
    return texts


def _complete_names_as_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:  # noqa: SLF001  # argparse has no public list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                _complete_names_as_files(command)
        elif not action.option_strings or action.dest in options.TAKE_A_FILE:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it


def main() -> None:
    """Write what the argument says."""
    made = {"man": man_pages, "completions": completions}[sys.argv[1]]()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
