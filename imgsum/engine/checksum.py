"""Images -> checksums. Read top to bottom, as a byte travels.

_items() opens images and cuts their extents into items. _digest() loads and hashes one, in a worker. checksum_tasks()
folds the results in content order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from imgsum.engine.content import (
    MAX_ZERO_PART,
    Content,
    Part,
    Progress,
    Stats,
    count_workers,
    open_content,
)
from imgsum.engine.pool import Pool, Worker
from imgsum.errors import ChangedError, Error, MismatchError, ReadError, UsageError, unexpected
from imgsum.extent import Extent, align, below, coalesce, overlay, tile
from imgsum.hash import blkhash
from imgsum.hash.blkhash import BlkHash, Construction
from imgsum.hash.blocks import block_digests, digest_of_block
from imgsum.parameters import SIZE, require
from imgsum.source import Command, Evidence, Image, OpenOptions, is_index, options_with, path_or_command
from imgsum.trace import debug

if TYPE_CHECKING:
    from imgsum.index.format import Index, Writer

SAMPLE = 256
"""Reused data blocks that are read all the same, unless a number is given."""


_TICK_NS = 20_000_000
"""Twice the longest tick of a kernel's clock."""


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
    reused: Reused | None = None
    """What came from an index; None: `since` was not asked for."""

    def __repr__(self) -> str:
        """What it is of, and the value."""
        return f"<Checksum {self.algorithm}/{self.block_size} {self.hexdigest} of {self.size} bytes of {self.name!r}>"


class Reused(NamedTuple):
    """Blocks that were not read."""

    bytes: int
    sampled: int
    """How many of them were read all the same, and compared."""


class Task(NamedTuple):
    """One image to be done."""

    image: str | Command
    construction: Construction
    options: OpenOptions
    size: int | None = None
    """What the content's size must be, if that is known. Nothing is read of an image of another size."""
    error: Error | None = None
    """Why there is nothing to do. It takes its place among the results."""
    index_path: str | None = None
    """Where the image's index is to be written, if it is."""
    since: Since | None = None
    """Which blocks need not be read."""
    any_construction: bool = False
    """An index in place of an image may be of another construction."""


class Since(NamedTuple):
    """Blocks that certainly did not change come from an index."""

    old: Index
    bitmap: str | None = None
    """The dirty bitmap that tells which; None: the evidence in the index does."""
    sample: int = SAMPLE
    """How many of the reused data blocks are read all the same, and compared."""


def checksum(
    image: Image,
    *,
    algorithm: str | None = None,
    block_size: int | None = None,
    construction: str = "blkhash",
    format: str | None = None,  # noqa: A002  # as in -f
    offset: int | None = None,
    length: int | None = None,
    index: str | os.PathLike[str] | None = None,
    since: str | os.PathLike[str] | None = None,
    bitmap: str | None = None,
    sample: int = SAMPLE,
    options: OpenOptions | None = None,
) -> Checksum:
    """The checksum of IMAGE's content, or of LENGTH bytes of it from OFFSET.

    image: a path, `-` for standard input, an NBD URI, or an imgsum.Command. format: the image's; None detects it.
    algorithm: a name that `imgsum algorithms` lists; None is sha256. block_size: bytes, a power of two; None is 64
    KiB. construction: `blkhash`, or `imageio` for the value that oVirt's imageio reports. index: where the index of
    this image is written. since: an index of an earlier state, or what an interrupted run left of one; blocks that
    certainly did not change are not read, and the algorithm and block size are that index's unless given. bitmap: the
    dirty bitmap that says which these are. sample: how many of them are read all the same, and compared. options: how
    the image is opened and read; format, offset and length go before what is in there. Raises an imgsum.Error when not
    every byte could be read or reused: there is no partial checksum.
    """
    chosen = blkhash.construction(construction, algorithm, block_size)
    options = options_with(options, format=format, offset=offset, length=length)
    tasks = index_tasks(
        [path_or_command(image, "image")],
        options,
        chosen,
        is_chosen=(construction, algorithm, block_size) != ("blkhash", None, None),
        index=None if index is None else _path(index, "index"),
        since=None if since is None else _path(since, "since"),
        bitmap=bitmap,
        sample=sample,
    )
    with tasks as made:
        (result,) = checksum_tasks(made, options)
    if isinstance(result, Error):
        raise result
    return result


