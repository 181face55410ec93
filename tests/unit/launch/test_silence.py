"""A child that is stopped is found before its first beat too; one that only takes long is not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from services.launch import silence
from services.launch.process import is_stopped
from services.launch.silence import SilenceWatch, done_in_time

FROZEN_SECONDS = 0.2
CONFIRM_SECONDS = 0.05


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "FROZEN_AFTER_SECONDS", FROZEN_SECONDS)
    monkeypatch.setattr(silence, "CONFIRM_SECONDS", CONFIRM_SECONDS)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


async def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(5):
        while not is_stopped(child.pid):  # noqa: ASYNC110 - what is waited for is a process
            await asyncio.sleep(0.01)


async def test_what_the_kernel_says(child: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(child.pid)
    await stop(child)
    child.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.05)
    assert not is_stopped(child.pid)
    child.kill()
    child.wait()
    assert not is_stopped(child.pid)


async def test_one_that_is_stopped_before_its_first_beat(child: subprocess.Popen[bytes]) -> None:
    silent = asyncio.get_running_loop().create_future()
    watch = SilenceWatch(silent.set_result)
    watch.start(child.pid)
    await asyncio.sleep(3 * FROZEN_SECONDS)
    assert not silent.done(), "it starts slowly, and is ended for it"
    await stop(child)
    assert await asyncio.wait_for(silent, 5) > FROZEN_SECONDS


async def test_each_child_gets_a_second_look(child: subprocess.Popen[bytes]) -> None:
    """Whatever became of the one before it."""
    silences: list[float] = []
    watch = SilenceWatch(silences.append)
    watch.start(child.pid)
    watch.heard()
    await asyncio.sleep(FROZEN_SECONDS + 3 * CONFIRM_SECONDS)
    assert len(silences) == 1
    watch.start(child.pid)
    watch.heard()
    await asyncio.sleep(FROZEN_SECONDS + CONFIRM_SECONDS / 2)
    assert len(silences) == 1
    watch.heard()  # Read only now.
    await asyncio.sleep(CONFIRM_SECONDS)
    assert len(silences) == 1
    watch.stop()


async def test_a_deadline_that_passed_while_this_process_did_not_run_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer came meanwhile, and is read a little later."""
    monkeypatch.setattr(silence, "CONFIRM_SECONDS", 5.0)
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    loop.call_soon(time.sleep, 0.6)  # The stall itself.
    loop.call_later(0.8, answer.set_result, None)
    assert await done_in_time(answer, 0.1)


async def always_late(seconds: float) -> None:
    """Every turn of the event loop takes so long."""
    while True:
        time.sleep(seconds)  # noqa: ASYNC251 - of the event loop
        await asyncio.sleep(0)


async def test_a_process_that_is_always_late_has_deadlines_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "OWN_STALL_SECONDS", 0.05)
    answer = asyncio.get_running_loop().create_future()
    late = asyncio.create_task(always_late(0.15))
    async with asyncio.timeout(10):
        assert not await done_in_time(answer, 0.1)
    late.cancel()
    await asyncio.wait([late])


async def test_a_process_that_is_always_late_finds_a_silent_child(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "OWN_STALL_SECONDS", 0.05)
    silent = asyncio.get_running_loop().create_future()
    watch = SilenceWatch(silent.set_result)
    watch.start(child.pid)
    watch.heard()
    late = asyncio.create_task(always_late(0.15))
    async with asyncio.timeout(10):
        assert await silent > FROZEN_SECONDS
    late.cancel()
    await asyncio.wait([late])


async def test_a_deadline_leaves_what_it_is_for_alone() -> None:
    answer = asyncio.get_running_loop().create_future()
    assert not await done_in_time(answer, 0.01)
    assert not answer.done()
    answer.set_result(None)
    assert await done_in_time(answer, 0.01)
