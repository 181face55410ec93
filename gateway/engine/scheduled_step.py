"""What a scheduler is held to, and what it hands out: plain facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.engine.sequence import Sequence
from gateway.engine.types import TokenLogprob
from gateway.engine.waiting_queue import SchedulingPolicy
from stagemesh.v1 import step_pb2

MIN_PROMPT_CHUNK_TOKENS = 128
"""A prompt is not cut finer than this to fill idle stages: below it, a chunk on a CPU
costs almost as much as a larger one (0.6 ms at 1 row, 3.7 ms at 128 for one linear)."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that the scheduler keeps to."""

    num_blocks: int
    """KV blocks of the weakest rank."""
    block_size: int
    """Tokens in a block."""
    max_num_seqs: int
    """Sequences with a slot, over all steps in flight."""
    max_num_batched_tokens: int
    """Query tokens in one step."""
    num_stages: int
    """Pipeline-parallel size: as many batches at least travel at a time, or stages are idle."""
    async_batch_depth: int = 0
    """Batches beyond that while no prompt is computed or could begin. They wait in front of
    stages, and all of them are smaller for it."""
    min_prompt_chunk_tokens: int = MIN_PROMPT_CHUNK_TOKENS
    """Prompts are not cut finer than this to fill idle stages."""
    async_scheduling: bool = True
    """Sends a sequence's next decode before its token is known; see `gateway.engine.scheduler`."""
    enable_prefix_caching: bool = True
    """Keeps the blocks of what was computed, for prompts that begin alike."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    """Order of admission and preemption."""

    @property
    def num_batches(self) -> int:
        """Steps of a round of decodes alone: as many batches travel at a time."""
        return self.num_stages + self.async_batch_depth


class ScheduledRow(NamedTuple):
    """Which sequence a row of a step belongs to, and how many tokens it samples."""

    sequence: Sequence
    num_sampled: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step to send, and whose rows it holds."""

    step: step_pb2.Step
    rows: list[ScheduledRow]
    num_tokens: int
    """Query tokens in the step."""
    num_prompt_tokens: int
    """Those of them that belong to prompts, or to logs that are computed again."""
    round_steps: int
    """Steps since the sequence of its first row was in one before; 0 for one that starts."""

    @property
    def num_decodes(self) -> int:
        """The others: one for each sequence that decodes."""
        return self.num_tokens - self.num_prompt_tokens


class SequenceOutput(NamedTuple):
    """Tokens that a step brought to a sequence, whose `finish_reason` may be set by them."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
