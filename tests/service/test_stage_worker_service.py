"""The stage worker's real gRPC service over a rank process that is made to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest

from services.errors import StageFailed
from services.launch import silence
from services.rpc import error_from_rpc
from stage_worker import answers, rank_calls, service
from stage_worker.rank_process import RANK_COMMAND, RankProcess
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2
from tests.service.fake_rank import FLOOD_RESULTS
from tests.service.worker_stage import (
    ARGUMENTS,
    REAL_RANK_SECONDS,
    REPOSITORY,
    TIMEOUT_SECONDS,
    Stage,
    has_ended,
    refused,
    results,
    stage,
    step,
    until,
)


@pytest.fixture(autouse=True)
def ranks_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


async def test_a_call_that_overtakes_the_answer_to_the_join_waits_for_it() -> None:
    """The head calls as soon as all have joined; the last one may not have heard it yet."""
    async with stage() as running:
        running.worker.ranks.clear()
        early = asyncio.create_task(running.form_group(1))
        await asyncio.sleep(0.2)
        assert not early.done()
        running.worker.ranks.append(running.rank)
        running.worker.placed.set()
        await early
        assert (await running.status()).epoch == 1


async def test_a_rank_is_loaded_and_runs_steps() -> None:
    async with stage() as running:
        assert await running.load(3) == ([3], [3])
        await running.form_group(1)
        call = await running.execute(step(1), step(2))
        assert await results(call, 2) == [1, 2]
        status = await running.status()
        assert status.state == stage_worker_pb2.COMPONENT_STATE_READY
        assert (status.epoch, status.last_step_id) == (1, 2)
        assert status.ranks[0].pid == await running.pid()
        assert status.ranks[0].device == "fake:0"
        call.cancel()


async def test_a_load_on_a_dead_rank_fails_at_once() -> None:
    """M6: it used to wait for half an hour."""
    async with stage("load-exit") as running:
        await running.pid()
        # Not by its deadline.
        with pytest.raises(grpc.aio.AioRpcError, match="exited with 7") as caught:
            await running.load()
        assert isinstance(error_from_rpc(caught.value), StageFailed)
        assert (await running.status()).error.reason == "RANK_DIED"


async def test_a_late_reply_is_not_taken_for_the_next_one() -> None:
    """S5: the first load is given up and answered while the second one waits."""
    async with stage("load-slow") as running:
        await running.pid()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.load(1, timeout_seconds=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await running.load(2) == ([2], [2])
        assert (await running.status()).state == stage_worker_pb2.COMPONENT_STATE_READY


async def test_loads_at_the_same_time_get_their_own_reports() -> None:
    async with stage("load-slow") as running:
        reports = await asyncio.gather(*(running.load(blocks) for blocks in (1, 2, 3)))
        assert [blocks for _, blocks in reports] == [[1], [2], [3]]


async def test_a_rank_does_not_collect_commands_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_calls, "MAX_UNANSWERED_COMMANDS", 2)
    async with stage("load-slow") as running:
        await running.pid()
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError):
                await running.load(timeout_seconds=0.05)
        with pytest.raises(grpc.aio.AioRpcError, match="2 commands to answer"):
            await running.load()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_gateway_that_does_not_read_loses_its_stream_and_nothing_else(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: one answer too many used to end the worker."""
    monkeypatch.setattr(answers, "MAX_PENDING_ANSWERS", 16)
    async with stage("step-flood") as running:
        call = await running.execute(step(1))
        await until(lambda: running.worker._answers is not None, "the stream")
        await until(lambda: running.worker._answers is None, "the end of the stream")
        if reads:
            answered = [response async for response in call]
            assert len(answered) < FLOOD_RESULTS
            assert "does not read" in answered[-1].error.message
        status = await running.status()
        assert not status.HasField("error")
        other = await running.execute(step(2))
        while (await other.read()).result.step_id == 1:
            pass  # The rest of the flood.
        other.cancel()
        call.cancel()


async def test_one_stream_at_a_time_until_the_next_epoch() -> None:
    async with stage() as running:
        await running.form_group(1)
        first = await running.execute(step(1))
        assert await results(first, 1) == [1]
        error = await refused(await running.execute())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "another stream" in str(error.details())
        await running.form_group(2)
        second = await running.execute(step(1), step(2))
        assert await results(second, 2) == [1, 2]
        assert await first.read() is grpc.aio.EOF
        second.cancel()


async def test_a_stream_that_its_client_leaves_makes_room_for_another() -> None:
    async with stage() as running:
        first = await running.execute(step(1))
        assert await results(first, 1) == [1]
        first.cancel()
        await until(lambda: running.worker._answers is None, "the end of the stream")
        second = await running.execute(step(2))
        assert await results(second, 1) == [2]
        second.cancel()


