"""Simulated stages, driven by hand: the tokens are those that prompt and positions give, and
what goes wrong on the way shows in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from stage_worker import splitmix64
from stage_worker.platforms.sim import SimulatedPlatform
from stage_worker.runner import StageOutput, StageRunner
from stage_worker.simulated import hashing, tokens
from stagemesh.v1 import stage_worker_pb2, step_pb2
from tests.stage_chain import (
    BLOCK_SIZE,
    Job,
    StageChain,
    make_runner,
    random_prompts,
    run_jobs,
    stage_plan,
)
from tests.unit.topology.model_directory import LLAMA_CONFIG, ModelDirectory

VOCAB_SIZE = int(str(LLAMA_CONFIG["vocab_size"]))
NUM_TOKENS = 12


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory without weights."""
    return ModelDirectory(tmp_path / "model").path


def jobs_for(prompts: Sequence[list[int]], **sampling: float) -> list[Job]:
    params = step_pb2.SamplingParams(**{"temperature": 0.0, "seed": 1, **sampling})
    return [Job(prompt, NUM_TOKENS, params) for prompt in prompts]


def expected(prompts: Sequence[list[int]]) -> list[list[int]]:
    return [tokens.expected_tokens(prompt, NUM_TOKENS, VOCAB_SIZE) for prompt in prompts]


@pytest.mark.parametrize("partition", [[3], [1, 2], [1, 1, 1]])
@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("preempted_at", [{}, {9: 1, 12: 0}])
def test_tokens_follow_from_the_prompt_alone(
    model: Path, partition: list[int], chunk: int, preempted_at: dict[int, int]
) -> None:
    prompts = random_prompts(4, VOCAB_SIZE)
    chain = StageChain(model, partition, device="sim")
    assert run_jobs(chain, jobs_for(prompts), chunk=chunk, preempted_at=preempted_at) == expected(
        prompts
    )


