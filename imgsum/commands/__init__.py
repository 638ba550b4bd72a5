"""The commands. Each is a module of its name, with NAMES, EPILOG, add_options() and run()."""

from __future__ import annotations

COMMANDS = {
    "checksum": "print a checksum for each image",
    "check": "verify images against checksums",
    "compare": "is the content the same, and where not?",
    "algorithms": "list the algorithms that -a takes",
}
"""Each with what it does, in the order of the help."""
