"""Computed weight bytes against checkpoints that nobody here wrote: transformers' own models of
every family that can be planned, and the demo model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.topology.plan import make_plan
from services.topology.plan_result import PlanSettings
from services.topology.planfacts import PLANNED_FAMILIES, read_planned_model
from services.topology.weightcheck import WeightCheck, check_weight_bytes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SHARD_BYTES = 16_000
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DEEPSEEK: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", COMMON | {"tie_word_embeddings": True}),
    "mistral": ("Mistral", COMMON | {"head_dim": 16}),
    "mixtral": ("Mixtral", COMMON | {"num_local_experts": 4}),
    "qwen2": ("Qwen2", COMMON),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 16, "attention_bias": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        COMMON
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "head_dim": 16,
        },
    ),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 12}),
    "deepseek-v3-bias": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 12, "attention_bias": True}),
}


def make_tiny_checkpoint(path: Path, name: str, keys: dict[str, Any]) -> Path:
    """A model of transformers with random weights in several files, and their index."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**keys)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(path, max_shard_size=SHARD_BYTES)
    return path


@pytest.fixture(scope="module", params=sorted(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, keys = MODELS[request.param]
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), name, keys)


def check(path: Path) -> WeightCheck:
    return check_weight_bytes(path, read_planned_model(path / "config.json").facts)


def test_every_family_has_a_checkpoint() -> None:
    assert {f"{name}ForCausalLM" for name, _ in MODELS.values()} == set(PLANNED_FAMILIES)


def test_the_computed_tensors_are_the_stored_ones(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    found = check(checkpoint)
    assert (found.source, found.equal, found.problem) == ("headers", True, None)
    # Not only what is needed is there: nothing else is.
    assert found.computed_bytes == found.checkpoint_bytes == index["metadata"]["total_size"]
    assert found.not_loaded_bytes == 0


def test_the_index_alone_says_the_same(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    found = check(tmp_path)
    assert (found.source, found.equal) == ("index", True)


def test_stages_together_hold_the_checkpoint(checkpoint: Path) -> None:
    planned = read_planned_model(checkpoint / "config.json")
    plan = make_plan(planned, PlanSettings(pipeline_parallel_size=3))
    stored = check(checkpoint).checkpoint_bytes
    held = sum(stage.weight_bytes for stage in plan.stages)
    twice = plan.stages[0].embedding_bytes if planned.facts.tie_word_embeddings else 0
    assert held - twice == stored


def test_the_demo_model(demo_model: Path) -> None:
    found = check(demo_model)
    assert found.equal is True
    assert found.computed_bytes == found.checkpoint_bytes == 538_060_032
