"""One rank's part of a stage: from a step and received activations to sent
activations or sampled tokens.

    runner = StageRunner(plan, tp_rank, device_index, platform, tensor_parallel)
    report = runner.load(on_progress)
    output = runner.run(step, received)      # or prepare(step), then compute(prepared, received)

A step that refers to sampled tokens takes `prepare`, then `compute` with those tokens.

Single-threaded. Does no sending or receiving between stages and keeps no clock.
A step that only releases slots has no tensors: nothing crosses for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from services.errors import StageFailed
from services.topology.families import read_model_facts
from stage_worker.layers.attention.metadata import AttentionMetadata, RowSpan, build_metadata
from stage_worker.layers.rotary import RotaryRows
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.platforms.base import Platform
from stage_worker.references import ReferredTokens
from stage_worker.sampler import DrawRequest, Sampler
from stage_worker.slots import SlotLimits, SlotTable
from stage_worker.weights import Progress
from stagemesh.v1 import stage_worker_pb2, step_pb2, topology_pb2

HIDDEN_STATES = "hidden_states"
NOT_SAMPLED = -1


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _without_gradients(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.inference_mode`, which is not entered a second time where the caller is in it: that
    takes as long as preparing a row."""
    wrapped = torch.inference_mode()(method)

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        return wrapped(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose slots are applied and whose indices are on the device."""

    step_id: int
    num_tokens: int
    """0 for a step that only releases slots."""
    token_ids: Tensor | None
    """[num_tokens] int64; only on the first stage."""
    rotary: RotaryRows | None
    metadata: AttentionMetadata | None
    sampled_indices: Tensor | None
    """[m] int64: tokens whose logits are needed; only on the last stage."""
    draws: tuple[DrawRequest, ...]
    referred: tuple[ReferredTokens, ...] = ()
    """Query tokens that earlier steps sample; only on the first stage."""
    num_returned: int = 0
    """Sampled tokens that go to stage 0; only on TP rank 0 of the last stage."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage has made of a step."""

    sent: tuple[Tensor, ...]
    """For the next stage, as `boundary_out` says; empty on the last one."""
    rows: list[step_pb2.ResultRow]
    """Only on TP rank 0 of the last stage."""
    returned: Tensor | None = None
    """[m] int64: the tokens that later steps may refer to, where `rows` are and the step asks
    for it. A token that was not accepted is `NOT_SAMPLED`."""


class StageRunner:
    """Owns weights, KV cache and slots of one rank."""

    def __init__(
        self,
        plan: stage_worker_pb2.StagePlan,
        tp_rank: int,
        device_index: int,
        platform: Platform,
        tensor_parallel: TensorParallel,
    ) -> None:
        """Reads config.json, no weights. Raises `ModelError`."""
        self._tp_rank = tp_rank
        self._sampler = Sampler()
        self._plan = plan
        facts = read_model_facts(Path(plan.model_path))
        self._model = platform.model(facts, plan, device_index, tensor_parallel)
        self._slots = self._new_slots()
        self._boundary_in = self._new_boundary_in()

    @property
    def max_num_batched_tokens(self) -> int:
        """Most query tokens of a step: one with more is refused."""
        return self._plan.max_num_batched_tokens

    @property
    def boundary_in(self) -> topology_pb2.BoundarySchema:
        """What must be received for every step; empty on the first stage."""
        return self._boundary_in

    @property
    def boundary_out(self) -> topology_pb2.BoundarySchema:
        """What is sent for every step; empty on the last stage."""
        return topology_pb2.BoundarySchema() if self._model.is_last else self._boundary()

    def load(self, on_progress: Progress) -> stage_worker_pb2.RankReport:
        """Comes to the plan given at construction. See `apply_plan`."""
        return self.apply_plan(self._plan, on_progress)

    def apply_plan(
        self, plan: stage_worker_pb2.StagePlan, on_progress: Progress
    ) -> stage_worker_pb2.RankReport:
        """Keeps what the rank has of the plan, loads what is missing, drops the rest.

        Sequences are forgotten. With `num_blocks` 0 the KV cache is left out and
        the report says how many blocks are possible. Its fingerprint is left to
        whoever has compared it. Raises `ModelError`.
        """
        report = self._model.apply_plan(plan, on_progress)
        self._plan = plan
        self._slots = self._new_slots()
        self._boundary_in = self._new_boundary_in()
        report.tp_rank = self._tp_rank
        report.boundary.CopyFrom(self.boundary_out)
        return report

    def reset(self) -> None:
        """Forgets all sequences: a new epoch."""
        self._slots.clear()

    def run(self, step: step_pb2.Step, received: Sequence[Tensor]) -> StageOutput:
        """Runs a step. `received` holds what `boundary_in` declares, complete."""
        return self.compute(self.prepare(step), received)

    @_without_gradients
    def prepare(self, step: step_pb2.Step) -> PreparedStep:
        """Applies a step to the slots and builds what its layers share.

        Steps are prepared in order, each once. Raises `StageFailed` for a step
        that breaks a rule; then nothing has changed.
        """
        if step.rows and not self._model.has_cache:
            raise StageFailed(f"step {step.step_id} came before the KV cache was allocated")
        spans = self._slots.apply(step)
        if not spans:
            return PreparedStep(step.step_id, 0, None, None, None, None, ())
        positions = _positions(spans)
        token_ids = None
        if self._model.is_first:
            tokens = chain.from_iterable(row.token_ids for row in step.rows)
            token_ids = self._on_device(np.fromiter(tokens, np.int64, len(positions)))
        metadata = build_metadata(
            spans,
            positions,
            self._slots.block_table_array,
            self._plan.block_size,
            self._model.device,
        )
        sampled, draws = self._draws(step, spans) if self._model.is_last else (None, ())
        referred = self._slots.references.resolve(step.rows) if self._model.is_first else ()
        samples = step.returns_tokens and bool(draws)
        return PreparedStep(
            step.step_id,
            len(positions),
            token_ids,
            self._model.rotary(self._on_device(positions)),
            metadata,
            sampled,
            draws,
            referred,
            sum(row.num_sampled for row in step.rows) if samples else 0,
        )

    @_without_gradients
    def compute(
        self,
        prepared: PreparedStep,
        received: Sequence[Tensor],
        returned: Mapping[int, Tensor] | None = None,
    ) -> StageOutput:
        """Runs a prepared step. `returned` holds the sampled tokens of the steps that are
        referred to. Raises `StageFailed` where a received tensor has another shape than the step
        says."""
        if prepared.rotary is None or prepared.metadata is None:
            return StageOutput((), [])
        if prepared.token_ids is not None:
            hidden_states = self._model.embed(
                self._query_tokens(prepared.token_ids, prepared.referred, returned or {})
            )
        else:
            hidden_states = self._received(prepared, received)
        hidden_states = self._model.forward(hidden_states, prepared.rotary, prepared.metadata)
        if not self._model.is_last:
            return StageOutput((hidden_states,), [])
        if prepared.sampled_indices is None:
            return StageOutput((), [])
        logits = self._model.logits(hidden_states, prepared.sampled_indices)
        if self._tp_rank != 0:
            return StageOutput((), [])
        rows = self._sampler(logits, prepared.draws)
        return StageOutput((), rows, self._returned(prepared, rows))

    def _query_tokens(
        self, token_ids: Tensor, referred: Sequence[ReferredTokens], returned: Mapping[int, Tensor]
    ) -> Tensor:
        for group in referred:
            tokens = returned[group.step_id].to(self._model.device)
            offsets = self._on_device(group.offsets)
            token_ids.index_copy_(
                0, self._on_device(group.query_indices), tokens.index_select(0, offsets)
            )
        return token_ids

    def _returned(
        self, prepared: PreparedStep, rows: Sequence[step_pb2.ResultRow]
    ) -> Tensor | None:
        if prepared.num_returned == 0:
            return None
        tokens = np.full(prepared.num_returned, NOT_SAMPLED, np.int64)
        for draw, row in zip(prepared.draws, rows, strict=True):
            tokens[draw.first_logit : draw.first_logit + len(row.token_ids)] = row.token_ids
        return self._on_device(tokens)

    def _received(self, prepared: PreparedStep, received: Sequence[Tensor]) -> Tensor:
        expected = (prepared.num_tokens, self._model.facts.hidden_size)
        if len(received) != 1 or tuple(received[0].shape) != expected:
            shapes = ", ".join(str(list(t.shape)) for t in received) or "nothing"
            raise StageFailed(
                f"step {prepared.step_id} needs {HIDDEN_STATES} {list(expected)}, received {shapes}"
            )
        return received[0]

    def _draws(
        self, step: step_pb2.Step, spans: Sequence[RowSpan]
    ) -> tuple[Tensor | None, tuple[DrawRequest, ...]]:
        indices: list[int] = []
        draws: list[DrawRequest] = []
        end = 0
        for index, (row, span) in enumerate(zip(step.rows, spans, strict=True)):
            end += span.num_tokens
            if row.num_sampled == 0:
                continue
            # The state itself, not its slot: the slot may be reused before this step is computed.
            state = self._slots[span.slot].sampling
            if state is not None:
                first = span.num_tokens - row.num_sampled
                drafts = tuple(row.token_ids[first + 1 :])
                position = span.position + first + 1
                draws.append(DrawRequest(index, len(indices), position, drafts, state))
            # All TP ranks take part in the logits; only the first has states and samples.
            indices.extend(range(end - row.num_sampled, end))
        if not indices:
            return None, ()
        return self._on_device(np.array(indices, np.int64)), tuple(draws)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _new_slots(self) -> SlotTable:
        plan = self._plan
        limits = SlotLimits(
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            vocab_size=self._model.facts.vocab_size,
        )
        keeps_sampling = self._model.is_last and self._tp_rank == 0
        return SlotTable(limits, keeps_sampling=keeps_sampling, device=self._model.device)

    def _new_boundary_in(self) -> topology_pb2.BoundarySchema:
        return topology_pb2.BoundarySchema() if self._model.is_first else self._boundary()

    def _boundary(self) -> topology_pb2.BoundarySchema:
        return topology_pb2.BoundarySchema(
            tensors=[
                topology_pb2.BoundaryTensor(
                    name=HIDDEN_STATES,
                    trailing_shape=[self._model.facts.hidden_size],
                    dtype=self._plan.dtype,
                    layout=topology_pb2.BOUNDARY_LAYOUT_REPLICATED,
                )
            ]
        )


def _positions(spans: Sequence[RowSpan]) -> np.ndarray:
    """Position of every query token, [num_tokens] int64, in row order."""
    counts = np.array([span.num_tokens for span in spans], np.int64)
    firsts = np.array([span.position for span in spans], np.int64)
    if counts.max() == 1:
        return firsts
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(firsts - starts, counts)
