"""The GitHub Action's step: runs imgsum as the inputs say, and tells the job. See action.yml and docs/ci.md.

Inputs come by environment variables, results go to the files that GITHUB_STEP_SUMMARY and GITHUB_OUTPUT name. The exit
status is imgsum's.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

OK, TROUBLE = 0, 2
WORDS = {"ok": "OK", "mismatch": "**FAILED**", "error": "**could not be read**", "malformed": "**malformed line**"}


def main() -> int:
    """Do what the inputs say, and return the exit status."""
    sums, images = lines_of("SUMS"), lines_of("IMAGES")
    if not sums and not images:
        return fail("neither sums nor images are given")
    try:
        options = options_of_inputs(for_check=bool(sums))
    except ValueError as error:
        return fail(str(error))
    try:
        return check(sums, images, options) if sums else checksum(images, options)
    except ValueError as error:  # json's and UnicodeDecodeError: imgsum ended in the middle of a line
        return fail(f"what imgsum printed is not JSON: {error}")


def guarded_main() -> int:
    """As main(). A trouble of the gate's own, a full disk for example, is never status 1, which is a difference."""
    try:
        status = main()
        sys.stdout.flush()
    except BaseException as error:  # a signal's too: Python would print a traceback
        with contextlib.suppress(Exception):
            message = f"the gate failed: {type(error).__name__}: {error}"
            os.write(2, f"{message}\n".encode(errors="backslashreplace"))
            annotate(message)
            output(status=str(TROUBLE), verified="0")
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(TROUBLE)  # what can't be flushed would make it status 120
    return status


def check(sums: list[str], images: list[str], options: list[str]) -> int:
    """Verify what SUMS list, and that IMAGES are among it."""
    verdicts, status = run(["check", *options, "--", *sums])
    names = {raw_name(verdict) for verdict in verdicts if verdict["status"] == "ok"}
    for image in images:
        if os.fsencode(image) not in names:
            verdicts.append({"status": "error", "name": image, "error": "no sums file verified it"})
            status = TROUBLE
    verified = sum(verdict["status"] == "ok" for verdict in verdicts)
    if not verified and status == OK:  # imgsum sees to that; a gate looks twice
        status = TROUBLE
    rows = []
    for verdict in verdicts:
        remark = verdict.get("error") or verdict.get("reason") or ""
        rows.append([code(name_of(verdict)), WORDS.get(verdict["status"], verdict["status"]), html_text(remark)])
        if verdict["status"] != "ok":
            # Of a mismatch only what is certain; hints are in the summary.
            differs = verdict["status"] == "mismatch"
            annotate(f"{name_of(verdict)}: {'the content is not what the sums file says' if differs else remark}")
    summarize(f"{verified} of {len(verdicts)} verified", ["image", "verdict", ""], rows)
    output(status=str(status), verified=str(verified))
    return status


def checksum(images: list[str], options: list[str]) -> int:
    """Print the checksums of IMAGES."""
    records, status = run(["checksum", *options, "--", *images])
    rows, lines = [], []
    for record in records:
        name = name_of(record)
        if "error" in record:
            rows.append([code(name), html_text(record["error"]), ""])
            annotate(f"{name}: {record['error']}")
        else:
            rows.append([code(name), code(record["checksum"]), f"{record['size']} bytes, {record['format']}"])
            lines.append(json.dumps(record))
    summarize("Checksums", ["image", "checksum", ""], rows)
    output(status=str(status), verified="0", checksums="\n".join(lines))
    return status


def run(arguments: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The objects that imgsum prints, and its status. What it says on stderr goes to the log."""
    # -P: the current directory is the workspace, and nothing in it may be imported.
    command = [sys.executable, "-P", "-m", "imgsum", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    sys.stdout.buffer.write(done.stdout)
    sys.stdout.flush()
    status = done.returncode if done.returncode in (0, 1, 2) else TROUBLE  # by a signal, it is negative
    # Names may have U+2028 and other ends of lines that JSON does not escape: only a newline ends a line here.
    return [json.loads(line) for line in done.stdout.split(b"\n") if line], status


def options_of_inputs(*, for_check: bool) -> list[str]:
    """The options of imgsum that the inputs stand for. Raises ValueError."""
    options = ["--json", "--progress"]
    for name in ("ALGORITHM", "BLOCK_SIZE", "FORMAT", "MAX_SIZE"):
        value = os.environ.get(f"IMGSUM_{name}", "").strip()
        if value:
            options.append(f"--{name.lower().replace('_', '-')}={value}")
    if flag("UNTRUSTED"):
        options.append("--untrusted")
    if flag("RELATIVE_TO_SUMS") and for_check:
        options.append("--relative-to-sums")
    return options


def flag(name: str) -> bool:
    """An input that is true or false. Anything else is an error, lest a gate is open by a slip."""
    value = os.environ.get(f"IMGSUM_{name}", "").strip().lower()
    if value not in ("", "true", "false"):
        raise ValueError(f"{name.lower().replace('_', '-')} is neither true nor false")
    return value == "true"


def lines_of(name: str) -> list[str]:
    """An input of several lines."""
    return [line.strip() for line in os.environ.get(f"IMGSUM_{name}", "").split("\n") if line.strip()]


def name_of(record: dict[str, Any]) -> str:
    """What an object is about: an image, or where a malformed line is."""
    if "name" in record:
        return str(record["name"])
    return f"{record['sums']}:{record['line']}" if "line" in record else str(record.get("sums", "imgsum"))


def raw_name(record: dict[str, Any]) -> bytes:
    """The bytes of an image's name."""
    return base64.b64decode(record["name_b64"]) if "name_b64" in record else str(record["name"]).encode()


def fail(message: str) -> int:
    """Say why nothing was done."""
    annotate(message)
    output(status=str(TROUBLE), verified="0")
    return TROUBLE


def annotate(message: str) -> None:
    """An annotation of the job. GitHub's escapes keep a name from becoming a command of the log's."""
    for char, escape in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        message = message.replace(char, escape)
    sys.stdout.buffer.write(f"::error title=imgsum::{message}\n".encode(errors="backslashreplace"))  # in any locale
    sys.stdout.flush()


def summarize(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A table in the job's summary."""
    append("GITHUB_STEP_SUMMARY", "\n".join([f"### imgsum: {title}", "", *table(header, rows), ""]))


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """The lines of a Markdown table, which ends where GitHub's limit of 1 MiB for a summary would."""
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    size = 0
    for number, row in enumerate(rows):
        line = f"| {' | '.join(row)} |"
        size += len(line.encode()) + 1
        if size > 900_000:
            yield f"| and {len(rows) - number} more |" + " |" * (len(header) - 1)
            return
        yield line


def html_text(text: str) -> str:
    """TEXT that is neither Markdown nor HTML, on one line."""
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return "".join(f"&#{ord(char)};" if char in "|`*_[]()<>&\\~#!@:\"'" else char for char in text)


def code(text: str) -> str:
    """TEXT as code."""
    return f"<code>{html_text(text)}</code>"


def output(**values: str) -> None:
    """Outputs of the step. The delimiter is random, so that no value can end itself and begin another."""
    for name, value in values.items():
        delimiter = f"imgsum-{uuid.uuid4()}"
        append("GITHUB_OUTPUT", f"{name}<<{delimiter}\n{value}\n{delimiter}\n")


def append(variable: str, text: str) -> None:
    """TEXT at the end of the file that the environment names; nowhere, outside GitHub."""
    if path := os.environ.get(variable):
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(guarded_main())
