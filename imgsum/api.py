"""What is public: all that is imported here."""

# ruff: noqa: PLC0414  # `as` says to type checkers that it is public

from imgsum import __version__ as __version__
from imgsum.engine.checksum import Checksum as Checksum
from imgsum.engine.checksum import Reused as Reused
from imgsum.engine.checksum import checksum as checksum
from imgsum.engine.compare import Comparison as Comparison
from imgsum.engine.compare import compare as compare
from imgsum.engine.content import Stats as Stats
from imgsum.engine.mask import Range as Range
from imgsum.errors import ChangedError as ChangedError
from imgsum.errors import Error as Error
from imgsum.errors import FormatError as FormatError
from imgsum.errors import MismatchError as MismatchError
from imgsum.errors import MissingError as MissingError
from imgsum.errors import OpenError as OpenError
from imgsum.errors import ReadError as ReadError
from imgsum.errors import RefusedError as RefusedError
from imgsum.errors import TruncatedError as TruncatedError
from imgsum.errors import UsageError as UsageError
from imgsum.index.format import Index as Index
from imgsum.source import Command as Command
from imgsum.source import OpenOptions as OpenOptions
from imgsum.sums.check import Report as Report
from imgsum.sums.check import Verdict as Verdict
from imgsum.sums.check import check as check

__all__ = ["__version__", *(name for name in globals() if not name.startswith("_"))]  # noqa: PLE0604
