"""Query tokens that the gateway does not know yet.

A step that returns its tokens can be referred to by later steps: the last stage
hands what it has sampled to stage 0 over the data plane, and stage 0 puts it in
the place of the reference. Every stage keeps the same book of such steps, so
that all refuse a wrong reference alike; only stage 0 needs the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stage_worker.pending_receive import NOTHING, PendingReceive
from stagemesh.v1 import step_pb2

KEPT_STEPS = 256
"""How far back a reference may reach. A gateway refers to steps in flight: as many as stages, which
are at most the layers, with `services.ranges.MAX_BATCH_DEPTH` and one on top."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Where the tokens of one row of a step are."""

    slot: int
    position: int
    """Of the row's first sampled token in its sequence."""
    offset: int
    """Of that token among all that the step samples."""
    count: int


@dataclass(frozen=True, slots=True)
class ReferredTokens:
    """The query tokens of a step that come from one earlier step."""

    step_id: int
    query_indices: np.ndarray
    """[n] int64 into the step's query tokens."""
    offsets: np.ndarray
    """[n] int64 into the earlier step's sampled tokens."""


class ReferenceBook:
    """Which of the last steps return their tokens, and where each token is."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[SampledRow, ...]] = {}

    def clear(self) -> None:
        """Forgets all steps: a new epoch."""
        self._steps.clear()

    def record(self, step: step_pb2.Step) -> None:
        """Takes a step in that has been applied."""
        self._steps.pop(step.step_id - KEPT_STEPS - 1, None)
        if not step.returns_tokens:
            return
        rows, offset = [], 0
        for row in step.rows:
            position = row.position + len(row.token_ids) - row.num_sampled + 1
            rows.append(SampledRow(row.slot, position, offset, row.num_sampled))
            offset += row.num_sampled
        self._steps[step.step_id] = tuple(rows)

    def problems(self, step_id: int, row: step_pb2.StepRow) -> Iterator[str]:
        """What is wrong with a row's references."""
        first_draft = len(row.token_ids) - row.num_sampled + 1
        seen: set[int] = set()
        for given in row.references:
            reference = given.reference
            name = f"refers to token {reference.index} of row {reference.row} of step "
            name += str(reference.step_id)
            if given.query_index >= len(row.token_ids) or given.query_index in seen:
                yield f"{name} for query token {given.query_index}, which it does not have or twice"
                return
            seen.add(given.query_index)
            if given.query_index >= first_draft and row.num_sampled > 1:
                yield f"{name} for a draft, which must be given as a token"
            rows = self._steps.get(reference.step_id, ())
            is_kept = step_id - KEPT_STEPS <= reference.step_id < step_id
            if not is_kept or not rows:
                yield f"{name}, which does not return its tokens or is not one of the last"
                return
            if reference.row >= len(rows) or reference.index >= rows[reference.row].count:
                yield f"{name}, which samples no such token"
                return
            sampled = rows[reference.row]
            is_at = (sampled.slot, sampled.position + reference.index)
            wanted = (row.slot, row.position + given.query_index)
            if is_at != wanted:
                yield (
                    f"{name}, which is of slot {is_at[0]} at position {is_at[1]}, not of slot "
                    f"{wanted[0]} at position {wanted[1]}"
                )

    def resolve(self, rows: Sequence[step_pb2.StepRow]) -> tuple[ReferredTokens, ...]:
        """Where the referred tokens of a checked step come from, a group for each earlier step."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        start = 0
        for row in rows:
            for given in row.references:
                reference = given.reference
                sampled = self._steps[reference.step_id][reference.row]
                indices, offsets = found.setdefault(reference.step_id, ([], []))
                indices.append(start + given.query_index)
                offsets.append(sampled.offset + reference.index)
            start += len(row.token_ids)
        return tuple(
            ReferredTokens(step_id, np.array(indices, np.int64), np.array(offsets, np.int64))
            for step_id, (indices, offsets) in found.items()
        )


class ReturnedTokens:
    """Sampled tokens on stage 0: here already, or on their way from the last stage."""

    def __init__(self) -> None:
        self._expected: dict[int, PendingReceive] = {}
        self._here: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forgets all: a new epoch."""
        self._expected.clear()
        self._here.clear()

    def expect(self, step_id: int, receive: PendingReceive) -> None:
        """Keeps a step's posted receive until somebody needs its tokens, or nobody can any more.

        Called once for every step, in order.
        """
        if receive is not NOTHING:
            self._expected[step_id] = receive
        old = step_id - KEPT_STEPS - 1
        self._here.pop(old, None)
        if (unused := self._expected.pop(old, None)) is not None:
            unused.wait()  # Done long ago, since steps are done in order: this frees the memory.

    def put(self, step_id: int, tokens: Tensor) -> None:
        """Keeps tokens that were sampled on this rank."""
        self._here[step_id] = tokens

    def wait(self, referred: Sequence[ReferredTokens]) -> dict[int, Tensor]:
        """Sampled tokens [m] int64 of every step that is referred to. Raises `PeerLost`."""
        for group in referred:
            if (receive := self._expected.pop(group.step_id, None)) is not None:
                (self._here[group.step_id],) = receive.wait()
        return {group.step_id: self._here[group.step_id] for group in referred}
