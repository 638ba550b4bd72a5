"""`imgsum algorithms`: list what -a takes."""

from __future__ import annotations

import argparse

from imgsum.commands.options import Arguments
from imgsum.errors import OK, UsageError
from imgsum.hash import algorithms, lanes
from imgsum.output import report

NAMES = None
EPILOG = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to PARSER."""
    parser.add_argument("--json", action="store_true", help="print one JSON object for each algorithm")


def run(arguments: Arguments) -> int:
    """Do as ARGUMENTS say, and return the exit status."""
    if arguments.names:
        raise UsageError(f"algorithms takes no name: '{arguments.names[0]}'")
    for algorithm in algorithms.available():
        by = lanes.sha256().description if algorithm.name == "sha256" else ""
        if arguments.json:
            record: dict[str, object] = {
                "schema": report.SCHEMA,
                "algorithm": algorithm.name,
                "bits": 8 * algorithm.digest_size,
                "cryptographic": algorithm.cryptographic,
            }
            if by:
                record["by"] = by
            report.write(report.to_json(record))
            continue
        remark = "" if algorithm.cryptographic else "  not cryptographic: finds accidents, not attacks"
        default = "  (default)" if algorithm.name == algorithms.DEFAULT else ""
        report.write(f"{algorithm.name:<12} {8 * algorithm.digest_size:4d} bits{default}{remark}{by and '  by ' + by}")
    for name, reason in algorithms.not_installed():
        if arguments.json:
            report.write(report.to_json({"schema": report.SCHEMA, "algorithm": name, "error": reason}))
        else:
            report.write(f"{name:<12} {reason}")
    return OK
