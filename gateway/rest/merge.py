"""Several generations read as one stream, for completions calls with several prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from gateway.engine.types import ChoiceDelta

MERGE_QUEUE_SIZE = 64
"""Deltas that wait for the writer; a full queue holds the generations' readers back."""

Indexed = tuple[int, ChoiceDelta]


async def merged(
    streams: Sequence[AsyncGenerator[ChoiceDelta, None]],
) -> AsyncGenerator[Indexed, None]:
    """Deltas of all streams as they come, each with its stream's index.

    Closing the iterator closes all streams; the first failure closes the others.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(MERGE_QUEUE_SIZE)

    async def read(index: int, stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    await queue.put((index, delta))
        except Exception as error:
            # Handed to the reader of `merged`, who raises it: a failing task would cancel
            # whatever that reader does at the moment instead.
            await queue.put(error)
            return
        await queue.put(None)

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(index, stream)) for index, stream in enumerate(streams)]
        failure: Exception | None = None
        try:
            running = len(readers)
            while running and failure is None:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    failure = item
                else:
                    yield item
        except GeneratorExit:
            # Swallowed inside the group, which would wrap it; the generator returns below.
            failure = None
        finally:
            for reader in readers:
                reader.cancel()
    if failure is not None:
        raise failure
