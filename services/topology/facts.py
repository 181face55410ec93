"""Plain facts about a model and a mesh that everyone shares. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT8 = "float8_e4m3fn"
STORAGE_BYTES = {**DTYPE_BYTES, FLOAT8: 1}
"""Bytes of an element of a weight: also of types that nothing is computed in."""


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Llama 3's frequency scaling (config.json `rope_scaling` / `rope_parameters`
    with rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class MlaFacts:
    """Multi-head latent attention (DeepSeek): keys and values come from one narrow
    latent vector for each token, and that vector is what the KV cache holds."""

    q_lora_rank: int | None
    """Width of the query's own latent; None where queries come straight from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """Mixture of experts: which layers have it, and how large it is."""

    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    """Of the experts that see every token, together; 0 for none."""
    dense_layers: frozenset[int]
    """Layers with an ordinary MLP of the model's `intermediate_size`."""
    has_correction_bias: bool
    """Whether the router has a bias for each expert (DeepSeek-V3), kept in float32."""
    mixtral_names: bool
    """Tensors are called block_sparse_moe and w1, w2, w3, as Mixtral has them."""


@dataclass(frozen=True, slots=True)
class Fp8Facts:
    """Weights of linear layers stored in one byte each, with scales in float32."""

    block: tuple[int, int] | None
    """Rows and columns that share a scale; None for one scale for each tensor."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a config.json says, in one spelling for all families."""

    path: Path
    architecture: str
    """First entry of `architectures`, for example "LlamaForCausalLM"."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RotaryScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """What the checkpoint is stored in."""
    qkv_bias: bool = False
    """Biases on q, k and v alone (Qwen2); `attention_bias` means all four."""
    qk_norm: bool = False
    """A norm over each head's query and key (Qwen3)."""
    mla: MlaFacts | None = None
    moe: MoeFacts | None = None
    fp8: Fp8Facts | None = None
    num_nextn_predict_layers: int = 0
    """Layers for multi-token prediction that the checkpoint holds behind the hidden layers."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts instead of one MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Sizes of a mesh and its layer partition; `services.topology.wire` turns it
    into the `Topology` message and back."""

    dp_size: int
    tp_size: int
    pp_size: int
    pp_layer_partition: tuple[int, ...]

    def layer_range(self, pp_rank: int) -> tuple[int, int]:
        """Half-open layer range of a stage."""
        start = sum(self.pp_layer_partition[:pp_rank])
        return start, start + self.pp_layer_partition[pp_rank]

    def global_rank(self, pp_rank: int, tp_rank: int) -> int:
        """Rank inside one replica: TP groups are consecutive, PP neighbours tp_size apart."""
        return pp_rank * self.tp_size + tp_rank

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tp_size * self.pp_size
