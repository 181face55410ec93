"""Stages without a model, in virtual time, that notice every mistake of a scheduler.

The cache is one shared memory of numbered cells. A step writes its tokens when
it enters the first stage and reads its whole context back, through the block
tables, when it leaves the last one. As with real keys and values, what is in a
cell depends on all tokens before it, so that a block shared with a sequence that
began otherwise is noticed. The "model" is a hash of what it reads: a wrong token,
order, position, block or a block reused too early gives other tokens than
`reference_tokens`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.engine.scheduled_step import ScheduledStep, SequenceOutput
from gateway.engine.scheduler import Scheduler
from gateway.engine.sequence import Sequence
from gateway.engine.types import SamplingParams, StopConditions
from stagemesh.v1 import step_pb2

VOCAB_SIZE = 97


def sample(context: Iterable[int], seed: int, choice_index: int) -> int:
    """The simulated model: one token for a context."""
    return hash((*context, seed, choice_index)) % VOCAB_SIZE


def reference_tokens(
    prompt: tuple[int, ...], stop: StopConditions, seed: int = 0, choice_index: int = 0
) -> list[int]:
    """Output of a sequence computed alone, one token after the other."""
    log = list(prompt)
    while len(log) - len(prompt) < stop.max_tokens:
        log.append(sample(log, seed, choice_index))
        if log[-1] in stop.stop_token_ids:
            break
    return log[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt like no other of another seed."""
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


