"""config.json to facts: both spellings, defaults, and everything that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.errors import ConfigError, ModelError, PartitionError
from services.topology.compatibility import check_topology
from services.topology.facts import ModelFacts, RotaryScaling
from services.topology.families import (
    read_model_facts,
    resolve_dtype,
    resolve_max_model_len,
    valid_tp_sizes,
)
from tests.unit.topology.model_directory import LLAMA_CONFIG, ModelDirectory

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMOLLM2 = ModelFacts(
    path=Path("/models/smollm2"),
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    dtype="float32",
)


def test_facts_of_a_llama(model: ModelDirectory) -> None:
    facts = model.facts()
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.head_dim == 4
    assert facts.num_key_value_heads == 2
    assert facts.rope_theta == 10000.0
    assert facts.rope_scaling is None
    assert facts.dtype == "float32"
    assert not facts.attention_bias and not facts.mlp_bias


def test_both_spellings_of_rotary_and_dtype_give_the_same_facts(model: ModelDirectory) -> None:
    model.write_config(rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5}, dtype="bfloat16")
    new = model.facts()
    assert new.rope_theta == 5e5
    assert new.rope_scaling == RotaryScaling(8.0, 1.0, 4.0, 64)
    model.write_config(
        "rope_parameters",
        "dtype",
        rope_theta=5e5,
        rope_scaling=LLAMA3_SCALING,
        torch_dtype="bfloat16",
    )
    assert model.facts() == new
    model.write_config(
        rope_scaling={
            "type": "llama3",
            **{k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"},
        }
    )
    assert model.facts() == new


def test_absent_keys_take_transformers_defaults(model: ModelDirectory) -> None:
    model.write_config(
        "num_key_value_heads", "dtype", "hidden_act", "tie_word_embeddings", "model_type"
    )
    facts = model.facts()
    assert facts.num_key_value_heads == facts.num_attention_heads
    assert facts.dtype == "float32"
    assert facts.tie_word_embeddings is False
    model.write_config(head_dim=10, attention_bias=True, mlp_bias=True)
    facts = model.facts()
    assert facts.head_dim == 10
    assert facts.attention_bias and facts.mlp_bias


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_a_missing_key_is_named_with_its_file(model: ModelDirectory, key: str) -> None:
    model.write_config(key)
    with pytest.raises(ModelError) as caught:
        model.facts()
    assert f"{model.path / 'config.json'}: {key} is missing" in str(caught.value)


def test_mistral_without_sliding_window(model: ModelDirectory) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    model.write_config(**mistral, sliding_window=None, attention_bias=True)
    facts = model.facts()
    assert facts.architecture == "MistralForCausalLM"
    assert not facts.attention_bias, "Mistral's projections have no bias, whatever the key says"
    # A window that no position leaves changes nothing.
    model.write_config(sliding_window=128)
    assert model.facts() == facts
    model.write_config(sliding_window=64)
    with pytest.raises(ModelError, match="sliding_window is 64, below the 128 positions"):
        model.facts()
    # Absent means 4096 for Mistral, as in transformers.
    model.write_config("sliding_window", max_position_embeddings=8192)
    with pytest.raises(ModelError, match="sliding_window is 4096, below the 8192 positions"):
        model.facts()
    model.write_config("num_key_value_heads", sliding_window=None)
    with pytest.raises(ModelError, match="num_key_value_heads is missing"):
        model.facts()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported architectures: LlamaForCausalLM, Mis"),
        ({"architectures": []}, "supported architectures: LlamaForCausalLM"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not served"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints are not served"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu"'),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            'rope_scaling.rope_type is "yarn"',
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs by layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}},
            "must be above low_freq_factor",
        ),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"dtype": "float64"}, "supported element types: float32, bfloat16, float16"),
        ({"num_key_value_heads": 4}, "does not divide the 6 attention heads"),
        ({"hidden_size": 25}, "attention heads do not divide"),
        ({"head_dim": 3}, "needs an even number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": True}, "vocab_size must be an integer, not bool"),
        ({"vocab_size": 50.5}, "vocab_size must be an integer, not float"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_what_is_not_served_is_refused_with_its_reason(
    model: ModelDirectory, changes: dict[str, object], reason: str
) -> None:
    model.write_config(**changes)
    with pytest.raises(ModelError) as caught:
        model.facts()
    assert reason in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a":' + b"[" * 100_000, "not"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not a JSON file that can be read"),
    ],
)
def test_a_file_that_is_no_config(model: ModelDirectory, data: bytes, reason: str) -> None:
    (model.path / "config.json").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        model.facts()
    assert reason in str(caught.value)


def test_missing_directory_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; give a local"):
        read_model_facts(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_model_facts(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
config_keys = st.sampled_from(
    [*LLAMA_CONFIG, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window"]
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(config_keys, json_values, min_size=1, max_size=3))
def test_any_json_gives_facts_or_a_model_error(
    model: ModelDirectory, changes: dict[str, object]
) -> None:
    (model.path / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **changes}))
    try:
        facts = model.facts()
    except ModelError as error:
        assert "config.json" in error.message
    else:
        assert facts.head_dim * facts.num_attention_heads > 0


def test_nine_heads_on_two_ranks_names_the_sizes_that_work() -> None:
    assert valid_tp_sizes(SMOLLM2) == (1, 3)
    with pytest.raises(ConfigError) as caught:
        check_topology(SMOLLM2, 2, 1)
    assert caught.value.message == (
        "tensor parallel size 2 does not divide the 9 attention heads: every rank of a stage "
        "computes whole heads and an equal part of the MLP; sizes that work for this model: 1, 3 "
        "(rule tp-does-not-divide)"
    )
    assert caught.value.param == "--tensor-parallel-size"
    check_topology(SMOLLM2, 3, 30)


def test_kv_heads_are_divided_or_held_by_several_ranks() -> None:
    facts = replace(SMOLLM2, num_attention_heads=24, num_key_value_heads=4)
    assert valid_tp_sizes(facts) == (1, 2, 4, 8, 12, 24)
    with pytest.raises(ConfigError, match="neither divides the 4 KV heads nor is a multiple"):
        check_topology(facts, 6, 1)
    narrow = replace(facts, intermediate_size=1532)
    with pytest.raises(ConfigError, match="does not divide the MLP's intermediate size of 1532"):
        check_topology(narrow, 8, 1)


def test_sizes_below_one_and_stages_above_layers() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        check_topology(SMOLLM2, 0, 1)
    with pytest.raises(PartitionError, match="31 is above the model's 30 hidden layers"):
        check_topology(SMOLLM2, 1, 31)


@pytest.mark.parametrize(
    ("flag", "stored", "device", "expected"),
    [
        ("auto", "float32", "cpu", "float32"),
        ("auto", "bfloat16", "cpu", "bfloat16"),
        ("auto", "float16", "cpu", "float32"),
        ("auto", "float16", "sim", "float32"),
        ("auto", "float32", "npu", "bfloat16"),
        ("auto", "float16", "npu", "float16"),
        ("auto", "bfloat16", "cuda", "bfloat16"),
        ("float16", "float32", "cpu", "float16"),
        ("float32", "bfloat16", "npu", "float32"),
    ],
)
def test_dtype(flag: str, stored: str, device: str, expected: str) -> None:
    assert resolve_dtype(flag, replace(SMOLLM2, dtype=stored), device) == expected


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="use one of auto, float32, bfloat16, float16"):
        resolve_dtype("fp8", SMOLLM2, "cpu")


def test_max_model_len() -> None:
    assert resolve_max_model_len(None, SMOLLM2) == 8192
    assert resolve_max_model_len(8192, SMOLLM2) == 8192
    assert resolve_max_model_len(1, SMOLLM2) == 1
    with pytest.raises(ConfigError, match="8193 is above the model's 8192 positions"):
        resolve_max_model_len(8193, SMOLLM2)
    with pytest.raises(ConfigError, match="at least 1"):
        resolve_max_model_len(0, SMOLLM2)
