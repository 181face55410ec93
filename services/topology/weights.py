"""Which tensors a checkpoint of a known family holds, and how each is split.

Names and shapes are those of Hugging Face checkpoints; a shape is
(out_features, in_features), as `torch.nn.Linear` stores it. The checkpoint
check, the memory plan and the worker's loader all read this one list. The
families in `families.FAMILIES` have the Llama layout; what differs in those
that can only be planned is said by `ModelFacts` (`mla`, `moe`, `qk_norm`, ...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

from services.topology.facts import (
    FLOAT8,
    STORAGE_BYTES,
    MeshShape,
    MlaFacts,
    ModelFacts,
    MoeFacts,
)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class Split(Enum):
    """How a TP group holds a tensor."""

    REPLICATED = "replicated"
    """Whole on every rank."""
    COLUMN = "column"
    """Output features (first dimension) cut into tp_size equal parts."""
    KV_COLUMN = "kv_column"
    """As COLUMN, but a part is at least one KV head: with more ranks than KV
    heads, several ranks hold the same head."""
    ROW = "row"
    """Input features (second dimension) cut into tp_size equal parts."""
    VOCABULARY = "vocabulary"
    """First dimension, padded up to a multiple of tp_size."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    split: Split
    dtype: str | None = None
    """One of `STORAGE_BYTES` where it does not follow the type that the model is loaded in."""

    def elements_per_rank(self, facts: ModelFacts, tp_size: int) -> int:
        """Elements that each rank of a TP group holds."""
        rows, rest = self.shape[0], prod(self.shape[1:])
        match self.split:
            case Split.REPLICATED:
                return rows * rest
            case Split.COLUMN:
                return rows // tp_size * rest
            case Split.KV_COLUMN:
                return rows * kv_heads_per_rank(facts, tp_size) // facts.num_key_value_heads * rest
            case Split.ROW:
                return rows * rest // tp_size
            case Split.VOCABULARY:
                return -(-rows // tp_size) * rest

    def bytes_per_rank(self, facts: ModelFacts, tp_size: int, dtype: str) -> int:
        """Bytes that each rank holds of a model loaded in `dtype`."""
        return self.elements_per_rank(facts, tp_size) * STORAGE_BYTES[self.dtype or dtype]

    def num_bytes(self, dtype: str) -> int:
        """Bytes of the whole tensor in a checkpoint stored in `dtype`."""
        return prod(self.shape) * STORAGE_BYTES[self.dtype or dtype]


def kv_heads_per_rank(facts: ModelFacts, tp_size: int) -> int:
    """KV heads that each rank of a TP group holds; at least one."""
    return max(1, facts.num_key_value_heads // tp_size)


def layer_weights(facts: ModelFacts, layer: int) -> tuple[WeightSpec, ...]:
    """The tensors of one hidden layer, in the order of its computation."""
    prefix = f"model.layers.{layer}."
    if facts.mla is None:
        attention = _attention(facts, f"{prefix}self_attn.")
    else:
        attention = _latent_attention(facts, facts.mla, f"{prefix}self_attn.")
    if facts.moe is not None and facts.is_moe_layer(layer):
        mlp = _experts(facts, facts.moe, prefix)
    else:
        mlp = _mlp(facts, f"{prefix}mlp.", facts.intermediate_size)
    return (
        _norm(f"{prefix}input_layernorm", facts.hidden_size),
        *attention,
        _norm(f"{prefix}post_attention_layernorm", facts.hidden_size),
        *mlp,
    )


def _norm(name: str, width: int) -> WeightSpec:
    return WeightSpec(f"{name}.weight", (width,), Split.REPLICATED)


def _linear(
    facts: ModelFacts,
    name: str,
    out_features: int,
    in_features: int,
    split: Split,
    *,
    bias: bool = False,
) -> Iterator[WeightSpec]:
    """A projection: its weight, with FP8 the scales, and its bias."""
    dtype = None if facts.fp8 is None else FLOAT8
    yield WeightSpec(f"{name}.weight", (out_features, in_features), split, dtype)
    if facts.fp8 is not None and facts.fp8.block is not None:
        rows, columns = facts.fp8.block
        scales = (-(-out_features // rows), -(-in_features // columns))
        yield WeightSpec(f"{name}.weight_scale_inv", scales, split, "float32")
    elif facts.fp8 is not None:
        yield WeightSpec(f"{name}.weight_scale", (1,), Split.REPLICATED, "float32")
    if bias:
        # A row-parallel bias is added once, after the partial sums: all ranks hold it.
        bias_split = Split.REPLICATED if split is Split.ROW else split
        yield WeightSpec(f"{name}.bias", (out_features,), bias_split)


def _attention(facts: ModelFacts, prefix: str) -> Iterator[WeightSpec]:
    hidden = facts.hidden_size
    query = facts.num_attention_heads * facts.head_dim
    key_value = facts.num_key_value_heads * facts.head_dim
    bias = facts.attention_bias or facts.qkv_bias
    yield from _linear(facts, f"{prefix}q_proj", query, hidden, Split.COLUMN, bias=bias)
    yield from _linear(facts, f"{prefix}k_proj", key_value, hidden, Split.KV_COLUMN, bias=bias)
    yield from _linear(facts, f"{prefix}v_proj", key_value, hidden, Split.KV_COLUMN, bias=bias)
    if facts.qk_norm:
        yield _norm(f"{prefix}q_norm", facts.head_dim)
        yield _norm(f"{prefix}k_norm", facts.head_dim)
    bias = facts.attention_bias
    yield from _linear(facts, f"{prefix}o_proj", hidden, query, Split.ROW, bias=bias)


def _latent_attention(facts: ModelFacts, mla: MlaFacts, prefix: str) -> Iterator[WeightSpec]:
    """What leads into a latent is whole on every rank; heads are split behind it."""
    hidden, heads, bias = facts.hidden_size, facts.num_attention_heads, facts.attention_bias
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    key_value = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    whole, column = Split.REPLICATED, Split.COLUMN
    if mla.q_lora_rank is None:
        yield from _linear(facts, f"{prefix}q_proj", query, hidden, column)
    else:
        rank = mla.q_lora_rank
        yield from _linear(facts, f"{prefix}q_a_proj", rank, hidden, whole, bias=bias)
        yield _norm(f"{prefix}q_a_layernorm", rank)
        yield from _linear(facts, f"{prefix}q_b_proj", query, rank, column)
    yield from _linear(facts, f"{prefix}kv_a_proj_with_mqa", latent, hidden, whole, bias=bias)
    yield _norm(f"{prefix}kv_a_layernorm", mla.kv_lora_rank)
    yield from _linear(facts, f"{prefix}kv_b_proj", key_value, mla.kv_lora_rank, column)
    output = heads * mla.v_head_dim
    yield from _linear(facts, f"{prefix}o_proj", hidden, output, Split.ROW, bias=bias)


def _mlp(
    facts: ModelFacts,
    prefix: str,
    intermediate: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[WeightSpec]:
    hidden, bias = facts.hidden_size, facts.mlp_bias
    gate, up, down = (f"{prefix}{name}" for name in names)
    yield from _linear(facts, gate, intermediate, hidden, Split.COLUMN, bias=bias)
    yield from _linear(facts, up, intermediate, hidden, Split.COLUMN, bias=bias)
    yield from _linear(facts, down, hidden, intermediate, Split.ROW, bias=bias)


def _experts(facts: ModelFacts, moe: MoeFacts, prefix: str) -> Iterator[WeightSpec]:
    """Router, experts, and the experts that all tokens share. TP cuts every expert."""
    block = f"{prefix}block_sparse_moe." if moe.mixtral_names else f"{prefix}mlp."
    names = ("w1", "w3", "w2") if moe.mixtral_names else ("gate_proj", "up_proj", "down_proj")
    yield WeightSpec(f"{block}gate.weight", (moe.num_experts, facts.hidden_size), Split.REPLICATED)
    if moe.has_correction_bias:
        bias = f"{block}gate.e_score_correction_bias"
        yield WeightSpec(bias, (moe.num_experts,), Split.REPLICATED, "float32")
    for expert in range(moe.num_experts):
        width = moe.expert_intermediate_size
        yield from _mlp(facts, f"{block}experts.{expert}.", width, names)
    if moe.shared_intermediate_size:
        yield from _mlp(facts, f"{block}shared_experts.", moe.shared_intermediate_size)


def embedding_weight(facts: ModelFacts) -> WeightSpec:
    """The input embedding; with tied embeddings it is the LM head as well."""
    return WeightSpec(EMBEDDING, (facts.vocab_size, facts.hidden_size), Split.VOCABULARY)


def final_norm_weight(facts: ModelFacts) -> WeightSpec:
    """The norm before the LM head."""
    return _norm("model.norm", facts.hidden_size)


def head_weight(facts: ModelFacts) -> WeightSpec:
    """The tensor that the LM head is read from."""
    name = EMBEDDING if facts.tie_word_embeddings else LM_HEAD
    return WeightSpec(name, (facts.vocab_size, facts.hidden_size), Split.VOCABULARY)


def stage_weights(facts: ModelFacts, shape: MeshShape, pp_rank: int) -> tuple[WeightSpec, ...]:
    """Every tensor that a stage needs, each once.

    A last stage with tied embeddings has the embedding as its head; a single
    stage holds it once for both ends.
    """
    specs: dict[str, WeightSpec] = {}
    if pp_rank == 0:
        embedding = embedding_weight(facts)
        specs[embedding.name] = embedding
    for layer in range(*shape.layer_range(pp_rank)):
        specs.update((spec.name, spec) for spec in layer_weights(facts, layer))
    if pp_rank == shape.pp_size - 1:
        specs.update((spec.name, spec) for spec in (final_norm_weight(facts), head_weight(facts)))
    return tuple(specs.values())


def model_weights(facts: ModelFacts) -> tuple[WeightSpec, ...]:
    """Every tensor that the whole model needs, each once."""
    whole = MeshShape(1, 1, 1, (facts.num_hidden_layers,))
    return stage_weights(facts, whole, 0)


def nextn_weights(facts: ModelFacts) -> tuple[WeightSpec, ...]:
    """The layers for multi-token prediction, which a checkpoint may hold and nobody loads.

    Each is a hidden layer of its own with an embedding, a head, and what joins the
    two streams. Source: README_WEIGHTS.md of DeepSeek-V3; names as in its index.
    """
    hidden = facts.hidden_size
    specs: list[WeightSpec] = []
    for layer in range(facts.num_nextn_predict_layers):
        number = facts.num_hidden_layers + layer
        prefix = f"model.layers.{number}."
        vocabulary = (facts.vocab_size, hidden)
        specs += layer_weights(facts, number)
        specs += (
            _norm(f"{prefix}enorm", hidden),
            _norm(f"{prefix}hnorm", hidden),
            WeightSpec(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), Split.REPLICATED),
            WeightSpec(f"{prefix}embed_tokens.weight", vocabulary, Split.VOCABULARY),
            _norm(f"{prefix}shared_head.norm", hidden),
            WeightSpec(f"{prefix}shared_head.head.weight", vocabulary, Split.VOCABULARY),
        )
    return tuple(specs)


@lru_cache(maxsize=64)
def layer_bytes(facts: ModelFacts, tp_size: int, dtype: str) -> tuple[int, ...]:
    """Weight bytes of every hidden layer, in order, on each rank of a TP group.

    Layers are of at most two kinds, so each kind is counted once: a layer of a
    large mixture of experts has thousands of tensors.
    """
    by_kind: dict[bool, int] = {}
    sizes = []
    for layer in range(facts.num_hidden_layers):
        kind = facts.is_moe_layer(layer)
        if kind not in by_kind:
            by_kind[kind] = sum(
                spec.bytes_per_rank(facts, tp_size, dtype) for spec in layer_weights(facts, layer)
            )
        sizes.append(by_kind[kind])
    return tuple(sizes)
