"""Weights that are kept short are exactly the weights that were given.

The oracle for quantized weights is the `gguf` package: it quantizes and makes float32 of it again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch import Tensor

from stage_worker.kernels.library import Library
from stage_worker.kernels.native import NativeOperators
from stage_worker.kernels.native_linear import (
    NativeLinear,
    PackedWeight,
    WeightForm,
    pack,
    unpack,
)
from stage_worker.layers.operators import TorchOperators

BLOCK_FORMATS = (
    Quantization.Q4_0,
    Quantization.Q4_1,
    Quantization.Q5_0,
    Quantization.Q5_1,
    Quantization.Q8_0,
)
ROWS = (1, 3, 8, 9, 24, 25, 36, 49, 130)
"""Some for every way: one pass over a panel, several, and a panel that is made float32 once."""


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


def quantized(num_outputs: int, num_inputs: int, form: Quantization, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((num_outputs, num_inputs), np.float32) * np.float32(0.05)
    return torch.from_numpy(dequantize(quantize(weight, form), form))


def k_quantized(num_outputs: int, num_inputs: int, most_code: int) -> Tensor:
    """As Q4_K and Q5_K: a half times 6 bits for scale and for minus, in float32 as `gguf` does."""
    rng = np.random.default_rng(1)
    shape = (num_outputs, num_inputs // 32)
    halves = rng.uniform(1e-4, 1e-2, (2, *shape)).astype(np.float16).astype(np.float32)
    scale, minus = halves * rng.integers(1, 64, (2, *shape)).astype(np.float32)
    codes = rng.integers(0, most_code + 1, (*shape, 32)).astype(np.float32)
    weight = scale[..., None] * codes - minus[..., None]
    return torch.from_numpy(weight.reshape(num_outputs, num_inputs))


def as_floats(library: Library, weight: Tensor) -> NativeLinear:
    """The product with the same weight, kept as it is."""
    num_outputs, num_inputs = weight.shape
    panels = weight.new_zeros((-(-num_outputs // library.panel) * library.panel, num_inputs))
    panels[:num_outputs] = weight
    panels = panels.view(-1, library.panel, num_inputs).transpose(1, 2).contiguous()
    packed = PackedWeight(WeightForm.FLOATS, panels, num_outputs, num_inputs)
    return NativeLinear(library, packed, None, 1)


def check_products(library: Library, weight: Tensor, form: WeightForm) -> None:
    packed = pack(library, weight)
    assert packed.form is form
    assert torch.equal(unpack(library, packed), weight)
    short, plain = NativeLinear(library, packed, None, 1), as_floats(library, weight)
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1])
        assert torch.equal(short(x), plain(x)), f"{rows} rows"


@pytest.mark.parametrize("form", BLOCK_FORMATS, ids=lambda form: form.name)
def test_what_was_quantized_is_kept_as_codes(library: Library, form: Quantization) -> None:
    weight = quantized(40, 192, form)
    check_products(library, weight, WeightForm.CODES)
    packed = pack(library, weight)
    assert packed.panels.nbytes < weight.nbytes / 2


@pytest.mark.parametrize("most_code", [15, 31])
def test_so_is_what_was_quantized_in_two_stages(library: Library, most_code: int) -> None:
    check_products(library, k_quantized(48, 256, most_code), WeightForm.CODES)


def test_bfloat16_is_kept_as_such(library: Library) -> None:
    weight = torch.randn(40, 70).bfloat16().float()
    check_products(library, weight, WeightForm.HALVES)
    assert pack(library, weight).panels.dtype == torch.int16


@pytest.mark.parametrize("change", [1e-7, float("inf"), float("nan")])
def test_one_weight_that_is_no_code_keeps_all_as_they_are(library: Library, change: float) -> None:
    weight = quantized(40, 192, Quantization.Q4_1)
    weight[39, 191] += change
    packed = pack(library, weight)
    assert packed.form is WeightForm.FLOATS
    assert torch.equal(unpack(library, packed).nan_to_num(), weight.nan_to_num())


def test_a_weight_whose_inputs_are_no_whole_blocks_is_not_searched(library: Library) -> None:
    weight = quantized(16, 64, Quantization.Q8_0)[:, :48].contiguous()
    assert pack(library, weight).form is WeightForm.FLOATS


def test_constant_blocks_are_codes(library: Library) -> None:
    weight = torch.zeros(16, 64)
    weight[3, 32:] = -0.3
    check_products(library, weight, WeightForm.CODES)


@settings(max_examples=200, deadline=None)
@given(
    weight=st_numpy.arrays(np.float32, (3, 32), elements=st.floats(width=32))
    | st_numpy.arrays(
        np.float32, (3, 32), elements=st.sampled_from([0.0, -0.5, 0.1, 0.2, 0.3, 1e-40, 3e38])
    )
)
def test_whatever_is_packed_comes_back(library: Library, weight: np.ndarray) -> None:
    given_weight = torch.from_numpy(weight)
    came_back = unpack(library, pack(library, given_weight))
    assert np.array_equal(came_back.numpy(), weight, equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    form=st.sampled_from(BLOCK_FORMATS),
    magnitude=st.floats(-3, 3),
)
def test_codes_are_found_at_any_size(
    library: Library, seed: int, form: Quantization, magnitude: float
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((4, 64), np.float32) * np.float32(10.0**magnitude)
    made = torch.from_numpy(dequantize(quantize(weight, form), form))
    packed = pack(library, made)
    assert torch.equal(unpack(library, packed), made)
    assert packed.form is WeightForm.CODES


def test_the_operators_choose_the_form() -> None:
    operators = NativeOperators(1, TorchOperators())
    linear = operators.linear(quantized(32, 64, Quantization.Q4_0), torch.randn(32))
    assert isinstance(linear, NativeLinear)
    assert linear.form is WeightForm.CODES
    assert linear.num_bytes == 4 * (32 * 64 + 32)
