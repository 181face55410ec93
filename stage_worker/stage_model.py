"""The weights and KV cache of one rank, and how it comes from one plan to another.

Parts are keyed by layer, so that loading is a difference: start, recovery and
re-partition are the same call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.errors import ConfigError
from services.topology.compatibility import check_topology
from services.topology.facts import DTYPE_BYTES, ModelFacts
from services.topology.families import read_model_facts
from services.topology.weights import (
    WeightSpec,
    embedding_weight,
    final_norm_weight,
    head_weight,
    kv_heads_per_rank,
)
from stage_worker.kv.paged_cache import MAX_BLOCKS, LayerKVCache, kv_block_bytes
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.block import FusedBlocks
from stage_worker.layers.context import LayerContext
from stage_worker.layers.norm import Norm
from stage_worker.layers.rotary import RotaryRows, RotaryTable
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from stage_worker.models import HiddenLayer, layer_family
from stage_worker.weights import Progress, WeightReader
from stagemesh.v1 import stage_worker_pb2

if TYPE_CHECKING:  # Platforms make stage models.
    from stage_worker.platforms.base import Platform


class StageModel:
    """One rank's layers and ends."""

    def __init__(
        self,
        facts: ModelFacts,
        plan: stage_worker_pb2.StagePlan,
        platform: Platform,
        device_index: int,
        tensor_parallel: TensorParallel,
    ) -> None:
        self.facts = facts
        self.device = platform.device(device_index)
        self._platform = platform
        self._tensor_parallel = tensor_parallel
        self._plan = plan
        self._layers: dict[int, HiddenLayer] = {}
        self._caches: dict[int, LayerKVCache] = {}
        self._fused: FusedBlocks | None = None
        """All layers in one call, where the operators can."""
        self._embedding: VocabParallelEmbedding | None = None
        self._final_norm: Norm | None = None
        self._head: VocabParallelHead | None = None
        self._rotary: RotaryTable | None = None
        self._context = self._new_context(plan)
        self._check(plan)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self._context.dtype

    @property
    def is_first(self) -> bool:
        return self._plan.placement.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self._plan.placement.pp_rank == self._plan.topology.pp_size - 1

    @property
    def has_cache(self) -> bool:
        """Whether the KV cache is allocated."""
        return bool(self._caches)

    def rotary(self, positions: Tensor) -> RotaryRows:
        """Rotary rows of a step's positions [n]."""
        if self._rotary is None:
            raise _not_loaded("the rotary table")
        return self._rotary.rows(positions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] -> [n, hidden]; only on the first stage."""
        if self._embedding is None:
            raise _not_loaded("the embedding")
        return self._embedding(token_ids)

    def forward(
        self, hidden_states: Tensor, rotary: RotaryRows, metadata: AttentionMetadata
    ) -> Tensor:
        """[n, hidden] -> [n, hidden] through the stage's layers."""
        if self._fused is not None:
            return self._fused(hidden_states, rotary, metadata)
        for index, layer in self._layers.items():
            hidden_states = layer(hidden_states, rotary, self._caches[index], metadata)
        return hidden_states

    def logits(self, hidden_states: Tensor, indices: Tensor) -> Tensor:
        """Logits [m, vocab] in float32 of the tokens `indices` [m]; only on the last stage."""
        if self._final_norm is None or self._head is None:
            raise _not_loaded("the LM head")
        return self._head(self._final_norm(hidden_states.index_select(0, indices)))

    @torch.inference_mode()
    def apply_plan(
        self, plan: stage_worker_pb2.StagePlan, on_progress: Progress
    ) -> stage_worker_pb2.RankReport:
        """Keeps, loads and drops; see `StageRunner.apply_plan`."""
        old = self._plan
        self._platform.cache_changes()
        if _basis(old) != _basis(plan):
            # Read first: a plan that cannot be reached leaves the old one as it was.
            facts, context = read_model_facts(Path(plan.model_path)), self._new_context(plan)
            self._drop_all()
            self.facts, self._context = facts, context
        self._check(plan)
        self._plan = plan
        self._drop_unwanted()
        self._load_missing(on_progress)
        if self._rotary is None or old.max_model_len != plan.max_model_len:
            self._rotary = RotaryTable(
                self.facts.head_dim,
                self.facts.rope_theta,
                self.facts.rope_scaling,
                plan.max_model_len,
                self.dtype,
                self.device,
            )
        self._allocate_cache(old)
        self._fused = self._fuse()
        return self._report()

    def _wanted_layers(self) -> range:
        return range(self._plan.placement.layer_start, self._plan.placement.layer_end)

    def _drop_all(self) -> None:
        self._fused = None
        self._layers.clear()
        self._caches.clear()
        self._embedding = self._final_norm = self._head = self._rotary = None

    def _drop_unwanted(self) -> None:
        self._fused = None  # It holds on to layers and caches.
        wanted = self._wanted_layers()
        for layer in [layer for layer in self._layers if layer not in wanted]:
            del self._layers[layer]
            self._caches.pop(layer, None)
        if not self.is_first:
            self._embedding = None
        if not self.is_last:
            self._final_norm = self._head = None

    def _missing_specs(self) -> dict[str, WeightSpec]:
        """What is still to be read, each tensor once."""
        facts, family = self.facts, layer_family(self.facts.architecture)
        specs = [
            spec
            for layer in self._wanted_layers()
            if layer not in self._layers
            for spec in family.weight_specs(facts, layer)
        ]
        if self.is_first and self._embedding is None:
            specs.append(embedding_weight(facts))
        if self.is_last and self._head is None:
            specs.append(final_norm_weight(facts))
            shared = self.is_first and facts.tie_word_embeddings
            if not shared:
                specs.append(head_weight(facts))
        return {spec.name: spec for spec in specs}

    def _load_missing(self, on_progress: Progress) -> None:
        facts, context, family = self.facts, self._context, layer_family(self.facts.architecture)
        missing = self._missing_specs()
        if not missing:
            return
        group = self._tensor_parallel
        with WeightReader(facts, group.rank, group.size, self.dtype, self.device) as reader:
            reader.expect(missing.values(), on_progress)
            if self.is_first and self._embedding is None:
                self._embedding = VocabParallelEmbedding(
                    reader.read(embedding_weight(facts)), context
                )
            for layer in self._wanted_layers():
                if layer not in self._layers:
                    self._layers[layer] = family(facts, layer, context, reader)
            if self.is_last and self._head is None:
                norm = reader.read(final_norm_weight(facts))
                self._final_norm = context.operators.rms_norm(norm, facts.rms_norm_eps)
                shared = self._embedding if facts.tie_word_embeddings else None
                weight = shared.weight if shared else reader.read(head_weight(facts))
                self._head = VocabParallelHead(
                    weight, facts.vocab_size, context, shared=shared is not None
                )
        self._layers = dict(sorted(self._layers.items()))

    def _allocate_cache(self, old: stage_worker_pb2.StagePlan) -> None:
        plan = self._plan
        if (old.num_blocks, old.block_size) != (plan.num_blocks, plan.block_size):
            self._caches.clear()
        if plan.num_blocks == 0:
            return
        shape = (plan.num_blocks, plan.block_size, self._num_kv_heads, self.facts.head_dim)
        made: list[Tensor] = []
        for layer in self._wanted_layers():
            if layer not in self._caches:
                keys, values = (self._platform.zeros(shape, self.dtype, self.device) for _ in "kv")
                self._caches[layer] = LayerKVCache(keys, values)
                made += (keys, values)
        if made:
            self._platform.cache_allocated(made)

    def _fuse(self) -> FusedBlocks | None:
        blocks = [layer.block for layer in self._layers.values()]
        made = [block for block in blocks if block is not None]
        if not self._caches or len(made) < len(blocks):
            return None
        caches = [self._caches[layer] for layer in self._layers]
        return self._context.operators.fuse(made, caches)

    @property
    def _num_kv_heads(self) -> int:
        return kv_heads_per_rank(self.facts, self._tensor_parallel.size)

    def _report(self) -> stage_worker_pb2.RankReport:
        plan = self._plan
        ends = [end for end in (self._embedding, self._final_norm, self._head) if end is not None]
        block_bytes = kv_block_bytes(
            len(self._wanted_layers()),
            plan.block_size,
            self._num_kv_heads,
            self.facts.head_dim,
            DTYPE_BYTES[plan.dtype],
        )
        budget = plan.kv_cache_memory_bytes or self._platform.default_kv_bytes(plan)
        return stage_worker_pb2.RankReport(
            weight_bytes=sum(part.num_bytes for part in (*self._layers.values(), *ends)),
            kv_block_bytes=block_bytes,
            possible_blocks=min(max(plan.num_blocks, budget // block_bytes), MAX_BLOCKS),
            num_blocks=plan.num_blocks,
        )

    def _check(self, plan: stage_worker_pb2.StagePlan) -> None:
        """The group that a rank is part of is given at construction, for good."""
        topology, group = plan.topology, self._tensor_parallel
        if topology.tp_size != group.size:
            raise ConfigError(
                f"the plan has tensor parallel size {topology.tp_size}, but this rank is one of "
                f"{group.size}: it must be started anew",
                param="--tensor-parallel-size",
            )
        check_topology(self.facts, topology.tp_size, topology.pp_size)

    def _new_context(self, plan: stage_worker_pb2.StagePlan) -> LayerContext:
        if plan.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f'dtype "{plan.dtype}" is not one of {", ".join(DTYPE_BYTES)}', param="--dtype"
            )
        return LayerContext(
            self.device,
            getattr(torch, plan.dtype),
            self._tensor_parallel,
            self._platform.operators(enforce_eager=plan.enforce_eager),
        )


def _basis(plan: stage_worker_pb2.StagePlan) -> tuple[str, str, bool]:
    """What every loaded part depends on."""
    return plan.model_path, plan.dtype, plan.enforce_eager


def _not_loaded(what: str) -> ConfigError:
    return ConfigError(f"{what} is not loaded on this rank: Load must come before the first step")
