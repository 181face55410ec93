"""What a step costs a stage on one core, without a mesh around it: the demo model cut in two, both
stages one after the other in this process.

    python -m benchmarks stage-step
    python -m benchmarks.stage_step --other /path/to/another/checkout --loads 16 8+64

What a rank computes is measured: preparing a step, layers, head, sampling. Receives, sends and
control are left out. With another checkout the two take turns, each in a process of its own, so
that a machine which gets slower gets slower for both. Two processes of the same code differ by
up to a few per cent, for as long as they live, with where their memory lies.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from stage_worker.rank_process import RANK_ENVIRONMENT

if TYPE_CHECKING:
    from torch import Tensor

    from stage_worker.runner import StageRunner
    from stagemesh.v1 import step_pb2

DEMO_MODEL = "smollm2-135m-instruct"
VOCABULARY = 49152
PARTITION = (17, 13)
CONTEXT = 128
"""Tokens of a sequence before its first decode."""
PROMPT = 256
"""Tokens of the sequence that comes in chunks; then the next one begins."""
STEPS = 24
ROUNDS = 5
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 17
MAX_NUM_BATCHED_TOKENS = 512
COMPUTE = "compute"
"""Says that this is the process which computes."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is in each step: decodes, and one prompt's chunk of so many tokens."""

    num_decodes: int
    chunk: int = 0

    @classmethod
    def parse(cls, text: str) -> Load:
        """`16`, or `8+32`."""
        return cls(*(int(part) for part in text.split("+")))

    def __str__(self) -> str:
        return f"{self.num_decodes}+{self.chunk}" if self.chunk else str(self.num_decodes)


LOADS = (Load(1), Load(4), Load(8), Load(16), Load(8, 32), Load(8, 64))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step; medians over a round, for each stage."""

    seconds: tuple[float, ...]
    page_faults: tuple[float, ...]

    def __str__(self) -> str:
        times = " + ".join(f"{1e3 * seconds:.2f}" for seconds in self.seconds)
        faults = " + ".join(f"{number:.0f}" for number in self.page_faults)
        return f"{times} ms, {faults} page faults"


def main(arguments: Sequence[str] = ()) -> None:
    """Prints milliseconds of each stage, and how many times as fast as the other checkout it is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stage_step")
    parser.add_argument("--other", metavar="PATH", help="a checkout to compare with")
    parser.add_argument("--loads", type=Load.parse, nargs="+", default=LOADS, metavar="N[+CHUNK]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    options = parser.parse_args(arguments)
    here = str(Path(__file__).parents[1])
    trees = [here] if options.other is None else [options.other, here]
    workers = [_Worker(tree) for tree in trees]
    for load in options.loads:
        rounds = [[worker.round(load) for worker in workers] for _ in range(options.rounds)]
        print(f"{load} decodes:" if not load.chunk else f"{load} tokens:")
        for tree, costs in zip(trees, zip(*rounds, strict=True), strict=True):
            print(f"    {tree}: {_median(costs)}")
        if len(trees) > 1:
            ratios = [
                [old / new for old, new in zip(other.seconds, ours.seconds, strict=True)]
                for other, ours in rounds
            ]
            stages = (f"{statistics.median(one):.3f}" for one in zip(*ratios, strict=True))
            print(f"    times as fast as the other: {', '.join(stages)}", flush=True)
    for worker in workers:
        worker.stop()


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        tuple(statistics.median(one) for one in zip(*(c.seconds for c in costs), strict=True)),
        tuple(statistics.median(one) for one in zip(*(c.page_faults for c in costs), strict=True)),
    )


class _Worker:
    """A process that computes with the code of one checkout."""

    def __init__(self, tree: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, COMPUTE],
            env={**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, load: Load) -> Cost:
        requests, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        print(load, file=requests, flush=True)
        line = answers.readline()
        if not line:
            raise SystemExit(f"a process that computes ended with {self._process.wait()}")
        seconds, page_faults = json.loads(line)
        return Cost(tuple(seconds), tuple(page_faults))

    def stop(self) -> None:
        self._process.communicate()


# ---- in the process that computes ---------------------------------------------------------------


