"""How much memory each stage needs, before anything is loaded. Pure arithmetic.

All bytes are those of one rank of the stage's TP group. Weights and KV cache
are exact; activations are an estimate from the largest tensors that live at the
same time in a layer. Stages differ by their layers, the embedding (first)
and the head (last), so the KV capacity of a mesh is that of its weakest stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.topology.facts import DTYPE_BYTES, MeshShape, ModelFacts
from services.topology.weights import (
    embedding_weight,
    final_norm_weight,
    head_weight,
    kv_heads_per_rank,
    layer_bytes,
)

# Logits are computed and sampled in float32.
_LOGIT_BYTES = 4
# Logits, a filtered or sorted copy, and probabilities live at the same time.
_LOGIT_COPIES = 3
# The residual stream and the branch that is added to it.
_RESIDUAL_COPIES = 2
# One receive that is posted ahead and one send that is still pending.
_BOUNDARY_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one rank of a stage needs."""

    pp_rank: int
    layer_start: int
    layer_end: int
    weight_bytes: int
    activation_bytes: int
    """Estimate of the most at one time, for a full step."""
    kv_bytes_per_token: int
    """Keys and values of one token over the stage's layers."""
    kv_block_bytes: int
    embedding_bytes: int = 0
    """Of `weight_bytes`; the first stage's."""
    head_bytes: int = 0
    """Of `weight_bytes`; the last stage's. 0 where it is the embedding of the same stage."""

    @property
    def fixed_bytes(self) -> int:
        """What is needed whatever the size of the KV cache."""
        return self.weight_bytes + self.activation_bytes

    def blocks_in(self, kv_cache_bytes: int) -> int:
        """KV blocks that fit into so many bytes of cache."""
        return max(0, kv_cache_bytes) // self.kv_block_bytes

    def usable_blocks(self, available_bytes: int) -> int:
        """KV blocks that fit beside weights and activations."""
        return self.blocks_in(available_bytes - self.fixed_bytes)


def predict_stage(
    facts: ModelFacts,
    shape: MeshShape,
    pp_rank: int,
    *,
    dtype: str,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> StageMemory:
    """Memory of one rank of stage `pp_rank`.

    `dtype` is the element type of weights, activations and cache;
    `max_num_batched_tokens` the query tokens of the largest step and
    `max_num_seqs` the rows whose logits it may sample.
    """
    element_bytes = DTYPE_BYTES[dtype]
    layer_start, layer_end = shape.layer_range(pp_rank)
    embedding_bytes, head_bytes, norm_bytes = end_bytes(facts, shape, pp_rank, dtype)
    of_layers = sum(layer_bytes(facts, shape.tp_size, dtype)[layer_start:layer_end])
    kv_width = kv_elements_per_token(facts, shape.tp_size)
    kv_bytes_per_token = (layer_end - layer_start) * kv_width * element_bytes
    return StageMemory(
        pp_rank=pp_rank,
        layer_start=layer_start,
        layer_end=layer_end,
        weight_bytes=embedding_bytes + of_layers + norm_bytes + head_bytes,
        activation_bytes=_activation_bytes(
            facts, shape, pp_rank, element_bytes, max_num_batched_tokens, max_num_seqs
        ),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_block_bytes=kv_bytes_per_token * block_size,
        embedding_bytes=embedding_bytes,
        head_bytes=head_bytes,
    )


def end_bytes(
    facts: ModelFacts, shape: MeshShape, pp_rank: int, dtype: str
) -> tuple[int, int, int]:
    """Bytes of embedding, LM head and final norm on each rank of a stage, 0 where it has none."""
    embedding_bytes = head_bytes = norm_bytes = 0
    if pp_rank == 0:
        embedding_bytes = embedding_weight(facts).bytes_per_rank(facts, shape.tp_size, dtype)
    if pp_rank == shape.pp_size - 1:
        norm_bytes = final_norm_weight(facts).bytes_per_rank(facts, shape.tp_size, dtype)
        if pp_rank > 0 or not facts.tie_word_embeddings:
            head_bytes = head_weight(facts).bytes_per_rank(facts, shape.tp_size, dtype)
    return embedding_bytes, head_bytes, norm_bytes


def kv_elements_per_token(facts: ModelFacts, tp_size: int) -> int:
    """Elements that each rank caches for one token and one layer: keys and values of its
    heads, or the latent vector, which every rank of a TP group holds whole."""
    if facts.mla is not None:
        return facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim
    return 2 * kv_heads_per_rank(facts, tp_size) * facts.head_dim


def predict_mesh(
    facts: ModelFacts,
    shape: MeshShape,
    *,
    dtype: str,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> tuple[StageMemory, ...]:
    """`predict_stage` for every stage, in stage order."""
    return tuple(
        predict_stage(
            facts,
            shape,
            pp_rank,
            dtype=dtype,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        for pp_rank in range(shape.pp_size)
    )


def _activation_bytes(
    facts: ModelFacts,
    shape: MeshShape,
    pp_rank: int,
    element_bytes: int,
    num_tokens: int,
    num_sampled: int,
) -> int:
    hidden, tp_size = facts.hidden_size, shape.tp_size
    layers = range(*shape.layer_range(pp_rank))
    mlp = max(_mlp_elements(facts, tp_size, is_moe) for is_moe in map(facts.is_moe_layer, layers))
    per_token = _RESIDUAL_COPIES * hidden + max(_attention_elements(facts, tp_size), mlp)
    if shape.pp_size > 1:
        per_token += _BOUNDARY_BUFFERS * hidden
    total = num_tokens * per_token * element_bytes
    if pp_rank == shape.pp_size - 1:
        total += logit_bytes(facts, num_sampled)
    return total


def logit_bytes(facts: ModelFacts, num_sampled: int) -> int:
    """What the last stage needs, on each rank, to sample so many rows."""
    return num_sampled * facts.vocab_size * _LOGIT_BYTES * _LOGIT_COPIES


def _attention_elements(facts: ModelFacts, tp_size: int) -> int:
    """Normed input, q, k, v (and latents), attention's output, o_proj's output."""
    hidden, heads = facts.hidden_size, facts.num_attention_heads // tp_size
    if facts.mla is None:
        key_value = kv_heads_per_rank(facts, tp_size) * facts.head_dim
        return 2 * hidden + 2 * heads * facts.head_dim + 2 * key_value
    mla = facts.mla
    latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
    query_key = 2 * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return 2 * hidden + latents + query_key + 2 * heads * mla.v_head_dim


def _mlp_elements(facts: ModelFacts, tp_size: int, is_moe: bool) -> int:
    """Normed input, gate, up, their product, down_proj's output; for experts all of it
    once for each expert that a token goes to, and the router's scores."""
    hidden = facts.hidden_size
    if not is_moe or facts.moe is None:
        return 2 * hidden + 3 * facts.intermediate_size // tp_size
    moe = facts.moe
    routed = moe.num_experts_per_token * (2 * hidden + 3 * moe.expert_intermediate_size // tp_size)
    return 2 * hidden + moe.num_experts + routed + 3 * moe.shared_intermediate_size // tp_size