async def drain(running: Stage, timeout_seconds: float) -> float:
    """Drains as the worker's owner does, and returns how long the ranks took to stop."""
    request = stage_worker_pb2.DrainRequest(timeout_seconds=timeout_seconds)
    await running.stub.Drain(request, timeout=TIMEOUT_SECONDS)
    await asyncio.wait_for(running.worker.leave.wait(), TIMEOUT_SECONDS)
    started = time.monotonic()
    await running.worker.stop_ranks()
    return time.monotonic() - started


@pytest.mark.parametrize("waits_for_head", [True, False])
async def test_a_head_that_leaves_takes_along_who_does_not_wait_for_another(
    waits_for_head: bool,
) -> None:
    async with stage(waits_for_head=waits_for_head) as running:
        await running.stub.Drain(
            stage_worker_pb2.DrainRequest(head_leaves=True), timeout=TIMEOUT_SECONDS
        )
        assert running.worker.leave.is_set() is not waits_for_head
        await running.stub.Drain(stage_worker_pb2.DrainRequest(), timeout=TIMEOUT_SECONDS)
        assert running.worker.leave.is_set()


async def test_without_a_head_a_rank_leaves_its_epoch_and_stays() -> None:
    async with stage(waits_for_head=True) as running:
        pid = await running.pid()
        await running.form_group(3)
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        await running.worker.leave_epoch()
        assert await call.read() == grpc.aio.EOF
        assert running.worker.epoch == 3
        # The old head may only have been cut off, and go on where it was.
        with pytest.raises(grpc.aio.AioRpcError, match="or has left them"):
            await running.load()
        assert "or has left them" in str((await refused(await running.execute(step(2)))).details())
        with pytest.raises(grpc.aio.AioRpcError, match="not above the present one, 3"):
            await running.form_group(3)
        await running.reset(4)
        await running.form_group(4)
        assert await running.pid() == pid


async def test_groups_that_are_formed_while_the_worker_leaves_are_no_epoch() -> None:
    """The old head's order is on its way in the rank when the worker turns to another."""
    async with stage("form-slow", waits_for_head=True) as running:
        await running.form_group(3)
        forming = asyncio.create_task(running.form_group(4))
        await until(lambda: running.rank.process._calls.has("form_group"), "the order")
        await running.worker.leave_epoch()
        with pytest.raises(grpc.aio.AioRpcError, match="has left the epoch"):
            await forming
        assert running.worker.epoch == 3
        with pytest.raises(grpc.aio.AioRpcError, match="or has left them"):
            await running.load()
        # The new head takes the next number.
        await running.reset(4)
        await running.form_group(4)
        await running.load()


async def test_drain_lets_queued_steps_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: the time is the request's, not the 2 s of a stop."""
    monkeypatch.setattr(service, "STOP_TIMEOUT_SECONDS", 0.1)
    async with stage("step-slow") as running:
        pid = await running.pid()
        call = await running.execute(*map(step, (1, 2, 3)))
        await until(lambda: running.worker._answers is not None, "the stream")
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(drain(running, 8.0))
            await asyncio.wait_for(running.worker.leave.wait(), TIMEOUT_SECONDS)
            assert (await running.status()).state == stage_worker_pb2.COMPONENT_STATE_DRAINING
            with pytest.raises(grpc.aio.AioRpcError, match="is leaving") as caught:
                await running.load()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await results(call, 3) == [1, 2, 3]
            assert await call.read() is grpc.aio.EOF
        assert drained.result() < 5.0
        assert has_ended(pid)
        assert not (await running.status()).HasField("error")


