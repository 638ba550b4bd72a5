"""Names of algorithms -> hash functions. The package of an algorithm is imported when that is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

from imgsum.errors import UsageError

TYPE_CHECKING = False

if TYPE_CHECKING:
    from imgsum.hash.lanes import BlockHash


class Hash(Protocol):
    """What hashlib, blake3 and xxhash have in common."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Hash DATA too."""

    def digest(self) -> bytes:
        """The digest of all that was hashed."""

    def copy(self) -> Hash:
        """Another one that has hashed the same."""


class Algorithm(NamedTuple):
    """A hash function of fixed digest length."""

    name: str
    """Canonical: lower case, as in `imgsum algorithms`, JSON and tags."""
    digest_size: int
    """Bytes."""
    cryptographic: bool
    """False: finds accidents, not attacks."""
    new: Callable[..., Hash]
    """new() or new(data)."""
    hash_blocks: BlockHash | None = None
    """Hashes many blocks in one call, where there is a way that is faster."""


class NotInstalledError(UsageError):
    """The algorithm's package is not installed."""


DEFAULT = "sha256"
NOT_CRYPTOGRAPHIC = ("xxh3-128", "xxh3-64", "xxh64")

# OpenSSL's spellings of what hashlib calls by another name.
_ALIASES = {"blake2b512": "blake2b", "blake2s256": "blake2s", "xxh128": "xxh3-128", "sha2-256": "sha256"}


def canonical(name: str) -> str:
    """The canonical spelling of an algorithm's NAME, known or not: `SHA3_256` is `sha3-256`."""
    name = name.lower().replace("_", "-").replace("sha512/", "sha512-")
    return _ALIASES.get(name, name)


@lru_cache(maxsize=64)  # the same object each time, as blkhash.zero_digest() keeps what it made for one
def load(name: str) -> Algorithm:
    """The algorithm called NAME, in any spelling. Raises UsageError; NotInstalledError where a package is missing."""
    name = canonical(name)
    try:
        if name == "blake3":
            from blake3 import blake3

            return Algorithm(name, 32, True, cast("Callable[..., Hash]", blake3))
        if name in NOT_CRYPTOGRAPHIC:
            import xxhash

            new = {"xxh3-128": xxhash.xxh3_128, "xxh3-64": xxhash.xxh3_64, "xxh64": xxhash.xxh64}[name]
            return Algorithm(name, new().digest_size, False, new)
    except ImportError:
        package = "blake3" if name == "blake3" else "xxhash"
        raise NotInstalledError(f"{name} needs a package that is not installed: pip install {package}") from None
    return _load_hashlib(name)


@lru_cache(maxsize=1)
def blake2b_256() -> Algorithm:
    """blake2b with 32-byte digests, for the imageio construction only. It is a different function than blake2b."""
    import hashlib

    def new(data: bytes | memoryview = b"") -> Hash:
        return hashlib.blake2b(data, digest_size=32)

    return Algorithm("blake2b-256", 32, True, new)


def _load_hashlib(name: str) -> Algorithm:
    import hashlib

    if not name.startswith("shake"):  # these have no fixed length
        # The constructors of the module are the fastest where there is one; new() knows OpenSSL's others.
        for spelling in (name.replace("-", "_"), name):
            if spelling in hashlib.algorithms_guaranteed:
                new = getattr(hashlib, spelling)
            elif spelling in hashlib.algorithms_available:
                new = _openssl_constructor(spelling)
            else:
                continue
            try:
                algorithm = Algorithm(name, new().digest_size, True, new)
            except ValueError:
                break  # listed, but this OpenSSL has it disabled
            return _in_lanes(algorithm) if name == "sha256" else algorithm
    raise UsageError(f"unknown algorithm '{name}' (`imgsum algorithms` lists what there is)")


def _in_lanes(sha256: Algorithm) -> Algorithm:
    from imgsum.hash import lanes

    return sha256._replace(hash_blocks=lanes.sha256().hash_blocks)


def _openssl_constructor(spelling: str) -> Callable[..., Hash]:
    import hashlib

    def new(data: bytes | memoryview = b"") -> Hash:
        return hashlib.new(spelling, data)

    return new


def available() -> list[Algorithm]:
    """Every algorithm that load() finds on this machine, the cryptographic ones first."""
    import hashlib

    found: dict[str, Algorithm] = {}
    for name in sorted({canonical(spelling) for spelling in hashlib.algorithms_available} | {"blake3"}):
        try:
            found[name] = load(name)
        except UsageError:
            continue
    absent = [name for name, _ in not_installed()]
    return [*found.values(), *(load(name) for name in NOT_CRYPTOGRAPHIC if name not in absent)]


def not_installed() -> list[tuple[str, str]]:
    """The algorithms whose package is not installed, each with the command that installs it."""
    found = []
    for name in ("blake3", *NOT_CRYPTOGRAPHIC):
        try:
            load(name)
        except NotInstalledError as error:
            found.append((name, error.reason.removeprefix(f"{name} ")))
    return found
