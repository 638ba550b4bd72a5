"""imgsum: the checksum for disk images.

The checksum is of the content that a guest would read, whatever the format.

    checksum(image) -> Checksum             its hexdigest, size, format ...
    check(sums) -> Report                   true when every line of the file was verified
    compare(first, second) -> Comparison    true when the content is the same; else where it differs
    OpenOptions(format="raw", ...)          how images are opened and read
    Command("nbdkit", "-r", ...)            an image that a program serves by NBD
    Error                                   what all of these raise, always one of its kinds

`import imgsum` itself costs nothing: api.py, which lists what is public, is imported when one of these is used.
"""

TYPE_CHECKING = False  # as in typing, whose import takes 3 ms

if TYPE_CHECKING:
    from imgsum.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    import os

    # `from imgsum import cli` asks here before it looks for a module.
    beside = os.path.join(os.path.dirname(__file__), name)
    if (name.startswith("_") and name != "__all__") or os.path.exists(f"{beside}.py") or os.path.isdir(beside):
        raise AttributeError(f"module 'imgsum' has no attribute '{name}'")
    from imgsum import api

    if name not in api.__all__ and name != "__all__":
        raise AttributeError(f"module 'imgsum' has no attribute '{name}'")
    value = getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from imgsum import api

    return [*api.__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
