"""A place in a `Room` while something is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from services.errors import Saturated
from services.rpc.rooms import Holder, Room

T = TypeVar("T")


class Place:
    """Of one call or connection. Made inside a running event loop."""

    def __init__(self, room: Room, group: str) -> None:
        """Takes the place at once. Where another is given it while nothing is awaited in it, it
        is gone, and nothing else happens."""
        self._room = room
        self._scope: asyncio.Timeout | None = None
        self._holder = Holder(group, self._give_up, asyncio.get_running_loop().time())
        room.enter(self._holder)

    async def holding(self, work: Awaitable[T]) -> T:
        """Awaits the work. Raises `Saturated` where another is given the place meanwhile."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            raise Saturated("newer calls took the place of this one; try again") from None
        finally:
            self._scope = None

    def leave(self) -> None:
        """Gives it back; may be called again."""
        self._room.leave(self._holder)

    def _give_up(self) -> None:
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
