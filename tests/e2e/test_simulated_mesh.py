"""A whole mesh whose devices wait instead of computing: real gateway, gRPC and gloo. So what
is measured is the pipeline, and what comes out shows whether order and blocks were right."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from services.topology.simulated_cost import StageCost
from stagemesh import AsyncClient
from tests.mesh_process import MeshProcess, wait_for
from tests.simulated_mesh import (
    StageStep,
    expected_outputs,
    generate_all,
    of_stage,
    prompts_of,
    read_trace,
    simulated_mesh,
    step_seconds,
)

PP_SIZE = 4


def metric(mesh: MeshProcess, name: str) -> float:
    """One sample of /metrics, by its whole name."""
    lines = httpx.get(f"{mesh.url}/metrics", timeout=10).text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
    return float(value)


async def leave_over_rest(http: httpx.AsyncClient, prompt: Sequence[int], *, stream: bool) -> None:
    """Closes the connection after the first bytes of a stream, or after a while without any."""
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    try:
        async with (
            asyncio.timeout(30 if stream else 0.1),
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for _ in response.aiter_bytes():
                break
    except TimeoutError:
        return


def test_order_and_blocks_are_right_under_preemption_and_aborts(tmp_path: Path) -> None:
    """F16: blocks are taken away and given to others while steps are in flight."""
    block_bytes = 2 * 4 * 16 * 3 * 64 * 4
    flags = ("--max-model-len", "512", "--max-num-batched-tokens", "96")
    tight = ("--kv-cache-memory-bytes", str(48 * block_bytes), "--max-num-seqs", "24")
    prompts = [prompt[: 20 + 5 * i] for i, prompt in enumerate(prompts_of(24, 200))]
    with simulated_mesh(tmp_path, PP_SIZE, StageCost(), *flags, *tight) as mesh:

        async def storm() -> None:
            """Every other one is left over REST: in a stream, or before there is an answer."""
            async with (
                AsyncClient(mesh.grpc_address) as client,
                httpx.AsyncClient(base_url=mesh.url, timeout=30) as http,
            ):
                for index, prompt in enumerate(prompts_of(40, 90)):
                    if index % 2:
                        await leave_over_rest(http, prompt, stream=index % 4 == 1)
                        continue
                    stream = client.stream(token_ids=prompt, max_tokens=100, ignore_eos=True)
                    async with stream:
                        async for _ in stream:
                            break

        async def both() -> list[list[int]]:
            answers = asyncio.create_task(asyncio.to_thread(generate_all, mesh, prompts, 60))
            await storm()
            return await answers

        assert asyncio.run(both()) == expected_outputs(prompts, 60)
        assert metric(mesh, "stagemesh_preemptions_total") > 0
        free = metric(mesh, "stagemesh_kv_blocks")
        wait_for(lambda: metric(mesh, "stagemesh_kv_free_blocks") == free, 5, "all blocks free")
        assert 'endpoint="/v1/completions",status="499"' in httpx.get(f"{mesh.url}/metrics").text


@pytest.fixture(scope="module")
def long_steps(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Sequence[StageStep]]:
    """Traces of two loads on one mesh of 50 ms stages: 16 prompts that fill a step each, behind
    four more that keep the first stage busy until all have arrived; and one of six steps."""
    directory = tmp_path_factory.mktemp("long-steps")
    flags = ("--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    with simulated_mesh(directory, PP_SIZE, StageCost(0.05), *flags) as mesh:
        generate_all(mesh, prompts_of(PP_SIZE + 16, 64), 1)
        generate_all(mesh, prompts_of(PP_SIZE + 17, 6 * 64)[-1:], 1)
    steps = [s for s in read_trace(directory) if s.step_id > PP_SIZE]
    last = PP_SIZE + 16
    return [s for s in steps if s.step_id <= last], [s for s in steps if s.step_id > last]


@pytest.mark.quiet
def test_independent_batches_fill_the_pipeline(
    long_steps: Sequence[Sequence[StageStep]],
) -> None:
    """F2: nothing waits for a result before the pipeline is full."""
    steps = long_steps[0]
    assert len(steps) == 16 * PP_SIZE
    wall = max(s.end for s in steps) - min(s.start for s in steps)
    assert wall == pytest.approx((16 + PP_SIZE - 1) * 0.05, rel=0.1)


@pytest.mark.quiet
def test_chunks_of_a_prompt_follow_each_other_through_the_stages(
    long_steps: Sequence[Sequence[StageStep]],
) -> None:
    """F4: chunk k + 1 is in stage 0 while chunk k is in stage 1."""
    steps = long_steps[1]
    first, second = of_stage(steps, 0), of_stage(steps, 1)
    assert len(first) == 6
    for behind, ahead in zip(first[1:], second, strict=False):
        overlap = min(behind.end, ahead.end) - max(behind.start, ahead.start)
        assert overlap > 0.5 * 0.05


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory) -> Sequence[StageStep]:
    """24 requests where 16 may run, 20 ms a stage; steps without the first and last rounds."""
    directory = tmp_path_factory.mktemp("decoding")
    prompts = prompts_of(24, 8)
    flags = ("--max-num-seqs", "16")
    with simulated_mesh(directory, PP_SIZE, StageCost(0.02), *flags) as mesh:
        started = time.monotonic()
        assert generate_all(mesh, prompts, 20) == expected_outputs(prompts, 20)
        ended = time.monotonic()
        assert metric(mesh, 'stagemesh_step_seconds_count{replica="0"}') > 0
        wait_for(lambda: "memory_peak_bytes{" in httpx.get(f"{mesh.url}/metrics").text, 5, "it")
        for stage in range(PP_SIZE):
            labels = f'{{replica="0",stage="{stage}"}}'
            assert 0 <= metric(mesh, f"stagemesh_stage_bubble_ratio{labels}") < 1
            peak = metric(mesh, f"stagemesh_stage_memory_peak_bytes{labels}")
            assert 50e6 < peak < 2e9
    steps = read_trace(directory)
    assert all(started < step.done < ended for step in steps)
    last = max(step.step_id for step in steps)
    return [s for s in steps if 3 * PP_SIZE < s.step_id <= last - 3 * PP_SIZE]


@pytest.mark.quiet
def test_running_requests_are_spread_over_the_steps_in_flight(
    decoding: Sequence[StageStep],
) -> None:
    """F3: 16 run at a time, over all steps in flight: four in each. A step in which new requests
    take the place of those that have ended holds their first tokens too."""
    rows = [step.sampled_rows for step in of_stage(decoding, PP_SIZE - 1)]
    assert statistics.mode(rows) == 16 // PP_SIZE
    even = [count for count in rows if count <= 16 // PP_SIZE + 1]
    assert len(even) >= 0.95 * len(rows), rows
    in_flight = [sum(rows[i : i + PP_SIZE]) for i in range(len(rows) - PP_SIZE + 1)]
    assert max(in_flight) <= 16


@pytest.mark.quiet
def test_the_pipeline_stays_full(decoding: Sequence[StageStep]) -> None:
    """A lenient bound, for a machine that others use too; `benchmarks pipeline-fullness` measures
    how full."""
    assert step_seconds(decoding, PP_SIZE) < 0.02 / 0.8


@pytest.mark.quiet
def test_a_batch_beyond_the_stages_keeps_it_fuller(tmp_path: Path) -> None:
    """With a batch more than stages none waits for what is on its way. A lenient bound, too."""
    prompts = prompts_of(2 * (PP_SIZE + 1), 8)
    flags = ("--pp-async-batch-depth", "1", "--max-num-seqs", str(len(prompts)))
    with simulated_mesh(tmp_path, PP_SIZE, StageCost(0.02), *flags) as mesh:
        assert generate_all(mesh, prompts, 20) == expected_outputs(prompts, 20)
    steps = read_trace(tmp_path)
    last, skipped = max(step.step_id for step in steps), 3 * (PP_SIZE + 1)
    steady = [step for step in steps if skipped < step.step_id <= last - skipped]
    assert {step.sampled_rows for step in of_stage(steady, PP_SIZE - 1)} == {2}
    assert step_seconds(steady, PP_SIZE) < 0.02 / 0.88
    waits = [step.receive for step in of_stage(steady, PP_SIZE - 1)]
    assert statistics.median(waits) < 0.001


@pytest.mark.quiet
def test_simulated_computing_reads_what_it_costs(decoding: Sequence[StageStep]) -> None:
    """The layers alone within 2 %; the phase has the host's work for a step besides."""
    for stage in range(PP_SIZE):
        steps = of_stage(decoding, stage)
        layers = statistics.median(step.end - step.start for step in steps)
        assert layers == pytest.approx(0.02, rel=0.02)
        assert layers <= statistics.median(step.compute for step in steps) < 1.1 * layers


