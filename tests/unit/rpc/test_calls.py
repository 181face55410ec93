"""Calls whose end is on its way to somebody who does not take it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.errors import Saturated
from services.rpc import endings, settings
from services.rpc.calls import Calls

FIRST, SECOND = "ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2"


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


class Closing:
    """Stands in for the look at the process's open files."""

    def __init__(self) -> None:
        self.looks: list[tuple[list[str], set[int]]] = []
        self.finds = True
        self._looked = asyncio.Event()

    def __call__(self, peers: frozenset[str], ports: set[int]) -> frozenset[str]:
        self.looks.append((sorted(peers), set(ports)))
        self._looked.set()
        return peers if self.finds else frozenset()

    async def has_looked(self, times: int) -> None:
        async with asyncio.timeout(5):
            while len(self.looks) < times:
                self._looked.clear()
                await self._looked.wait()


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Closing:
    closing = Closing()
    monkeypatch.setattr(endings, "close_connections", closing)
    monkeypatch.setattr(endings, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", 0.05)
    return closing


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


async def test_an_end_is_waited_for_so_long_and_no_longer(closing: Closing) -> None:
    all_calls = Calls(2)
    all_calls.listens_on(8001)
    started = asyncio.get_running_loop().time()
    await (taken := Call(all_calls, 1)).ends()
    await (left := Call(all_calls, 2)).ends()
    await taken.over()
    await closing.has_looked(1)
    assert asyncio.get_running_loop().time() - started >= settings.SLOW_READER_SECONDS
    assert closing.looks[0] == ([SECOND], {8001})
    await left.over()


async def test_there_is_a_pause_between_looks_and_each_is_for_all_who_are_due(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endings, "PAUSE_SECONDS", 0.5)
    all_calls = Calls(200)
    ended = [Call(all_calls, 1 + number % 2) for number in range(200)]
    for call in ended:
        await call.ends()
    started = asyncio.get_running_loop().time()
    await closing.has_looked(3)
    assert asyncio.get_running_loop().time() - started > 0.9
    assert closing.looks[1][0] == closing.looks[2][0] == [FIRST, SECOND]
    # Each is named once, however many calls it has, and however often one looks.
    assert sorted(str(record.args) for record in caplog.records) == [
        str((FIRST,)),
        str((SECOND,)),
    ]
    for call in ended:
        await call.over()


async def test_a_connection_that_could_not_be_closed_is_tried_again_until_the_call_is_over(
    closing: Closing, caplog: pytest.LogCaptureFixture
) -> None:
    closing.finds = False
    await (call := Call(Calls(1), 1)).ends()
    await closing.has_looked(3)
    # Each thing once: that it is closed, and that it was not.
    assert [record.args for record in caplog.records] == [(FIRST,)] * 2
    await call.over()
    looks = len(closing.looks)
    await asyncio.sleep(0.1)
    assert len(closing.looks) == looks


async def test_a_probe_whose_end_is_not_taken_is_in_nobodys_way(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "MAX_PROBE_CALLS", 2)
    all_calls = Calls(1)
    calls = [Call(all_calls, port, "/grpc.health.v1.Health/Check") for port in range(3)]
    for call in calls:
        await call.ends()
    assert closing.looks == []
    for call in calls:
        await call.over()
