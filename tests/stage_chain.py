"""All stages of a mesh in one process, and the least scheduler that drives them.

Boundary tensors are passed by hand, so what is tested is the torch side of a
stage alone: no gateway, no rank processes, no collectives between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.platforms import select_platform
from stage_worker.runner import StageOutput, StageRunner
from stagemesh.v1 import stage_worker_pb2, step_pb2, topology_pb2

GREEDY = step_pb2.SamplingParams(temperature=0.0, seed=0, num_logprobs=2)
BLOCK_SIZE = 8
NUM_BLOCKS = 96
MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 8


def stage_plan(
    path: Path,
    partition: Sequence[int],
    pp_rank: int,
    *,
    tp_size: int = 1,
    dtype: str = "float32",
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    max_model_len: int = MAX_MODEL_LEN,
) -> stage_worker_pb2.StagePlan:
    """A plan of small sizes."""
    start = sum(partition[:pp_rank])
    return stage_worker_pb2.StagePlan(
        topology=topology_pb2.Topology(
            dp_size=1,
            tp_size=tp_size,
            pp_size=len(partition),
            pp_layer_partition=partition,
        ),
        placement=topology_pb2.Placement(
            pp_rank=pp_rank,
            tp_ranks=list(range(tp_size)),
            device_indices=list(range(tp_size)),
            layer_start=start,
            layer_end=start + partition[pp_rank],
        ),
        model_path=str(path),
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=512,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=max_model_len,
        gpu_memory_utilization=0.9,
    )


def make_runner(
    plan: stage_worker_pb2.StagePlan,
    tensor_parallel: TensorParallel | None = None,
    device: str = "cpu",
) -> StageRunner:
    """A loaded runner on one device with one thread."""
    platform = select_platform(device)
    platform.set_up(0, 1)
    group = tensor_parallel or TensorParallel()
    runner = StageRunner(plan, group.rank, 0, platform, group)
    runner.load(lambda loaded_bytes, total_bytes: None)
    return runner


class StageChain:
    """Stages of TP size 1, one after the other."""

    def __init__(
        self,
        path: Path,
        partition: Sequence[int],
        *,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        self.runners = [
            make_runner(stage_plan(path, partition, rank, dtype=dtype), device=device)
            for rank in range(len(partition))
        ]

    def __call__(self, step: step_pb2.Step) -> list[step_pb2.ResultRow]:
        output = StageOutput((), [])
        for runner in self.runners:
            output = runner.run(step, output.sent)
        return output.rows


@dataclass(slots=True)
class Job:
    """One sequence to generate."""

    prompt: list[int]
    num_tokens: int
    sampling: step_pb2.SamplingParams = field(default_factory=lambda: GREEDY)
    choice_index: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[step_pb2.TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    started: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.num_tokens


def run_jobs(
    execute: Callable[[step_pb2.Step], list[step_pb2.ResultRow]],
    jobs: Sequence[Job],
    *,
    chunk: int = 512,
    preempted_at: dict[int, int] | None = None,
) -> list[list[int]]:
    """Generates all jobs, job i entering at step i, so that prompt chunks and decodes mix.

    `preempted_at` maps a step's number to the job that loses its blocks before it.
    """
    preempted_at = preempted_at or {}
    free_blocks = list(range(NUM_BLOCKS))[::-1]
    step_id = 0
    while not all(job.is_done for job in jobs):
        step_id += 1
        step = step_pb2.Step(epoch=1, step_id=step_id)
        for slot, job in enumerate(jobs):
            if job.started and (job.is_done or preempted_at.get(step_id) == slot):
                step.released_slots.append(slot)
                free_blocks.extend(job.blocks)
                job.started, job.blocks, job.num_cached = False, [], 0
        members = []
        for slot, job in enumerate(jobs[:step_id]):
            if not job.is_done:
                _add_row(step, slot, job, chunk, free_blocks)
                members.append(job)
        for result in execute(step):
            job = members[result.row]
            job.output.extend(result.token_ids)
            job.logprobs.extend(result.logprobs)
    return [job.output for job in jobs]


def _add_row(step: step_pb2.Step, slot: int, job: Job, chunk: int, free_blocks: list[int]) -> None:
    if not job.started:
        step.starts.add(
            slot=slot,
            choice_index=job.choice_index,
            sampling=job.sampling,
            prompt_length=len(job.prompt),
            history_token_ids=job.tokens,
        )
        job.started = True
    end = min(len(job.tokens), job.num_cached + chunk)
    new_blocks = [free_blocks.pop() for _ in range(-(-end // BLOCK_SIZE) - len(job.blocks))]
    job.blocks.extend(new_blocks)
    step.rows.add(
        slot=slot,
        position=job.num_cached,
        token_ids=job.tokens[job.num_cached : end],
        new_block_ids=new_blocks,
        num_sampled=int(end == len(job.tokens)),
    )
    job.num_cached = end


def random_prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 40 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 41, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