@pytest.mark.parametrize("timeout_seconds", [0.0, -1.0, float("nan")])
async def test_drain_does_not_wait_longer_than_it_may(
    timeout_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STOP_TIMEOUT_SECONDS", 0.1)
    async with stage("step-hang") as running:
        pid = await running.pid()
        call = await running.execute(step(1))
        assert await drain(running, timeout_seconds) < 4.0
        assert has_ended(pid)
        call.cancel()


async def test_a_load_ends_with_the_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STOP_TIMEOUT_SECONDS", 0.05)
    async with stage("load-slow") as running:
        await running.pid()
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(refused_load(running))
            await until(
                lambda: running.rank.process.state == stage_worker_pb2.COMPONENT_STATE_LOADING,
                "the load",
            )
            await running.worker.stop_ranks()
        assert "has left" in loading.result()


async def refused_load(running: Stage) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.load()
    return str(caught.value.details())


def quick_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "FROZEN_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(silence, "CONFIRM_SECONDS", 0.2)


async def test_a_frozen_rank_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_silence(monkeypatch)
    async with stage() as running:
        pid = await running.pid()
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        os.kill(pid, signal.SIGSTOP)
        error = (await asyncio.wait_for(call.read(), TIMEOUT_SECONDS)).error
        assert error.reason == "RANK_FROZEN"
        assert f"{pid} (stage 1, TP rank 0) has been silent for" in error.message
        assert await call.read() is grpc.aio.EOF
        await until(lambda: has_ended(pid), "the end of the rank")
        assert (await running.status()).error == error


async def test_a_rank_inherits_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hidden-1")
    monkeypatch.setenv("NOT_A_SECRET", "plain")
    seen = tmp_path / "environment"
    shows = f"import os; open({str(seen)!r}, 'w').write(str(dict(os.environ)))"
    rank = RankProcess(ARGUMENTS, lambda *_: None, lambda _: None, (sys.executable, "-Sc", shows))
    await asyncio.wait_for(rank.run(), TIMEOUT_SECONDS)
    assert "plain" in seen.read_text() and "hidden-1" not in seen.read_text()


async def test_a_rank_that_is_stopped_while_it_starts_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has not said a word yet; one that only takes long to say it is let be."""
    quick_silence(monkeypatch)
    failures: list[step_pb2.StageError] = []
    sleeper = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    rank = RankProcess(ARGUMENTS, lambda *_: None, failures.append, sleeper)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rank.run())
        await asyncio.sleep(1.5)
        assert not failures
        os.kill(rank.status().pid, signal.SIGSTOP)
        await asyncio.wait_for(rank.over.wait(), TIMEOUT_SECONDS)
    assert [failure.reason for failure in failures] == ["RANK_FROZEN"]


@pytest.mark.parametrize("stall_seconds", [0.6, 1.1])
async def test_a_stall_of_the_worker_is_not_the_ranks(
    stall_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5b: heartbeats that the worker has not read yet are no silence."""
    quick_silence(monkeypatch)
    async with stage() as running:
        await running.pid()
        for _ in range(2):
            await asyncio.sleep(0.1)
            time.sleep(stall_seconds)  # noqa: ASYNC251 - the stall itself
        await asyncio.sleep(0.8)
        assert not (await running.status()).HasField("error")
        assert await running.load(2) == ([2], [2])


async def test_a_rank_that_dies_gives_its_signal_as_the_reason() -> None:
    async with stage() as running:
        pid = await running.pid()
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        os.kill(pid, signal.SIGKILL)
        error = (await asyncio.wait_for(call.read(), TIMEOUT_SECONDS)).error
        assert error.reason == "RANK_DIED"
        assert f"rank process {pid}" in error.message
        assert "was ended by SIGKILL" in error.message
        assert (error.pp_rank, error.tp_rank) == (1, 0)
        late = await running.execute()
        assert (await late.read()).error == error


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("own", [None, "glibc.malloc.tcache_count=7"])
async def test_a_rank_keeps_memory_in_large_pages_unless_told_otherwise(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    async with stage() as running:
        environment = environment_of(await running.pid())
    (tunables,) = (line for line in environment if line.startswith(b"GLIBC_TUNABLES="))
    assert tunables.startswith(f"GLIBC_TUNABLES={own or 'glibc.malloc.hugetlb=1'}".encode())


async def test_what_is_no_event_is_the_ranks_failure() -> None:
    async with stage("load-garbage") as running:
        with pytest.raises(grpc.aio.AioRpcError, match="sent what is no event"):
            await running.load()
        assert (await running.status()).error.reason == "RANK_FAILED"


async def test_a_rank_that_cannot_be_started_fails_and_leaves_no_socket() -> None:
    """S8"""
    async with stage(command=("/nonexistent/rank",)) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="could not be started"):
            await running.load()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            worker = running.worker
            rank = RankProcess(ARGUMENTS, worker.on_result, worker.on_failure, ("/nonexistent",))
            await rank.run()
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_rank_that_does_not_read_holds_its_gateway_back() -> None:
    """What is sent waits with who sends it, not in the worker."""
    start = step_pb2.SlotStart(history_token_ids=[1] * (1 << 20))
    large = step_pb2.Step(step_id=2, starts=[start])
    request = stage_worker_pb2.ExecuteRequest(step=large).SerializeToString()
    async with stage("step-hang") as running:
        call = await running.execute(step(1))
        written = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while written < 200:
                    await call.write(request)
                    written += 1
        assert 0 < written < 100
        await running.status()
        call.cancel()


STOP = rank_pb2.RankCommand(stop=rank_pb2.RankStop()).SerializeToString()


@pytest.mark.parametrize(
    "request_bytes",
    [b"", STOP, step(1) + STOP, b"\xff\xff\xff"],
    ids=["nothing", "a stop", "a step and a stop", "noise"],
)
async def test_what_is_no_step_never_reaches_a_rank(request_bytes: bytes) -> None:
    async with stage() as running:
        error = await refused(await running.execute(request_bytes))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "is not steps alone" in str(error.details())
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        call.cancel()


async def test_a_step_that_is_damaged_inside_is_refused_by_the_rank() -> None:
    """The worker passes bytes on; the real rank says what is wrong and stays."""
    async with stage(command=RANK_COMMAND) as running:
        pid = await running.pid()
        call = await running.execute(b"\x0a\x02\xff\xff")
        error = (await asyncio.wait_for(call.read(), REAL_RANK_SECONDS)).error
        assert error.reason == "STAGE_FAILED"
        assert "a command of 4 bytes cannot be read" in error.message
        assert not has_ended(pid)
