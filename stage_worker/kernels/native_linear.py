"""`y = x W^T + b` with the weight in panels, in the shortest form that says it exactly.

A few rows wait for the weight to come from memory, so its length counts. A float32 weight that was
made from a file of bfloat16 has nothing in its lower half; one that was made from a quantized GGUF
is `code * scale - minus`. Both are found by looking, kept short, and made float32 again in a
register: every product is the one of the plain weight, bit by bit. See
docs/decisions/009-short-weights.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from stage_worker.kernels.library import Library

_LOWER_HALF = 0xFFFF
_HALF_BITS = 16


class WeightForm(IntEnum):
    """How a packed weight lies in memory; the values are those of kernels/weights.h."""

    FLOATS = 0
    HALVES = 1
    """Upper halves of float32, which is bfloat16."""
    CODES = 2
    """8-bit codes, with a scale and a minus for each block of inputs."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] in panels of output features, each read once, in order."""

    form: WeightForm
    panels: Tensor
    num_outputs: int
    num_inputs: int


def pack(library: Library, weight: Tensor) -> PackedWeight:
    """Packs weight [out, in] float32 in the shortest form that is exact."""
    num_outputs, num_inputs = weight.shape
    weight = weight.contiguous()
    panels = _as_codes(library, weight)
    if panels is not None:
        return PackedWeight(WeightForm.CODES, panels, num_outputs, num_inputs)
    bits = weight.view(torch.int32)
    if not (bits & _LOWER_HALF).any():
        halves = (bits >> _HALF_BITS).to(torch.int16)
        panels = _in_panels(halves, library.panel)
        return PackedWeight(WeightForm.HALVES, panels, num_outputs, num_inputs)
    panels = _in_panels(weight, library.panel)
    return PackedWeight(WeightForm.FLOATS, panels, num_outputs, num_inputs)


def unpack(library: Library, packed: PackedWeight) -> Tensor:
    """The float32 weight [out, in] behind a packed one."""
    shape = (-(-packed.num_outputs // library.panel), packed.num_inputs, library.panel)
    match packed.form:
        case WeightForm.FLOATS:
            panels = packed.panels
        case WeightForm.HALVES:
            panels = (packed.panels.to(torch.int32) << _HALF_BITS).view(torch.float32)
        case WeightForm.CODES:
            panels = torch.empty(shape, dtype=torch.float32)
            library.expand_codes(
                packed.panels.data_ptr(), shape[0], packed.num_inputs, panels.data_ptr()
            )
    return panels.transpose(1, 2).reshape(-1, packed.num_inputs)[: packed.num_outputs]


def _as_codes(library: Library, weight: Tensor) -> Tensor | None:
    """Panels of codes, or None where the weight is none. Ends at the first block that is not."""
    num_outputs, num_inputs = weight.shape
    if num_inputs % library.code_block:
        return None
    num_panels = -(-num_outputs // library.panel)
    panel_bytes = library.panel_bytes(WeightForm.CODES, num_inputs)
    panels = torch.empty(num_panels * panel_bytes, dtype=torch.uint8)
    failed = library.find_codes(weight.data_ptr(), num_outputs, num_inputs, panels.data_ptr())
    return None if failed else panels


def _in_panels(weight: Tensor, panel: int) -> Tensor:
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // panel)
    if num_outputs % panel:
        padded = weight.new_zeros((num_panels * panel, num_inputs))
        padded[:num_outputs] = weight
        weight = padded
    return weight.view(num_panels, panel, num_inputs).transpose(1, 2).contiguous()


class NativeLinear:
    """See `layers.linear.Linear`. float32 on the CPU only."""

    __slots__ = ("_function", "_num_threads", "_pointers", "bias", "packed")

    def __init__(
        self, library: Library, packed: PackedWeight, bias: Tensor | None, num_threads: int
    ) -> None:
        self._function = library.linear
        self._num_threads = num_threads
        self.packed = packed
        self.bias = None if bias is None else bias.contiguous()
        self._pointers = (
            packed.panels.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        x = x.contiguous()
        rows, packed = x.shape[0], self.packed
        y = x.new_empty((rows, packed.num_outputs))
        panels, bias = self._pointers
        self._function(
            *(x.data_ptr(), rows, packed.num_inputs, packed.form, panels, packed.num_outputs),
            *(bias, y.data_ptr(), self._num_threads),
        )
        return y

    @property
    def form(self) -> WeightForm:
        """How the weight is kept."""
        return self.packed.form

    @property
    def num_bytes(self) -> int:
        """As plain weights, which is what a plan counts; short ones take less."""
        weight_bytes = 4 * self.packed.num_outputs * self.packed.num_inputs
        return weight_bytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def keeps_weight(self) -> bool:
        return False
