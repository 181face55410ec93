"""config.json to `ModelFacts` for planning: everything that decides about memory, also of
architectures and checkpoints that no worker runs yet.

A model that is served is read exactly as `serve` reads it. Any other one is read
here, where only sizes count (rotary embedding, activation function and sliding
window change no tensor), and `PlannedModel` carries what `serve` says against it.
Sources: config.json and weight names of the published checkpoints, for example
https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.errors import ModelError
from services.topology.configkeys import ConfigKeys
from services.topology.facts import Fp8Facts, MlaFacts, ModelFacts, MoeFacts
from services.topology.families import (
    DEFAULT_ROPE_THETA,
    FAMILIES,
    checkpoint_dtype,
    facts_of,
    head_dim_of,
)
from services.topology.jsonfile import read_json_object

# Bounds of what is believed of a config.json; far above any published model.
_MAX_LAYERS = 10_000
_MAX_HEADS = 10_000
_MAX_SIZE = 1 << 24
_MAX_POSITIONS = 1 << 31
_MAX_EXPERTS = 4096
_MAX_NEXTN_LAYERS = 16


class Experts(Enum):
    """Which keys say how large the experts are, and what their tensors are called."""

    NONE = "none"
    MIXTRAL = "mixtral"
    QWEN = "qwen"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True, slots=True)
class PlannedFamily:
    """One architecture that can be planned."""

    architecture: str
    experts: Experts = Experts.NONE
    latent_attention: bool = False
    qkv_bias: bool = False
    """Always has biases on q, k and v, and none on the output."""
    qk_norm: bool = False
    has_attention_bias_flag: bool = False
    has_mlp_bias_flag: bool = False
    has_correction_bias: bool = False


PLANNED_FAMILIES: Mapping[str, PlannedFamily] = {
    family.architecture: family
    for family in (
        PlannedFamily("LlamaForCausalLM", has_attention_bias_flag=True, has_mlp_bias_flag=True),
        PlannedFamily("MistralForCausalLM"),
        PlannedFamily("MixtralForCausalLM", Experts.MIXTRAL),
        PlannedFamily("Qwen2ForCausalLM", qkv_bias=True),
        PlannedFamily("Qwen3ForCausalLM", qk_norm=True, has_attention_bias_flag=True),
        PlannedFamily(
            "Qwen3MoeForCausalLM", Experts.QWEN, qk_norm=True, has_attention_bias_flag=True
        ),
        PlannedFamily(
            "DeepseekV2ForCausalLM",
            Experts.DEEPSEEK,
            latent_attention=True,
            has_attention_bias_flag=True,
        ),
        PlannedFamily(
            "DeepseekV3ForCausalLM",
            Experts.DEEPSEEK,
            latent_attention=True,
            has_attention_bias_flag=True,
            has_correction_bias=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a config.json says, and whether `serve` takes the model."""

    facts: ModelFacts
    serve_obstacle: str | None
    """What `serve` says against the model; None where it serves it."""
    sliding_window: int | None
    """Positions that attention sees at most, where that is less than all."""


def read_planned_model(config_file: Path) -> PlannedModel:
    """Reads a config.json. Raises `ModelError` for an unknown architecture or a bad value."""
    keys = ConfigKeys(config_file, read_json_object(config_file))
    try:
        return PlannedModel(facts_of(keys), None, None)
    except ModelError as error:
        obstacle = error.message
    family = _family(keys)
    return PlannedModel(_planned_facts(keys, family), obstacle, _sliding_window(keys))


def _family(keys: ConfigKeys) -> PlannedFamily:
    architectures = keys.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = PLANNED_FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(PLANNED_FAMILIES)
        says = "is missing" if name is None else f"says {str(name)[:80]}, which cannot be planned"
        raise keys.error("architectures", f"{says}; architectures that can: {known}")
    return family


