"""The pre-norm transformer block: attention and a gated MLP, each behind a norm and beside what
it is added to.

A family makes one of its own parts. A device whose operators can run several blocks
at once takes the parts out of it (`Operators.fuse`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.backend import AttentionBackend
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.norm import Norm
from stage_worker.layers.rotary import RotaryRows


class Projection(Protocol):
    """[n, in] -> [n, out] over all ranks of a stage: a linear operator and what it takes to add
    up the ranks' parts."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PreNormBlock:
    """One block of one rank."""

    input_norm: Norm
    qkv: Projection
    """Queries, keys and values in one product."""
    attend: AttentionBackend
    head_dim: int
    output: Projection
    mlp_norm: Norm
    gate_up: Projection
    """Gate and up in one product."""
    silu_mul: Callable[[Tensor], Tensor]
    down: Projection

    def __call__(
        self,
        hidden_states: Tensor,
        rotary: RotaryRows,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[n, hidden] -> [n, hidden], residual added."""
        qkv = self.qkv(self.input_norm(hidden_states))
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        x = self.output(self.attend(qkv, rotary, cache, metadata))
        hidden_states = x.add_(hidden_states)
        x = self.down(self.silu_mul(self.gate_up(self.mlp_norm(hidden_states))))
        return x.add_(hidden_states)

    @property
    def num_bytes(self) -> int:
        parts = (self.input_norm, self.qkv, self.output, self.mlp_norm, self.gate_up, self.down)
        return sum(part.num_bytes for part in parts)


class FusedBlocks(Protocol):
    """All blocks of a stage with their caches in one call."""

    def __call__(
        self, hidden_states: Tensor, rotary: RotaryRows, metadata: AttentionMetadata
    ) -> Tensor:
        """[n, hidden] -> [n, hidden]; what is given is left as it is."""
        ...
