"""A source that does what real ones can't be made to do: it is slow, fails, or lies on command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from imgsum.errors import ReadError
from imgsum.extent import Extent


class FakeSource:
    """CONTENT, with extents as told. `before_read(offset, length)` may wait or raise. Everything is counted."""

    format = "raw"

    def __init__(
        self,
        content: bytes,
        extents: Iterable[Extent] | None = None,
        before_read: Callable[[int, int], object] = lambda offset, length: None,
    ) -> None:
        self.name = "fake"
        self.content = content
        self.size = len(content)
        self.reads: list[tuple[int, int]] = []
        self.readers: list[FakeReader] = []
        self.closed = False
        self.changed: Exception | None = None
        self._extents = extents
        self.before_read = before_read

    def extents(self, start: int, length: int) -> Iterator[Extent]:
        if self._extents is None:
            yield Extent(start, length, False)
        else:
            yield from self._extents

    def reader(self) -> FakeReader:
        reader = FakeReader(self)
        self.readers.append(reader)
        return reader

    def check_unchanged(self) -> None:
        if self.changed:
            raise self.changed

    def details(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        assert not self.closed
        assert all(reader.closed for reader in self.readers)
        self.closed = True


class FakeReader:
    def __init__(self, source: FakeSource) -> None:
        self.source = source
        self.closed = False

    def read(self, offset: int, buffer: memoryview) -> None:
        assert not self.source.closed
        assert len(buffer) > 0
        assert offset + len(buffer) <= self.source.size
        self.source.reads.append((offset, len(buffer)))
        self.source.before_read(offset, len(buffer))
        buffer[:] = self.source.content[offset : offset + len(buffer)]

    def close(self) -> None:
        self.closed = True


def fail_at(offsets: Iterable[int]) -> Callable[[int, int], None]:
    """For before_read: an input/output error wherever one of OFFSETS is read."""
    bad = sorted(offsets)

    def check(offset: int, length: int) -> None:
        for at in bad:
            if offset <= at < offset + length:
                raise ReadError("input/output error", offset=at)

    return check