def _planned_facts(keys: ConfigKeys, family: PlannedFamily) -> ModelFacts:
    hidden_size = keys.integer("hidden_size", maximum=_MAX_SIZE)
    num_layers = keys.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads = keys.integer("num_attention_heads", maximum=_MAX_HEADS)
    mla = _mla(keys) if family.latent_attention else None
    served = FAMILIES.get(family.architecture)
    optional = mla is not None or (served is not None and served.kv_heads_may_be_absent)
    if keys.absent("num_key_value_heads") and optional:
        num_kv_heads = num_heads
    else:
        num_kv_heads = keys.integer("num_key_value_heads", maximum=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise keys.error(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide the {num_heads} attention heads",
        )
    if mla is None:
        head_dim = head_dim_of(keys, hidden_size, num_heads)
    else:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return ModelFacts(
        path=keys.file.parent,
        architecture=family.architecture,
        model_type=keys.text("model_type", default=""),
        vocab_size=keys.integer("vocab_size", maximum=_MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", maximum=_MAX_SIZE),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", above=0.0, default=1e-6),
        # No tensor depends on the rotary embedding, so it is not read.
        rope_theta=DEFAULT_ROPE_THETA,
        rope_scaling=None,
        max_position_embeddings=keys.integer("max_position_embeddings", maximum=_MAX_POSITIONS),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", default=False),
        attention_bias=family.has_attention_bias_flag
        and keys.boolean("attention_bias", default=False),
        mlp_bias=family.has_mlp_bias_flag and keys.boolean("mlp_bias", default=False),
        dtype=checkpoint_dtype(keys),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        mla=mla,
        moe=_moe(keys, family, num_layers),
        fp8=_fp8(keys),
        num_nextn_predict_layers=_count(
            keys, "num_nextn_predict_layers", default=0, maximum=_MAX_NEXTN_LAYERS
        ),
    )


def _mla(keys: ConfigKeys) -> MlaFacts:
    rank = None
    if not keys.absent("q_lora_rank"):
        rank = keys.integer("q_lora_rank", maximum=_MAX_SIZE)
    return MlaFacts(
        q_lora_rank=rank,
        kv_lora_rank=keys.integer("kv_lora_rank", maximum=_MAX_SIZE),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim", maximum=_MAX_SIZE),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim", maximum=_MAX_SIZE),
        v_head_dim=keys.integer("v_head_dim", maximum=_MAX_SIZE),
    )


def _moe(keys: ConfigKeys, family: PlannedFamily, num_layers: int) -> MoeFacts | None:
    layers = range(num_layers)
    shared = 0
    match family.experts:
        case Experts.NONE:
            return None
        case Experts.MIXTRAL:
            count, width_key = "num_local_experts", "intermediate_size"
            dense = frozenset[int]()
        case Experts.QWEN:
            # transformers 5 writes the key as Mixtral has it.
            count = "num_experts" if keys.present("num_experts") else "num_local_experts"
            width_key = "moe_intermediate_size"
            step = _count(keys, "decoder_sparse_step", default=1, maximum=_MAX_LAYERS, minimum=1)
            named = keys.get("mlp_only_layers") or []
            if not isinstance(named, list):
                raise keys.error("mlp_only_layers", "must be a list of layers")
            dense = frozenset(
                layer for layer in layers if layer in named or (layer + 1) % step != 0
            )
        case Experts.DEEPSEEK:
            count, width_key = "n_routed_experts", "moe_intermediate_size"
            first = _count(keys, "first_k_dense_replace", default=0, maximum=_MAX_LAYERS)
            every = _count(keys, "moe_layer_freq", default=1, maximum=_MAX_LAYERS, minimum=1)
            dense = frozenset(layer for layer in layers if layer < first or layer % every != 0)
            shared = _count(keys, "n_shared_experts", default=0, maximum=_MAX_EXPERTS)
    width = keys.integer(width_key, maximum=_MAX_SIZE)
    num_experts = keys.integer(count, maximum=_MAX_EXPERTS)
    return MoeFacts(
        num_experts=num_experts,
        num_experts_per_token=keys.integer("num_experts_per_tok", maximum=num_experts),
        expert_intermediate_size=width,
        shared_intermediate_size=shared * width,
        dense_layers=dense,
        has_correction_bias=family.has_correction_bias,
        mixtral_names=family.experts is Experts.MIXTRAL,
    )


def _fp8(keys: ConfigKeys) -> Fp8Facts | None:
    if keys.absent("quantization_config"):
        return None
    section = keys.section("quantization_config")
    method = section.text("quant_method", default="")
    if method != "fp8":
        raise section.error(
            "quant_method", f'is "{method[:80]}"; the only one that can be planned is fp8'
        )
    block = section.get("weight_block_size")
    if block is None:
        return Fp8Facts(None)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 1 <= size <= _MAX_SIZE for size in block)
    ):
        raise section.error("weight_block_size", "must be two positive integers")
    return Fp8Facts((block[0], block[1]))


def _sliding_window(keys: ConfigKeys) -> int | None:
    if keys.absent("sliding_window") or keys.get("use_sliding_window") is False:
        return None
    window = keys.integer("sliding_window", maximum=1 << 62)
    positions = keys.integer("max_position_embeddings", maximum=_MAX_POSITIONS)
    return window if window < positions else None


def _count(keys: ConfigKeys, key: str, *, default: int, maximum: int, minimum: int = 0) -> int:
    """An integer that may be absent, and 0 unless `minimum` says otherwise."""
    if keys.absent(key):
        return default
    if minimum == 0 and keys.get(key) == 0:
        return 0
    return keys.integer(key, maximum=maximum)
