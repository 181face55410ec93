"""Calls whose end is on its way to somebody who does not take it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.errors import Saturated
from services.rpc import calls, settings
from services.rpc.calls import Calls


class Call:
    """A call of a method that does nothing, whose end is taken when it is told so."""

    def __init__(self, all_calls: Calls, port: int, method: str = "/a.B/C") -> None:
        self._peer = f"ipv4:10.0.0.1:{port}"
        self._taken = asyncio.Event()
        self._ends = asyncio.Event()
        self._task = asyncio.create_task(self._run(all_calls, method))

    def peer(self) -> str:
        return self._peer

    async def _run(self, all_calls: Calls, method: str) -> None:
        context: Any = self
        await all_calls.answer(context, method, nothing())
        all_calls.ends(context)
        self._ends.set()
        await self._taken.wait()

    async def ends(self) -> None:
        """Waits until it does; raises what it is refused with."""
        waiting = asyncio.create_task(self._ends.wait())
        await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            await self._task

    async def over(self) -> None:
        self._taken.set()
        await self._task
        await asyncio.sleep(0)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    closed: list[str] = []

    def close(peer: str) -> bool:
        closed.append(peer)
        return True

    monkeypatch.setattr(calls, "close_connection", close)
    return closed


async def nothing() -> None:
    """A handler."""


async def test_a_call_counts_until_its_end_is_taken() -> None:
    all_calls = Calls(1)
    await (first := Call(all_calls, 1)).ends()
    with pytest.raises(Saturated):
        await Call(all_calls, 2).ends()
    await first.over()
    await (last := Call(all_calls, 3)).ends()
    await last.over()


async def test_an_end_is_waited_for_so_long_and_no_longer(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", 0.02)
    all_calls = Calls(2)
    await (taken := Call(all_calls, 1)).ends()
    await (left := Call(all_calls, 3)).ends()
    await taken.over()
    await asyncio.sleep(0.1)
    assert closed == ["ipv4:10.0.0.1:3"]
    await left.over()


async def test_a_probe_whose_end_is_not_taken_makes_room_by_its_connection(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "MAX_PROBE_CALLS", 2)
    all_calls = Calls(1)
    calls = [Call(all_calls, port, "/grpc.health.v1.Health/Check") for port in range(3)]
    for call in calls:
        await call.ends()
    assert closed == ["ipv4:10.0.0.1:0"]
    for call in calls:
        await call.over()
