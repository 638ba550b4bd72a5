"""libnbd's Python binding: found, checked, and its errors in words. Imported only when an NBD source is opened."""

from __future__ import annotations

import re
import sys
from typing import Any

from imgsum.errors import MissingError, OpenError

_INSTALL = (
    f"the Python that runs imgsum is {sys.executable}. Install libnbd's binding with `apt install python3-libnbd` (on"
    " Fedora `dnf install python3-libnbd`), and imgsum so that it sees the system's packages: `pipx install --python"
    " /usr/bin/python3 --system-site-packages imgsum`, or `uv venv --python /usr/bin/python3 --system-site-packages &&"
    " uv pip install imgsum`"
)

# "nbd_connect_uri: connect: No such file or directory": which C function it was helps nobody.
_FUNCTION = re.compile(r"^(?:nbd_\w+: )+")

# What the dynamic linker says when it has no memory: "libnbd.so.0: failed to map segment from shared object".
_NO_MEMORY = re.compile(
    r"failed to map segment|cannot allocate|out of memory|cannot create .* (?:map|memory)", re.IGNORECASE
)


def load() -> Any:
    """The module `nbd` of libnbd 1.14 or newer.

    Raises MissingError, also when it is another package of that name, and OpenError when memory is short.
    """
    try:
        import nbd
    except MemoryError as error:
        raise OpenError("memory is short: libnbd's Python module can't be loaded") from error
    except ImportError as error:
        if _NO_MEMORY.search(str(error)):
            raise OpenError(f"memory is short: libnbd's Python module can't be loaded ({error})") from error
        if not isinstance(error, ModuleNotFoundError):
            raise MissingError(f"NBD needs libnbd's Python module, which can't be loaded ({error})") from error
        raise MissingError(f"NBD needs libnbd's Python module, which is not installed: {_INSTALL}") from error
    handle, buffer = getattr(nbd, "NBD", None), getattr(nbd, "Buffer", None)
    if not (hasattr(handle, "aio_pread_structured") and hasattr(buffer, "from_buffer")):
        where = getattr(nbd, "__file__", None) or "built in"
        if hasattr(handle, "aio_connect_uri"):
            raise MissingError(f"NBD needs libnbd 1.14 or newer, and this one is older ({where})")
        raise MissingError(
            f"NBD needs libnbd's Python module, and the `nbd` that Python finds ({where}) is another package:"
            f" uninstall that one (pip uninstall nbd); {_INSTALL}"
        )
    return nbd


def words(error: Exception) -> str:
    """What libnbd, or the server through it, says in ERROR: lower case, without the name of the C function."""
    text = _FUNCTION.sub("", str(error.args[0]) if error.args else str(error))
    if text.startswith("read: command failed: Operation not supported"):
        return "the NBD server says that it can't read this export"
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def cause(error: Exception) -> Exception:
    """ERROR without its traceback, whose frames would keep the handle, and so the connection, as long as the error."""
    return error.with_traceback(None)