def _serve() -> None:
    runners = [_runner(rank) for rank in range(len(PARTITION))]
    for slot in range(MAX_NUM_SEQS):
        _round(runners, [(_Part(slot, 0, PROMPT),)])  # So that all of the cache is written.
    for line in sys.stdin:
        cost = _round(runners, _steps(Load.parse(line)))
        print(json.dumps([cost.seconds, cost.page_faults]), flush=True)


def _runner(pp_rank: int) -> StageRunner:
    from services.models.cache import models_directory
    from stage_worker.layers.tensor_parallel import TensorParallel
    from stage_worker.platforms import select_platform
    from stage_worker.runner import StageRunner
    from stagemesh.v1 import stage_worker_pb2, topology_pb2

    start = sum(PARTITION[:pp_rank])
    plan = stage_worker_pb2.StagePlan(
        topology=topology_pb2.Topology(
            dp_size=1, tp_size=1, pp_size=len(PARTITION), pp_layer_partition=PARTITION
        ),
        placement=topology_pb2.Placement(
            pp_rank=pp_rank,
            tp_ranks=[0],
            device_indices=[0],
            layer_start=start,
            layer_end=start + PARTITION[pp_rank],
        ),
        model_path=str(models_directory() / DEMO_MODEL),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.9,
    )
    platform = select_platform("cpu")
    platform.set_up(0, 1)
    runner = StageRunner(plan, 0, 0, platform, TensorParallel())
    runner.load(lambda loaded_bytes, total_bytes: None)
    return runner


@dataclass(frozen=True, slots=True)
class _Part:
    """Query tokens of one sequence."""

    slot: int
    position: int
    num_tokens: int


Step = tuple[_Part, ...]


def _steps(load: Load) -> Iterator[Step]:
    """The decodes begin behind `CONTEXT` tokens that are in the cache."""
    prompt = 0
    for number in range(STEPS):
        parts = [_Part(slot, CONTEXT + number, 1) for slot in range(load.num_decodes)]
        if load.chunk:
            parts.append(_Part(load.num_decodes, prompt, load.chunk))
            prompt = prompt + load.chunk if prompt + 2 * load.chunk <= PROMPT else 0
        yield tuple(parts)


def _round(runners: Sequence[StageRunner], steps: Iterable[Step]) -> Cost:
    for runner in runners:
        runner.reset()
    seconds: list[list[float]] = [[] for _ in runners]
    page_faults: list[list[float]] = [[] for _ in runners]
    lengths: dict[int, int] = {}
    for step_id, step in enumerate(steps, 1):
        message = _message(step_id, step, lengths)
        sent: tuple[Tensor, ...] = ()
        for runner, times, faults in zip(runners, seconds, page_faults, strict=True):
            faults_before, started = _page_faults(), time.perf_counter()
            sent = runner.run(message, sent).sent
            times.append(time.perf_counter() - started)
            faults.append(_page_faults() - faults_before)
    return Cost(
        tuple(statistics.median(times) for times in seconds),
        tuple(statistics.median(faults) for faults in page_faults),
    )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _message(step_id: int, step: Step, lengths: dict[int, int]) -> step_pb2.Step:
    """A step with greedy sampling. `lengths` is what each slot has by now."""
    from stagemesh.v1 import step_pb2

    message = step_pb2.Step(epoch=1, step_id=step_id)
    greedy = step_pb2.SamplingParams(temperature=0.0, seed=0)
    for part in step:
        end = part.position + part.num_tokens
        if lengths.get(part.slot) != part.position:
            if part.slot in lengths:
                message.released_slots.append(part.slot)
            message.starts.add(slot=part.slot, sampling=greedy, prompt_length=end)
            num_blocks = 0
        else:
            num_blocks = -(-part.position // BLOCK_SIZE)
        lengths[part.slot] = end
        first = part.slot * MAX_MODEL_LEN // BLOCK_SIZE
        message.rows.add(
            slot=part.slot,
            position=part.position,
            token_ids=[(part.slot + 1) * 7919 * i % VOCABULARY for i in range(part.position, end)],
            new_block_ids=range(first + num_blocks, first - (-end // BLOCK_SIZE)),
            num_sampled=1,
        )
    return message


if __name__ == "__main__":
    if sys.argv[1:] == [COMPUTE]:
        _serve()
    else:
        main(sys.argv[1:])
