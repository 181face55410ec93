"""Memory per stage: weights equal the checkpoint's, TP slices, ties, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.topology.facts import MeshShape, ModelFacts
from services.topology.memory import StageMemory, predict_mesh
from services.topology.partition import even_partition
from services.topology.weights import kv_heads_per_rank, model_weights, stage_weights
from tests.unit.topology.test_families import SMOLLM2

# Bytes of all tensors of SmolLM2-135M-Instruct in float32, as its safetensors header has them.
SMOLLM2_WEIGHT_BYTES = 538_060_032
SMOLLM2_EMBEDDING_BYTES = 49_152 * 576 * 4


def mesh(tp_size: int, pp_size: int, facts: ModelFacts = SMOLLM2) -> MeshShape:
    return MeshShape(1, tp_size, pp_size, even_partition(facts.num_hidden_layers, pp_size))


def predict(facts: ModelFacts, shape: MeshShape, dtype: str = "float32") -> tuple[StageMemory, ...]:
    return predict_mesh(
        facts, shape, dtype=dtype, block_size=16, max_num_batched_tokens=512, max_num_seqs=64
    )


def test_one_rank_holds_exactly_the_checkpoint() -> None:
    (stage,) = predict(SMOLLM2, mesh(1, 1))
    assert stage.weight_bytes == SMOLLM2_WEIGHT_BYTES
    (half,) = predict(SMOLLM2, mesh(1, 1), "bfloat16")
    assert half.weight_bytes * 2 == SMOLLM2_WEIGHT_BYTES


@pytest.mark.parametrize("pp_size", [2, 3, 4, 30])
def test_tied_embeddings_are_held_at_both_ends(pp_size: int) -> None:
    stages = predict(SMOLLM2, mesh(1, pp_size))
    assert sum(stage.weight_bytes for stage in stages) == (
        SMOLLM2_WEIGHT_BYTES + SMOLLM2_EMBEDDING_BYTES
    )
    untied = replace(SMOLLM2, tie_word_embeddings=False)
    assert sum(s.weight_bytes for s in predict(untied, mesh(1, pp_size))) == (
        SMOLLM2_WEIGHT_BYTES + SMOLLM2_EMBEDDING_BYTES
    )


def test_stages_together_hold_every_tensor_once() -> None:
    facts = replace(SMOLLM2, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    shape = mesh(1, 4)
    names = [spec.name for rank in range(4) for spec in stage_weights(facts, shape, rank)]
    assert len(names) == len(set(names))
    assert set(names) == {spec.name for spec in model_weights(facts)}


def test_tensor_parallel_slices() -> None:
    (whole,) = predict(SMOLLM2, mesh(1, 1))
    (third,) = predict(SMOLLM2, mesh(3, 1))
    norms = (2 * 30 + 1) * 576 * 4
    assert third.weight_bytes - norms == (whole.weight_bytes - norms) // 3
    assert third.kv_bytes_per_token * 3 == whole.kv_bytes_per_token


def test_kv_heads_are_held_several_times_when_there_are_more_ranks() -> None:
    facts = replace(SMOLLM2, num_attention_heads=24, num_key_value_heads=4)
    assert [kv_heads_per_rank(facts, size) for size in (1, 2, 4, 8)] == [4, 2, 1, 1]
    (four,) = predict(facts, mesh(4, 1))
    (eight,) = predict(facts, mesh(8, 1))
    assert four.kv_bytes_per_token == eight.kv_bytes_per_token


def test_vocabulary_is_padded_to_the_ranks() -> None:
    facts = replace(SMOLLM2, vocab_size=49_150)
    (stage,) = predict(facts, mesh(3, 1))
    (round_up,) = predict(replace(SMOLLM2, vocab_size=49_152), mesh(3, 1))
    assert stage.weight_bytes == round_up.weight_bytes


def test_kv_bytes() -> None:
    first, second = predict(SMOLLM2, MeshShape(1, 1, 2, (20, 10)))
    assert first.kv_bytes_per_token == 20 * 2 * 3 * 64 * 4
    assert second.kv_bytes_per_token * 2 == first.kv_bytes_per_token
    assert first.kv_block_bytes == 16 * first.kv_bytes_per_token
    assert (first.layer_start, first.layer_end) == (0, 20)
    assert (second.layer_start, second.layer_end) == (20, 30)


def test_only_the_last_stage_pays_for_logits() -> None:
    first, middle, last = predict(SMOLLM2, mesh(1, 3))
    assert first.activation_bytes == middle.activation_bytes
    assert last.activation_bytes - middle.activation_bytes == 64 * 49_152 * 4 * 3


def test_usable_blocks() -> None:
    (stage,) = predict(SMOLLM2, mesh(1, 1))
    assert stage.usable_blocks(stage.fixed_bytes + 3 * stage.kv_block_bytes) == 3
    assert stage.usable_blocks(stage.fixed_bytes + 3 * stage.kv_block_bytes - 1) == 2
    assert stage.usable_blocks(0) == 0
    assert stage.blocks_in(2 * stage.kv_block_bytes) == 2
