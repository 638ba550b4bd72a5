"""Man pages and the shells' completions, made from the parser: `python tools/make_docs.py man|completions`."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from imgsum import __version__
from imgsum.commands import COMMANDS
from imgsum.commands import parser as parsers
from imgsum.hash import algorithms

ROOT = Path(__file__).resolve().parent.parent


_TROUBLE = "Trouble: usage, an image that cannot be read or is refused."

EXIT_STATUS = {
    "": {"0": "All as asked.", "1": "Content differs (check, compare).", "2": f"{_TROUBLE} It wins over 1."},
    "checksum": {
        "0": "A checksum was printed for each image.",
        "2": f"{_TROUBLE} The others have their checksums.",
    },
    "check": {
        "0": "Every line was verified, and there was one.",
        "1": "Content differs from what a line says.",
        "2": "Something could not be verified, or a line is malformed, or nothing was verified. It wins over 1.",
    },
    "compare": {"0": "The content is the same.", "1": "The content differs.", "2": f"{_TROUBLE} It wins over 1."},
    "algorithms": {"0": "The list was printed.", "2": "Usage, or standard output cannot be written."},
}
"""For each command, and for imgsum itself."""

EXAMPLES = {
    "": {
        "The checksum of a disk image, whatever its format.": "imgsum checksum disk.qcow2",
        "Verify images that were copied, converted or uploaded.": "imgsum check SUMS",
        "The options of a command.": "imgsum help checksum",
    },
    "checksum": {
        "Write a sums file.": "imgsum checksum *.qcow2 >SUMS",
        "What is in a compressed image.": "xz -dc disk.raw.xz | imgsum checksum",
        "An export of an NBD server.": "imgsum checksum nbd://server/export",
        "The part of a device that an image was written to.": "imgsum checksum --length 10g /dev/sdb",
        "An image that somebody uploaded.": "imgsum checksum --untrusted -f qcow2 upload",
    },
    "check": {
        "Verify what SUMS lists.": "imgsum check SUMS",
        "Print only what is wrong, and look for images beside SUMS.": "imgsum check -q --relative-to-sums images/SUMS",
        "Verify one image whose checksum is known.": "echo 'DIGEST  disk.qcow2' | imgsum check",
    },
    "compare": {
        "Is a conversion right?": "imgsum compare disk.vmdk disk.qcow2",
        "List all that differs, for a program.": "imgsum compare --all --json before.qcow2 after.qcow2",
        "A device that is larger than the image written to it.": "imgsum compare --length 10g disk.raw /dev/sdb",
    },
    "algorithms": {"What -a takes here.": "imgsum algorithms"},
}
"""What to do, and how."""


def man_pages() -> dict[Path, str]:
    """Each page's path and text: imgsum(1), and one for each command, of the name that git and others would give it."""
    os.environ["COLUMNS"] = "80"  # not the terminal's: the same parser gives the same page
    pages: dict[str, argparse.ArgumentParser] = {"imgsum": parsers.top_parser()}
    for command in COMMANDS:
        pages[f"imgsum-{command}"] = parsers.command_parser(command, for_docs=True)
    return {ROOT / "docs" / "man" / f"{name}.1": _man_page(name, parser) for name, parser in pages.items()}


def _man_page(name: str, parser: argparse.ArgumentParser) -> str:
    description = COMMANDS.get(name.removeprefix("imgsum-"), "the checksum for disk images")
    parser.prog = name
    data = {
        "project_name": "imgsum",
        "prog": name,
        "version": __version__,
        "manual_title": "imgsum manual",
        "description": description,
        "date": f"imgsum {__version__}",  # not the day of the build: the same parser gives the same page
    }
    command = name.removeprefix("imgsum").removeprefix("-")
    if not command:
        parser.epilog = None  # the list of commands, which is a section of its own
    page = Manpage(parser, _data=data)
    others = [f"imgsum{command}(1)" for command in ("", *(f"-{c}" for c in COMMANDS))]
    see_also = ", ".join(other for other in others if other != f"{name}(1)")
    sections = [str(page).rstrip()]
    if not command:
        sections.append(".SH COMMANDS\n" + _tagged([(f"imgsum {key}", text) for key, text in COMMANDS.items()]))
    sections.append(".SH EXIT STATUS\n" + _tagged(list(EXIT_STATUS[command].items())))
    sections.append(".SH EXAMPLES\n" + _tagged([(example, text) for text, example in EXAMPLES[command].items()]))
    return "\n\n".join([*sections, f".SH SEE ALSO\n{see_also}\n"])


def _tagged(items: list[tuple[str, str]]) -> str:
    """Paragraphs that begin with a term in bold."""
    return "\n".join(f".TP\n\\fB{_roff(term)}\\fR\n{_roff(text)}" for term, text in items)


def _roff(text: str) -> str:
    """TEXT as itself: roff takes lines that begin with a dot or an apostrophe for requests."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith(".") else text


def completions() -> dict[Path, str]:
    """Each completion file's path and text."""
    names = {"bash": "imgsum", "zsh": "_imgsum"}
    texts = {}
    for shell, name in names.items():
        parser = parsers.docs_parser()
        _complete_values(parser)
        texts[ROOT / "completions" / name] = shtab.complete(parser, shell=shell)
    return texts


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Names are files; -a has the values that every Python and system has. The parser has those of -f."""
    for action in parser._actions:  # noqa: SLF001  # argparse has no public list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                _complete_values(command)
        elif not action.option_strings or action.dest in parsers.TAKE_A_FILE:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
        elif action.dest == "algorithm":
            names = {
                algorithms.canonical(name) for name in hashlib.algorithms_guaranteed if not name.startswith("shake")
            }
            action.choices = [*sorted(names | {"blake3"}), *algorithms.NOT_CRYPTOGRAPHIC]


def main() -> None:
    """Write what the argument says."""
    made = {"man": man_pages, "completions": completions}[sys.argv[1]]()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
