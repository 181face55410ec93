"""Simulated devices: as many as are wanted, on a CPU that sleeps."""

from __future__ import annotations

import time

import torch

from services.launch.process import allow_late_timers
from services.topology.facts import ModelFacts
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.platforms.base import Model
from stage_worker.platforms.cpu import CpuPlatform
from stage_worker.simulated.model import SimulatedModel
from stagemesh.v1 import stage_worker_pb2

MEMORY_BYTES = 64 << 30
"""What a simulated device pretends to have. The keys of its cache take a small part of it."""
NANOSECONDS = 1e-9
EXACT_TIMER_SECONDS = 1e-6
WAKE_EARLY_SECONDS = 1e-3
"""What waits while the device is busy ends so long before it is done."""
MOST_LATE_NS = 400_000
"""Wake-ups later than this are somebody else's work on the core, nothing to expect again. Wake-ups
took 0.2 to 0.35 ms on a virtual machine of two cores."""
SLOW_LEARNING_RATE = 0.02
FAST_LEARNING_RATE = 0.2
"""Ten times as fast downwards: about the tenth part of wake-ups is sooner than what is learned."""


class SimulatedPlatform(CpuPlatform):
    """See `platforms.base.Platform`. Works like an accelerator: what the host starts on it is
    done later, and `synchronize` waits for it."""

    name = "sim"
    needs_weights = False
    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self._busy_until_ns = 0
        self._usually_late_ns = 0

    def set_up(self, index: int, num_threads: int) -> None:
        torch.set_num_threads(1)
        # Ranks let timers be late (see `rank_main`), and those of this thread are the device's
        # clock. Gloo's threads come from it too, which costs 0.4 % of a core.
        allow_late_timers(EXACT_TIMER_SECONDS)

    def busy_seconds(self) -> float:
        remaining_ns = self._busy_until_ns - time.monotonic_ns()
        return max(0.0, remaining_ns * NANOSECONDS - WAKE_EARLY_SECONDS)

    def synchronize(self) -> None:
        """Sleeps to the deadline, or not at all where it has passed."""
        wake_ns = self._busy_until_ns - self._usually_late_ns
        remaining_ns = wake_ns - time.monotonic_ns()
        if remaining_ns > 0:
            time.sleep(remaining_ns * NANOSECONDS)
            self._learn(time.monotonic_ns() - wake_ns)
        while time.monotonic_ns() < self._busy_until_ns:
            pass  # Woken earlier than usual: some microseconds.

    def _learn(self, late_ns: int) -> None:
        """A sleep ends late by what the kernel and the machine take to wake a thread. What counts
        is how late the soon ones are: to wake too early costs CPU, which others may need."""
        change_ns = min(late_ns, MOST_LATE_NS) - self._usually_late_ns
        rate = SLOW_LEARNING_RATE if change_ns > 0 else FAST_LEARNING_RATE
        self._usually_late_ns += int(rate * change_ns)

    def memory(self) -> tuple[int, int]:
        return MEMORY_BYTES, MEMORY_BYTES

    def default_kv_bytes(self, plan: stage_worker_pb2.StagePlan) -> int:
        return int(MEMORY_BYTES * plan.gpu_memory_utilization)

    def model(
        self,
        facts: ModelFacts,
        plan: stage_worker_pb2.StagePlan,
        device_index: int,
        tensor_parallel: TensorParallel,
    ) -> Model:
        return SimulatedModel(
            facts, plan, tensor_parallel, self.default_kv_bytes, self._set_busy_until
        )

    def _set_busy_until(self, monotonic_ns: int) -> None:
        self._busy_until_ns = monotonic_ns
