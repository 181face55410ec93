"""A worker that is a spare, takes over a place, and loses one: over gRPC, with a made-up rank."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest

from services.errors import ConfigError
from stage_worker import rank_process
from stage_worker.rank_arguments import NO_STAGE, RankPlace
from stage_worker.standing import Standing
from stagemesh.v1 import stage_worker_pb2, topology_pb2
from tests.service.fake_rank import MISSING_MODEL
from tests.service.worker_stage import (
    ARGUMENTS,
    REPOSITORY,
    TIMEOUT_SECONDS,
    Execute,
    Stage,
    refused,
    results,
    stage,
    step,
)

RECEIVE = stage_worker_pb2.RANK_PHASE_RECEIVE
STARTING = stage_worker_pb2.COMPONENT_STATE_STARTING
STANDBY = stage_worker_pb2.COMPONENT_STATE_STANDBY
READY = stage_worker_pb2.COMPONENT_STATE_READY
FIRST = topology_pb2.Placement(pp_rank=0, tp_ranks=[0], layer_start=0, layer_end=2)
SECOND = topology_pb2.Placement(pp_rank=1, tp_ranks=[0], layer_start=2, layer_end=4)


@pytest.fixture(autouse=True)
def ranks_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


async def reset(running: Stage, epoch: int, placement: topology_pb2.Placement) -> None:
    request = stage_worker_pb2.ResetRanksRequest(epoch=epoch, placement=placement)
    await running.stub.ResetRanks(request, timeout=TIMEOUT_SECONDS)


async def stand_by(running: Stage, epoch: int, *, replace: bool = False) -> None:
    request = stage_worker_pb2.ResetRanksRequest(epoch=epoch, standby=True, replace=replace)
    await running.stub.ResetRanks(request, timeout=TIMEOUT_SECONDS)


async def load(
    running: Stage,
    placement: topology_pb2.Placement,
    num_blocks: int,
    *,
    in_advance: bool = False,
    model_path: str = "",
) -> None:
    plan = stage_worker_pb2.StagePlan(
        placement=placement, num_blocks=num_blocks, model_path=model_path
    )
    request = stage_worker_pb2.LoadRequest(plan=plan, in_advance=in_advance)
    call = running.stub.Load(request, timeout=TIMEOUT_SECONDS)
    assert [response async for response in call][-1].HasField("report")


async def until_state(running: Stage, state: stage_worker_pb2.ComponentState) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (await running.status()).state != state:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


def place_of(running: Stage) -> RankPlace:
    return running.rank.process._arguments.place


async def test_a_spare_computes_nothing_before_it_has_a_place() -> None:
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        await until_state(running, STANDBY)
        for call in (running.reset(1), running.form_group(1)):
            with pytest.raises(grpc.aio.AioRpcError, match="is a spare"):
                await call
        error = await refused(await running.execute(step(1)))
        assert "is a spare" in (error.details() or "")


async def test_a_spare_that_holds_weights_serves_at_its_place_in_the_next_epoch() -> None:
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        await load(running, FIRST, 0, in_advance=True)
        status = await running.status()
        assert (status.state, status.holds) == (STANDBY, FIRST)
        assert place_of(running) == RankPlace(0, 0)
        await reset(running, 3, SECOND)
        assert place_of(running) == RankPlace(1, 0)
        await running.form_group(3)
        await load(running, SECOND, 4)
        status = await running.status()
        assert (status.state, status.holds) == (READY, SECOND)
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        call.cancel()


async def test_whoever_has_lost_its_place_never_holds_it_again() -> None:
    """Orders of the epochs that it was lost in come late, and are refused."""
    async with stage() as running:
        running.worker.standing.joined(FIRST, standby=False)
        await reset(running, 1, FIRST)
        await running.form_group(1)
        await load(running, FIRST, 4)
        pid = await running.pid()
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        await stand_by(running, 2)
        assert await call.read() is grpc.aio.EOF
        status = await running.status()
        assert (status.state, status.holds) == (STANDBY, FIRST)
        assert await running.pid() == pid, "it has left its groups, and keeps its weights"
        with pytest.raises(grpc.aio.AioRpcError, match="another worker has taken it over"):
            await reset(running, 2, FIRST)
        # The head gives it a place anew, and what was said of the old one changes nothing.
        await reset(running, 3, FIRST)
        await stand_by(running, 2)
        await running.form_group(3)
        assert (await running.status()).state == READY
        assert running.worker.standing.took_over


async def test_the_rank_of_a_spare_that_never_had_a_place_dies() -> None:
    """Its error names no stage, and the worker goes on with another."""
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        running.rank.process.starts_at(RankPlace(NO_STAGE, 0))
        pid = await running.pid()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (await running.status()).ranks[0].pid == pid:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "(of a spare, TP rank 0)" in (await running.status()).error.message


async def test_a_spare_whose_rank_dies_holds_nothing_until_it_has_loaded_again() -> None:
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        await load(running, SECOND, 0, in_advance=True)
        pid = await running.pid()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (await running.status()).ranks[0].pid == pid:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await until_state(running, STANDBY)
        assert not (await running.status()).HasField("holds")
        assert place_of(running) == RankPlace(1, 0), "the new process stands where the old one did"


async def test_ranks_that_hold_a_step_are_replaced_when_their_place_is_lost() -> None:
    async with stage() as running:
        running.worker.standing.joined(FIRST, standby=False)
        await reset(running, 1, FIRST)
        await running.form_group(1)
        pid = await running.pid()
        await stand_by(running, 1, replace=True)
        assert await running.pid() != pid
        await until_state(running, STANDBY)


@pytest.mark.parametrize("tp_ranks", [[], [0, 1], [1 << 20]])
async def test_a_place_that_its_ranks_cannot_fill_is_refused(tp_ranks: list[int]) -> None:
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        placement = topology_pb2.Placement(pp_rank=1, tp_ranks=tp_ranks)
        with pytest.raises(grpc.aio.AioRpcError, match="this worker runs 1 ranks"):
            await reset(running, 1, placement)
        with pytest.raises(grpc.aio.AioRpcError, match="this worker runs 1 ranks"):
            await load(running, placement, 0, in_advance=True)
        assert place_of(running) == ARGUMENTS.place


def test_what_was_said_of_an_earlier_place_does_not_touch_a_later_one() -> None:
    standing = Standing()
    standing.joined(FIRST, standby=False)
    assert standing.lose(4)
    assert not standing.lose(4), "known"
    standing.take(5, SECOND, 1)
    assert not standing.lose(4)
    standing.take(7, FIRST, 1)
    with pytest.raises(ConfigError, match=r"given in epoch 6, .* given one in epoch 7"):
        standing.take(6, SECOND, 1)
    assert standing.placement == FIRST
    standing.take(8, SECOND, 1)
    assert standing.placement == SECOND
    assert standing.lose(8)
    assert standing.placement is None


async def serve(running: Stage, placement: topology_pb2.Placement) -> None:
    """At a place, in epoch 1."""
    running.worker.standing.joined(placement, standby=False)
    await reset(running, 1, placement)
    await running.form_group(1)
    await load(running, placement, 4)


async def hang(running: Stage) -> Execute:
    """The rank has a step that does not end."""
    call = await running.execute(step(1))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (await running.status()).ranks[0].phase != RECEIVE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return call


async def test_what_comes_late_for_a_spare_does_not_touch_who_serves() -> None:
    async with stage() as running:
        await serve(running, FIRST)
        with pytest.raises(grpc.aio.AioRpcError, match="is no spare"):
            await load(running, SECOND, 0, in_advance=True)
        assert place_of(running) == RankPlace(0, 0)
        with pytest.raises(grpc.aio.AioRpcError, match="a plan for stage 1 of replica 0"):
            await load(running, SECOND, 0)
        with pytest.raises(grpc.aio.AioRpcError, match="a plan for stage 0 of replica 1"):
            await load(running, other_replica(FIRST), 4)
        status = await running.status()
        assert (status.state, status.holds) == (READY, FIRST)
        call = await running.execute(step(1))
        assert await results(call, 1) == [1]
        call.cancel()


async def test_a_spare_that_is_given_a_place_while_it_takes_another_loads_nothing() -> None:
    async with stage("take-slow") as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(refused_load(running, FIRST))
            while running.worker.ranks[0].process._one_by_one.locked() is False:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await reset(running, 1, SECOND)
        assert "is no spare" in loading.result()
        assert not (await running.status()).HasField("holds")


async def refused_load(running: Stage, placement: topology_pb2.Placement) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(running, placement, 0, in_advance=True)
    return caught.value.details() or ""


def other_replica(placement: topology_pb2.Placement) -> topology_pb2.Placement:
    other = topology_pb2.Placement()
    other.CopyFrom(placement)
    other.dp_rank = placement.dp_rank + 1
    return other


async def test_what_comes_late_for_a_place_does_not_touch_a_spare() -> None:
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        await load(running, FIRST, 0, in_advance=True)
        with pytest.raises(grpc.aio.AioRpcError, match="is a spare"):
            await load(running, SECOND, 4)
        assert (await running.status()).holds == FIRST


async def test_a_spare_that_could_not_load_is_ready_for_a_place_all_the_same() -> None:
    async with stage() as running:
        running.worker.standing.joined(topology_pb2.Placement(), standby=True)
        pid = await running.pid()
        with pytest.raises(grpc.aio.AioRpcError, match="it is not there"):
            await load(running, FIRST, 0, in_advance=True, model_path=MISSING_MODEL)
        status = await running.status()
        assert (status.state, status.HasField("holds")) == (STANDBY, False)
        await load(running, FIRST, 0, in_advance=True)
        assert (await running.status()).holds == FIRST
        assert await running.pid() == pid


async def test_a_spare_is_ready_once_its_ranks_have_left_their_groups() -> None:
    async with stage("leave-slow") as running:
        await serve(running, FIRST)
        losing = asyncio.create_task(stand_by(running, 1))
        await until_state(running, STARTING)
        await losing
        status = await running.status()
        assert (status.state, status.holds) == (STANDBY, FIRST)


async def test_ranks_leave_their_groups_where_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway has asked, and is gone: ranks that do not answer are replaced all the same."""
    monkeypatch.setattr(rank_process, "LEAVE_TIMEOUT_SECONDS", 0.5)
    async with stage("step-hang") as running:
        await serve(running, FIRST)
        pid = await running.pid()
        call = await hang(running)
        request = stage_worker_pb2.ResetRanksRequest(epoch=1, standby=True)
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
            await running.stub.ResetRanks(request, timeout=0.2)
        call.cancel()
        assert (await running.status()).state == STARTING
        await until_state(running, STANDBY)
        assert await running.pid() != pid


async def test_ranks_that_hold_a_step_are_replaced_where_the_loss_is_known_already() -> None:
    """A heartbeat has told of it, and of no step."""
    async with stage("step-hang") as running:
        await serve(running, FIRST)
        pid = await running.pid()
        call = await hang(running)
        assert running.worker.standing.lose(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(running.worker.become_spare())
            await asyncio.sleep(0)
            await stand_by(running, 1, replace=True)
            replaced = await running.pid()
            assert replaced != pid
        call.cancel()
        # Said again it finds ranks that are in no group.
        await stand_by(running, 1, replace=True)
        assert await running.pid() == replaced
