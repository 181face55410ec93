"""config.json to facts for planning: published sizes, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.errors import ModelError
from services.topology.families import FAMILIES, PLANNED_ONLY, read_model_facts, valid_tp_sizes
from services.topology.memory import kv_elements_per_token
from services.topology.planfacts import PLANNED_FAMILIES, read_planned_model
from services.topology.weightcheck import check_weight_bytes
from services.topology.weights import layer_bytes, layer_weights, model_weights
from tests.unit.topology.model_directory import LLAMA_CONFIG, ModelDirectory
from tests.unit.topology.published_configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_FILE_BYTES,
    MIXTRAL_8X22B,
    MIXTRAL_8X22B_INDEX_BYTES,
    QWEN2_14B,
    QWEN2_14B_INDEX_BYTES,
    QWEN3_MOE_30B,
    QWEN3_MOE_30B_INDEX_BYTES,
    write_config,
)


def test_what_is_served_and_what_is_only_planned_are_all_that_is_known() -> None:
    assert set(PLANNED_FAMILIES) == set(FAMILIES) | set(PLANNED_ONLY)
    assert not set(FAMILIES) & set(PLANNED_ONLY)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (MIXTRAL_8X22B, MIXTRAL_8X22B_INDEX_BYTES),
        (QWEN2_14B, QWEN2_14B_INDEX_BYTES),
        (QWEN3_MOE_30B, QWEN3_MOE_30B_INDEX_BYTES),
    ],
)
def test_published_index_totals(tmp_path: Path, config: dict[str, object], published: int) -> None:
    facts = read_planned_model(write_config(tmp_path, config)).facts
    assert check_weight_bytes(tmp_path, facts).computed_bytes == published


def test_deepseek_v3_is_its_published_size(tmp_path: Path) -> None:
    facts = read_planned_model(write_config(tmp_path, DEEPSEEK_V3)).facts
    weights = check_weight_bytes(tmp_path, facts)
    total = weights.computed_bytes + weights.not_loaded_bytes
    # The files also hold 163 headers, some 70 KB each.
    assert 0 < DEEPSEEK_V3_FILE_BYTES - total < DEEPSEEK_V3_FILE_BYTES * 0.0001


def test_deepseek_v3_layers(tmp_path: Path) -> None:
    facts = read_planned_model(write_config(tmp_path, DEEPSEEK_V3)).facts
    assert [facts.is_moe_layer(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    names = {spec.name: spec for spec in layer_weights(facts, 3)}
    prefix = "model.layers.3."
    assert names[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
    # 576 rows are four and a half blocks of 128: the last one has a scale too.
    assert names[f"{prefix}self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 56)
    assert names[f"{prefix}mlp.experts.255.down_proj.weight"].dtype == "float8_e4m3fn"
    assert names[f"{prefix}mlp.shared_experts.up_proj.weight_scale_inv"].shape == (16, 56)
    assert names[f"{prefix}mlp.gate.weight"].dtype is None
    assert names[f"{prefix}mlp.gate.e_score_correction_bias"].dtype == "float32"
    dense = {spec.name for spec in layer_weights(facts, 2)}
    assert "model.layers.2.mlp.gate_proj.weight" in dense
    assert "model.layers.2.mlp.gate.weight" not in dense


def test_a_latent_cache_is_the_same_on_every_rank(tmp_path: Path) -> None:
    facts = read_planned_model(write_config(tmp_path, DEEPSEEK_V3)).facts
    assert [kv_elements_per_token(facts, size) for size in (1, 8, 16)] == [576] * 3


def test_tp_must_not_cut_inside_an_fp8_block(tmp_path: Path) -> None:
    facts = read_planned_model(write_config(tmp_path, DEEPSEEK_V3)).facts
    assert valid_tp_sizes(facts) == (1, 2, 4, 8, 16)
    file = write_config(tmp_path, DEEPSEEK_V3, quantization_config=None)
    assert valid_tp_sizes(read_planned_model(file).facts)[-1] == 128


def test_every_rank_together_holds_the_layers(tmp_path: Path) -> None:
    facts = read_planned_model(write_config(tmp_path, QWEN3_MOE_30B)).facts
    one, four = layer_bytes(facts, 1, "bfloat16"), layer_bytes(facts, 4, "bfloat16")
    # Norms and routers are on every rank; all else is cut.
    norms = 2 * 2048 + 2 * 128
    whole = (norms + 128 * 2048) * 2
    assert [(size - whole) * 4 + whole for size in four] == list(one)


def test_serve_refuses_what_can_only_be_planned_by_its_name(tmp_path: Path) -> None:
    file = write_config(tmp_path, DEEPSEEK_V3)
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM, which can be planned") as caught:
        read_model_facts(tmp_path)
    assert "not served yet" in caught.value.message
    assert read_planned_model(file).serve_obstacle == caught.value.message


def test_a_served_model_is_read_as_serve_reads_it(model: ModelDirectory) -> None:
    planned = read_planned_model(model.path / "config.json")
    assert planned.facts == model.facts()
    assert planned.serve_obstacle is None


def test_a_checkpoint_that_serve_refuses_is_planned(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    planned = read_planned_model(write_config(tmp_path, LLAMA_CONFIG, rope_scaling=yarn))
    assert planned.serve_obstacle is not None and '"yarn"' in planned.serve_obstacle
    plain = read_planned_model(write_config(tmp_path, LLAMA_CONFIG))
    assert model_weights(planned.facts) == model_weights(plain.facts)
    window = read_planned_model(
        write_config(
            tmp_path, LLAMA_CONFIG, architectures=["MistralForCausalLM"], sliding_window=64
        )
    )
    assert window.sliding_window == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel, which cannot be planned"),
        ({"architectures": []}, "architectures is missing"),
        ({"n_routed_experts": None}, "n_routed_experts is missing"),
        ({"n_routed_experts": 0}, "n_routed_experts is 0"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank must be an integer"),
        ({"moe_layer_freq": -1}, "moe_layer_freq is -1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"num_nextn_predict_layers": 1000}, "num_nextn_predict_layers is 1000"),
        ({"quantization_config": {"quant_method": "awq"}}, 'quant_method is "awq"'),
        ({"quantization_config": []}, "quantization_config must be an object"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size must be two positive integers",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "does not divide the 128 attention heads"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_planned_model(write_config(tmp_path, DEEPSEEK_V3, **changes))


def test_mlp_only_layers_must_be_a_list(tmp_path: Path) -> None:
    file = write_config(tmp_path, QWEN3_MOE_30B, mlp_only_layers=3)
    with pytest.raises(ModelError, match="mlp_only_layers must be a list"):
        read_planned_model(file)
    file = write_config(tmp_path, QWEN3_MOE_30B, mlp_only_layers=[0], decoder_sparse_step=2)
    moe = read_planned_model(file).facts.moe
    assert moe is not None
    assert moe.dense_layers == {0, *range(0, 48, 2)}


def test_the_weights_beside_the_config(model: ModelDirectory) -> None:
    nothing = check_weight_bytes(model.path, model.facts())
    assert (nothing.source, nothing.equal) == (None, None)
    model.write_sharded()
    same = check_weight_bytes(model.path, model.facts())
    assert (same.source, same.equal, same.problem) == ("headers", True, None)
    assert same.checkpoint_bytes == same.computed_bytes
    model.write_config(num_hidden_layers=4)
    more = check_weight_bytes(model.path, model.facts())
    assert more.equal is False
    assert more.problem is not None and "model.layers.3." in more.problem
    assert "missing" in more.problem


def test_an_index_without_its_files_is_compared_by_its_total(tmp_path: Path) -> None:
    facts = read_planned_model(write_config(tmp_path, MIXTRAL_8X22B)).facts
    index = tmp_path / "model.safetensors.index.json"
    for total, equal in ((MIXTRAL_8X22B_INDEX_BYTES, True), (1, False)):
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": {}}))
        found = check_weight_bytes(tmp_path, facts)
        assert (found.source, found.equal, found.checkpoint_bytes) == ("index", equal, total)
    index.write_text(json.dumps({"weight_map": {}}))
    assert check_weight_bytes(tmp_path, facts).equal is None


def test_damaged_weights_are_no_reason_to_refuse_a_plan(model: ModelDirectory) -> None:
    file = model.write_single()
    file.write_bytes(file.read_bytes()[:-1])
    found = check_weight_bytes(model.path, model.facts())
    assert found.equal is None
    assert found.problem is not None and "truncated" in found.problem
