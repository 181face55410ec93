"""Plain facts about a model and a mesh that everyone shares. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Llama 3's frequency scaling (config.json `rope_scaling` / `rope_parameters`
    with rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
