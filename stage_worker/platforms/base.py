"""What the rest of the worker may ask about a device, whatever it is."""

from __future__ import annotations

from typing import Protocol

import torch

from stage_worker.layers.operators import Operators
from stagemesh.v1 import stage_worker_pb2


class Platform(Protocol):
    """One kind of device."""

    name: str
    """"cpu", "npu" or "cuda"."""
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
        """Waits until what was queued on the device is done."""
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

    def operators(self, *, enforce_eager: bool) -> Operators:
        """What layers are made of; torch's own operators where `enforce_eager`."""
        ...
