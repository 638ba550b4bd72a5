"""imgsum: the checksum for disk images.

The checksum is of the content that a guest would read, whatever the format. One byte travels so, and the modules are
best read in that order:

    cli -> source -> extent -> content -> pipeline -> digest -> blkhash -> report
           (where)   (what)    (range)   (8 workers)  (H)      (in order)  (print)

    cli.py, commands.py         arguments -> calls -> exit status; signals (options.py, option_groups.py: the grammar)
    source/                     where bytes come from: raw files, streams, qcow2, NBD, a private qemu-nbd
    extent.py, content.py       what is certainly zero, and the range that is read
    pipeline.py                 the fixed pool of workers, the ordered queue, the first error wins
    digest.py, blkhash.py       algorithms, and the construction of the checksum
    checksums.py, job.py        images -> checksums
    sums.py, checking.py        a sums file -> verdicts
    comparison.py, comparison_pieces.py, differences.py     two images -> where they differ
    report.py, progress.py      results -> lines or JSON; how far it is
    errors.py, units.py         imgsum.Error and its kinds; sizes

Everything below is imported when it is used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms

if TYPE_CHECKING:
    from imgsum.engine.checksum import Checksum, checksum
    from imgsum.engine.compare import Comparison, compare
    from imgsum.engine.content import Stats
    from imgsum.engine.mask import Range
    from imgsum.errors import Error
    from imgsum.source import OpenOptions
    from imgsum.sums.check import Report, Verdict, check

__all__ = [
    "Checksum",
    "Comparison",
    "Error",
    "OpenOptions",
    "Range",
    "Report",
    "Stats",
    "Verdict",
    "__version__",
    "check",
    "checksum",
    "compare",
]

__version__ = "0.1.0"

_HOMES = {
    "Checksum": "engine.checksum",
    "Comparison": "engine.compare",
    "Error": "errors",
    "OpenOptions": "source",
    "Range": "engine.mask",
    "Report": "sums.check",
    "Stats": "engine.content",
    "Verdict": "sums.check",
    "check": "sums.check",
    "checksum": "engine.checksum",
    "compare": "engine.compare",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: `import imgsum` itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'imgsum' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(f"imgsum.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
