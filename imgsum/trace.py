"""What imgsum opens, asks, reads and decides, on stderr through logging: --debug, or IMGSUM_DEBUG=1.

It costs nothing while it is off: logging itself, 7 ms, is imported by enable().
"""

from __future__ import annotations

from imgsum.errors import printable

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms
if TYPE_CHECKING:
    from logging import Logger

_log: Logger | None = None


def enable() -> None:
    """Let debug() and exception() say something from now on."""
    global _log  # noqa: PLW0603  # one switch for the process, as in logging
    import logging

    logging.basicConfig(format="imgsum: debug: %(message)s")
    _log = logging.getLogger("imgsum")
    _log.setLevel(logging.DEBUG)


def debug(message: str, *values: object) -> None:
    """Log MESSAGE % VALUES, with control characters escaped."""
    if _log is not None:
        _log.debug("%s", printable(message % values))


def exception(error: BaseException) -> None:
    """Log ERROR with its traceback."""
    if _log is not None:
        _log.debug("%s", printable(str(error)), exc_info=error)
