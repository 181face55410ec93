"""Which tensors a checkpoint of a supported family holds, and how each is split.

Names and shapes are those of Hugging Face checkpoints; a shape is
(out_features, in_features), as `torch.nn.Linear` stores it. The checkpoint
check, the memory plan and the worker's loader all read this one list. All
families in `families.FAMILIES` share the Llama layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

from services.topology.facts import MeshShape, ModelFacts

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

    def elements_per_rank(self, facts: ModelFacts, tp_size: int) -> int:
        """Elements that each rank of a TP group holds."""
        rows, rest = self.shape[0], prod(self.shape[1:])
        match self.split:
            case Split.REPLICATED:
                return rows * rest
            case Split.COLUMN:
                return rows // tp_size * rest
            case Split.KV_COLUMN:
                return kv_heads_per_rank(facts, tp_size) * facts.head_dim * rest
            case Split.ROW:
                return rows * rest // tp_size
            case Split.VOCABULARY:
                return -(-rows // tp_size) * rest


def kv_heads_per_rank(facts: ModelFacts, tp_size: int) -> int:
    """KV heads that each rank of a TP group holds; at least one."""
    return max(1, facts.num_key_value_heads // tp_size)


def layer_weights(facts: ModelFacts, layer: int) -> tuple[WeightSpec, ...]:
    """The tensors of one hidden layer, in the order of its computation."""
    hidden, intermediate = facts.hidden_size, facts.intermediate_size
    query = facts.num_attention_heads * facts.head_dim
    key_value = facts.num_key_value_heads * facts.head_dim
    prefix = f"model.layers.{layer}."

    def linear(
        name: str, out_features: int, in_features: int, split: Split, bias: bool
    ) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{prefix}{name}.weight", (out_features, in_features), split)
        if bias:
            # A row-parallel bias is added once, after the partial sums: all ranks hold it.
            bias_split = Split.REPLICATED if split is Split.ROW else split
            yield WeightSpec(f"{prefix}{name}.bias", (out_features,), bias_split)

    attention, mlp = facts.attention_bias, facts.mlp_bias
    return (
        WeightSpec(f"{prefix}input_layernorm.weight", (hidden,), Split.REPLICATED),
        *linear("self_attn.q_proj", query, hidden, Split.COLUMN, attention),
        *linear("self_attn.k_proj", key_value, hidden, Split.KV_COLUMN, attention),
        *linear("self_attn.v_proj", key_value, hidden, Split.KV_COLUMN, attention),
        *linear("self_attn.o_proj", hidden, query, Split.ROW, attention),
        WeightSpec(f"{prefix}post_attention_layernorm.weight", (hidden,), Split.REPLICATED),
        *linear("mlp.gate_proj", intermediate, hidden, Split.COLUMN, mlp),
        *linear("mlp.up_proj", intermediate, hidden, Split.COLUMN, mlp),
        *linear("mlp.down_proj", hidden, intermediate, Split.ROW, mlp),
    )


def embedding_weight(facts: ModelFacts) -> WeightSpec:
    """The input embedding; with tied embeddings it is the LM head as well."""
    return WeightSpec(EMBEDDING, (facts.vocab_size, facts.hidden_size), Split.VOCABULARY)


def final_norm_weight(facts: ModelFacts) -> WeightSpec:
    """The norm before the LM head."""
    return WeightSpec(FINAL_NORM, (facts.hidden_size,), Split.REPLICATED)


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
