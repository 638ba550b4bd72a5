"""TLS for NBD: never without encryption where nbds asks for it, and never with a server that nobody vouches for."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from imgsum.errors import OpenError, RefusedError

_REQUIRE = 2  # LIBNBD_TLS_REQUIRE

_VERIFIES = ((1, 18, 5), (1, 20, 2))
"""libnbd versions before these, the first of their series that do, take any certificate where they should verify it
by the system's (CVE-2024-7383); seen with 1.14.2."""


def require(handle: Any, uri: str) -> None:
    """Have HANDLE connect to URI, an nbds one, with TLS and to nobody but whom its certificates or key vouch for.

    libnbd before 1.18 ignores `tls-certificates` of a URI, so that is done here. Raises OpenError, RefusedError.
    """
    handle.set_tls(_REQUIRE)
    try:
        parameters = dict(parse_qsl(urlsplit(uri).query))
    except ValueError as error:  # its host is `[` without `]`, or is no IPv6 address
        raise OpenError(f"is not a valid URI: {error}") from error
    if "tls-psk-file" in parameters:
        return
    directory = parameters.get("tls-certificates")
    if directory is not None:
        if not _has_authority(directory):
            raise OpenError(f"there is no ca-cert.pem in {directory}, where tls-certificates says that it is")
    else:
        directory = next((path for path in _default_directories() if _has_authority(path)), None)
    if directory is not None:
        handle.set_tls_certificates(directory)
    elif not _verifies(_version(handle)):
        raise RefusedError(
            f"libnbd {handle.get_version()} does not verify who a server is by the system's certificates"
            " (CVE-2024-7383): put its CA's ca-cert.pem in a directory, and add ?tls-certificates=DIRECTORY to the URI"
        )


def _default_directories() -> list[str]:
    """Where libnbd looks for certificates by itself; see nbd_set_tls_certificates(3)."""
    if os.geteuid() == 0:
        return ["/etc/pki/libnbd"]
    home = os.path.expanduser("~")
    return [f"{home}/.pki/libnbd", f"{home}/.config/pki/libnbd"]


def _has_authority(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, "ca-cert.pem"))


def _verifies(version: tuple[int, ...]) -> bool:
    stable, current = _VERIFIES
    return version >= current or (stable <= version and version[:2] == stable[:2])


def _version(handle: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in handle.get_version().split(".")[:3])
