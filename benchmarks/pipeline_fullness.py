"""How full the pipeline is: simulated stages of one cost, real gateway, gRPC and gloo.

With P stages that take s seconds a step, P steps in flight could leave the pipeline
every s seconds. What is lost is somebody's wait: the clocks of the stages say whose.
Left out are the first and the last P rounds, a round being one step of every batch.

The machine may have fewer cores than stages, and other users: each point is measured
several times, and the best is taken.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.topology.simulated_cost import StageCost
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

STAGES = (2, 4, 8)
TARGETS = {0.02: 0.97, 0.005: 0.90}
"""Least share of the ideal, by what a step costs in seconds."""
ROWS_PER_STEP = 2
PROMPT_TOKENS = 8
MEASURED_ROUNDS = 30
TRIES = 3
MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Fullness:
    """One measurement."""

    pp_size: int
    stage_seconds: float
    step_seconds: float
    """From one step to the next at the end of the pipeline."""
    steady: Sequence[StageStep]

    @property
    def ratio(self) -> float:
        """Share of the ideal throughput."""
        return self.stage_seconds / self.step_seconds


def measure(pp_size: int, stage_seconds: float) -> Fullness:
    """Runs one mesh. Raises `AssertionError` where it answers wrongly."""
    prompts = prompts_of(ROWS_PER_STEP * pp_size, PROMPT_TOKENS)
    rounds = MEASURED_ROUNDS + 2 * pp_size
    flags = ("--max-num-seqs", str(len(prompts)))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with simulated_mesh(path, pp_size, StageCost(stage_seconds), *flags) as mesh:
            outputs = generate_all(mesh, prompts, rounds)
        assert outputs == expected_outputs(prompts, rounds)
        steps = read_trace(path)
    skipped = pp_size * pp_size
    last = max(step.step_id for step in steps)
    steady = [step for step in steps if skipped < step.step_id <= last - skipped]
    return Fullness(pp_size, stage_seconds, step_seconds(steady, pp_size), steady)


def best_of(tries: int, pp_size: int, stage_seconds: float) -> Fullness:
    """The fullest of some measurements; no more than are needed to reach the target."""
    best = measure(pp_size, stage_seconds)
    for _ in range(tries - 1):
        if best.ratio >= TARGETS[stage_seconds]:
            break
        best = max(best, measure(pp_size, stage_seconds), key=lambda found: found.ratio)
    return best


def report(found: Fullness) -> str:
    """Lines of a table: the ratio, and where each stage's time went, per step."""
    ideal, measured = found.stage_seconds * MILLISECONDS, found.step_seconds * MILLISECONDS
    target = TARGETS[found.stage_seconds]
    lines = [
        f"PP {found.pp_size}, {ideal:g} ms a stage: expected {1000 / ideal:.1f} steps/s, measured "
        f"{1000 / measured:.1f}, ratio {found.ratio:.3f} (target {target})",
        "  ms a step: stage | control |  receive | compute |  send",
    ]
    for stage in range(found.pp_size):
        steps = of_stage(found.steady, stage)
        means = [
            statistics.mean(times) * MILLISECONDS
            for times in (
                [step.control_wait for step in steps],
                [step.receive for step in steps],
                [step.compute for step in steps],
                [step.send for step in steps],
            )
        ]
        lines.append(
            "             {:5} | {:7.2f} | {:8.2f} | {:7.2f} | {:5.2f}".format(stage, *means)
        )
    return "\n".join(lines)


def main() -> None:
    """Prints every point."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, best of up to {TRIES}")
    for stage_seconds in TARGETS:
        for pp_size in STAGES:
            print(report(best_of(TRIES, pp_size, stage_seconds)), flush=True)
