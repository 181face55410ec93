"""A rank that is replaced while it is not there yet."""

from __future__ import annotations

import asyncio
import sys

import pytest

from services.errors import StageFailed
from stage_worker.rank_arguments import RankArguments
from stage_worker.rank_process import RankProcess
from stage_worker.rank_supervisor import RankSupervisor
from stagemesh.v1 import step_pb2

WAIT_SECONDS = 10.0
NEVER_ENDS = (sys.executable, "-c", "import time; time.sleep(60)")
ARGUMENTS = RankArguments(
    fd=-1,
    parent_pid=0,
    host="127.0.0.1",
    device="cpu",
    device_index=0,
    num_threads=1,
    pp_rank=1,
    tp_rank=0,
    step_timeout_seconds=5.0,
)


def new_process(failures: list[step_pb2.StageError]) -> RankProcess:
    return RankProcess(ARGUMENTS, lambda tp_rank, result: None, failures.append, NEVER_ENDS)


async def test_a_process_that_was_given_up_before_its_exec_does_not_live() -> None:
    failures: list[step_pb2.StageError] = []
    process = new_process(failures)
    process.replace("is replaced")
    await asyncio.wait_for(process.run(), WAIT_SECONDS)
    assert process.over.is_set()
    assert [error.reason for error in failures] == ["RANK_FROZEN"]
    with pytest.raises(StageFailed, match="is replaced"):
        await process.started()


async def test_a_process_that_has_been_in_no_group_holds_no_step() -> None:
    """It is what has taken the place of one that did: that is what was asked for."""
    failures: list[step_pb2.StageError] = []
    supervisor = RankSupervisor(lambda: new_process(failures))
    process = supervisor.process
    resetting = asyncio.create_task(supervisor.reset(replace=True))
    await asyncio.sleep(0)
    assert not process.is_ending
    assert failures == []
    resetting.cancel()
    await asyncio.wait([resetting])