def new_sequence(
    prompt: Iterable[int],
    max_tokens: int,
    *,
    name: str = "request",
    stop_token_ids: frozenset[int] = frozenset(),
    sampling: SamplingParams | None = None,
    choice_index: int = 0,
    priority: int = 0,
    cache_salt: str = "",
) -> Sequence:
    """A sequence with neutral settings."""
    return Sequence(
        name,
        choice_index,
        tuple(prompt),
        sampling or SamplingParams(),
        StopConditions(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
        priority=priority,
        cache_salt=cache_salt,
    )


@dataclass(slots=True)
class _Slot:
    choice_index: int
    seed: int
    num_logprobs: int | None
    block_table: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    """None until its first row, which may start behind a cached prefix."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What one row reads when it leaves the last stage."""

    slot: _Slot
    block_table: list[int]
    num_tokens: int
    num_sampled: int
    checksum: int
    """Of the context as it was when the row entered the first stage."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way, with one read for each row."""

    step: step_pb2.Step
    finish_time: float
    seconds: float
    """On each stage."""
    reads: list[_Read]


class SimulatedMesh:
    """`num_stages` stages that take `stage_seconds` each (or what it says of a step); refuses
    what a real stage would."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_stages: int,
        stage_seconds: float | Callable[[step_pb2.Step], float] = 1.0,
        round_trip_seconds: float = 0.0,
        hop_seconds: float = 0.0,
        epoch: int = 1,
    ) -> None:
        self.num_stages = num_stages
        self.epoch = epoch
        self.stage_seconds = stage_seconds
        self.round_trip_seconds = round_trip_seconds
        """From the end of a step to the entry of one that follows from its result."""
        self.hop_seconds = hop_seconds
        """From a stage to the next, and from the last one's token to the first."""
        self._sampled: dict[tuple[int, int], tuple[_Slot, int, int]] = {}
        """(step id, row) -> slot, position and token that it samples; of steps that return them."""
        self._finish_times: dict[int, float] = {}
        self.num_references = 0
        self.entries: dict[tuple[int, int], float] = {}
        """(step id, stage) -> virtual time of entry."""
        self.steps: list[step_pb2.Step] = []
        self.busy_seconds = 0.0
        """Of each stage."""
        self.num_cached_tokens = 0
        """Not computed because they were there."""
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._cells: dict[int, tuple[int, int]] = {}
        """Token, and hash of it and all before it."""
        self._slots: dict[int, _Slot] = {}
        self._stage_free = [0.0] * num_stages
        self._flights: deque[_Flight] = deque()

    @property
    def next_finish_time(self) -> float | None:
        """When the result of the oldest step is known; None when the mesh is empty."""
        if not self._flights:
            return None
        return self._flights[0].finish_time + self.round_trip_seconds

    def send(self, step: step_pb2.Step, now: float) -> None:
        """Enters a step; every rule of step.proto is checked."""
        assert step.epoch == self.epoch
        assert step.step_id == len(self.steps) + 1
        self.steps.append(step)
        for slot in step.released_slots:
            del self._slots[slot]
        for start in step.starts:
            assert start.slot not in self._slots, "start on a used slot"
            assert start.slot < self._max_num_seqs
            self._slots[start.slot] = _Slot(
                start.choice_index,
                start.sampling.seed,
                start.sampling.num_logprobs if start.sampling.HasField("num_logprobs") else None,
            )
        assert len(step.rows) > 0
        assert sum(len(row.token_ids) for row in step.rows) <= self._max_num_batched_tokens
        assert len({row.slot for row in step.rows}) == len(step.rows)
        self._resolve(step)
        reads = [self._write(row) for row in step.rows]
        self._record(step, reads)
        seconds = (
            self.stage_seconds
            if isinstance(self.stage_seconds, float)
            else (self.stage_seconds(step))
        )
        # The first stage waits for what the step refers to.
        time = max(
            [
                now,
                *(self._finish_times[r.reference.step_id] for w in step.rows for r in w.references),
            ]
        )
        for stage in range(self.num_stages):
            time = max(time, self._stage_free[stage])
            self.entries[step.step_id, stage] = time
            time += seconds
            self._stage_free[stage] = time
            time += self.hop_seconds
        self.busy_seconds += seconds
        self._finish_times[step.step_id] = time
        self._flights.append(_Flight(step, time, seconds, reads))

    def finish_next(self) -> step_pb2.StepResult:
        """The oldest step leaves the last stage."""
        flight = self._flights.popleft()
        result = step_pb2.StepResult(epoch=flight.step.epoch, step_id=flight.step.step_id)
        result.clock.compute_ns = round(flight.seconds * 1e9)
        result.clock.end_ns = round(flight.finish_time * 1e9)
        for row, read in enumerate(flight.reads):
            context = self._context(read.block_table, read.num_tokens)
            assert hash(context) == read.checksum, "a block was reused while a step was reading it"
            if read.num_sampled == 0:
                continue
            token_id = sample(context, read.slot.seed, read.slot.choice_index)
            result_row = result.rows.add(row=row, token_ids=[token_id])
            if read.slot.num_logprobs is not None:
                result_row.logprobs.add(logprob=-token_id / 128)
        return result

    def _resolve(self, step: step_pb2.Step) -> None:
        """Puts sampled tokens in the place of references, as the first stage does."""
        for row in step.rows:
            for given in row.references:
                found = self._sampled.get((given.reference.step_id, given.reference.row))
                assert found is not None, "a reference to a step that does not return its tokens"
                slot, position, token_id = found
                assert given.reference.index == 0
                assert slot is self._slots[row.slot], "a reference to another sequence's token"
                assert position == row.position + given.query_index
                assert row.token_ids[given.query_index] == 0
                row.token_ids[given.query_index] = token_id
                self.num_references += 1

    def _record(self, step: step_pb2.Step, reads: list[_Read]) -> None:
        """What the step will sample; the model is known, so the future is."""
        if not step.returns_tokens:
            return
        for index, (row, read) in enumerate(zip(step.rows, reads, strict=True)):
            if row.num_sampled:
                context = self._context(read.block_table, read.num_tokens)
                token_id = sample(context, read.slot.seed, read.slot.choice_index)
                self._sampled[step.step_id, index] = (read.slot, read.num_tokens, token_id)

    def _write(self, row: step_pb2.StepRow) -> _Read:
        slot = self._slots[row.slot]
        assert all(0 <= block < self._num_blocks for block in row.new_block_ids)
        slot.block_table.extend(row.new_block_ids)
        assert len(set(slot.block_table)) == len(slot.block_table)
        assert len(row.token_ids) > 0
        if slot.num_tokens is None:
            # A cached prefix: what it holds is checked when it is read.
            slot.num_tokens = row.position
            self.num_cached_tokens += row.position
        assert row.position == slot.num_tokens
        end = row.position + len(row.token_ids)
        self._assert_own(slot, row.position // self._block_size, -(-end // self._block_size))
        context = self._context(slot.block_table, row.position)
        chain = self._cells[self._cell(slot.block_table, row.position - 1)][1] if context else 0
        for position, token_id in enumerate(row.token_ids, row.position):
            chain = hash((chain, token_id))
            self._cells[self._cell(slot.block_table, position)] = (token_id, chain)
        slot.num_tokens = end
        table = list(slot.block_table)
        checksum = hash(self._context(table, end))
        return _Read(slot, table, end, row.num_sampled, checksum)

    def _assert_own(self, slot: _Slot, first: int, end: int) -> None:
        """Blocks that are written belong to nobody else."""
        written = set(slot.block_table[first:end])
        for other in self._slots.values():
            assert other is slot or written.isdisjoint(other.block_table), "a shared block changes"

    def _context(self, table: list[int], num_tokens: int) -> tuple[int, ...]:
        """The tokens in front of a position, each of which belongs behind those before it."""
        tokens, chain = [], 0
        for position in range(num_tokens):
            token_id, found = self._cells[self._cell(table, position)]
            chain = hash((chain, token_id))
            assert chain == found, "a block was computed behind another beginning"
            tokens.append(token_id)
        return tuple(tokens)

    def _cell(self, table: list[int], position: int) -> int:
        return table[position // self._block_size] * self._block_size + position % self._block_size


Action = tuple[float, Callable[[], None]]


@dataclass(slots=True)
class Simulation:
    """A scheduler and a mesh under one virtual clock."""

    scheduler: Scheduler
    mesh: SimulatedMesh
    now: float = 0.0
    scheduled: list[ScheduledStep] = field(default_factory=list)
    on_output: Callable[[SequenceOutput], None] = lambda output: None

    def pump(self) -> list[ScheduledStep]:
        """Sends everything that can be sent now."""
        sent = []
        while (scheduled := self.scheduler.schedule()) is not None:
            self.mesh.send(scheduled.step, self.now)
            sent.append(scheduled)
        self.scheduled.extend(sent)
        return sent

    def finish_next(self) -> list[SequenceOutput]:
        """Lets the oldest step finish, at its time, and applies its result."""
        finish_time = self.mesh.next_finish_time
        assert finish_time is not None, "nothing is in flight"
        self.now = max(self.now, finish_time)
        outputs = self.scheduler.apply(self.mesh.finish_next())
        for output in outputs:
            self.on_output(output)
        return outputs

    def run(self, actions: Iterable[Action] = (), max_steps: int = 5000) -> None:
        """Runs to the end; `actions` happen at their virtual times."""
        pending = deque(sorted(actions, key=lambda action: action[0]))
        while True:
            while pending and pending[0][0] <= self.now:
                pending.popleft()[1]()
            self.pump()
            assert len(self.scheduled) <= max_steps, "no progress"
            finish_time = self.mesh.next_finish_time
            if pending and (finish_time is None or pending[0][0] < finish_time):
                self.now = pending[0][0]
            elif finish_time is not None:
                self.finish_next()
            else:
                return
