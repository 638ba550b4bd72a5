"""What is measured: a case is a few commands on the same content, and the bars that their ratios are to reach.

The bars are those that the project set itself. All that reads the same content must give the same checksum.
"""

from __future__ import annotations

import importlib

from bench.case import CASES

__all__ = ["CASES"]

for _name in ("raw", "nbd", "qcow2", "verify"):  # in this order, each registers its cases
    importlib.import_module(f"bench.cases.{_name}")
