"""Random qcow2 images, made by the real qemu-img and qemu-io: a seed is an image, or a chain of them.

Knows nothing of imgsum. What is right is what QEMU reads: `raw_content()`.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
SECTOR = 512


class Image(NamedTuple):
    """An image that was made, and how."""

    path: Path
    format: str
    size: int
    story: list[str]
    """The commands that made it, to be read by whoever looks into a failure."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run COMMAND; its stdout. Raises RuntimeError with what it said when it fails."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, errors="replace", check=False, cwd=cwd
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def raw_content(path: Path, format_: str = "qcow2", *options: str) -> bytes:
    """What QEMU reads of the image at PATH. Raises RuntimeError when it refuses or fails."""
    raw = path.with_name(path.name + ".content")
    try:
        run("qemu-img", "convert", "-U", "-f", format_, "-O", "raw", *options, path, raw)
        return raw.read_bytes()
    finally:
        raw.unlink(missing_ok=True)


def random_image(seed: int | str, directory: Path, most: int = 3 * MIB) -> Image:
    """The image of SEED, made in DIRECTORY, of about MOST bytes of content at most."""
    return _Maker(random.Random(seed), directory, most).image()


class _Maker:
    def __init__(self, rng: random.Random, directory: Path, most: int) -> None:
        self.rng = rng
        self.directory = directory
        self.most = most
        self.story: list[str] = []
        self.source = directory / "source"  # what qemu-io writes from

    def image(self) -> Image:
        rng = self.rng
        layers = rng.choice((1, 1, 1, 2, 2, 3, 4))
        size = self._size()
        below: tuple[str, str] | None = None
        for number in range(layers):
            name = f"layer{number}"
            if number == 0 and layers > 1 and rng.random() < 0.5:
                self._raw(name, size)
                below = (name, "raw")
            else:
                self._qcow2(name, size, below)
                below = (name, "qcow2")
            size = rng.choice((size, size, self._size(), size // 2 // SECTOR * SECTOR, size * 2))
        assert below is not None
        path = self.directory / below[0]
        if rng.random() < 0.15:
            path = self._converted(path, below[1])
            below = (path.name, "qcow2")
        if below[1] == "raw":
            return Image(path, "raw", path.stat().st_size, self.story)
        return Image(path, "qcow2", 0, self.story)

    def _size(self) -> int:
        rng = self.rng
        kind = rng.random()
        if kind < 0.05:
            return rng.choice((0, 512, 1024, 65536 - 512, 65536, 65536 + 512))
        size = rng.randrange(1, self.most)
        return size // SECTOR * SECTOR if kind < 0.6 else size // (64 * KIB) * 64 * KIB

    def _raw(self, name: str, size: int) -> None:
        rng = self.rng
        odd = rng.choice((0, 0, 1, 300))  # sizes that are no multiple of a sector
        path = self.directory / name
        with path.open("wb") as file:
            file.truncate(size + odd)
            for _ in range(rng.randrange(6)):
                at = rng.randrange(size + odd + 1)
                file.seek(at)
                file.write(self._bytes(min(size + odd - at, rng.randrange(1, 300 * KIB))))
        self.story.append(f"raw {name} {size + odd}")

    def _qcow2(self, name: str, size: int, below: tuple[str, str] | None) -> None:
        rng = self.rng
        cluster_bits = rng.choice((9, 9, 10, 12, 13, 14, 15, 16, 16, 16, 17, 18, 21))
        options, external = self._options(name, cluster_bits, below is not None)
        if below is None or "extended_l2=on" in options:
            kinds = ("off", "off", "off", "metadata", "falloc", "full")
            options.append(f"preallocation={rng.choice(kinds)}")
        command = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", ",".join(options)]
        if below:
            command += ["-b", below[0], "-F", below[1]]
        self._run(*command, name, str(size))
        cluster_size = 1 << cluster_bits
        for _ in range(rng.randrange(4)):
            self._operations(name, size, cluster_size, compress=not external)
            what = rng.random()
            if what < 0.2 and not external:
                self._try("qemu-img", "snapshot", "-c", f"s{rng.randrange(1000)}", name)
            elif what < 0.35:
                size = self._resized(name, size, size + rng.randrange(1, 1 + self.most // 4) // SECTOR * SECTOR)
            elif what < 0.45:
                size = self._resized(name, size, rng.randrange(size + 1) // SECTOR * SECTOR)

    def _options(self, name: str, cluster_bits: int, backed: bool) -> tuple[list[str], bool]:
        """Options of `qemu-img create`, and whether the data is in another file."""
        rng = self.rng
        options = [f"cluster_size={1 << cluster_bits}"]
        if rng.random() < 0.15:
            return [*options, "compat=0.10"], False
        if cluster_bits >= 14 and rng.random() < 0.35:
            options.append("extended_l2=on")
        if rng.random() < 0.3:
            options.append("compression_type=zstd")
        if rng.random() < 0.15:
            options.append(f"data_file={name}.data")
            if not backed and rng.random() < 0.5:
                options.append("data_file_raw=on")
            return options, True
        if rng.random() < 0.1:
            options.append("lazy_refcounts=on")
        return options, False

    def _resized(self, name: str, size: int, wanted: int) -> int:
        """The size after trying to make it WANTED: version 2 with snapshots, and some overlays, can't be resized."""
        done = self._try("qemu-img", "resize", "-q", "--shrink", "-f", "qcow2", name, str(wanted))
        return wanted if done else size

    def _operations(self, name: str, size: int, cluster_size: int, compress: bool) -> None:
        """Writes, zeroes, discards in one run of qemu-io."""
        rng = self.rng
        commands: list[str] = []
        content = self._bytes(256 * KIB)
        self.source.write_bytes(content)
        for _ in range(rng.randrange(1, 12)):
            at, length = self._range(size, cluster_size, rng.random() < 0.5)
            if not length:
                continue
            kind = rng.random()
            if kind < 0.35:
                commands.append(f"write -q -s {self.source} {at} {length}")
            elif kind < 0.45:
                commands.append(f"write -q -P {rng.randrange(256)} {at} {length}")
            elif kind < 0.6:
                commands.append(f"write -q -z {rng.choice(('', '-u', '-n'))} {at} {length}")
            elif kind < 0.75:
                commands.append(f"discard -q {at} {length}")
            elif compress:
                clusters = list(range(rng.randrange(1, 6)))
                rng.shuffle(clusters)  # in the file, their compressed bytes lie in the order of the writes
                for cluster in clusters:
                    begin = (at // cluster_size + cluster) * cluster_size
                    if begin + cluster_size <= size:
                        pattern = rng.choice((f"-s {self.source}", f"-P {rng.randrange(256)}"))
                        commands.append(f"write -q -c {pattern} {begin} {cluster_size}")
        arguments = [word for command in commands for word in ("-c", " ".join(command.split()))]
        if arguments:
            # Zero clusters without -u, and holes, may not be what the image's version knows: that is not the point.
            done = subprocess.run(
                ["qemu-io", "-f", "qcow2", "-d", rng.choice(("unmap", "ignore")), *arguments, name],
                capture_output=True,
                text=True,
                check=False,
                cwd=self.directory,
            )
            self.story.append(f"qemu-io {name} {arguments} -> {done.returncode} {done.stdout} {done.stderr}")

    def _range(self, size: int, cluster_size: int, aligned: bool) -> tuple[int, int]:
        rng = self.rng
        unit = cluster_size if aligned else SECTOR
        if size < unit:
            return 0, size
        at = rng.randrange(size // unit) * unit
        most = min(size - at, rng.choice((cluster_size, 3 * cluster_size, 200 * KIB, 1 * MIB)))
        length = max(unit, rng.randrange(1, most + 1) // unit * unit)
        return at, min(length, size - at)

    def _converted(self, path: Path, format_: str) -> Path:
        rng = self.rng
        options = [f"cluster_size={1 << rng.choice((9, 12, 16, 18, 21))}"]
        if rng.random() < 0.5:
            options.append("compression_type=zstd")
        compress = ["-c"] if rng.random() < 0.7 else []
        if compress and rng.random() < 0.5:
            compress += ["-W", "-m", "16"]  # clusters are written as they are done, in any order
        self._run(
            "qemu-img",
            "convert",
            *compress,
            "-f",
            format_,
            "-O",
            "qcow2",
            "-o",
            ",".join(options),
            path.name,
            "converted",
        )
        return self.directory / "converted"

    def _bytes(self, length: int) -> bytes:
        """Content that differs everywhere, and can be compressed, or can't, or is zeros here and there."""
        rng = self.rng
        parts: list[bytes] = []
        done = 0
        while done < length:
            size = rng.randrange(1, 64 * KIB)
            kind = rng.random()
            if kind < 0.4:
                part = rng.randbytes(size)
            elif kind < 0.8:
                word = rng.randbytes(8)
                part = b"".join(word + str(number).encode() for number in range(size // 10 + 1))
            else:
                part = bytes(size)
            parts.append(part)
            done += len(part)
        return b"".join(parts)[:length]

    def _try(self, *command: str) -> bool:
        """Whether QEMU did it. It refuses some things, and has even found its own work to be corrupt."""
        try:
            self._run(*command)
        except RuntimeError as error:
            self.story.append(f"refused: {error}")
            return False
        return True

    def _run(self, *command: str) -> None:
        self.story.append(" ".join(command))
        run(*command, cwd=self.directory)


def clear(directory: Path) -> None:
    """Remove all that is in DIRECTORY."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def changed_bytes(content: bytes, rng: random.Random, places: Sequence[int]) -> bytes:
    """CONTENT with a few bytes, most of them near one of PLACES, set to something else."""
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        near = rng.choice(places) + rng.randrange(64) if rng.random() < 0.8 else rng.randrange(len(content))
        at = min(near, len(content) - 1)
        changed[at] = rng.choice((0, 1, 0x40, 0x80, 0xFF, rng.randrange(256), changed[at] ^ 1 << rng.randrange(8)))
    return bytes(changed)
