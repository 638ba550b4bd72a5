"""Random qcow2 images against QEMU, for as long as one likes: `python tests/fuzz_qcow2.py --seconds 600`.

Four kinds of cases: valid images, whose checksum must be that of what QEMU reads, whatever the size of requests;
compressed clusters in any order, written by hand; images with bytes changed; images cut off. The last two must end in
time, with that checksum or with an error, and where only one of the two sides has an error, in a way that
docs/qcow2-differences.md lists. Prints what goes against that, with the seed, and ends with 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from qcow2_images import Image, changed_bytes, clear, random_image, raw_content, run
from qcow2_streams import random_streams
from reference import blkhash

import imgsum

MAX_SIZE = 64 << 20
"""A damaged image may say that it has exbibytes. Larger ones are not compared."""

TIME_LIMIT = 20
"""Seconds, also on a busy machine, for what takes some milliseconds."""

WAYS: tuple[dict[str, object], ...] = (
    {},
    {"request_size": 4 << 10},
    {"request_size": 64 << 10, "direct": True},
    {"request_size": 128 << 10},
    {"request_size": 1 << 20, "direct": True},
    {"request_size": 32 << 20},
)
"""Ways to read that must not matter."""

STRICTER = (
    # What QEMU reads and imgsum doesn't: docs/qcow2-differences.md says why.
    r"^truncated",
    r"more than the \d+ of --max-size",
    r"^the format of the backing file .* is not recorded",
    r"^the backing file .* is not a plain path",
    r"^the external data file .* is not a plain path",
)
MORE_LENIENT = (
    # What QEMU refuses and imgsum reads: parts of an image that its content does not need.
    r"[Ss]napshot",
    r"[Bb]itmap",
    r"[Rr]efcount|reference count",
    r"CRYPTO|[Ee]ncryption",
    r"[Ff]eature name",
)


class Outcome(NamedTuple):
    """What one side says: a checksum, or an error."""

    checksum: str | None
    error: str | None


def by_imgsum(image: Path, format_: str = "qcow2", **options: object) -> Outcome:
    """imgsum's outcome. Anything that it raises but an imgsum.Error passes, and so does a time-out."""

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {TIME_LIMIT} seconds")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(TIME_LIMIT)
    try:
        opened = imgsum.OpenOptions(format=format_, max_size=MAX_SIZE, **options)  # type: ignore[arg-type]
        return Outcome(imgsum.checksum(image, options=opened).hexdigest, None)
    except imgsum.Error as error:
        return Outcome(None, error.reason)
    finally:
        signal.alarm(0)


def by_imgsum_with_zlib(image: Path) -> Outcome:
    """imgsum's outcome without ISA-L, which reads some deflate data that zlib, and so QEMU, refuses."""
    isal = sys.modules.get("isal")
    sys.modules["isal"] = None  # type: ignore[assignment]
    try:
        return by_imgsum(image)
    finally:
        del sys.modules["isal"]
        if isal is not None:
            sys.modules["isal"] = isal


def by_qemu(image: Path, format_: str = "qcow2") -> Outcome:
    """QEMU's outcome."""
    try:
        return Outcome(blkhash(raw_content(image, format_)), None)
    except RuntimeError as error:
        return Outcome(None, str(error))


def disagreement(ours: Outcome, theirs: Outcome, zstd: bool) -> str | None:
    """What is wrong about two outcomes of a damaged image, or None.

    ZSTD: its compressed clusters are zstd frames without checksums, and what a damaged one decompresses to has changed
    from version 1.5.4 of the library to 1.5.7.
    """
    if ours.checksum and theirs.checksum and ours.checksum != theirs.checksum and not zstd:
        return "another checksum than QEMU"
    if ours.error is not None and theirs.checksum and not _listed(ours.error, STRICTER):
        return f"only imgsum has an error: {ours.error}"
    if theirs.error is not None and ours.checksum and not _listed(theirs.error, MORE_LENIENT):
        return f"only QEMU has an error: {theirs.error}"
    return None


def _listed(error: str, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, error) for pattern in patterns)


def damage(content: bytes, rng: random.Random) -> bytes:
    """CONTENT, a qcow2 file, with bytes changed where it matters most: header, extensions, L1 and L2 tables."""
    places = [0, 0, 24, 36, 72, 100, 112, 130]
    l1_size, l1_offset = int.from_bytes(content[36:40], "big"), int.from_bytes(content[40:48], "big")
    for entry in range(min(l1_size, 8)):
        at = l1_offset + entry * 8
        places += [at, at]
        l2_offset = int.from_bytes(content[at : at + 8], "big") & 0x00FFFFFFFFFFFE00
        if 0 < l2_offset < len(content) - 64:
            places += [l2_offset, l2_offset, l2_offset + 64, rng.randrange(l2_offset, len(content))]
    return changed_bytes(content, rng, [min(place, len(content) - 1) for place in places])


