"""libnbd's Python binding: found, checked, and its messages. Imported only when an NBD source is opened."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable
from typing import Any, ClassVar

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


def message(error: Exception) -> str:
    """What libnbd, or the server through it, says in ERROR: lower case, without the name of the C function."""
    text = _FUNCTION.sub("", str(error.args[0]) if error.args else str(error))
    if text.startswith("read: command failed: Operation not supported"):
        return "the NBD server says that it can't read this export"
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def cause(error: Exception) -> Exception:
    """ERROR without its traceback, whose frames would keep the handle, and so the connection, as long as the error."""
    return error.with_traceback(None)


# What the binding does in a way that a hostile server can abuse is called by ctypes. It makes an int of each of the 16
# million numbers of a large reply, and prints an exception where a name of the server's isn't UTF-8.


class _Callback(ctypes.Structure):
    """libnbd's nbd_*_callback: the function, its first argument, and what is to be called when it isn't needed."""

    _fields_: ClassVar = [("function", ctypes.c_void_p), ("data", ctypes.c_void_p), ("free", ctypes.c_void_p)]


_DEBUG = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)
_EXTENTS = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("libnbd.so.0")
    library.nbd_set_debug_callback.argtypes = [ctypes.c_void_p, _Callback]
    block_status = library.nbd_aio_block_status
    block_status.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, _Callback, _Callback, ctypes.c_uint32]
    block_status.restype = ctypes.c_int64
    library.nbd_get_error.restype = ctypes.c_char_p
    return library


def _pointer(handle: Any) -> int:
    """The struct nbd_handle * of HANDLE."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    return int(get(handle._o, b"nbd_handle"))  # noqa: SLF001


def on_debug(handle: Any, call: Callable[[], None]) -> None:
    """CALL for each debug message of HANDLE, of which there is one for each step."""

    def function(_data: int, _context: int, _message: int) -> int:
        call()
        return 0

    handle.debug_callback = _DEBUG(function)  # must live as long as the handle, or until end_debug()
    callback = _Callback(ctypes.cast(handle.debug_callback, ctypes.c_void_p))
    _library().nbd_set_debug_callback(_pointer(handle), callback)
    handle.set_debug(True)


def end_debug(handle: Any) -> None:
    """Undo on_debug()."""
    handle.set_debug(False)
    handle.clear_debug_callback()
    del handle.debug_callback


def extents_callback(call: Callable[[bytes, int, bytes | None], None], max_size: int) -> Any:
    """For aio_block_status(): CALL(context, offset, pairs) for each chunk; must be kept until the request is done.

    PAIRS is None when they have more than MAX_SIZE bytes.
    """

    def function(_data: int, context: bytes, offset: int, entries: int, count: int, _error: int) -> int:
        call(context, offset, ctypes.string_at(entries, 4 * count) if 4 * count <= max_size else None)
        return 0

    return _EXTENTS(function)


def aio_block_status(handle: Any, length: int, offset: int, callback: Any) -> int:
    """Ask about LENGTH bytes from OFFSET; the request's cookie. Raises nbd.Error."""
    library = _library()
    extents = _Callback(ctypes.cast(callback, ctypes.c_void_p))
    cookie = int(library.nbd_aio_block_status(_pointer(handle), length, offset, extents, _Callback(), 0))
    if cookie < 0:
        raise load().Error((library.nbd_get_error() or b"").decode(errors="replace"))
    return cookie
