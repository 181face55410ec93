"""The layer partition: the even rule, the user's own, and every rule that can be broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import PartitionError
from services.topology.partition import (
    PARTITION_ENV,
    PARTITION_FLAG,
    check_partition,
    even_partition,
    format_partition,
    parse_partition,
    resolve_partition,
)

sizes = st.integers(1, 200).flatmap(
    lambda layers: st.tuples(st.just(layers), st.integers(1, layers))
)


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "expected"),
    [
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (30, 2, (15, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (5, 3, (2, 2, 1)),
        (4, 3, (1, 2, 1)),
        (43, 10, (4, 4, 4, 4, 4, 4, 5, 5, 5, 4)),
        (7, 1, (7,)),
        (3, 3, (1, 1, 1)),
    ],
)
def test_even_partition_as_vllm_cuts_it(
    num_layers: int, pp_size: int, expected: tuple[int, ...]
) -> None:
    assert even_partition(num_layers, pp_size) == expected


@given(sizes)
def test_even_partition_is_even_and_spares_the_last_stage(size: tuple[int, int]) -> None:
    num_layers, pp_size = size
    partition = even_partition(num_layers, pp_size)
    assert len(partition) == pp_size
    assert sum(partition) == num_layers
    assert max(partition) - min(partition) <= 1
    assert partition[-1] == min(partition)
    # From the second-to-last stage down, larger stages come first.
    assert list(partition[:-1]) == sorted(partition[:-1])
    check_partition(partition, num_layers, pp_size)


@pytest.mark.parametrize(("num_layers", "pp_size"), [(2, 4), (30, 31)])
def test_more_stages_than_layers_names_both(num_layers: int, pp_size: int) -> None:
    with pytest.raises(PartitionError) as caught:
        even_partition(num_layers, pp_size)
    assert f"size {pp_size} is above the model's {num_layers} hidden layers" in str(caught.value)
    assert caught.value.param == "--pipeline-parallel-size"


@pytest.mark.parametrize("pp_size", [0, -1])
def test_no_stage_at_all(pp_size: int) -> None:
    with pytest.raises(PartitionError, match="at least 1"):
        resolve_partition(30, pp_size)


@pytest.mark.parametrize("text", ["31,30", "31, 30", " 31 ,30 ", "+31,030"])
def test_parse(text: str) -> None:
    assert parse_partition(text) == (31, 30)


@given(st.lists(st.integers(1, 9999), min_size=1))
def test_parse_reads_what_format_writes(partition: list[int]) -> None:
    assert parse_partition(format_partition(partition)) == tuple(partition)


@given(st.text(max_size=60))
def test_parse_gives_positive_integers_or_an_error(text: str) -> None:
    try:
        partition = parse_partition(text)
    except PartitionError as error:
        assert error.param == PARTITION_FLAG
    else:
        assert partition and all(layers >= 1 for layers in partition)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0,61", "stage 0 0 layers; every stage needs at least 1"),
        ("62,-1", "stage 1 -1 layers; every stage needs at least 1"),
        ("a,b", 'entry "a" of stage 0 is not a layer count'),
        ("31,", 'entry "" of stage 1 is not a layer count'),
        ("31.5,29.5", "not a layer count"),
        ("31;30", "not a layer count"),
        ("3_1,30", "not a layer count"),
        ("\u0663\u0661,30", "not a layer count"),
        ("9" * 5000 + ",1", "not a layer count"),
        ("", "is empty"),
        ("  ", "is empty"),
    ],
)
def test_a_partition_that_is_none(text: str, rule: str) -> None:
    with pytest.raises(PartitionError) as caught:
        parse_partition(text)
    assert rule in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("partition", "rule"),
    [
        ((0, 61), "every stage needs at least 1"),
        ((-1, 62), "every stage needs at least 1"),
        ((61,), "has 1 entries for 2 stages"),
        ((20, 20, 21), "has 3 entries for 2 stages"),
        ((), "has 0 entries for 2 stages"),
        ((31, 29), "sums to 60 layers, but the model has 61 hidden layers"),
    ],
)
def test_every_rule_is_named_for_flag_and_environment(
    partition: tuple[int, ...], rule: str
) -> None:
    with pytest.raises(PartitionError) as caught:
        resolve_partition(61, 2, partition)
    assert rule in caught.value.message
    assert caught.value.param == PARTITION_FLAG
    if partition:
        with pytest.raises(PartitionError) as caught:
            resolve_partition(61, 2, partition, PARTITION_ENV)
        assert rule in caught.value.message
        assert caught.value.param == PARTITION_ENV


def test_resolve_takes_the_users_partition_before_the_even_one() -> None:
    assert resolve_partition(61, 2) == (31, 30)
    assert resolve_partition(61, 2, (32, 29)) == (32, 29)
