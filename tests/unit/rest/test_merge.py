"""Several streams read as one: order, failures, and closing at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from gateway.engine.types import ChoiceDelta
from gateway.rest.merge import MERGE_QUEUE_SIZE, merged
from services.errors import StageFailed


class Source:
    """Gives `count` deltas, then ends, fails, or waits for ever."""

    def __init__(self, count: int, then: Exception | None = None, *, forever: bool = False) -> None:
        self.count, self.then, self.forever = count, then, forever
        self.given = 0
        self.closed = False

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            while self.given < self.count:
                self.given += 1
                yield ChoiceDelta(0, str(self.given), (self.given,))
            if self.then is not None:
                raise self.then
            if self.forever:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def streams(sources: list[Source]) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
    return merged([source.deltas() for source in sources])


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_everything_comes_in_its_stream_s_order(count: int) -> None:
    sources = [Source(index + 1) for index in range(count)]
    seen: dict[int, list[str]] = {}
    async for index, delta in streams(sources):
        seen.setdefault(index, []).append(delta.text)
    assert seen == {i: [str(k + 1) for k in range(i + 1)] for i in range(count)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("failure", [StageFailed("gone"), ZeroDivisionError()])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_failure_is_raised_as_it_is_and_closes_all(failure: Exception, count: int) -> None:
    sources = [Source(1, failure), *(Source(1, forever=True) for _ in range(count - 1))]
    with pytest.raises(type(failure)):
        async with asyncio.timeout(10):
            async for _ in streams(sources):
                pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_in_the_middle_closes_all(count: int) -> None:
    sources = [Source(10**6, forever=True) for _ in range(count)]
    reading = streams(sources)
    async with contextlib.aclosing(reading):
        await anext(reading)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelling_the_reader_closes_all(count: int) -> None:
    sources = [Source(1, forever=True) for _ in range(count)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async with contextlib.aclosing(streams(sources)) as reading:
                async for _ in reading:
                    pass
    assert all(source.closed for source in sources)


async def test_a_slow_reader_holds_the_streams_back() -> None:
    sources = [Source(10**6) for _ in range(2)]
    async with contextlib.aclosing(streams(sources)) as reading:
        await anext(reading)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sum(source.given for source in sources) <= MERGE_QUEUE_SIZE + 4