def virtual_size(image: Path) -> int:
    """The size that the header of IMAGE has."""
    with image.open("rb") as file:
        return int.from_bytes(file.read(32)[24:32], "big")


def valid_case(image: Image) -> str | None:
    """What is wrong about the checksums of an image as it was made, or None."""
    theirs = by_qemu(image.path, image.format)
    if theirs.error is not None:
        return f"QEMU: {theirs}"
    return _read_in_all_ways(image.path, image.format, theirs)


def streams_case(seed: int, directory: Path, ask_qemu: bool, most: int = 1 << 20) -> str | None:
    """What is wrong about the checksums of compressed clusters in any order, or None. QEMU may be asked, too."""
    made = random_streams(seed, most)
    path = directory / "streams.qcow2"
    path.write_bytes(made.file)
    right = Outcome(blkhash(made.content), None)
    if ask_qemu and by_qemu(path) != right:
        return f"{made.story}: QEMU: {by_qemu(path)}, right: {right}"
    problem = _read_in_all_ways(path, "qcow2", right)
    if problem is None and made.tidy and by_imgsum(path, untrusted=True) != right:
        problem = f"--untrusted: {by_imgsum(path, untrusted=True)}"
    return problem and f"{made.story}: {problem}"


def _read_in_all_ways(path: Path, format_: str, right: Outcome) -> str | None:
    for way in WAYS:
        ours = by_imgsum(path, format_, **way)
        if ours != right:
            return f"{way}: imgsum: {ours}, right: {right}"
    return None


def damaged_cases(image: Image, rng: random.Random, count: int, tally: Counter[str]) -> list[str]:
    """What is wrong about COUNT images made from one by changing bytes, and by cutting. TALLY counts outcomes."""
    content = image.path.read_bytes()
    damaged = image.path.with_name("damaged.qcow2")
    wrong = []
    for _ in range(count):
        made = content[: rng.randrange(len(content))] if rng.random() < 0.3 else damage(content, rng)
        damaged.write_bytes(made)
        ours = by_imgsum(damaged)
        size = virtual_size(damaged) if len(made) >= 32 else 0
        theirs = by_qemu(damaged) if size <= MAX_SIZE else Outcome(None, "not asked")
        tally[f"imgsum {'error' if ours.error else 'checksum'}, QEMU {'error' if theirs.error else 'checksum'}"] += 1
        if theirs.error == "not asked":
            problem = None if ours.error is not None else "a checksum of an image beyond --max-size"
        else:
            problem = disagreement(ours, theirs, zstd=len(content) > 104 and content[104] == 1)
        if problem and theirs.error and by_imgsum_with_zlib(damaged).error:
            tally["deflate data that only ISA-L reads"] += 1
            problem = None
        if problem:
            wrong.append(problem)
            descriptor, kept = tempfile.mkstemp(prefix="imgsum-fuzz.", suffix=".qcow2", dir=image.path.parent.parent)
            os.write(descriptor, made)
            os.close(descriptor)
            wrong.append(f"    kept as {kept}")
    return wrong


def main() -> int:
    """Run cases until the time is over; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--seed", type=int, help="only this case")
    parser.add_argument("--damaged", type=int, default=15, help="damaged images for each valid one (15)")
    arguments = parser.parse_args()
    run("qemu-img", "--version")
    first = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    end = time.monotonic() + arguments.seconds
    tally: Counter[str] = Counter()
    failures = 0
    seed = first
    with tempfile.TemporaryDirectory(prefix="imgsum-fuzz.") as name:
        directory = Path(name)
        os.chdir(directory)
        while True:
            image = random_image(seed, directory)
            problems = [valid_case(image), streams_case(seed, directory, ask_qemu=seed % 4 == 0)]
            tally["valid"] += 2
            if image.format == "qcow2":
                problems += damaged_cases(image, random.Random(seed), arguments.damaged, tally)
            found = [problem for problem in problems if problem]
            if found:
                failures += 1
                print(f"seed {seed}:", *found, *image.story, sep="\n    ", flush=True)
            clear(directory)
            if arguments.seed is not None or time.monotonic() > end:
                break
            seed += 1
        os.chdir("/")
    print(f"seeds {first} to {seed}: {dict(tally)}, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