@pytest.mark.quiet
def test_phases_add_up_to_wall_time(decoding: Sequence[StageStep]) -> None:
    """F18: against the stamps of the ends of steps, which are no part of the phases."""
    for stage in range(PP_SIZE):
        steps = of_stage(decoding, stage)
        wall = steps[-1].done - steps[0].done
        assert sum(step.phases for step in steps[1:]) == pytest.approx(wall, rel=0.01)


@pytest.mark.quiet
def test_a_slow_first_stage_shows_downstream_as_receiving(tmp_path: Path) -> None:
    """30 ms more on stage 0: the others wait for its activations, not for control."""
    slow = {0: StageCost(0.05)}
    with simulated_mesh(tmp_path, PP_SIZE, StageCost(0.02), stages=slow) as mesh:
        generate_all(mesh, prompts_of(8, 8), 8)
    steps = read_trace(tmp_path)
    last = max(step.step_id for step in steps)
    steps = [step for step in steps if PP_SIZE < step.step_id <= last - PP_SIZE]
    for stage in range(1, PP_SIZE):
        own = of_stage(steps, stage)
        assert statistics.median(s.receive for s in own) == pytest.approx(0.03, abs=0.003)
        assert statistics.median(s.end - s.start for s in own) == pytest.approx(0.02, rel=0.02)
        assert statistics.median(s.control_wait for s in own) < 0.003
    assert statistics.median(s.receive for s in of_stage(steps, 0)) < 0.001
