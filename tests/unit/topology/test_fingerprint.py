"""Fingerprints: what they cover, and that a difference names its field and both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import FingerprintMismatch, JoinRefused
from services.topology.checkpoint import inspect_checkpoint
from services.topology.facts import MeshShape
from services.topology.fingerprint import (
    build_fingerprint,
    check_fingerprint,
    differences,
    digest,
    environment_fingerprint,
    require_equal,
)
from stagemesh.v1 import topology_pb2
from stagemesh.version import __version__
from tests.unit.topology.model_directory import ModelDirectory

SHAPE = MeshShape(1, 2, 2, (2, 1))


def fingerprint(
    model: ModelDirectory,
    shape: MeshShape = SHAPE,
    dtype: str = "float32",
    block_size: int = 16,
) -> topology_pb2.Fingerprint:
    checkpoint = inspect_checkpoint(model.path)
    return build_fingerprint(checkpoint, shape, dtype=dtype, block_size=block_size)


def of_fields(*fields: tuple[str, str]) -> topology_pb2.Fingerprint:
    return topology_pb2.Fingerprint(
        digest=digest(fields),
        fields=[topology_pb2.FingerprintField(name=name, value=value) for name, value in fields],
    )


def test_the_same_model_and_plan_give_the_same_fingerprint(model: ModelDirectory) -> None:
    model.write_sharded(2)
    one = fingerprint(model)
    # Another spelling of the same configuration: order, spacing, who saved it.
    model.config = dict(reversed(model.config.items()))
    model.config["transformers_version"] = "9.9"
    (model.path / "config.json").write_text(json.dumps(model.config, indent=4))
    two = fingerprint(model)
    assert one == two
    require_equal(one, two)
    names = [field.name for field in one.fields]
    assert names[:8] == [
        "config",
        "weights",
        "dp_size",
        "tp_size",
        "pp_size",
        "pp_layer_partition",
        "dtype",
        "block_size",
    ]
    assert len(one.digest) == 64
    assert {field.name: field.value for field in one.fields}["stagemesh"] == __version__


@pytest.mark.parametrize(
    ("change", "field", "ours", "theirs"),
    [
        (lambda m: fingerprint(m, replace(SHAPE, tp_size=1)), "tp_size", "2", "1"),
        (lambda m: fingerprint(m, replace(SHAPE, dp_size=3)), "dp_size", "1", "3"),
        (
            lambda m: fingerprint(m, replace(SHAPE, pp_layer_partition=(1, 2))),
            "pp_layer_partition",
            "2,1",
            "1,2",
        ),
        (lambda m: fingerprint(m, dtype="bfloat16"), "dtype", "float32", "bfloat16"),
        (lambda m: fingerprint(m, block_size=32), "block_size", "16", "32"),
    ],
)
def test_a_difference_names_field_and_both_values(
    model: ModelDirectory,
    change: Callable[[ModelDirectory], topology_pb2.Fingerprint],
    field: str,
    ours: str,
    theirs: str,
) -> None:
    model.write_single()
    head, worker = fingerprint(model), change(model)
    assert differences(head, worker) == ((field, ours, theirs),)
    assert head.digest != worker.digest
    with pytest.raises(FingerprintMismatch) as caught:
        require_equal(head, worker, worker_name="worker 10.0.0.2:7000")
    assert caught.value.param == field
    assert (
        f"{field} differs: the head has {ours} and worker 10.0.0.2:7000 has {theirs}"
        in caught.value.message
    )


def test_another_config_and_other_weights(model: ModelDirectory) -> None:
    model.write_single()
    head = fingerprint(model)
    model.write_config(rope_theta=500000.0)
    (difference,) = differences(head, fingerprint(model))
    assert difference.name == "config"
    model.write_config("rope_theta")
    model.write_single({**model.arrays(), **{"extra": model.arrays()["model.norm.weight"]}})
    (difference,) = differences(head, fingerprint(model))
    assert difference.name == "weights"
    with pytest.raises(FingerprintMismatch, match="same copy of the model"):
        require_equal(head, fingerprint(model))


def test_the_index_is_covered(model: ModelDirectory) -> None:
    model.write_sharded(2)
    head = fingerprint(model)
    index = model.path / "model.safetensors.index.json"
    index.write_text(index.read_text() + "\n")
    (difference,) = differences(head, fingerprint(model))
    assert difference.name == "weights"


def test_only_fields_that_both_have_are_compared(model: ModelDirectory) -> None:
    model.write_single()
    plan = fingerprint(model)
    require_equal(plan, environment_fingerprint())
    require_equal(of_fields(("torch", "1")), of_fields(("torch_npu", "2")))
    with pytest.raises(FingerprintMismatch, match="install the same version of torch"):
        require_equal(of_fields(("torch", "1")), of_fields(("torch", "2")))


def test_a_fingerprint_that_is_none() -> None:
    good = of_fields(("a", "1"), ("b", "2"))
    check_fingerprint(good)
    forged = topology_pb2.Fingerprint(digest="0" * 64, fields=good.fields)
    with pytest.raises(JoinRefused, match="digest is 0000"):
        require_equal(good, forged)
    with pytest.raises(JoinRefused, match="digest"):
        require_equal(good, topology_pb2.Fingerprint())
    with pytest.raises(JoinRefused, match="has field a twice"):
        require_equal(good, of_fields(("a", "1"), ("a", "2")))
    with pytest.raises(JoinRefused, match="at most 100"):
        require_equal(good, of_fields(*((str(i), "") for i in range(101))))
    with pytest.raises(FingerprintMismatch) as caught:
        require_equal(good, of_fields(("a", "x" * 100_000)))
    assert len(caught.value.message) < 500


field_lists = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=4)


@given(field_lists, field_lists)
def test_different_fields_give_different_digests(
    one: list[tuple[str, str]], two: list[tuple[str, str]]
) -> None:
    assert (digest(one) == digest(two)) == (one == two)


def test_nodes_must_not_contradict_each_other_about_their_links(model: ModelDirectory) -> None:
    model.write_single()
    checkpoint = inspect_checkpoint(model.path)
    auto, hccs, roce = (
        build_fingerprint(
            checkpoint, SHAPE, dtype="float32", block_size=16, nnodes=2, interconnect=links
        )
        for links in ("auto", "hccs", "roce")
    )
    require_equal(auto, roce)
    require_equal(hccs, auto)
    with pytest.raises(FingerprintMismatch) as caught:
        require_equal(hccs, roce)
    assert caught.value.message == (
        "interconnect differs: the head has hccs and the worker has roce; state the same "
        "--interconnect on every node"
    )
