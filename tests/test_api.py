"""The Python API: what a program that imports imgsum gets."""

from __future__ import annotations

import math
import os
import pydoc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from fakes import FakeSource
from reference import KIB

import imgsum
import imgsum.errors
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


NAN = float("nan")


@pytest.mark.parametrize(
    "fields",
    [
        *({"request_size": value} for value in (-4096, 0, 5000, 2048, 64 << 20, True, 4096.0, "4k", None, 10**5000)),
        *({"queue_size": value} for value in (-1, True, 1.5, "16m", None, 1 << 63)),
        *({"connect_timeout": value} for value in (-1, 0, NAN, math.inf, True, "30", None, 10**400)),
        *({"io_timeout": value} for value in (-1, 0, NAN, math.inf, True, "30", 10**400)),
        *({"connections": value} for value in (0, -1, 1025, True, 2.0, "2")),
        *({"max_size": value} for value in (-1, True, 1.5, "1t", 1 << 63)),
        *({"offset": value} for value in (-1, True, 1.5, "0", None, 1 << 63)),
        *({"length": value} for value in (-5, True, 1.5, "0", 1 << 63)),
        *({"format": value} for value in ("nope", "RAW", "", b"raw", 5, ["raw"])),
        *({"reader": value} for value in ("nope", "", None, 5)),
        *({"snapshot": value} for value in ("", "a\0b", b"a", 5)),
        *({"secret_file": value} for value in ("", "a\0b", b"a", 5)),
        *(
            {name: value}
            for name in ("direct", "force_share", "extents", "untrusted", "own_descriptors")
            for value in (0, 1, "no", None)
        ),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_options_that_make_no_sense(fields: dict[str, Any]) -> None:
    (name,) = fields
    for make in (imgsum.OpenOptions, imgsum.OpenOptions()._replace):
        with pytest.raises(imgsum.UsageError, match=rf"^{name}: ") as caught:
            make(**fields)
        assert len(str(caught.value)) < 250
    if name in ("offset", "length", "format") and fields[name] is not None:
        for call in (lambda: imgsum.checksum("x", **fields), lambda: imgsum.compare("x", "y", **fields)):
            with pytest.raises(imgsum.UsageError, match=rf"^{name}: "):
                call()


@pytest.mark.parametrize(
    "fields",
    [
        *({"block_size": value} for value in (-65536, 0, 256, 1000, 1 << 40, True, 65536.0, "64k")),
        *({"algorithm": value} for value in (b"sha256", 5, ["sha256"])),
        *({"construction": value} for value in ("nope", "", None, 5)),
        *({"options": value} for value in (imgsum.OpenOptions, {"format": "raw"}, (), "raw")),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_parameters_that_make_no_sense(fields: dict[str, Any]) -> None:
    (name,) = fields
    for function in (imgsum.checksum, imgsum.check):
        with pytest.raises(imgsum.UsageError, match=rf"^{name}: "):
            function("x", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        *({"limit": value} for value in (0, -1, True, 1.5, "1")),
        *({"strict": value} for value in (1, None, "no")),
        *({name: value} for name in ("options", "second_options") for value in (imgsum.OpenOptions, {}, "raw")),
        {"second_format": "nope"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_comparisons_that_make_no_sense(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(imgsum.UsageError, match=rf"^{name.removeprefix('second_')}: "):
        imgsum.compare("x", "y", **fields)
    with pytest.raises(imgsum.UsageError, match=r"^relative_to_sums: "):
        imgsum.check("x", relative_to_sums=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 5, b"disk", [], ["touch", "RAN"], ("touch", "RAN"), 1.5, str], ids=repr)
def test_only_paths_and_commands_are_images(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, call in (
        ("image", lambda: imgsum.checksum(value)),
        ("first", lambda: imgsum.compare(value, "y")),
        ("second", lambda: imgsum.compare("x", value)),
        ("sums", lambda: imgsum.check(value)),
    ):
        with pytest.raises(imgsum.UsageError, match=rf"^{name}: not a path"):
            call()
    assert os.listdir() == []


def test_commands() -> None:
    command = imgsum.Command("nbdkit", "-r", "null")
    assert (str(command), repr(command)) == ("[ nbdkit -r null ]", "Command('nbdkit', '-r', 'null')")
    for words in ([], [""], [5], ["nbdkit", None], ["nbdkit", "a\0b"], [["nbdkit", "null"]]):
        with pytest.raises(imgsum.UsageError):
            imgsum.Command(*words)  # type: ignore[arg-type]
    with pytest.raises(imgsum.UsageError, match=r"^sums: not a path"):
        imgsum.check(command)  # type: ignore[arg-type]


def test_parameters_go_before_the_options(image: Callable[..., Path]) -> None:
    path = image("64k:A 64k:B")
    half = imgsum.OpenOptions(offset=65536)
    want = reference.blkhash(b"B" * 65536)
    assert imgsum.checksum(path, options=half).hexdigest == want
    assert imgsum.checksum(path, offset=0, options=half).size == 131072
    assert imgsum.compare(path, image("64k:C 64k:B"), options=half)


def test_formats(tmp_path: Path) -> None:
    container = tmp_path / "image"
    container.write_bytes(b"QFI\xfb\0\0\0\3" + bytes(504))
    for opened in ({"format": "raw"}, {"options": imgsum.OpenOptions(format="raw")}):
        assert imgsum.checksum(container, **opened).size == 512
    with pytest.raises(imgsum.Error):
        imgsum.checksum(container)
    assert imgsum.compare(container, container, format="raw", second_format="raw")
    with pytest.raises(imgsum.Error):
        imgsum.compare(container, container, format="raw")
    sums = tmp_path / "SUMS"
    sums.write_text(f"{imgsum.checksum(container, format='raw').hexdigest}  {container}\n")
    assert imgsum.check(sums, format="raw")
    assert not imgsum.check(sums)


def test_the_api_is_shown(image: Callable[..., Path], tmp_path: Path) -> None:
    shown = pydoc.plain(pydoc.render_doc(imgsum))
    errors = {
        cls.__name__
        for cls in vars(imgsum.errors).values()
        if isinstance(cls, type) and cls.__name__ not in ("naming", "NotNativeError")
    }
    names = {"checksum", "check", "compare", "Command", "OpenOptions", "Checksum", "Comparison", "Report", *errors}
    for name in names:
        assert name in dir(imgsum)
        assert name in imgsum.__all__
        assert f" {name}(" in shown or f".{name}\n" in shown or f".{name}(" in shown, name
    path = image("64k:A")
    result = imgsum.checksum(path)
    (tmp_path / "SUMS").write_text(f"{result.hexdigest}  {path}\n")
    for value in (result, imgsum.compare(path, path), imgsum.check(tmp_path / "SUMS"), imgsum.OpenOptions()):
        assert len(repr(value).replace(str(path), "")) < 150
    assert repr(imgsum.OpenOptions(format="raw", length=5)) == "OpenOptions(format='raw', length=5)"
