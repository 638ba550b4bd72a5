"""Images -> checksums. Read top to bottom, as a byte travels.

_items() opens images and cuts their extents into items. _digest() loads and hashes one, in a worker. checksum_tasks()
folds the results in content order.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from imgsum import blkhash
from imgsum.blkhash import BlkHash, Construction
from imgsum.engine.content import (
    MAX_ZERO_PART,
    Content,
    Image,
    Part,
    Progress,
    Stats,
    count_workers,
    image_name,
    open_content,
)
from imgsum.engine.pool import Pool, Worker
from imgsum.errors import Error, MismatchError, ReadError
from imgsum.extent import Extent, align, coalesce
from imgsum.hash.blocks import block_digests, digest_of_block
from imgsum.source import OpenOptions


class Checksum(NamedTuple):
    """The checksum of an image's content."""

    hexdigest: str
    algorithm: str
    block_size: int
    size: int
    """Bytes of content that were hashed."""
    format: str
    name: str
    """The image, as it was given."""
    construction: str
    stats: Stats
    note: str | None
    """What a user should know about this value, or None."""


class Task(NamedTuple):
    """One image to be done."""

    image: Image
    construction: Construction
    options: OpenOptions
    size: int | None = None
    """What the content's size must be, if that is known. Nothing is read of an image of another size."""
    error: Error | None = None
    """Why there is nothing to do. It takes its place among the results."""


def checksum(
    image: Image,
    *,
    algorithm: str | None = None,
    block_size: int | None = None,
    construction: str = "blkhash",
    offset: int = 0,
    length: int | None = None,
    options: OpenOptions | None = None,
) -> Checksum:
    """The checksum of IMAGE's content, or of LENGTH bytes of it from OFFSET.

    algorithm: a name that `imgsum algorithms` lists; None is sha256. block_size: bytes, a power of two; None is 64
    KiB. construction: `blkhash`, or `imageio` for the value that oVirt's imageio reports. options: how the image is
    opened and read. Raises an imgsum.Error when not every byte could be read: there is no partial checksum.
    """
    chosen = blkhash.construction(construction, algorithm, block_size)
    options = (options or OpenOptions())._replace(offset=offset, length=length)
    (result,) = checksum_tasks([Task(image, chosen, options)], options)
    if isinstance(result, Error):
        raise result
    return result


def checksum_tasks(
    tasks: Iterable[Task], options: OpenOptions, *, progress: Progress | None = None, workers: int | None = None
) -> Generator[Checksum | Error, None, None]:
    """For each of TASKS in turn its checksum, or the Error that says why there is none.

    One pool serves them all, with as many WORKERS as OPTIONS allow buffers unless a number is given. TASKS are taken
    only as far ahead as needed.
    """
    opened: list[_Run] = []  # in order
    current: _Run | None = None
    try:
        with Pool(workers or count_workers(options)) as pool:
            for done in pool.map(_digest, _items(tasks, opened)):
                item, run = done.item, done.item.run
                if progress and run is not current:
                    current = run
                    progress.begin(run.name, run.size)
                if run.error is None:
                    run.error = done.error
                if item.is_end:
                    if progress:
                        progress.end()
                    opened.remove(run)
                    yield run.finish()
                elif run.error is None:
                    run.fold(item, done.result)
                    if progress:
                        progress.advance(run.done)
    finally:
        for run in opened:
            run.close()


class _Item(NamedTuple):
    """Some content of an image, in order; or, with neither field set, its end."""

    run: _Run
    part: Part | None = None
    """Whole blocks to be loaded and hashed. The last block of the content may be shorter."""
    zeros: int = 0
    """Bytes that are certainly zero."""

    @property
    def has_work(self) -> bool:
        """See pool.Item."""
        return self.part is not None

    @property
    def is_end(self) -> bool:
        """Nothing is left of the image. Until this is taken its files are open, or its server runs."""
        return self.part is None and not self.zeros

    @property
    def weight(self) -> int:
        """See pool.Item. At most 4 images wait behind a slow one."""
        return 8 if self.is_end else 1


def _items(tasks: Iterable[Task], opened: list[_Run]) -> Iterator[_Item]:
    """All images as items, in order. An image is opened while those before it are still being hashed."""
    for task in tasks:
        run = _Run(task)
        opened.append(run)
        try:
            yield from _items_of(run, run.open())
        except Exception as error:
            run.feed_error = error  # comes after the errors of the items before it
        yield _Item(run)