def test_no_sampling_parameter_changes_them(model: Path) -> None:
    prompts = random_prompts(2, VOCAB_SIZE)
    chain = StageChain(model, [3], device="sim")
    changed = jobs_for(
        prompts, temperature=2.0, presence_penalty=2.0, repetition_penalty=100.0, top_k=5
    )
    assert run_jobs(chain, changed) == expected(prompts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bytes_cross_a_boundary_unchanged_in_any_type(model: Path, dtype: str) -> None:
    prompts = random_prompts(2, VOCAB_SIZE)
    chain = StageChain(model, [1, 2], dtype=dtype, device="sim")
    assert run_jobs(chain, jobs_for(prompts)) == expected(prompts)


def corrupted(
    chain: StageChain, corrupt: Callable[[step_pb2.Step, StageOutput], StageOutput]
) -> Callable[[step_pb2.Step], list[step_pb2.ResultRow]]:
    """The chain with `corrupt` between the first stage and the second."""

    def execute(step: step_pb2.Step) -> list[step_pb2.ResultRow]:
        output = chain.runners[0].run(step, ())
        return chain.runners[1].run(step, corrupt(step, output).sent).rows

    return execute


def test_activations_in_another_order_show(model: Path) -> None:
    def swap(step: step_pb2.Step, output: StageOutput) -> StageOutput:
        (activation,) = output.sent
        return StageOutput((activation.flip(0),), []) if step.step_id == 6 else output

    prompts = random_prompts(4, VOCAB_SIZE)
    chain = StageChain(model, [1, 2], device="sim")
    assert run_jobs(corrupted(chain, swap), jobs_for(prompts)) != expected(prompts)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_block_that_somebody_else_writes_shows(model: Path, stage: int) -> None:
    """A token far behind the newest is read too."""
    prompt = random_prompts(1, VOCAB_SIZE)[0] * 2
    chain = StageChain(model, [1, 2], device="sim")
    good, bad = jobs_for([prompt])[0], jobs_for([prompt])[0]

    def execute(step: step_pb2.Step) -> list[step_pb2.ResultRow]:
        if step.step_id == 3:
            cache = chain.runners[stage]._model._cache  # type: ignore[attr-defined]
            cache._blocks[bad.blocks[0], BLOCK_SIZE // 2] ^= np.uint64(1)
        return chain(step)

    run_jobs(execute, [bad])
    run_jobs(StageChain(model, [1, 2], device="sim"), [good])
    assert good.output == tokens.expected_tokens(prompt, NUM_TOKENS, VOCAB_SIZE)
    assert bad.output[:2] == good.output[:2]
    assert bad.output[2:] != good.output[2:]


def test_a_wrong_block_table_shows(model: Path) -> None:
    """The gateway's mistake: two sequences share a block that is not the same."""
    prompts = random_prompts(2, VOCAB_SIZE)
    jobs = jobs_for(prompts)
    chain = StageChain(model, [3], device="sim")

    def execute(step: step_pb2.Step) -> list[step_pb2.ResultRow]:
        for row in step.rows:
            if row.slot == 1 and row.position == 0:
                row.new_block_ids[0] = jobs[0].blocks[0]
        return chain(step)

    run_jobs(execute, jobs)
    assert [job.output for job in jobs] != expected(prompts)


def test_a_step_takes_what_its_cost_says(model: Path) -> None:
    plan = stage_plan(model, [3], 0)
    plan.simulated_costs.add(
        fixed_seconds=0.01, per_token_seconds=0.002, per_context_token_seconds=0.001
    )
    step = step_pb2.Step(epoch=1, step_id=1)
    step.starts.add(slot=0, sampling=step_pb2.SamplingParams(seed=1))
    step.rows.add(slot=0, position=4, token_ids=[1, 2, 3], new_block_ids=[0], num_sampled=1)
    times = []
    for _ in range(5):  # Other work on the machine makes one long, never short.
        runner = make_runner(plan, device="sim")
        started = time.monotonic()
        runner.run(step, ())
        device_of(runner).synchronize()
        times.append(time.monotonic() - started)
    assert 0.01 + 3 * 0.002 + 7 * 0.001 <= min(times) < 0.1


def device_of(runner: StageRunner) -> SimulatedPlatform:
    device = runner._model._busy_until.__self__  # type: ignore[attr-defined]
    assert isinstance(device, SimulatedPlatform)
    return device


def test_a_device_is_busy_while_the_host_goes_on() -> None:
    device = SimulatedPlatform()
    started = time.monotonic()
    device._set_busy_until(time.monotonic_ns() + 300_000_000)
    assert time.monotonic() - started < 0.25
    device.synchronize()
    assert time.monotonic() - started >= 0.3
    device.synchronize()  # Nothing is left to wait for.


def test_rows_without_room_for_a_hash_are_refused(tmp_path: Path) -> None:
    directory = ModelDirectory(tmp_path / "model")
    directory.write_config(hidden_size=6, num_attention_heads=3, num_key_value_heads=1)
    plan = stage_plan(directory.path, [3], 0, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"activations are 12 bytes, .* needs 16"):
        make_runner(plan, device="sim")


def test_a_simulated_cache_has_the_real_ones_blocks(model: Path) -> None:
    plan = stage_plan(model, [3], 0, num_blocks=0)
    plan.kv_cache_memory_bytes = 10 * 2 * 3 * BLOCK_SIZE * 2 * 4 * 4
    report = make_runner(plan, device="sim").load(lambda loaded, total: None)
    assert isinstance(report, stage_worker_pb2.RankReport)
    assert (report.possible_blocks, report.weight_bytes) == (10, 0)


words = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8)


@given(words)
def test_numpy_and_plain_integers_agree(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    positions = np.arange(len(values), dtype=np.uint64)
    assert hashing.mix(array).tolist() == [splitmix64.mix(v) for v in values]
    assert hashing.token_keys(array, positions).tolist() == [
        tokens.token_key(value, position) for position, value in enumerate(values)
    ]
    assert hashing.next_tokens(array, 288).tolist() == [tokens.next_token(v, 288) for v in values]


@given(words, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_words_survive_an_activation(values: list[int], dtype: torch.dtype) -> None:
    pairs = np.array(values, np.uint64).repeat(2).reshape(-1, 2)
    packed = hashing.pack(pairs, 24, dtype)
    assert (packed.shape, packed.dtype) == (torch.Size([len(values), 24]), dtype)
    assert hashing.unpack(packed).tolist() == pairs.tolist()
