"""docs/transfers.md, run as it is written: two hosts are two directories, with ssh and scp between them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from conftest import HANG, need
from reference import MIB

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "transfers.md").read_text()

SECTIONS: dict[str, list[tuple[str, str]]] = {
    section.splitlines()[0]: re.findall(r"```sh\n# on (source|destination)\n(.*?)```", section, re.DOTALL)
    for section in TEXT.split("\n## ")[1:]
}

SSH = '#!/bin/sh\ncd "$HOSTS/$1" && shift && exec sh -c "$*"\n'
SCP = """#!/bin/bash
for word in "$@"; do
    case $word in
        *:*) paths+=("$HOSTS/${word%%:*}/${word#*:}") ;;
        *) paths+=("$word") ;;
    esac
done
exec cp -- "${paths[@]}"
"""


@pytest.fixture
def hosts(tmp_path: Path, tool: Callable[[str], str]) -> Path:
    """Two hosts, with images on the first, and programs for both in `bin`."""
    for name in ("source", "destination", "bin"):
        (tmp_path / name).mkdir()
    imgsum = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m imgsum "$@"\n'
    for name, text in (("ssh", SSH), ("scp", SCP), ("imgsum", imgsum)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    reference.write("1m:R 2m:- 1m:A", tmp_path / "source" / "data.raw")
    reference.write("1m:A 5m:- 2m:R", tmp_path / "disk.raw")
    subprocess.run(
        [tool("qemu-img"), "convert", "-f", "raw", "-O", "qcow2", "disk.raw", "source/disk.qcow2"],
        cwd=tmp_path,
        check=True,
    )
    return tmp_path


@pytest.fixture
def device(hosts: Path, tool: Callable[[str], str], root: None) -> Iterator[str]:
    """A block device that is larger than the image, and full of something else."""
    reference.write("16m:Z", hosts / "device")
    losetup = tool("losetup")
    made = subprocess.run([losetup, "--find", "--show", hosts / "device"], check=False, capture_output=True, text=True)
    need(made.returncode == 0, f"loop devices don't work here: {made.stderr.strip()}")
    yield made.stdout.strip()
    subprocess.run([losetup, "--detach", made.stdout.strip()], check=True)


def run(hosts: Path, blocks: list[tuple[str, str]], **variables: str) -> list[str]:
    """Run BLOCKS, one shell for each host, in their order. What each prints."""
    assert blocks
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(hosts / "bin"), os.environ["PATH"], "/usr/sbin", "/sbin"]),
        "HOSTS": str(hosts),
        **variables,
    }
    printed = []
    earlier = {"source": "", "destination": ""}  # a shell of one host keeps its variables
    for host, script in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{earlier[host]}\n{script}"],
            cwd=hosts / host,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
        earlier[host] += "".join(re.findall(r"^\w+=.*\n", script, re.MULTILINE))
    return printed


def test_every_section_has_a_test() -> None:
    assert list(SECTIONS) == [
        "With a file of checksums",
        "Against the other host, without a file",
        "A qcow2 image on a device that is larger",
        "A card that bmaptool wrote",
        "Against an export of the other host, over NBD with TLS",
    ]
    assert TEXT.count("```sh\n") == sum(map(len, SECTIONS.values()))


def test_with_a_file_of_checksums(hosts: Path) -> None:
    assert run(hosts, SECTIONS["With a file of checksums"]) == [
        "",
        "disk.qcow2: OK\ndata.raw: OK\n",
        "disk.raw: OK\ndata.raw: OK\n",
    ]


def test_what_was_damaged_on_the_way_is_found(hosts: Path) -> None:
    before, after, _ = SECTIONS["With a file of checksums"]
    run(hosts, [before])
    damage(hosts / "destination" / "data.raw")
    with pytest.raises(AssertionError, match="1 computed checksum did NOT match"):
        run(hosts, [after])


def test_without_a_file(hosts: Path) -> None:
    blocks = SECTIONS["Against the other host, without a file"]
    assert run(hosts, blocks) == ["images are identical\n"]
    damage(hosts / "destination" / "data.raw")
    ((host, script),) = blocks
    with pytest.raises(AssertionError, match="images differ at offset"):
        run(hosts, [(host, script.split("\n", 1)[1])])


def test_a_larger_device(hosts: Path, device: str) -> None:
    blocks = SECTIONS["A qcow2 image on a device that is larger"]
    assert run(hosts, blocks, DEVICE=device) == ["images are identical\n", f"{device}: OK\n"]
    assert (hosts / "device").read_bytes()[8 * MIB :] == b"Z" * (8 * MIB)


def test_a_card(hosts: Path, device: str, tool: Callable[[str], str]) -> None:
    tool("bmaptool")
    blocks = SECTIONS["A card that bmaptool wrote"]
    assert run(hosts, blocks, DEVICE=device)[1].endswith("the mapped ranges are as the bmap says\n")
    compare = blocks[1][1].splitlines()[-1]
    damage(hosts / "device", 2 * MIB)  # which is not mapped
    assert run(hosts, [("destination", compare)], DEVICE=device) == ["the mapped ranges are as the bmap says\n"]
    damage(hosts / "device", 5)
    with pytest.raises(AssertionError):
        run(hosts, [("destination", compare)], DEVICE=device)


def test_over_nbd_with_tls(hosts: Path, tool: Callable[[str], str]) -> None:
    for name in ("psktool", "qemu-nbd"):
        tool(name)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    blocks = SECTIONS["Against an export of the other host, over NBD with TLS"]
    try:
        printed = run(hosts, blocks, SOURCE="127.0.0.1", PORT=port)
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((hosts / "source" / "nbd.pid").read_text()), 15)
    assert printed[1] == "images are identical\n"


def damage(image: Path, at: int = 3 * MIB + 5) -> None:
    with open(image, "r+b") as file:
        file.seek(at)
        file.write(b"!")
