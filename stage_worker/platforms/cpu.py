"""The CPU: the default where no accelerator is, and what tests run on."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import resource
import sys
from collections.abc import Sequence

import torch

from services.launch.memory import host_memory
from services.topology.facts import ModelFacts
from stage_worker.kernels.build import KernelsUnavailable
from stage_worker.kernels.native import NativeOperators
from stage_worker.layers.linear import packing_works
from stage_worker.layers.operators import Operators, TorchOperators
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.platforms.base import Model
from stage_worker.platforms.prefault import Prefault
from stage_worker.stage_model import StageModel
from stagemesh.v1 import stage_worker_pb2

log = logging.getLogger("stagemesh.rank")

MAX_DEFAULT_KV_BYTES = 4 << 30
"""Per mesh: a laptop keeps room for the user's other programs."""
DEFAULT_KV_SHARE = 0.3
"""Share of available memory that all ranks of a mesh take together."""


class CpuPlatform:
    """See `platforms.base.Platform`. All indices are the same device."""

    name = "cpu"
    collective_backend = "gloo"
    needs_weights = True
    runs_ahead = False

    def __init__(self) -> None:
        self._prefault = Prefault()

    def device_count(self) -> int:
        return os.cpu_count() or 1

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def set_up(self, index: int, num_threads: int) -> None:
        torch.set_num_threads(max(1, num_threads))

    def synchronize(self) -> None:
        pass

    def finish(self, timeout_seconds: float) -> bool:
        return True

    def busy_seconds(self) -> float:
        return 0.0

    def memory(self) -> tuple[int, int]:
        return _available_and_total_bytes()

    def default_kv_bytes(self, plan: stage_worker_pb2.StagePlan) -> int:
        # Which ranks share this machine is not known here, so all of them are assumed to.
        ranks = plan.topology.dp_size * plan.topology.tp_size * plan.topology.pp_size
        free, _ = self.memory()
        return int(min(MAX_DEFAULT_KV_BYTES, free * DEFAULT_KV_SHARE)) // max(1, ranks)

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # Zeroed pages of its own, which the kernel gives on first touch and gets back as soon as
        # the tensor is dropped. torch.zeros writes all of them (10 s for 4 GB on a busy two-core
        # machine) and holds them, and so does numpy where malloc has freed memory of that size.
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without large pages refuses.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def cache_changes(self) -> None:
        self._prefault.cancel()

    def cache_allocated(self, tensors: Sequence[torch.Tensor]) -> None:
        self._prefault.begin(tensors)

    def memory_peak_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def model(
        self,
        facts: ModelFacts,
        plan: stage_worker_pb2.StagePlan,
        device_index: int,
        tensor_parallel: TensorParallel,
    ) -> Model:
        return StageModel(facts, plan, self, device_index, tensor_parallel)

    def operators(self, *, enforce_eager: bool) -> Operators:
        plain = TorchOperators(packed_linear=packing_works())
        if enforce_eager:
            return plain
        try:
            return NativeOperators(torch.get_num_threads(), plain)
        except KernelsUnavailable as reason:
            log.warning(
                "no compiled kernels: %s; torch's operators are used, which are slower "
                "at small batches",
                reason,
            )
            return plain


def _available_and_total_bytes() -> tuple[int, int]:
    """Within this process's control group; where the system does not tell, free is half."""
    memory = host_memory()
    if memory is not None:
        return memory.available_bytes, memory.total_bytes
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // 2, total
