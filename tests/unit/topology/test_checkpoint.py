"""Safetensors headers: whole checkpoints, and every way in which one can be damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from services.errors import ModelError
from services.topology.checkpoint import (
    MAX_HEADER_BYTES,
    check_weights,
    inspect_checkpoint,
    read_weight_file,
)
from tests.unit.topology.model_directory import ModelDirectory


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        inspect_checkpoint(path)
    return caught.value.message


def test_a_single_file(model: ModelDirectory) -> None:
    file = model.write_single()
    checkpoint = inspect_checkpoint(model.path)
    check_weights(checkpoint, model.facts())
    arrays = load_file(file)
    assert set(checkpoint.tensors) == set(arrays)
    assert checkpoint.weight_bytes == sum(array.nbytes for array in arrays.values())
    assert checkpoint.index_sha256 is None
    assert checkpoint.files[0].size_bytes == file.stat().st_size


def test_offsets_are_where_the_bytes_are(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
        "c": np.zeros((0, 5), dtype=np.float32),
        "d": np.array(7, dtype=np.int64),
    }
    file = tmp_path / "x.safetensors"
    save_file(arrays, file)
    data = file.read_bytes()
    tensors = {tensor.name: tensor for tensor in read_weight_file(file).tensors}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "a": "float32",
        "b": "float16",
        "c": "float32",
        "d": "I64",
    }
    for name, array in arrays.items():
        tensor = tensors[name]
        assert tensor.shape == array.shape
        assert data[tensor.data_start : tensor.data_end] == array.tobytes()


def test_a_sharded_checkpoint(model: ModelDirectory) -> None:
    files = model.write_sharded(3)
    checkpoint = inspect_checkpoint(model.path)
    check_weights(checkpoint, model.facts())
    assert [file.name for file in checkpoint.files] == [file.name for file in files]
    assert {name: tensor.file for name, tensor in checkpoint.tensors.items()} == model.read_index()
    assert checkpoint.index_sha256 is not None


def test_a_missing_shard(model: ModelDirectory) -> None:
    files = model.write_sharded(2)
    files[1].unlink()
    message = refusal(model.path)
    assert str(files[1]) in message and "is missing" in message and "download" in message


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_file_names_both_sizes(model: ModelDirectory, kept: int) -> None:
    file = model.write_single()
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    message = refusal(model.path)
    assert str(file) in message and "download" in message
    assert f"is {len(whole[:kept])} bytes" in message
    if kept == -1:
        assert str(len(whole)) in message and "truncated" in message


def test_bytes_after_the_last_tensor(model: ModelDirectory) -> None:
    file = model.write_single()
    file.write_bytes(file.read_bytes() + b"\0")
    assert "describes only" in refusal(model.path)


def test_a_tensor_that_only_the_index_has(model: ModelDirectory) -> None:
    files = model.write_sharded(2)
    model.write_index({**model.read_index(), "model.extra": files[0].name})
    assert f"{files[0]} has no tensor model.extra" in refusal(model.path)


def test_a_tensor_in_another_file_than_the_index_says(model: ModelDirectory) -> None:
    files = model.write_sharded(2)
    index = model.read_index()
    (other,) = (file for file in files if file.name != index["lm_head.weight"])
    model.write_index({**index, "lm_head.weight": other.name})
    assert f"{other} has no tensor lm_head.weight" in refusal(model.path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", 7, None])
def test_an_index_names_only_files_of_its_directory(model: ModelDirectory, name: object) -> None:
    model.write_index({"model.norm.weight": name})
    message = refusal(model.path)
    assert "is not in a file of this directory" in message or "is missing" in message


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(model: ModelDirectory, weight_map: object) -> None:
    model.write_index(weight_map)
    assert "weight_map is missing or empty" in refusal(model.path)


def test_other_formats_and_nothing_at_all(model: ModelDirectory) -> None:
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(model.path)
    (model.path / "pytorch_model.bin").touch()
    assert "pytorch_model*.bin" in refusal(model.path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"t": 3}, "has no description"),
        ({"t": {}}, "unknown element type None"),
        ({"t": entry(dtype="F99")}, "unknown element type F99"),
        ({"t": entry(dtype=["F32"])}, "unknown element type"),
        ({"t": entry(shape=[-2])}, "cannot be right"),
        ({"t": entry(shape=[2.0])}, "cannot be right"),
        ({"t": entry(shape=[True])}, "cannot be right"),
        ({"t": entry(shape="2")}, "cannot be right"),
        ({"t": entry(shape=[1] * 100)}, "cannot be right"),
        ({"t": entry(shape=[1 << 70])}, "cannot be right"),
        ({"t": entry(offsets=[0])}, "cannot be right"),
        ({"t": entry(offsets=None)}, "cannot be right"),
        ({"t": entry(offsets=[8, 0])}, "is 8 bytes, but its offsets 8 to 0 give -8"),
        ({"t": entry(shape=[3])}, "is 12 bytes, but its offsets 0 to 8 give 8"),
        ({"t": entry(shape=[1 << 62, 1 << 62])}, "but its offsets"),
        ({"t": entry(offsets=[4, 12])}, "the one before it ends at"),
        ({"t": entry(), "u": entry()}, "the one before it ends at"),
        ({"t": entry(shape=[1 << 40], offsets=[0, 1 << 42])}, "truncated"),
    ],
)
def test_a_header_that_cannot_be_right(
    model: ModelDirectory, header: dict[str, object], problem: str
) -> None:
    file = raw_file(model.path / "model.safetensors", header, b"\0" * 8)
    message = refusal(model.path)
    assert problem in message and str(file) in message


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most 100000000 are allowed"),
        (b"\xff" * 64, "at most 100000000 are allowed"),
        (struct.pack("<Q", 50) + b"{}", "its header alone ends at byte 58"),
        (struct.pack("<Q", 2) + b"[]", "must hold a JSON object"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not UTF-8"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not"),
    ],
)
def test_bytes_that_are_no_header(model: ModelDirectory, data: bytes, problem: str) -> None:
    (model.path / "model.safetensors").write_bytes(data)
    assert problem in refusal(model.path)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=200), st.integers(0, 1 << 64))
def test_hostile_bytes_give_a_model_error(tmp_path: Path, data: bytes, length: int) -> None:
    file = tmp_path / "x.safetensors"
    for content in (data, struct.pack("<Q", length % len(data or b"1")) + data):
        file.write_bytes(content)
        try:
            read_weight_file(file)
        except ModelError as error:
            assert "x.safetensors" in error.message


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_one_changed_header_byte_never_crashes(tmp_path: Path, position: int, value: int) -> None:
    arrays: dict[str, np.ndarray] = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(4, np.float16),
    }
    file = tmp_path / "x.safetensors"
    save_file(arrays, file)
    data = bytearray(file.read_bytes())
    data[position % len(data)] = value
    file.write_bytes(data)
    try:
        tensors = read_weight_file(file).tensors
    except ModelError as error:
        assert "x.safetensors" in error.message
    else:
        assert sum(tensor.num_bytes for tensor in tensors) <= len(data)


def test_a_tensor_of_the_family_that_is_missing(model: ModelDirectory) -> None:
    arrays = model.arrays()
    del arrays["model.layers.2.mlp.up_proj.weight"]
    model.write_single(arrays)
    with pytest.raises(ModelError) as caught:
        check_weights(inspect_checkpoint(model.path), model.facts())
    assert "has no tensor model.layers.2.mlp.up_proj.weight" in caught.value.message
    assert "LlamaForCausalLM with 3 layers" in caught.value.message


def test_a_missing_head_says_why_one_is_needed(model: ModelDirectory) -> None:
    arrays = model.arrays()
    del arrays["lm_head.weight"]
    model.write_single(arrays)
    checkpoint = inspect_checkpoint(model.path)
    with pytest.raises(ModelError, match="tie_word_embeddings is false"):
        check_weights(checkpoint, model.facts())
    model.write_config(tie_word_embeddings=True)
    check_weights(checkpoint, model.facts())


def test_a_wrong_shape_names_both(model: ModelDirectory) -> None:
    arrays = model.arrays()
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((9, 24), np.float32)
    file = model.write_single(arrays)
    with pytest.raises(ModelError) as caught:
        check_weights(inspect_checkpoint(model.path), model.facts())
    assert f"{file}: tensor model.layers.0.self_attn.k_proj.weight" in caught.value.message
    assert "has shape [9, 24], but config.json makes it [8, 24]" in caught.value.message


def test_an_element_type_that_is_not_served(model: ModelDirectory) -> None:
    arrays = model.arrays()
    arrays["model.norm.weight"] = np.zeros(24, np.int8)
    model.write_single(arrays)
    with pytest.raises(ModelError, match="element type I8; supported: float32, bfloat16, float16"):
        check_weights(inspect_checkpoint(model.path), model.facts())


def test_tensors_beyond_the_family_do_not_matter(model: ModelDirectory) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float64)}
    model.write_single({**model.arrays(), **extra})
    check_weights(inspect_checkpoint(model.path), model.facts())


def test_biases_are_part_of_the_family_where_the_config_says_so(model: ModelDirectory) -> None:
    model.write_single()
    model.write_config(attention_bias=True)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        check_weights(inspect_checkpoint(model.path), model.facts())
    model.write_single()
    check_weights(inspect_checkpoint(model.path), model.facts())
