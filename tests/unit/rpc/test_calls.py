"""Calls whose end is on its way to somebody who does not take it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.errors import Saturated
from services.rpc import calls, settings
from services.rpc.calls import Calls


class Context:
    """Of one call."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._callbacks: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return f"ipv4:10.0.0.1:{self._port}"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def over(self) -> None:
        for callback in self._callbacks:
            callback(self)


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


async def answer(all_calls: Calls, context: Any, method: str = "/a.B/C") -> None:
    await all_calls.answer(context, method, nothing())
    all_calls.ends(context)


async def test_a_call_counts_until_its_end_is_taken() -> None:
    all_calls, context = Calls(1), Context(1)
    await answer(all_calls, context)
    with pytest.raises(Saturated):
        await answer(all_calls, Context(2))
    context.over()
    await answer(all_calls, last := Context(3))
    last.over()


async def test_an_end_is_waited_for_so_long_and_no_longer(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", 0.02)
    all_calls, taken = Calls(2), Context(1)
    await answer(all_calls, taken)
    await answer(all_calls, Context(3))
    taken.over()
    await asyncio.sleep(0.1)
    assert closed == ["ipv4:10.0.0.1:3"]


async def test_a_probe_whose_end_is_not_taken_makes_room_by_its_connection(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "MAX_PROBE_CALLS", 2)
    all_calls = Calls(1)
    contexts = [Context(port) for port in range(3)]
    for context in contexts:
        await answer(all_calls, context, "/grpc.health.v1.Health/Check")
    assert closed == ["ipv4:10.0.0.1:0"]
    for context in contexts:
        context.over()
