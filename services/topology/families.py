"""What is known of model families without torch: config.json to `ModelFacts`,
which architectures are served, and which sizes a model can be split into.

`FAMILIES` is the list of supported architectures; a test holds the worker's
models to it. Both spellings of config.json are read: transformers 4 (`rope_theta`
and `rope_scaling`, `torch_dtype`) and transformers 5 (`rope_parameters`, `dtype`).
What would change the model's output and is not implemented is refused with its
reason, never ignored. Every refusal is a `ModelError` that names file and key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.errors import ConfigError, ModelError
from services.topology.configkeys import ConfigKeys
from services.topology.facts import DTYPE_BYTES, ModelFacts, RotaryScaling
from services.topology.jsonfile import read_json_object

TP_SIZE_FLAG = "--tensor-parallel-size"
DTYPE_FLAG = "--dtype"
MAX_MODEL_LEN_FLAG = "--max-model-len"
DEFAULT_ROPE_THETA = 10000.0

# Bounds of what is believed of a config.json; far above any published model.
_MAX_LAYERS = 10_000
_MAX_HEADS = 10_000
_MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture and where its config.json differs from Llama's."""

    architecture: str
    supports_pp: bool
    has_bias_flags: bool
    """Whether `attention_bias` and `mlp_bias` mean anything."""
    sliding_window_when_absent: int | None
    """What transformers takes where the key is absent."""
    kv_heads_may_be_absent: bool
    """Absent means "as many as attention heads"; elsewhere the key is required."""


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", True, True, None, True),
        Family("MistralForCausalLM", True, False, 4096, False),
    )
}

PLANNED_ONLY = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that `stagemesh plan` knows (`services.topology.planfacts`) and no worker runs."""


def read_model_facts(path: Path) -> ModelFacts:
    """Reads `path/config.json`. Raises `ModelError` for what is missing or not served."""
    if not path.is_dir():
        raise ModelError(
            f"model directory {path} does not exist; give a local Hugging Face directory",
            param="model",
        )
    config_file = path / "config.json"
    return facts_of(ConfigKeys(config_file, read_json_object(config_file)))


def facts_of(keys: ConfigKeys) -> ModelFacts:
    """The facts in a config.json that was read already. Raises as `read_model_facts`."""
    family = _family(keys)
    _refuse_what_is_not_implemented(keys, family)

    hidden_size = keys.integer("hidden_size", maximum=_MAX_SIZE)
    num_attention_heads = keys.integer("num_attention_heads", maximum=_MAX_HEADS)
    if keys.absent("num_key_value_heads") and family.kv_heads_may_be_absent:
        num_key_value_heads = num_attention_heads
    else:
        num_key_value_heads = keys.integer("num_key_value_heads", maximum=_MAX_HEADS)
    if num_attention_heads % num_key_value_heads:
        raise keys.error(
            "num_key_value_heads",
            f"is {num_key_value_heads}, which does not divide the {num_attention_heads} "
            "attention heads",
        )
    rope_theta, rope_scaling = _rotary(keys)
    return ModelFacts(
        path=keys.file.parent,
        architecture=family.architecture,
        model_type=keys.text("model_type", default=""),
        vocab_size=keys.integer("vocab_size", maximum=_MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", maximum=_MAX_SIZE),
        num_hidden_layers=keys.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim_of(keys, hidden_size, num_attention_heads),
        rms_norm_eps=keys.number("rms_norm_eps", above=0.0),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=keys.integer("max_position_embeddings", maximum=1 << 31),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", default=False),
        attention_bias=family.has_bias_flags and keys.boolean("attention_bias", default=False),
        mlp_bias=family.has_bias_flags and keys.boolean("mlp_bias", default=False),
        dtype=checkpoint_dtype(keys),
    )


def valid_tp_sizes(facts: ModelFacts) -> tuple[int, ...]:
    """Every tensor parallel size that this model can be split into, ascending."""
    heads = facts.num_attention_heads
    return tuple(size for size in range(1, heads + 1) if tp_obstacle(facts, size) is None)


def family_supports_pp(architecture: str) -> bool:
    """Whether the family's layers can be cut into stages. What is only planned can."""
    family = FAMILIES.get(architecture)
    return family is None or family.supports_pp


