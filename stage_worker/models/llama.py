"""The Llama family: Llama 2 and 3, SmolLM2, Mistral without sliding window.

A stage holds a range of layers, the embedding if it is the first and norm and
head if it is the last. Parts are made and dropped one by one, so that a stage
can come from one plan to another and read only what is new.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.topology.facts import ModelFacts
from services.topology.weights import WeightSpec, kv_heads_per_rank, layer_weights
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.context import LayerContext
from stage_worker.layers.rotary import RotaryRows
from stage_worker.weights import WeightReader


class LayerTensors:
    """One hidden layer's tensors as read, under their names inside the layer."""

    def __init__(self, facts: ModelFacts, layer: int, reader: WeightReader) -> None:
        prefix = f"model.layers.{layer}."
        self._tensors = {
            spec.name.removeprefix(prefix): reader.read(spec)
            for spec in layer_weights(facts, layer)
        }

    def weight(self, *names: str) -> Tensor:
        """Weights of the named modules, stacked over output features."""
        return _stack([self._tensors[f"{name}.weight"] for name in names])

    def bias(self, *names: str) -> Tensor | None:
        """Biases of the named modules, or None where they have none."""
        found = [self._tensors[f"{n}.bias"] for n in names if f"{n}.bias" in self._tensors]
        return _stack(found) if found else None


class LlamaAttention:
    """Query, key and value in one column-parallel product, output row-parallel."""

    def __init__(self, tensors: LayerTensors, facts: ModelFacts, context: LayerContext) -> None:
        group = context.tensor_parallel
        self._head_dim = facts.head_dim
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._qkv = context.operators.linear(tensors.weight(*names), tensors.bias(*names))
        self._output = RowParallelLinear(tensors, "self_attn.o_proj", context)
        self._attend = context.operators.attention(
            facts.num_attention_heads // group.size,
            kv_heads_per_rank(facts, group.size),
            facts.head_dim,
            context.dtype,
        )

    def __call__(
        self, x: Tensor, rotary: RotaryRows, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        return self._output(self._attend(qkv, rotary, cache, metadata))

    @property
    def num_bytes(self) -> int:
        return self._qkv.num_bytes + self._output.num_bytes


class LlamaMLP:
    """Gate and up in one column-parallel product, down row-parallel."""

    def __init__(self, tensors: LayerTensors, context: LayerContext) -> None:
        names = ("mlp.gate_proj", "mlp.up_proj")
        self._gate_up = context.operators.linear(tensors.weight(*names), tensors.bias(*names))
        self._silu_mul = context.operators.silu_mul
        self._down = RowParallelLinear(tensors, "mlp.down_proj", context)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        return self._down(self._silu_mul(self._gate_up(x)))

    @property
    def num_bytes(self) -> int:
        return self._gate_up.num_bytes + self._down.num_bytes


class RowParallelLinear:
    """Input features cut over the ranks, partial sums added up, bias once after."""

    def __init__(self, tensors: LayerTensors, name: str, context: LayerContext) -> None:
        self._group = context.tensor_parallel
        bias = tensors.bias(name)
        # With one rank the product adds the bias itself.
        self._late_bias = bias if self._group.size > 1 else None
        self._linear = context.operators.linear(
            tensors.weight(name), bias if self._group.size == 1 else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in / tp_size] -> [n, out]."""
        y = self._group.all_reduce(self._linear(x))
        return y if self._late_bias is None else y.add_(self._late_bias)

    @property
    def num_bytes(self) -> int:
        late = 0 if self._late_bias is None else self._late_bias.nbytes
        return self._linear.num_bytes + late


class LlamaLayer:
    """One pre-norm transformer block."""

    def __init__(
        self, facts: ModelFacts, layer: int, context: LayerContext, reader: WeightReader
    ) -> None:
        tensors = LayerTensors(facts, layer, reader)
        norm = context.operators.rms_norm
        self._input_norm = norm(tensors.weight("input_layernorm"), facts.rms_norm_eps)
        self._attention = LlamaAttention(tensors, facts, context)
        self._mlp_norm = norm(tensors.weight("post_attention_layernorm"), facts.rms_norm_eps)
        self._mlp = LlamaMLP(tensors, context)

    def __call__(
        self,
        hidden_states: Tensor,
        rotary: RotaryRows,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[n, hidden] -> [n, hidden], residual added."""
        x = self._attention(self._input_norm(hidden_states), rotary, cache, metadata)
        hidden_states = x.add_(hidden_states)
        return self._mlp(self._mlp_norm(hidden_states)).add_(hidden_states)

    @property
    def num_bytes(self) -> int:
        parts = (self._input_norm, self._attention, self._mlp_norm, self._mlp)
        return sum(part.num_bytes for part in parts)

    @staticmethod
    def weight_specs(facts: ModelFacts, layer: int) -> tuple[WeightSpec, ...]:
        """What making this layer reads."""
        return layer_weights(facts, layer)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
