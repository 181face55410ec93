"""Traffic in a storm, and what must be true of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.chaos.storm import Blow, Condition, Storm, wait_until_as_before
from tests.chaos.traffic import Call, Outcome, Traffic
from tests.mesh_process import MeshProcess

LOG_BYTES_PER_BLOW = 40_000
"""What a recovery may write at most, over all processes."""
LOG_BYTES_PER_CALL = 1000


def run_in_storm(
    mesh: MeshProcess,
    calls: Sequence[Call],
    num_tokens: int,
    blows: Sequence[Blow],
    at_a_time: int,
) -> list[Outcome]:
    """The outcomes of all calls, which have `num_tokens` in all, after every blow has fallen
    while they ran; blocks, processes and queues are what they were before."""
    before = Condition.of(mesh)
    written = len(mesh.log())

    async def run() -> list[Outcome]:
        traffic = Traffic(mesh.grpc_address, calls, num_tokens, at_a_time)
        storm = Storm(mesh, blows, traffic)
        async with asyncio.TaskGroup() as tasks:
            health = tasks.create_task(storm.watch_health())
            blowing = tasks.create_task(storm.run())
            outcomes = await traffic.run()
            health.cancel()
            assert blowing.done(), f"the calls were over after {len(storm.fallen)} blows"
        return outcomes

    outcomes = asyncio.run(run())
    wait_until_as_before(mesh, before)
    written = len(mesh.log()) - written
    pause = max(outcome.longest_pause_seconds for outcome in outcomes)
    print(
        f"{len(outcomes)} calls complete, {num_tokens} tokens, {len(blows)} blows; the longest "
        f"pause of a stream was {pause:.1f} s; {written // max(1, len(blows))} bytes of log a blow",
        flush=True,
    )
    most = LOG_BYTES_PER_BLOW * len(blows) + LOG_BYTES_PER_CALL * len(calls)
    assert written < most, "the log is flooded"
    return outcomes
