"""Before: the loop that one would write first. One thread reads 1 MiB, hashes its blocks, and reads on.

It knows as much as imgsum (holes are not read, blocks of zeros are not hashed) so that what differs is that nothing
happens at the same time. This is the mailing list's "before" too. Run as a script: naive.py [--direct] IMAGE|URI
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
from collections.abc import Iterator

BLOCK = 64 << 10
READ = 1 << 20
ZERO_STATUS = 2  # NBD_STATE_ZERO of base:allocation
ZEROS = bytearray(BLOCK)

Chunk = tuple[int, "memoryview | None"]
"""(length, content), None being zeros that were not read."""


def checksum(chunks: Iterator[Chunk]) -> str:
    """The blkhash of CHUNKS, each a whole number of blocks but for the last one."""
    outer = hashlib.sha256()
    zero_digest = hashlib.sha256(ZEROS).digest()
    size = 0
    for length, content in chunks:
        for at in range(0, length, BLOCK):
            block = ZEROS[: length - at] if content is None else content[at : at + BLOCK]
            if len(block) == BLOCK and (content is None or ZEROS.startswith(block)):
                outer.update(zero_digest)
            else:
                outer.update(hashlib.sha256(block).digest())
        size += length
    outer.update(size.to_bytes(8, "little"))
    return outer.hexdigest()


def file_chunks(path: str, direct: bool) -> Iterator[Chunk]:
    """The content of a raw image, whose runs of data begin and end on blocks."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffer = memoryview(mmap.mmap(-1, READ))
    size = os.lseek(fd, 0, os.SEEK_END)
    at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole is left
            data = size
        if data > at:
            yield data - at, None
            at = data
            continue
        end = os.lseek(fd, at, os.SEEK_HOLE)
        while at < end:
            count = os.preadv(fd, [buffer[: min(READ, end - at)]], at)
            yield count, buffer[:count]
            at += count


def nbd_chunks(uri: str) -> Iterator[Chunk]:
    """The content of an NBD export, over one connection, one request at a time."""
    import nbd

    handle = nbd.NBD()
    handle.add_meta_context("base:allocation")
    handle.connect_uri(uri)
    size = handle.get_size()
    at = 0
    while at < size:
        entries: list[int] = []  # length, flags, length, flags ...
        handle.block_status(min(size - at, 1 << 30), at, lambda *answer, into=entries: into.extend(answer[2]))
        for length, flags in zip(entries[::2], entries[1::2], strict=True):
            end = min(at + length, size)
            if flags & ZERO_STATUS:
                yield end - at, None
                at = end
            while at < end:
                content = handle.pread(min(READ, end - at), at)
                yield len(content), memoryview(content)
                at += len(content)


def main() -> None:
    """Print the checksum as imgsum does."""
    parser = argparse.ArgumentParser(description="The simple loop")
    parser.add_argument("--direct", action="store_true", help="O_DIRECT")
    parser.add_argument("image")
    arguments = parser.parse_args()
    if arguments.image.startswith("nbd"):
        chunks = nbd_chunks(arguments.image)
    else:
        chunks = file_chunks(arguments.image, arguments.direct)
    print(f"{checksum(chunks)}  {arguments.image}")


if __name__ == "__main__":
    main()
