"""What the rest of the worker may ask about a device, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.topology.facts import ModelFacts
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.operators import Operators
from stage_worker.layers.rotary import RotaryRows
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.weights import Progress
from stagemesh.v1 import stage_worker_pb2


class Model(Protocol):
    """One rank's part of the model: `StageModel`, or what stands for it."""

    facts: ModelFacts
    device: torch.device

    @property
    def is_first(self) -> bool: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def has_cache(self) -> bool: ...

    def apply_plan(
        self, plan: stage_worker_pb2.StagePlan, on_progress: Progress
    ) -> stage_worker_pb2.RankReport:
        """Keeps, loads and drops; see `StageRunner.apply_plan`."""
        ...

    def rotary(self, positions: Tensor) -> RotaryRows:
        """What layers need of a step's positions [n]."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] -> [n, hidden]; only on the first stage."""
        ...

    def forward(
        self, hidden_states: Tensor, rotary: RotaryRows, metadata: AttentionMetadata
    ) -> Tensor:
        """[n, hidden] -> [n, hidden] through the stage's layers."""
        ...

    def logits(self, hidden_states: Tensor, indices: Tensor) -> Tensor:
        """Logits [m, vocab] in float32 of the tokens `indices` [m]; only on the last stage."""
        ...


class Platform(Protocol):
    """One kind of device."""

    name: str
    """"cpu", "npu", "cuda" or "sim"."""
    needs_weights: bool
    """Whether a model directory must hold weights."""
    runs_ahead: bool
    """Whether operators return before their work is done, so that the host can prepare the next
    step meanwhile."""
    collective_backend: str
    """Backend name for `torch.distributed`."""

    def device_count(self) -> int:
        """Devices of this node."""
        ...

    def device(self, index: int) -> torch.device:
        """The device of a local index."""
        ...

    def set_up(self, index: int, num_threads: int) -> None:
        """Makes the device current for this process. Call once, before any tensor.

        Raises `ConfigError` where the device is not there.
        """
        ...

    def synchronize(self) -> None:
        """Waits until the computing that this thread has queued on the device is done: not what
        other streams do, where a receive for a later step may wait."""
        ...

    def finish(self, timeout_seconds: float) -> bool:
        """Waits until what this thread has queued on the device is done, what it waits for from
        others included; returns False when it is not by then."""
        ...

    def busy_seconds(self) -> float:
        """How long the device will be busy at least with what was queued; 0 where that is not
        known."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        ...

    def default_kv_bytes(self, plan: stage_worker_pb2.StagePlan) -> int:
        """Bytes for the KV cache of one rank, asked after the weights are loaded."""
        ...

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A large zeroed tensor, such as a KV cache."""
        ...

    def cache_changes(self) -> None:
        """Tensors that `zeros` has made may be dropped from now on."""
        ...

    def cache_allocated(self, tensors: Sequence[Tensor]) -> None:
        """The KV cache is there; these tensors of it are new."""
        ...

    def memory_peak_bytes(self) -> int:
        """Most memory that this process has held so far, on the device where it has its own.
        May be asked by any thread."""
        ...

    def model(
        self,
        facts: ModelFacts,
        plan: stage_worker_pb2.StagePlan,
        device_index: int,
        tensor_parallel: TensorParallel,
    ) -> Model:
        """A rank's part of the model, with nothing loaded yet."""
        ...

    def operators(self, *, enforce_eager: bool) -> Operators:
        """What layers are made of; torch's own operators where `enforce_eager`."""
        ...
