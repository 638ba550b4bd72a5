"""The Python API: what a program that imports imgsum gets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from fakes import FakeSource
from reference import KIB

import imgsum
from imgsum.extent import Extent


def test_a_checksum(image: Callable[..., Path], no_leak: None) -> None:
    path = image("64k:A 1m:- 100:B")
    result = imgsum.checksum(path)
    assert result.hexdigest == reference.blkhash(reference.content("64k:A 1m:- 100:B"))
    assert result[:6] == (result.hexdigest, "sha256", 65536, reference.size("64k:A 1m:- 100:B"), "raw", str(path))
    assert imgsum.checksum(str(path))[:6] == result[:6]


def test_all_that_is_promised_is_there() -> None:
    for name in imgsum.__all__:
        assert getattr(imgsum, name) is not None
    assert {"checksum", "compare", "Error", "__version__"} <= set(imgsum.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        imgsum.nonsense  # noqa: B018 it is the access that fails


def test_errors_are_one_family(tmp_path: Path) -> None:
    for call in (
        lambda: imgsum.checksum(tmp_path),
        lambda: imgsum.checksum(tmp_path / "missing"),
        lambda: imgsum.checksum("a\0b"),
        lambda: imgsum.checksum("-", algorithm="nonsense"),
        lambda: imgsum.checksum("-", block_size=1000),
        lambda: imgsum.checksum("-", construction="nonsense"),
    ):
        with pytest.raises(imgsum.Error):
            call()


def test_from_several_threads_at_once(image: Callable[..., Path], no_leak: None) -> None:
    specs = [f"{n}m:{letter} 100k:- 5:C" for n in (1, 2) for letter in "AB"]
    paths = [image(spec) for spec in specs]
    found: dict[str, str] = {}

    def run(spec: str, path: Path) -> None:
        for _ in range(5):
            found[spec] = imgsum.checksum(path).hexdigest

    threads = [threading.Thread(target=run, args=pair) for pair in zip(specs, paths, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {spec: reference.blkhash(reference.content(spec)) for spec in specs}


def test_an_interrupt_leaves_nothing(opens: dict[str, Any], no_leak: None) -> None:
    def extents() -> Iterator[Extent]:
        yield Extent(0, 64 * KIB, False)
        raise KeyboardInterrupt

    source = opens["fake"] = FakeSource(bytes(256 * KIB), extents())
    with pytest.raises(KeyboardInterrupt):
        imgsum.checksum("fake")
    assert source.closed


def test_a_descriptor_of_the_callers_own(image: Callable[..., Path]) -> None:
    with open(image("512:A"), "rb") as file:
        assert imgsum.checksum(f"/dev/fd/{file.fileno()}").hexdigest == reference.blkhash(b"A" * 512)
        os.fstat(file.fileno())  # and it stays theirs