def _path(value: Image, parameter: str) -> str:
    """VALUE as str. Raises UsageError, which names the PARAMETER, for what is no path."""
    path = path_or_command(value, parameter)
    if isinstance(path, Command):
        raise UsageError(f"{parameter}: not a path: {path}")
    return path


@contextlib.contextmanager
def index_tasks(
    images: Sequence[str | Command],
    options: OpenOptions,
    construction: Construction,
    *,
    is_chosen: bool,
    index: str | None = None,
    since: str | None = None,
    bitmap: str | None = None,
    sample: int | None = None,
) -> Iterator[list[Task]]:
    """Tasks for IMAGES, while the context lasts. IS_CHOSEN: the user asked for CONSTRUCTION, no index's own will do.

    INDEX, SINCE, BITMAP, SAMPLE: see checksum(). Raises UsageError for what makes no sense together.
    """
    if (index is not None or since is not None) and (len(images) != 1 or options.offset or options.length is not None):
        raise UsageError("an index is of all of one image: give one, and no --offset or --length")
    if since is None and (bitmap is not None or sample not in (None, SAMPLE)):
        raise UsageError("--bitmap and --sample are about blocks that --since reuses, and there is no --since")
    if sample is not None:
        require(SIZE, sample=sample)
    if since is None:
        yield [Task(image, construction, options, index_path=index, any_construction=not is_chosen) for image in images]
        return
    from imgsum.index.format import Index

    with Index(since, partial=True, max_size=options.max_size) as old:
        if is_chosen and old.construction != construction:
            raise UsageError(
                f"the index is of {old.algorithm} over blocks of {old.block_size} bytes, and the checksum is not",
                name=since,
            )
        known = Since(old, bitmap, SAMPLE if sample is None else sample)
        yield [Task(images[0], old.construction, options, index_path=index, since=known)]


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
                    try:
                        run.fold(item, done.result)
                    except Error as error:
                        run.error = error
                        continue
                    if progress:
                        progress.advance(run.done)
    finally:
        for run in opened:
            run.close()


class _Item(NamedTuple):
    """`length` bytes of an image's content, in order: to be hashed, reused, or certainly zero; or the image's end."""

    run: _Run
    length: int = 0
    part: Part | None = None
    """Whole blocks to be loaded and hashed. The last block of the content may be shorter."""
    digests: bytes | None = None
    """Of the blocks, from an index. With a part: what that must have, a sample that is not folded."""
    reused: bool = False
    """What the blocks are is known from an index."""

    @property
    def has_work(self) -> bool:
        """See pool.Item."""
        return self.part is not None

    @property
    def is_end(self) -> bool:
        """Nothing is left of the image. Until this is taken its files are open, or its server runs."""
        return self.part is None and not self.length

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
            content = run.open()
            if content is None:
                pass
            elif task.since is None:
                yield from _items_to_read(run, content, content.start, content.bound)
            else:
                yield from _items_since(run, content, task.since)
        except Exception as error:
            run.feed_error = error  # comes after the errors of the items before it
        yield _Item(run)


def _items_to_read(run: _Run, content: Content, start: int, end: int) -> Iterator[_Item]:
    """START..END of CONTENT, which is whole blocks, as items."""
    aligned = align(run.count(content.extents(start, end)), run.construction.block_size, start, end)
    for extent in coalesce(aligned, content.part_size, MAX_ZERO_PART):
        if run.error is not None:
            return
        debug("%s: %s bytes at %s: %s", run.name, extent.length, extent.start, "zero" if extent.zero else "data")
        if extent.zero:
            yield _Item(run, extent.length)
            continue
        part = content.part(extent.start, extent.length)
        yield _Item(run, part.length, part)
        if content.end is not None and part.start + part.length >= content.end:
            return


