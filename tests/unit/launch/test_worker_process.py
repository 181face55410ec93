"""A worker that beats, one that does not, and one that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.launch import silence
from services.launch.pulse import BEAT, JOINED, NOTIFY_ENV, WATCHDOG_ENV, Pulse
from services.launch.worker_process import WorkerProcess
from services.topology.placement import StagePlacement

PLACEMENT = StagePlacement(0, 0, 1, (0,), (0,), 0, 1)
CHILD = """
import os, sys, time
fd, code = int(sys.argv[1]), int(sys.argv[2])
os.write(fd, b"j")
for _ in range(10 if code else 10_000):
    os.write(fd, b".")
    time.sleep(0.02)
sys.exit(code)
"""
TIMEOUT_SECONDS = 20.0


@asynccontextmanager
async def worker(code: int) -> AsyncIterator[WorkerProcess]:
    made = WorkerProcess(PLACEMENT, lambda fd: [sys.executable, "-c", CHILD, str(fd), str(code)])
    await made.start()
    try:
        yield made
    finally:
        made.kill()
        await asyncio.wait_for(made.ended(), TIMEOUT_SECONDS)
        made.close()


async def test_its_end_is_told_and_another_can_be_started() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with worker(code=7) as made:
        first = await asyncio.wait_for(made.ended(), TIMEOUT_SECONDS)
        assert (first.how, first.code, first.had_joined) == ("exited with 7", 7, True)
        await made.start()
        assert made.is_running
        second = await asyncio.wait_for(made.ended(), TIMEOUT_SECONDS)
        assert second.pid != first.pid
    assert len(os.listdir("/proc/self/fd")) == before


async def test_one_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "FROZEN_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(silence, "CONFIRM_SECONDS", 0.1)
    async with worker(code=0) as made:
        while not made.has_joined:  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        assert made.is_running
        assert made._process is not None
        made._process.send_signal(signal.SIGSTOP)
        ended = await asyncio.wait_for(made.ended(), TIMEOUT_SECONDS)
        assert "was stopped or hung: silent for" in ended.how
        assert ended.code == -signal.SIGKILL


async def test_one_that_is_stopped_while_it_starts_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "FROZEN_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(silence, "CONFIRM_SECONDS", 0.1)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    made = WorkerProcess(PLACEMENT, lambda fd: command)
    await made.start()
    assert made._process is not None
    made._process.send_signal(signal.SIGSTOP)
    ended = await asyncio.wait_for(made.ended(), TIMEOUT_SECONDS)
    assert "was stopped or hung" in ended.how


async def test_one_that_never_joined_says_so() -> None:
    made = WorkerProcess(PLACEMENT, lambda fd: [sys.executable, "-c", "raise SystemExit(1)"])
    await made.start()
    ended = await asyncio.wait_for(made.ended(), TIMEOUT_SECONDS)
    assert (ended.had_joined, ended.dismissed, ended.code) == (False, False, 1)


async def test_a_pulse_is_felt_by_launcher_and_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    ours, theirs = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(TIMEOUT_SECONDS)
        monkeypatch.setenv(NOTIFY_ENV, path)
        monkeypatch.setenv(WATCHDOG_ENV, "10000000")
        pulse = Pulse(theirs)
        pulse.joined()
        running = asyncio.ensure_future(pulse.run())
        await asyncio.sleep(0.05)
        running.cancel()
        assert os.read(ours, 99) == JOINED + BEAT
        assert systemd.recv(99) == b"WATCHDOG=1"
    os.close(ours)
    pulse._write(BEAT)  # Nobody listens any more, which the lifeline tells.
    os.close(theirs)
