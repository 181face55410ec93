"""What one step stream has still to write to the gateway.

Bounded, and adding to it never waits and never raises: whoever adds is reading a
rank's events, and a gateway that does not read must not stop that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from stagemesh.v1 import stage_worker_pb2

MAX_PENDING_ANSWERS = 1024
"""Steps in flight are far fewer; beyond this the gateway does not read, and the stream ends."""


class Answers:
    """A queue with an end."""

    def __init__(self) -> None:
        self._waiting: deque[stage_worker_pb2.ExecuteResponse] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether the gateway does not read."""
        return len(self._waiting) >= MAX_PENDING_ANSWERS

    def put(self, response: stage_worker_pb2.ExecuteResponse) -> None:
        """Adds one answer; for nothing after `close`."""
        if not self._closed:
            self._waiting.append(response)
            self._changed.set()

    def close(self, instead: stage_worker_pb2.ExecuteResponse | None = None) -> None:
        """Nothing is added any more; what waits is still written, or one answer instead of it.

        The end of a stream comes behind what is being written: gRPC has no way past it.
        """
        if instead is not None:
            self._waiting.clear()
            self._waiting.append(instead)
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[stage_worker_pb2.ExecuteResponse]:
        """Answers in order until the end."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