def resolve_dtype(flag: str, facts: ModelFacts, device: str) -> str:
    """Element type of weights and activations: one of `DTYPE_BYTES`.

    `flag` is `--dtype`; `device` the device kind ("cpu", "npu", "cuda", "sim").
    "auto" takes the checkpoint's own type, except that
    - float16 becomes float32 on the CPU: half-precision arithmetic is slow there
      and overflows where bfloat16 does not, and float32 holds every float16 value;
    - float32 becomes bfloat16 on an accelerator: that is what its matrix units
      are for, and a float32 checkpoint of a chat model is stored so by habit.
    Raises `ConfigError` for any other flag.
    """
    if flag in DTYPE_BYTES:
        return flag
    if flag != "auto":
        known = ", ".join(["auto", *DTYPE_BYTES])
        raise ConfigError(
            f'{DTYPE_FLAG} "{flag}" is not known; use one of {known}', param=DTYPE_FLAG
        )
    on_accelerator = device in ("npu", "cuda")
    if facts.dtype == "float16" and not on_accelerator:
        return "float32"
    if facts.dtype == "float32" and on_accelerator:
        return "bfloat16"
    return facts.dtype


def resolve_max_model_len(flag: int | None, facts: ModelFacts) -> int:
    """Most tokens of one sequence. None takes the model's own context length.

    Raises `ConfigError` where the flag is below 1 or above what the model's
    positions were made for.
    """
    longest = facts.max_position_embeddings
    if flag is None:
        return longest
    if flag < 1:
        raise ConfigError(
            f"{MAX_MODEL_LEN_FLAG} is {flag}; it must be at least 1", param=MAX_MODEL_LEN_FLAG
        )
    if flag > longest:
        raise ConfigError(
            f"{MAX_MODEL_LEN_FLAG} {flag} is above the model's {longest} positions "
            f"(max_position_embeddings in {facts.path / 'config.json'}); use at most {longest}",
            param=MAX_MODEL_LEN_FLAG,
        )
    return flag


def tp_obstacle(facts: ModelFacts, tp_size: int) -> str | None:
    """Why the model cannot be split over `tp_size` ranks, or None.

    TP must divide attention heads and MLP width, and either divide the KV heads or be a
    multiple of them (each KV head is then held by several ranks).
    """
    if tp_size < 1:
        return "is not at least 1"
    if facts.num_attention_heads % tp_size:
        return f"does not divide the {facts.num_attention_heads} attention heads"
    kv_heads = facts.num_key_value_heads
    # A latent KV cache has no heads; every rank holds it whole.
    if facts.mla is None and kv_heads % tp_size and tp_size % kv_heads:
        return f"neither divides the {kv_heads} KV heads nor is a multiple of them"
    block = 1 if facts.fp8 is None or facts.fp8.block is None else facts.fp8.block[0]
    for name, width in _mlp_widths(facts):
        if width % tp_size:
            return f"does not divide {name} of {width}"
        if width > block and width // tp_size % block:
            return f"cuts {name} of {width} inside an FP8 block of {block}"
    return None


def _mlp_widths(facts: ModelFacts) -> Iterator[tuple[str, int]]:
    """Every width that TP cuts, and what it is called."""
    moe = facts.moe
    if moe is None or moe.dense_layers:
        yield "the MLP's intermediate size", facts.intermediate_size
    if moe is not None:
        yield "the experts' intermediate size", moe.expert_intermediate_size
        if moe.shared_intermediate_size:
            yield "the shared experts' intermediate size", moe.shared_intermediate_size


def _family(keys: ConfigKeys) -> Family:
    architectures = keys.get("architectures")
    supported = ", ".join(FAMILIES)
    if not isinstance(architectures, list) or not architectures:
        raise keys.error("architectures", f"is missing; supported architectures: {supported}")
    family = FAMILIES.get(architectures[0]) if isinstance(architectures[0], str) else None
    if family is None:
        name = str(architectures[0])[:80]
        problem = "is not served"
        if name in PLANNED_ONLY:
            problem = "can be planned (stagemesh plan) but is not served yet"
        raise keys.error(
            "architectures", f"says {name}, which {problem}; supported architectures: {supported}"
        )
    return family


