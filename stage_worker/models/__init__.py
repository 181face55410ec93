"""Model families: which class runs a layer of which architecture.

`services.topology.families.FAMILIES` is the torch-free list of the same names;
a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from services.errors import ModelError
from services.topology.facts import ModelFacts
from services.topology.weights import WeightSpec
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.block import PreNormBlock
from stage_worker.layers.context import LayerContext
from stage_worker.layers.rotary import RotaryRows
from stage_worker.models.llama import LlamaLayer
from stage_worker.weights import WeightReader


class HiddenLayer(Protocol):
    """One hidden layer on one rank."""

    @property
    def block(self) -> PreNormBlock | None:
        """All that the layer is, where it is such a block."""
        ...

    def __call__(
        self,
        hidden_states: Tensor,
        rotary: RotaryRows,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[n, hidden] -> [n, hidden], residual added."""
        ...

    @property
    def num_bytes(self) -> int: ...


class LayerFamily(Protocol):
    """Makes the layers of one architecture."""

    def __call__(
        self, facts: ModelFacts, layer: int, context: LayerContext, reader: WeightReader
    ) -> HiddenLayer: ...

    def weight_specs(self, facts: ModelFacts, layer: int) -> tuple[WeightSpec, ...]: ...


LAYER_FAMILIES: Mapping[str, LayerFamily] = {
    "LlamaForCausalLM": LlamaLayer,
    "MistralForCausalLM": LlamaLayer,
}


def layer_family(architecture: str) -> LayerFamily:
    """The family of an architecture. Raises `ModelError` for one that is not served."""
    family = LAYER_FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"architecture {architecture} is not served; served are: {', '.join(LAYER_FAMILIES)}"
        )
    return family