def _items_since(run: _Run, content: Content, since: Since) -> Iterator[_Item]:
    """CONTENT as items: what is unchanged since an index was made from there, the rest to be read."""
    index, block_size = since.old, run.construction.block_size
    if index.construction != run.construction:
        raise UsageError(
            f"the index is of {index.algorithm} over blocks of {index.block_size} bytes, and the checksum is not"
        )
    whole = index.size == content.bound and index.checksum is not None
    limit = (
        content.bound if whole else min(index.blocks * block_size, index.size, content.bound) // block_size * block_size
    )
    sample = _Sample(index.data_blocks, since.sample)
    unchanged = below(content.unchanged(index.format, index.evidence, since.bitmap), limit)
    # QEMU's bitmaps forget that a disk shrank and grew again. So what certainly is zero does not come from the index.
    zeros = content.extents(0, content.bound) if since.bitmap is not None else tile((), 0, content.bound)
    runs = (
        coalesce(align(extents, block_size, 0, content.bound), MAX_ZERO_PART, MAX_ZERO_PART)
        for extents in (unchanged, run.count(zeros))
    )
    for start, length, (is_known, is_zero) in overlay(*runs):
        if is_zero:
            yield _Item(run, length)
            continue
        if not is_known:
            yield from _items_to_read(run, content, start, start + length)
            continue
        at, end = start, start + length
        for number, known in index.runs(start // block_size):
            reused = min(number, -(-(end - at) // block_size))
            digests = None
            if known is not None:
                digests = known[: reused * index.digest_size]
                for block in sample.of(reused):
                    block_start = at + block * block_size
                    part = content.part(block_start, min(block_size, end - block_start))
                    expected = digests[block * index.digest_size : (block + 1) * index.digest_size]
                    yield _Item(run, part.length, part, expected, reused=True)
            size = min(reused * block_size, end - at)
            yield _Item(run, size, digests=digests, reused=True)
            at += size
            if at >= end or run.error is not None:
                break
    index.check_unchanged()


class _Sample:
    """Which of so many data blocks are read although they are known: one at random of each of COUNT equal parts."""

    def __init__(self, blocks: int, count: int) -> None:
        from random import SystemRandom  # who made the image must not know where we look

        self._random = SystemRandom()
        self._step = max(1, blocks // count) if count else 0
        self._seen = 0
        self._stratum = 0
        self._next = self._random.randrange(self._step) if count else 0

    def of(self, number: int) -> Iterator[int]:
        """Those of the next NUMBER data blocks, counted from the first of these."""
        end = self._seen + number
        while self._step and self._next < end:
            yield self._next - self._seen
            self._stratum += 1
            self._next = self._stratum * self._step + self._random.randrange(self._step)
        self._seen = end


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
        self.name = str(task.image)
        self.construction = task.construction
        self.content: Content | None = None
        self.size: int | None = None
        self.hash: BlkHash | Writer = BlkHash(task.construction)
        self._writer: Writer | None = None
        self._index: Index | None = None
        """What is taken for the image."""
        self.done = 0
        self.error: BaseException | None = None
        """The first in content order. Once it is set, workers skip what is left of this image."""
        self.feed_error: BaseException | None = None
        self._task = task
        self._bytes_read = self._zero_bytes = self._reused_bytes = self._extents = self._requests = 0
        self._sampled = 0
        self._started = time.monotonic()

    def open(self) -> Content | None:
        """Open the image; None: it is an index. Raises an imgsum.Error, also when it is not as the task says."""
        task = self._task
        if task.error is not None:
            raise task.error
        if is_index(task.image, task.options):
            self._open_index(str(task.image))
            return None
        options = task.options if task.since is None else task.options._replace(bitmap=task.since.bitmap)
        content = self.content = open_content(task.image, options, self.construction.block_size)
        if task.index_path is not None and _wait_for_clock(content.evidence()):
            self.content = None
            content.close()  # what was read of it may be older than its evidence says
            content = self.content = open_content(task.image, options, self.construction.block_size)
        if content.end is not None:
            self.size = content.end - content.start
            self._check_size(self.size)
        if task.index_path is not None:
            from imgsum.index.format import Writer

            self.hash = self._writer = Writer(
                task.index_path,
                self.construction,
                size=self.size,
                image_format=content.format,
                evidence=content.evidence(),
            )
        return content

    def _open_index(self, path: str) -> None:
        """Take the value of the index at PATH, which proves it."""
        from imgsum.index.format import Index

        task = self._task
        if task.options.offset or task.options.length is not None:
            raise UsageError("is an index: it has the value of all of the content, not of a range")
        if task.index_path is not None or task.since is not None:
            raise UsageError("is an index, and an image is needed")
        with Index(path, max_size=task.options.max_size) as index:
            if index.construction != self.construction and not task.any_construction:
                raise UsageError(
                    f"is an index of {index.algorithm} over blocks of {index.block_size} bytes, which is not asked for"
                )
            self.size = self.done = index.size
            self._check_size(self.size)
            self._index, self.construction = index, index.construction

    def _check_size(self, size: int) -> None:
        expected = self._task.size
        if expected is not None and size != expected:
            hint = f" (--length {expected} reads no more of it)" if size > expected else ""
            raise MismatchError(f"has {size} bytes, and the sum is of {expected} bytes{hint}")

    def count(self, extents: Iterable[Extent]) -> Iterator[Extent]:
        """EXTENTS, counted."""
        for extent in extents:
            self._extents += 1
            yield extent

    def fold(self, item: _Item, digests: bytes | None) -> None:
        """Add ITEM, whose blocks have DIGESTS where they were hashed, to the checksum."""
        if item.part is not None:
            assert self.content is not None
            assert digests is not None
            self._bytes_read += item.length
            self._requests += self.content.requests(item.part)
            if item.reused:
                if digests != item.digests:
                    raise ChangedError(
                        "differs from the index: that is not of what this image was made from", offset=item.part.start
                    )
                self._sampled += 1
                return
            self.hash.update(digests)
        elif item.digests is not None:
            self.hash.update(item.digests)
        else:
            blocks, rest = divmod(item.length, self.construction.block_size)
            self.hash.zero(blocks)
            if rest:  # the last block of the content
                self.hash.update(blkhash.zero_digest(self.construction.algorithm, rest))
        self.done += item.length
        if item.reused:
            self._reused_bytes += item.length
        elif item.part is None:
            self._zero_bytes += item.length

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
        if error is None and self.size not in (None, self.done):
            error = ReadError(f"only {self.done} of {self.size} bytes were read")  # a bug, and no checksum
        hexdigest = ""
        try:
            if error is None:
                known = None if self._index is None else self._index.checksum
                hexdigest = known or self.hash.finish(self.done)
        except Error as unwritten:
            error = unwritten
        self.close(error)
        if error is not None:
            return about_image(error, self.name)
        return Checksum(
            hexdigest=hexdigest,
            algorithm=self.construction.algorithm.name,
            block_size=self.construction.block_size,
            size=self.done,
            format="index" if content is None else content.format,
            name=self.name,
            construction=self.construction.name,
            stats=Stats(
                self._bytes_read,
                self._zero_bytes,
                self._extents,
                self._requests,
                time.monotonic() - self._started,
                details,
                self._reused_bytes,
            ),
            note=None if content is None else content.note,
            reused=None if self._task.since is None else Reused(self._reused_bytes, self._sampled),
        )

    def close(self, error: BaseException | None = None) -> None:
        """Give back what is open. What an index has so far is kept, unless ERROR says that it may be wrong."""
        if self._writer is not None:
            since = self._task.since
            unfinished = since.old if since and since.old.checksum is None else None  # it stays, if it has more
            has_more = unfinished is None or self.done >= unfinished.blocks * self.construction.block_size
            self._writer.close(keep=has_more and not isinstance(error, ChangedError))
        if self.content is not None:
            self.content.close()


def _wait_for_clock(evidence: Evidence) -> bool:
    """Wait until a file that is written to from now on has a later ctime than EVIDENCE says. Whether that took time.

    Times move on with the kernel's clock, in ticks of up to 10 ms: two writes in one tick have the same ctime.
    """
    changed = max((when for record in evidence if isinstance(when := record.get("ctime_ns"), int)), default=0)
    age = time.time_ns() - changed
    if not -_TICK_NS < age < _TICK_NS:  # one in the future is of another clock, or this one was put back
        return False
    time.sleep((_TICK_NS - age) / 1e9)
    return True


def about_image(error: BaseException, name: str) -> Error:
    """ERROR as one about the image NAME. What nobody foresaw is a bug, but no reason to leave other images undone."""
    described = error if isinstance(error, Error) else unexpected(error)
    described.image = name
    return described.about(name)
