"""The cut of whoever gives none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.topology.layouts import default_partition
from services.topology.partition import check_partition, even_partition
from tests.unit.topology.test_families import SMOLLM2


@pytest.mark.parametrize("device", ["npu", "cuda", "sim"])
@pytest.mark.parametrize("pp_size", [1, 2, 4, 7])
def test_devices_other_than_cpus_are_cut_as_vllm_cuts(device: str, pp_size: int) -> None:
    assert default_partition(SMOLLM2, 1, pp_size, device) == even_partition(30, pp_size)


@pytest.mark.parametrize(
    ("pp_size", "partition"),
    # The head is 49,152 x 576 weights, a layer 3,540,096: eight layers, which count as 2.7.
    [(1, (30,)), (2, (16, 14)), (3, (11, 11, 8)), (4, (8, 8, 8, 6))],
)
def test_on_cpus_a_third_of_the_head_counts(pp_size: int, partition: tuple[int, ...]) -> None:
    assert default_partition(SMOLLM2, 1, pp_size, "cpu") == partition


def test_a_head_that_is_small_changes_nothing() -> None:
    facts = replace(SMOLLM2, vocab_size=1000)
    assert default_partition(facts, 1, 2, "cpu") == (15, 15)


@given(st.integers(1, 80), st.data())
def test_every_stage_of_a_cpu_has_a_layer(num_layers: int, data: st.DataObject) -> None:
    facts = replace(
        SMOLLM2, num_hidden_layers=num_layers, vocab_size=data.draw(st.integers(1, 300_000))
    )
    pp_size = data.draw(st.integers(1, num_layers))
    partition = default_partition(facts, 1, pp_size, "cpu")
    check_partition(partition, num_layers, pp_size)
    assert partition[-1] <= even_partition(num_layers, pp_size)[-1] + 1
