"""A rank that fails or hangs: who is replaced, who is kept, and when a worker gives up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import pytest

from services.errors import StageFailed
from services.launch.restarts import RestartLimits
from stage_worker import rank_process
from stage_worker.rank_process import RankProcess
from stage_worker.rank_supervisor import RankSupervisor
from stage_worker.service import StageWorker
from stagemesh.v1 import stage_worker_pb2
from tests.service.worker_stage import (
    ARGUMENTS,
    REPOSITORY,
    TIMEOUT_SECONDS,
    has_ended,
    results,
    stage,
    step,
)

STOPPED_WORKER = """
import asyncio, uvloop
from stage_worker import rank_process
from stage_worker.rank_arguments import RankPlace
from tests.service.worker_stage import stage, until

rank_process.LEAVE_TIMEOUT_SECONDS = 0.5

async def main():
    async with stage("leave-slow,take-slow") as running:
        pid = await running.pid()
        telling = asyncio.create_task(running.rank.{told})
        await until(lambda: len(running.rank.process._calls) == 1, "the command")
        print("told", flush=True)
        await telling
        print("kept" if await running.pid() == pid else "replaced")

uvloop.run(main())
"""
"""On uvloop, which looks at its timers before its sockets where it was stopped while it waited."""


@pytest.fixture(autouse=True)
def ranks_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


async def test_a_new_process_takes_the_place_of_a_dead_one() -> None:
    """It has no weights and is in no group: nothing runs on it before it has both."""
    async with stage() as running:
        await running.reset(1)
        await running.form_group(1)
        await running.load(3)
        pid = await running.pid()
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        os.kill(pid, signal.SIGKILL)
        assert (await call.read()).error.reason == "RANK_DIED"
        assert await call.read() is grpc.aio.EOF
        await running.reset(2)
        assert await running.pid() != pid
        status = await running.status()
        assert status.state == stage_worker_pb2.COMPONENT_STATE_STARTING
        assert not status.HasField("error")
        with pytest.raises(grpc.aio.AioRpcError, match="formed again"):
            await running.load(3)
        await running.form_group(3)
        assert await running.load(3) == ([3], [3])
        again = await running.execute(step(1))
        assert await results(again, 1) == [1]
        again.cancel()


async def test_a_rank_that_can_leave_its_groups_is_kept() -> None:
    async with stage() as running:
        await running.reset(1)
        await running.form_group(1)
        pid = await running.pid()
        await running.load(3)
        await running.reset(2)
        assert await running.pid() == pid
        assert (await running.status()).state == stage_worker_pb2.COMPONENT_STATE_READY
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 1 is not above"):
            await running.reset(1)


@pytest.mark.parametrize("mode", ["step-hang", "step-compute,step-hang"])
async def test_a_rank_that_does_not_leave_its_groups_is_replaced(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocked in a wait that nothing breaks; one that says that it computes gets longer."""
    monkeypatch.setattr(rank_process, "LEAVE_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(rank_process, "COMPUTE_GRACE_SECONDS", 1.0)
    async with stage(mode) as running:
        await running.form_group(1)
        pid = await running.pid()
        call = await running.execute(step(1))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        await running.reset(2)
        assert (time.monotonic() - started > 1.0) == ("step-compute" in mode)
        assert await running.pid() != pid
        assert has_ended(pid)
        call.cancel()


@pytest.mark.parametrize("told", ["reset(replace=False)", "take_place(RankPlace(0, 0))"])
def test_a_worker_that_was_stopped_reads_what_its_rank_has_answered(told: str) -> None:
    """Deadlines have passed when it wakes up, and the answer waits in its socket."""
    command = [sys.executable, "-c", STOPPED_WORKER.format(told=told)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "told\n"
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        worker.send_signal(signal.SIGCONT)
        assert worker.communicate(timeout=TIMEOUT_SECONDS)[0] == "kept\n"
        assert worker.returncode == 0


async def test_ranks_are_replaced_when_the_gateway_asks_for_it() -> None:
    async with stage() as running:
        await running.form_group(1)
        pid = await running.pid()
        await running.reset(2, replace=True)
        assert await running.pid() != pid


@pytest.mark.parametrize(("reason", "kept"), [("STEP_FAILED", False), ("PEER_LOST", True)])
async def test_after_what_nobody_foresaw_a_rank_starts_anew(reason: str, kept: bool) -> None:
    """After a lost neighbour its weights are as good as before."""
    async with stage(f"step-error={reason}") as running:
        await running.form_group(1)
        pid = await running.pid()
        call = await running.execute(step(1))
        assert (await call.read()).error.reason == reason
        await running.reset(2)
        assert (await running.pid() == pid) is kept
        await running.form_group(2)
        call.cancel()


async def test_a_rank_that_ends_too_often_ends_its_worker() -> None:
    worker = StageWorker()
    rank = RankSupervisor(
        lambda: RankProcess(ARGUMENTS, worker.on_result, worker.on_failure, ("/nonexistent",)),
        RestartLimits(most=1),
    )
    with pytest.raises(StageFailed, match="1 restarts within 120 s"):
        await asyncio.wait_for(rank.run(), TIMEOUT_SECONDS)
