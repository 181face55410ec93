"""One choice of a request, as the scheduler sees it.

The token log (prompt, then output) is the only truth about a sequence:
everything else, its slot, its blocks, how far the stages are, can be thrown
away and made again from the log. Preemption and recovery do exactly that.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

from gateway.engine.types import FinishReason, SamplingParams, StopConditions


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """Holds neither slot nor blocks; new, or preempted."""
    RUNNING = "running"
    """Holds a slot."""
    FINISHED = "finished"
    """Holds nothing; results that still arrive for it are dropped."""


class ExpectedToken(NamedTuple):
    """A token that a step in flight samples: where it will be found."""

    step_id: int
    row: int


class Sequence:
    """State of one choice. Written by the scheduler only."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "cache_salt",
        "choice_index",
        "expected",
        "finish_reason",
        "last_step_id",
        "num_cached_tokens",
        "num_failures",
        "num_registered_blocks",
        "num_scheduled_tokens",
        "num_sent_blocks",
        "priority",
        "prompt_length",
        "rank",
        "request_id",
        "rows_in_flight",
        "sampling",
        "slot",
        "status",
        "stop",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        choice_index: int,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        stop: StopConditions,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.request_id = request_id
        self.choice_index = choice_index
        self.sampling = sampling
        self.stop = stop
        self.priority = priority
        self.cache_salt = cache_salt
        """Only sequences with the same salt share cached blocks."""
        self.prompt_length = len(prompt_token_ids)
        self.token_ids: list[int] = list(prompt_token_ids)
        """The log: prompt and output so far."""
        self.expected: deque[ExpectedToken] = deque()
        """Tokens that come behind the log, in order, once their steps are done."""
        self.status = SequenceStatus.WAITING
        self.arrival = 0
        """Order of arrival."""
        self.rank = (0, 0)
        """Order of service; see `gateway.engine.waiting_queue`."""
        self.num_scheduled_tokens = 0
        """Tokens of the log sent to the stages: the position of the next query token."""
        self.slot: int | None = None
        self.block_table: list[int] = []
        self.num_sent_blocks = 0
        """Entries of the block table that the stages know."""
        self.num_registered_blocks = 0
        """Leading entries of the block table that are offered to the prefix cache."""
        self.block_hashes: list[bytes] = []
        """Of the log's full blocks, as far as they were needed; no life changes them."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it first ran; None before."""
        self.num_failures = 0
        """Failures of the stages in a row that met it at work, without a new token in between."""
        self.rows_in_flight = 0
        """Rows sent whose step is not done, of this and of earlier lives."""
        self.last_step_id = 0
        """Last step with a row of this sequence; 0 before the first."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that the stages have not been sent, those counted that they are sampling: 1 when
        the sequence decodes, more in a prompt."""
        return len(self.token_ids) + len(self.expected) - self.num_scheduled_tokens

    @property
    def num_tokens_to_come(self) -> int:
        """Tokens that may still be sampled, apart from those that are expected."""
        known = len(self.token_ids) - self.prompt_length
        return self.stop.max_tokens - known - len(self.expected)

    def append(self, token_id: int) -> bool:
        """Adds a sampled token to the log; returns whether it ended the sequence.

        Sets `finish_reason`, and `stop_reason` to the token id that stopped it.
        """
        self.token_ids.append(token_id)
        self.num_failures = 0
        stop = self.stop
        if token_id in stop.stop_token_ids:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = token_id
        elif len(self.token_ids) - self.prompt_length >= stop.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None
