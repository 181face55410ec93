"""What a rank reads of a checkpoint, and how it comes from one plan to another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.errors import ConfigError, ModelError, StageFailed
from services.topology.families import FAMILIES, read_model_facts
from services.topology.weights import model_weights, stage_weights
from services.topology.wire import shape_from_proto
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.models import LAYER_FAMILIES
from stage_worker.platforms import select_platform
from stage_worker.runner import StageRunner
from stage_worker.weights import WeightReader
from stagemesh.v1 import step_pb2
from tests.stage_chain import GREEDY, make_runner, stage_plan

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
PARTITION = (2, 2)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A tied model of four layers in two files."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    files: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    weight_map = {}
    for i, spec in enumerate(model_weights(read_model_facts(tmp_path))):
        files[i % 2][spec.name] = torch.randn(spec.shape, generator=generator)
        weight_map[spec.name] = f"part-{i % 2}.safetensors"
    for i, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"part-{i}.safetensors")
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    return tmp_path


def whole(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint."""
    return load_file(path / "part-0.safetensors") | load_file(path / "part-1.safetensors")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_slices_of_all_ranks_make_the_tensor(model_path: Path, tp_size: int) -> None:
    facts, tensors = read_model_facts(model_path), whole(model_path)
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(tp_size):
        with WeightReader(facts, rank, tp_size, torch.float32, torch.device("cpu")) as reader:
            for spec in model_weights(facts):
                parts.setdefault(spec.name, []).append(reader.read(spec))
    prefix = "model.layers.3.self_attn."

    def joined(name: str, dim: int) -> torch.Tensor:
        return torch.cat(parts[name], dim)

    assert joined(f"{prefix}q_proj.weight", 0).equal(tensors[f"{prefix}q_proj.weight"])
    assert joined(f"{prefix}q_proj.bias", 0).equal(tensors[f"{prefix}q_proj.bias"])
    assert joined(f"{prefix}o_proj.weight", 1).equal(tensors[f"{prefix}o_proj.weight"])
    assert all(p.equal(tensors[f"{prefix}o_proj.bias"]) for p in parts[f"{prefix}o_proj.bias"])
    # Two KV heads on four ranks: neighbours hold the same head.
    keys = parts[f"{prefix}k_proj.weight"]
    holders = max(1, tp_size // 2)
    assert torch.cat(keys[::holders]).equal(tensors[f"{prefix}k_proj.weight"])
    assert all(keys[i].equal(keys[i // holders * holders]) for i in range(tp_size))
    embedding = joined("model.embed_tokens.weight", 0)
    assert embedding[:37].equal(tensors["model.embed_tokens.weight"])
    assert not embedding[37:].any()
    assert len({len(part) for part in parts["model.embed_tokens.weight"]}) == 1


def test_a_stage_reads_its_own_tensors_and_reports_progress(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = WeightReader._slice

    def spy(self: WeightReader, file: str, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        read.append(name)
        return original(self, file, name, where)

    monkeypatch.setattr(WeightReader, "_slice", spy)
    plan = stage_plan(model_path, PARTITION, 1)
    seen: list[tuple[int, int]] = []
    runner = StageRunner(plan, 0, 0, select_platform("cpu"), TensorParallel())
    report = runner.load(lambda loaded_bytes, total_bytes: seen.append((loaded_bytes, total_bytes)))
    facts = read_model_facts(model_path)
    specs = stage_weights(facts, shape_from_proto(plan.topology), 1)
    assert sorted(read) == sorted(spec.name for spec in specs)
    expected = 4 * sum(spec.elements_per_rank(facts, 1) for spec in specs)
    assert report.weight_bytes == expected
    assert seen[0] == (0, expected)
    assert seen[-1] == (expected, expected)
    assert seen == sorted(seen)


def test_a_plan_is_reached_by_the_difference(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(stage_plan(model_path, (1, 3), 0, num_blocks=0))
    read: list[str] = []
    original = WeightReader.read
    monkeypatch.setattr(
        WeightReader, "read", lambda self, spec: read.append(spec.name) or original(self, spec)
    )
    nobody = lambda loaded_bytes, total_bytes: None  # noqa: E731
    without_cache = runner.apply_plan(stage_plan(model_path, (1, 3), 0, num_blocks=0), nobody)
    assert without_cache.num_blocks == 0
    assert without_cache.possible_blocks > 0
    allocated = runner.apply_plan(stage_plan(model_path, (1, 3), 0, num_blocks=5), nobody)
    assert (allocated.num_blocks, read) == (5, [])

    runner.apply_plan(stage_plan(model_path, (2, 2), 0), nobody)
    assert {name.split(".")[2] for name in read} == {"1"}
    assert [t.name for t in runner.boundary_out.tensors] == ["hidden_states"]
    # From the first stage to the last: layers 2 and 3 and both ends of it are new.
    read.clear()
    report = runner.apply_plan(stage_plan(model_path, (2, 2), 1), nobody)
    assert {name.split(".")[2] for name in read if ".layers." in name} == {"2", "3"}
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= set(read)
    assert not runner.boundary_out.tensors
    assert not report.boundary.tensors
    fresh = make_runner(stage_plan(model_path, (2, 2), 1))
    assert report.weight_bytes == fresh.load(nobody).weight_bytes
    x = torch.randn(3, 16)
    start = step_pb2.SlotStart(slot=0, sampling=GREEDY)
    row = step_pb2.StepRow(slot=0, token_ids=[1, 2, 3], new_block_ids=[0], num_sampled=1)
    step = step_pb2.Step(starts=[start], rows=[row])
    assert runner.run(step, (x,)).rows == fresh.run(step, (x,)).rows


def test_possible_blocks_follow_from_the_bytes_given(model_path: Path) -> None:
    plan = stage_plan(model_path, PARTITION, 0, num_blocks=0)
    plan.kv_cache_memory_bytes = 10_000
    report = make_runner(plan).load(lambda loaded_bytes, total_bytes: None)
    # 2 (keys, values) x 2 layers x 8 tokens x 2 heads x 4 x 4 bytes
    assert report.kv_block_bytes == 1024
    assert report.possible_blocks == 9


def test_a_missing_tensor_is_named(model_path: Path) -> None:
    tensors = load_file(model_path / "part-0.safetensors")
    name = "model.layers.2.self_attn.q_proj.weight"
    other = "part-1.safetensors" if name not in tensors else "part-0.safetensors"
    tensors = load_file(model_path / other)
    del tensors[name]
    save_file(tensors, model_path / other)
    with pytest.raises(ModelError, match=f"{other} has no tensor {name}"):
        make_runner(stage_plan(model_path, PARTITION, 1))


def test_a_truncated_file_is_named(model_path: Path) -> None:
    file = model_path / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"part-1\.safetensors.*truncated.*download"):
        make_runner(stage_plan(model_path, PARTITION, 0))


def test_a_tensor_of_another_shape_is_named(model_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 32}
    (model_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"mlp\.gate_proj\.weight has shape \[24, 16\].*\[32, 16\]"
    ):
        make_runner(stage_plan(model_path, PARTITION, 0))


def test_a_step_before_the_cache_is_refused(model_path: Path) -> None:
    runner = make_runner(stage_plan(model_path, PARTITION, 0, num_blocks=0))
    step = step_pb2.Step(step_id=1, rows=[step_pb2.StepRow(slot=0, token_ids=[1])])
    with pytest.raises(StageFailed, match="step 1 came before the KV cache"):
        runner.run(step, ())


def test_received_tensors_are_held_to_the_step(model_path: Path) -> None:
    runner = make_runner(stage_plan(model_path, PARTITION, 1))
    row = step_pb2.StepRow(slot=0, token_ids=[1, 2], new_block_ids=[0])
    step = step_pb2.Step(
        step_id=4, starts=[step_pb2.SlotStart(slot=0, sampling=GREEDY)], rows=[row]
    )
    prepared = runner.prepare(step)
    with pytest.raises(
        StageFailed, match=r"step 4 needs hidden_states \[2, 16\], received \[3, 16\]"
    ):
        runner.compute(prepared, (torch.zeros(3, 16),))


def test_a_step_that_only_releases_sends_nothing(model_path: Path) -> None:
    runner = make_runner(stage_plan(model_path, PARTITION, 0))
    start = step_pb2.SlotStart(slot=0, sampling=GREEDY)
    runner.run(step_pb2.Step(step_id=1, starts=[start]), ())
    output = runner.run(step_pb2.Step(step_id=2, released_slots=[0]), ())
    assert (output.sent, output.rows) == ((), [])


def test_steps_may_be_prepared_ahead_of_the_results_before(model_path: Path) -> None:
    """The slot of step 2's sequence is used again by step 3 before step 2 has sampled."""
    sampling = step_pb2.SamplingParams(temperature=0.0, seed=1, presence_penalty=2.0)

    def start(history: list[int]) -> step_pb2.SlotStart:
        return step_pb2.SlotStart(
            slot=0, sampling=sampling, prompt_length=len(history), history_token_ids=history
        )

    def row(tokens: list[int], position: int, **fields: object) -> step_pb2.StepRow:
        return step_pb2.StepRow(
            slot=0, position=position, token_ids=tokens, num_sampled=1, **fields
        )

    steps = [
        step_pb2.Step(step_id=1, starts=[start([1, 2])], rows=[row([1, 2], 0, new_block_ids=[4])]),
        step_pb2.Step(step_id=2, rows=[row([7], 2)]),
        step_pb2.Step(
            step_id=3,
            released_slots=[0],
            starts=[start([9])],
            rows=[row([9], 0, new_block_ids=[5])],
        ),
        step_pb2.Step(step_id=4, rows=[row([3], 1)]),
    ]
    runner = make_runner(stage_plan(model_path, (4,), 0))
    in_turn = [runner.run(step, ()).rows for step in steps]
    runner.reset()
    prepared = [runner.prepare(step) for step in steps]
    assert [runner.compute(step, ()).rows for step in prepared] == in_turn


def test_a_plan_that_cannot_be_reached_leaves_the_old_one(model_path: Path) -> None:
    runner = make_runner(stage_plan(model_path, (4,), 0))
    nowhere = stage_plan(model_path / "nowhere", (4,), 0)
    with pytest.raises(ModelError, match="nowhere does not exist"):
        runner.apply_plan(nowhere, lambda loaded_bytes, total_bytes: None)
    row = step_pb2.StepRow(slot=0, token_ids=[1], new_block_ids=[0], num_sampled=1)
    start = step_pb2.SlotStart(slot=0, sampling=GREEDY)
    assert runner.run(step_pb2.Step(starts=[start], rows=[row]), ()).rows


def test_a_plan_of_another_tp_size_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor parallel size 2, but this rank is one of 1"):
        make_runner(stage_plan(model_path, PARTITION, 0, tp_size=2))
    with pytest.raises(ConfigError, match=r"3 does not divide the 4 attention heads.*: 1, 2, 4"):
        make_runner(stage_plan(model_path, PARTITION, 0, tp_size=3), TensorParallel(0, 3))


def test_an_unknown_dtype_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match='dtype "int8" is not one of float32'):
        make_runner(stage_plan(model_path, PARTITION, 0, dtype="int8"))


def test_every_family_that_is_planned_can_be_run() -> None:
    assert set(LAYER_FAMILIES) == set(FAMILIES)
