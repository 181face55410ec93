"""Values: what is accepted, and that the rest is refused with a rule."""

from __future__ import annotations

import pytest

from services.cli import values


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", 0),
        ("65535", 65535),
        (8000, 8000),
    ],
)
def test_port_takes_the_whole_range(written: values.Raw, expected: int) -> None:
    assert values.port(written) == expected


@pytest.mark.parametrize("written", ["-1", "65536", "http", "", "80.5", True, 1.5, ["80"]])
def test_port_refuses(written: values.Raw) -> None:
    with pytest.raises(ValueError, match="must be a port from 0"):
        values.port(written)


@pytest.mark.parametrize("written", ["0", "-3", "two", "1e3", "٣", True, [1], "1048577"])
def test_positive_integer_refuses(written: values.Raw) -> None:
    with pytest.raises(ValueError, match="must be a whole number from 1 to 1048576"):
        values.positive_integer(written)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25_600),
        ("2M", 2 * 2**20),
        ("1.5g", 1_500_000_000),
        ("4G", 4 * 2**30),
        ("1T", 2**40),
    ],
)
def test_size_reads_suffixes_as_vllm_does(written: values.Raw, expected: int) -> None:
    assert values.size(written) == expected


def test_size_refuses_a_decimal_point_before_a_binary_suffix() -> None:
    with pytest.raises(ValueError, match=r"write 1\.5g"):
        values.size("1.5G")


@pytest.mark.parametrize("written", ["0", "0k", "-4G", "4GiB", "4 G", "nan", "", "0.0001k"])
def test_size_refuses(written: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        values.size(written)


@pytest.mark.parametrize("written", ["9223372036854775808", "9000000T", "9" * 400 + ".5k"])
def test_size_refuses_what_64_bits_do_not_hold(written: str) -> None:
    with pytest.raises(ValueError, match="must be at most 9223372036854775807"):
        values.size(written)


@pytest.mark.parametrize("written", [2**31, "2147483648", "2G"])
def test_token_count_refuses_what_32_bits_do_not_hold(written: values.Raw) -> None:
    with pytest.raises(ValueError, match="must be at most 2147483647"):
        values.token_count(written)


@pytest.mark.parametrize("written", ["auto", "AUTO", "-1", -1])
def test_token_count_or_auto_leaves_the_decision_open(written: values.Raw) -> None:
    assert values.token_count_or_auto(written) is None


@pytest.mark.parametrize("written", ["0", "1.01", "-0.5", "nan", "inf", "all"])
def test_fraction_refuses(written: str) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        values.fraction(written)


def test_fraction_takes_one() -> None:
    assert values.fraction("1") == 1.0
    assert values.fraction(0.25) == 0.25


@pytest.mark.parametrize("written", ["32,29", [32, 29], " 32 , 29 "])
def test_partition_takes_text_and_list(written: values.Raw) -> None:
    assert values.partition(written) == (32, 29)


@pytest.mark.parametrize("written", ["0,61", "-1,62", "32,", ",", "", "32;29", [], [0.5], True])
def test_partition_refuses(written: values.Raw) -> None:
    with pytest.raises(ValueError, match="at least 1 per stage"):
        values.partition(written)


def test_seed_is_an_unsigned_integer_of_64_bits() -> None:
    assert values.seed(str(2**64 - 1)) == 2**64 - 1
    for written in ("-1", str(2**64)):
        with pytest.raises(ValueError, match="from 0 to 18446744073709551615"):
            values.seed(written)


def test_choices_are_exact() -> None:
    dtype = values.one_of("auto", "float32")
    assert dtype("float32") == "float32"
    with pytest.raises(ValueError, match="must be one of auto, float32"):
        dtype("fp32")


def test_generation_config_knows_the_spelling_of_vllm() -> None:
    assert values.generation_config("vllm") == "none"
    assert values.generation_config("auto") == "auto"
    assert values.generation_config("/models/x") == "/models/x"


def test_switch_takes_only_true_and_false() -> None:
    assert values.switch(True) is True
    assert values.switch("False") is False
    with pytest.raises(ValueError, match="true or false"):
        values.switch(1)


def test_texts_takes_one_or_several() -> None:
    assert values.texts("a") == ("a",)
    assert values.texts(["a", "b"]) == ("a", "b")
    with pytest.raises(ValueError, match="at least one"):
        values.texts([])