def _refuse_what_is_not_implemented(keys: ConfigKeys, family: Family) -> None:
    if not keys.absent("quantization_config"):
        raise keys.error(
            "quantization_config",
            "is set, and quantized checkpoints are not served; "
            "use a float32, bfloat16 or float16 checkpoint of the model",
        )
    hidden_act = keys.text("hidden_act", default="silu")
    if hidden_act != "silu":
        raise keys.error("hidden_act", f'is "{hidden_act}"; only "silu" is implemented')
    window = _sliding_window(keys, family)
    positions = keys.integer("max_position_embeddings", maximum=1 << 31)
    if window is not None and window < positions:
        raise keys.error(
            "sliding_window",
            f"is {window}, below the {positions} positions; sliding-window attention is not "
            "implemented, use a checkpoint without it (sliding_window: null)",
        )
    layer_types = keys.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        raise keys.error("layer_types", 'names layers other than "full_attention"')


def _sliding_window(keys: ConfigKeys, family: Family) -> int | None:
    if not keys.present("sliding_window"):
        return family.sliding_window_when_absent
    if keys.absent("sliding_window") or keys.get("use_sliding_window") is False:
        return None
    return keys.integer("sliding_window", maximum=1 << 62)


def head_dim_of(keys: ConfigKeys, hidden_size: int, num_attention_heads: int) -> int:
    """Width of one head: written, or what the hidden size gives."""
    if keys.absent("head_dim"):
        if hidden_size % num_attention_heads:
            raise keys.error(
                "hidden_size",
                f"is {hidden_size}, which the {num_attention_heads} attention heads do not divide, "
                "and head_dim is not given",
            )
        head_dim = hidden_size // num_attention_heads
    else:
        head_dim = keys.integer("head_dim", maximum=_MAX_SIZE)
    if head_dim % 2:
        raise keys.error("head_dim", f"is {head_dim}; rotary embedding needs an even number")
    return head_dim


def _rotary(keys: ConfigKeys) -> tuple[float, RotaryScaling | None]:
    """`rope_theta` and scaling, from either spelling."""
    new_spelling = not keys.absent("rope_parameters")
    section_name = "rope_parameters" if new_spelling else "rope_scaling"
    section = keys.section(section_name)
    theta_keys = section if section.present("rope_theta") else keys
    theta = theta_keys.number("rope_theta", above=0.0, default=DEFAULT_ROPE_THETA)
    # "type" is how transformers wrote it before 4.43.
    type_key = "rope_type" if section.present("rope_type") else "type"
    rope_type = section.text(type_key, default="default")
    for owner in (keys, section):
        if owner.number("partial_rotary_factor", above=0.0, default=1.0) != 1.0:
            raise owner.error("partial_rotary_factor", "is not 1.0, which is not implemented")
    if rope_type == "default":
        if not section.only_scalars():
            raise keys.error(section_name, "differs by layer, which is not implemented")
        return theta, None
    if rope_type != "llama3":
        raise section.error(
            type_key, f'is "{rope_type}"; rotary types that are implemented: default, llama3'
        )
    scaling = RotaryScaling(
        factor=section.number("factor", above=0.0),
        low_freq_factor=section.number("low_freq_factor", above=0.0),
        high_freq_factor=section.number("high_freq_factor", above=0.0),
        original_max_position_embeddings=section.integer(
            "original_max_position_embeddings", maximum=1 << 31
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise section.error(
            "high_freq_factor",
            f"is {scaling.high_freq_factor}; it must be above low_freq_factor, "
            f"which is {scaling.low_freq_factor}",
        )
    return theta, scaling


def checkpoint_dtype(keys: ConfigKeys) -> str:
    """What config.json says; transformers reads an absent key as float32."""
    key = "dtype" if not keys.absent("dtype") else "torch_dtype"
    dtype = keys.text(key, default="float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise keys.error(key, f'is "{dtype[:80]}"; supported element types: {known}')
    return dtype
