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
from stage_worker.layers.block import PreNormBlock, Projection
from stage_worker.layers.context import LayerContext
from stage_worker.layers.rotary import RotaryRows
from stage_worker.weights import WeightReader

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


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


class RowParallelLinear:
    """Input features cut over several ranks, partial sums added up, bias once after."""

    __slots__ = ("_bias", "_group", "_linear")

    def __init__(self, tensors: LayerTensors, name: str, context: LayerContext) -> None:
        self._group = context.tensor_parallel
        self._bias = tensors.bias(name)
        self._linear = context.operators.linear(tensors.weight(name), None)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in / tp_size] -> [n, out]."""
        y = self._group.all_reduce(self._linear(x))
        return y if self._bias is None else y.add_(self._bias)

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes + (0 if self._bias is None else self._bias.nbytes)


class LlamaLayer:
    """One pre-norm transformer block: QKV, and gate with up, are column-parallel products, the
    other two row-parallel."""

    __slots__ = ("block",)

    def __init__(
        self, facts: ModelFacts, layer: int, context: LayerContext, reader: WeightReader
    ) -> None:
        tensors = LayerTensors(facts, layer, reader)
        operators, group_size = context.operators, context.tensor_parallel.size
        heads = facts.num_attention_heads // group_size
        kv_heads = kv_heads_per_rank(facts, group_size)
        self.block = PreNormBlock(
            input_norm=operators.rms_norm(tensors.weight("input_layernorm"), facts.rms_norm_eps),
            qkv=operators.linear(tensors.weight(*_QKV), tensors.bias(*_QKV)),
            attend=operators.attention(heads, kv_heads, facts.head_dim, context.dtype),
            head_dim=facts.head_dim,
            output=_row_parallel(tensors, "self_attn.o_proj", context),
            mlp_norm=operators.rms_norm(
                tensors.weight("post_attention_layernorm"), facts.rms_norm_eps
            ),
            gate_up=operators.linear(tensors.weight(*_GATE_UP), tensors.bias(*_GATE_UP)),
            silu_mul=operators.silu_mul,
            down=_row_parallel(tensors, "mlp.down_proj", context),
        )

    def __call__(
        self,
        hidden_states: Tensor,
        rotary: RotaryRows,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[n, hidden] -> [n, hidden], residual added."""
        return self.block(hidden_states, rotary, cache, metadata)

    @property
    def num_bytes(self) -> int:
        return self.block.num_bytes

    @staticmethod
    def weight_specs(facts: ModelFacts, layer: int) -> tuple[WeightSpec, ...]:
        """What making this layer reads."""
        return layer_weights(facts, layer)


def _row_parallel(tensors: LayerTensors, name: str, context: LayerContext) -> Projection:
    if context.tensor_parallel.size > 1:
        return RowParallelLinear(tensors, name, context)
    return context.operators.linear(tensors.weight(name), tensors.bias(name))


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