def _items_of(run: _Run, content: Content) -> Iterator[_Item]:
    aligned = align(run.count(content.extents()), run.construction.block_size, content.start, content.bound)
    for extent in coalesce(aligned, content.part_size, MAX_ZERO_PART):
        if run.error is not None:
            return
        if extent.zero:
            yield _Item(run, zeros=extent.length)
            continue
        part = content.part(extent.start, extent.length)
        yield _Item(run, part)
        if content.end is not None and part.start + part.length >= content.end:
            return


def _digest(worker: Worker, item: _Item) -> bytes:
    """The digests of ITEM's blocks, laid end to end."""
    run, part = item.run, item.part
    assert run.content is not None
    assert part is not None
    try:
        if run.error is not None:
            return b""  # nobody wants it any more
        pieces = run.content.load(part, worker)
        if run.construction.block_size > run.content.piece_size:
            return digest_of_block(pieces, run.construction, run.hash.zero_digest)
        return b"".join([block_digests(piece, run.construction, run.hash.zero_digest) for piece in pieces])
    finally:
        run.content.release(part)


class _Run:
    """One image on its way to a Checksum. Belongs to the thread that feeds and folds."""

    def __init__(self, task: Task) -> None:
        self.name = image_name(task.image)
        self.construction = task.construction
        self.content: Content | None = None
        self.size: int | None = None
        self.hash = BlkHash(task.construction)
        self.done = 0
        self.error: BaseException | None = None
        """The first in content order. Once it is set, workers skip what is left of this image."""
        self.feed_error: BaseException | None = None
        self._task = task
        self._bytes_read = self._zero_bytes = self._extents = self._requests = 0
        self._started = time.monotonic()

    def open(self) -> Content:
        """Open the image. Raises an imgsum.Error, also when it is not as the task says."""
        if self._task.error is not None:
            raise self._task.error
        content = self.content = open_content(self._task.image, self._task.options, self.construction.block_size)
        if content.end is not None:
            self.size = content.end - content.start
            expected = self._task.size
            if expected is not None and self.size != expected:
                hint = f" (--length {expected} reads no more of it)" if self.size > expected else ""
                raise MismatchError(f"has {self.size} bytes, and the sum is of {expected} bytes{hint}")
        return content

    def count(self, extents: Iterable[Extent]) -> Iterator[Extent]:
        """EXTENTS, counted."""
        for extent in extents:
            self._extents += 1
            yield extent

    def fold(self, item: _Item, digests: bytes | None) -> None:
        """Add ITEM, whose blocks have DIGESTS, to the checksum."""
        if item.part is not None:
            assert self.content is not None
            assert digests is not None
            self.hash.update(digests)
            self.done += item.part.length
            self._bytes_read += item.part.length
            self._requests += self.content.requests(item.part)
        else:
            blocks, rest = divmod(item.zeros, self.construction.block_size)
            self.hash.zero(blocks)
            if rest:  # the last block of the content
                self.hash.update(blkhash.zero_digest(self.construction.algorithm, rest))
            self.done += item.zeros
            self._zero_bytes += item.zeros

    def finish(self) -> Checksum | Error:
        """Close the image. Its checksum, if every byte was read and none changed meanwhile."""
        content, error = self.content, self.error or self.feed_error
        details: dict[str, object] = {}
        try:
            if content is not None:
                details = content.details()
                if error is None:
                    content.check_unchanged()
        except Error as changed:
            error = changed
        self.close()
        if error is None and self.size not in (None, self.done):
            error = ReadError(f"only {self.done} of {self.size} bytes were read")  # a bug, and no checksum
        if error is not None:
            return about_image(error, self.name)
        assert content is not None
        return Checksum(
            hexdigest=self.hash.finish(self.done),
            algorithm=self.construction.algorithm.name,
            block_size=self.construction.block_size,
            size=self.done,
            format=content.format,
            name=self.name,
            construction=self.construction.name,
            stats=Stats(
                self._bytes_read,
                self._zero_bytes,
                self._extents,
                self._requests,
                time.monotonic() - self._started,
                details,
            ),
            note=content.note,
        )

    def close(self) -> None:
        """Give back what is open."""
        if self.content is not None:
            self.content.close()


def about_image(error: BaseException, name: str) -> Error:
    """ERROR as one about the image NAME. What nobody foresaw is a bug, but no reason to leave other images undone."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        described: Error = ReadError(
            f"there is not enough memory ({error})" if str(error) else "there is not enough memory"
        )
    elif isinstance(error, Error):
        described = error
    else:
        described = Error(f"internal error: {error!r} (IMGSUM_DEBUG=1 shows where; please report it)")
    if described is not error:
        described.__cause__ = error
    described.image = name
    return described.about(name)
