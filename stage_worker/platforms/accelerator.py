"""What CUDA and Ascend have in common: devices with memory of their own, asked
through `torch.accelerator`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from services.errors import ConfigError
from services.topology.facts import ModelFacts
from stage_worker.layers.operators import TorchOperators
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.platforms.base import Model
from stage_worker.stage_model import StageModel
from stagemesh.v1 import stage_worker_pb2

QUERY_INTERVAL_SECONDS = 50e-6


class AcceleratorPlatform:
    """See `platforms.base.Platform`."""

    name: str
    collective_backend: str
    needs_weights = True
    runs_ahead = True
    _index = 0

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def device(self, index: int) -> torch.device:
        return torch.device(self.name, index)

    def set_up(self, index: int, num_threads: int) -> None:
        count = self.device_count()
        if index >= count:
            raise ConfigError(
                f"{self.name} device {index} is wanted, but this node has {count}; "
                "use fewer tensor-parallel ranks or stages on it",
                param="device",
            )
        self._index = index
        torch.accelerator.set_device_index(index)
        torch.set_num_threads(max(1, num_threads))

    def synchronize(self) -> None:
        torch.accelerator.current_stream().synchronize()

    def finish(self, timeout_seconds: float) -> bool:
        event = torch.Event(self.name)
        event.record(torch.accelerator.current_stream())
        deadline = time.monotonic() + timeout_seconds
        # An event can be waited for without a deadline only.
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(QUERY_INTERVAL_SECONDS)
        return True

    def busy_seconds(self) -> float:
        return 0.0

    def memory(self) -> tuple[int, int]:
        free, total = torch.get_device_module(self.name).mem_get_info()
        return int(free), int(total)

    def default_kv_bytes(self, plan: stage_worker_pb2.StagePlan) -> int:
        # What an earlier cache had is kept for later by torch, and not counted as free.
        torch.get_device_module(self.name).empty_cache()
        free, total = self.memory()
        kept_free = int(total * (1.0 - plan.gpu_memory_utilization))
        return max(0, free - kept_free - _activation_bytes(plan))

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def cache_changes(self) -> None:
        pass

    def cache_allocated(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def memory_peak_bytes(self) -> int:
        # Which device is current is a matter of the thread, and the heartbeat's has set none.
        return int(torch.accelerator.max_memory_allocated(self._index))

    def model(
        self,
        facts: ModelFacts,
        plan: stage_worker_pb2.StagePlan,
        device_index: int,
        tensor_parallel: TensorParallel,
    ) -> Model:
        return StageModel(facts, plan, self, device_index, tensor_parallel)

    def operators(self, *, enforce_eager: bool) -> TorchOperators:
        return TorchOperators()


def _activation_bytes(plan: stage_worker_pb2.StagePlan) -> int:
    """Room for a step's activations: a generous 64 KiB for each query token."""
    return int(plan.max_num_batched_tokens) * (64 << 10)
