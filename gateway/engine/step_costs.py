"""What steps and rounds of decodes have been seen to take."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import NamedTuple

MIN_CHUNK_TOKENS = 8
"""Of a prompt while others decode, whatever steps cost: every step has its fixed costs too."""
MIN_LONE_CHUNK_TOKENS = 48
"""Of a prompt alone, whatever steps cost: matrix products of fewer rows are slower everywhere."""
NUM_REMEMBERED_STEPS = 15
"""Of each kind. Their median is not moved by a few outliers (a first step, a busy moment)."""
NUM_TRUSTED_STEPS = 3
"""Of one kind: the median of fewer can be an outlier."""
NUM_REMEMBERED_SIZES = 64
"""Numbers of decodes of which steps are remembered: those that were seen last."""
NANOSECOND = 1e-9
"""The clock's unit: less is nothing."""
NUM_LAST_STEPS = 256
"""Rounds have fewer: as many as stages, and batches beyond them."""
ROUND_MARGIN = 0.9
"""Of the time that a round may take: steps vary, and contexts grow meanwhile."""
ALIKE = 0.75
"""Steps whose times differ by less keep stages waiting for little, and two stages are never kept
from trying it: 2 * ROUND_MARGIN - 1 is more."""


class SeenStep(NamedTuple):
    """What the last stage did for a step."""

    num_prompt_tokens: int
    num_decodes: int
    seconds: float
    """It computed."""
    end_seconds: float
    """When it was done; only differences say something."""
    round_steps: int
    """Steps since the sequence of its first row was in one before; 0 for one that starts."""


class StepCosts:
    """What recent steps took on the last stage, by kind of work."""

    __slots__ = (
        "_chunk_token_seconds",
        "_further_token_seconds",
        "_last",
        "_last_of_prompts",
        "_lone_token_seconds",
        "_of_decodes",
        "_of_rounds",
        "_rest_between",
        "_rest_usual",
    )

    def __init__(self) -> None:
        self._last = deque[SeenStep](maxlen=NUM_LAST_STEPS)
        self._of_decodes = _BySize()
        """A step of decodes alone, by their number."""
        self._of_rounds = _BySize()
        """From a token to the next while no prompt is at work, by the number of all decodes."""
        self._rest_usual = _recent()
        """Of such a round, what the last stage did not compute."""
        self._rest_between = _recent()
        """The same of a round with steps of prompts alone: mostly nothing and now and then much, so
        their mean counts. None is taken for more than the step of all decodes."""
        self._last_of_prompts = deque[SeenStep](maxlen=NUM_REMEMBERED_STEPS)
        self._further_token_seconds: float | None = None
        """What a prompt token adds to a step that there is anyway; None until it is asked for."""
        self._chunk_token_seconds = _recent()
        """A prompt token's in a step of a few of them alone, with its part of the fixed costs."""
        self._lone_token_seconds = _recent()
        """The same in a step of many."""

    def observe(self, step: SeenStep) -> None:
        """The next step is done."""
        self._last.append(step)
        num_prompt_tokens, num_decodes, seconds, _, _ = step
        if seconds < NANOSECOND:
            return
        self._further_token_seconds = None
        if num_prompt_tokens == 0:
            self._of_decodes.add(num_decodes, seconds)
            self._observe_round(step)
            return
        if num_prompt_tokens < MIN_CHUNK_TOKENS:
            return  # It is the fixed costs that would be measured.
        if num_decodes == 0:
            few = num_prompt_tokens < MIN_LONE_CHUNK_TOKENS
            tokens = self._chunk_token_seconds if few else self._lone_token_seconds
            tokens.append(seconds / num_prompt_tokens)
        self._last_of_prompts.append(step)

    def _further_token(self) -> float | None:
        if self._further_token_seconds is None and self._of_decodes and self._last_of_prompts:
            self._further_token_seconds = median(
                max(0.0, step.seconds - self._of_decodes.at(max(1, step.num_decodes)))
                / step.num_prompt_tokens
                for step in self._last_of_prompts
            )
        return self._further_token_seconds

    def _observe_round(self, latest: SeenStep) -> None:
        """It ends with a step of decodes alone; of those in it that had one before."""
        if not 0 < latest.round_steps < len(self._last):
            return
        round_seconds = latest.end_seconds - self._last[-1 - latest.round_steps].end_seconds
        if round_seconds <= 0:
            return
        steps = [self._last[-back] for back in range(1, latest.round_steps + 1)]
        rest = max(0.0, round_seconds - sum(step.seconds for step in steps))
        if all(step.num_prompt_tokens == 0 for step in steps):
            self._of_rounds.add(sum(step.num_decodes for step in steps), round_seconds)
            self._rest_usual.append(min(rest, round_seconds / 2))
        elif all(step.num_decodes == 0 for step in steps[1:]):
            # A stage that is done with prompts sooner than the one before with decodes waits for
            # these: more prompt tokens would fill that time, not fewer.
            rest -= sum(max(0.0, latest.seconds - step.seconds) for step in steps)
            self._rest_between.append(min(max(0.0, rest), latest.seconds))

    def tokens_beside_decodes(self, num_decodes: int, decode_steps: float) -> int | None:
        """Prompt tokens that add as much to a step of so many decodes as `decode_steps` of these
        take; None while that is unknown."""
        further = self._further_token()
        if further is None:
            return None
        return _quotient(decode_steps * self._of_decodes.at(num_decodes), further)

    def tokens_alone(self, decode_steps: float) -> int | None:
        """Prompt tokens that take as long, in a step of their own, as so many steps of one decode,
        which is what a step costs whatever it holds; None while that is unknown."""
        if not self._of_decodes or not self._lone_token_seconds:
            return None
        return _quotient(decode_steps * self._of_decodes.at(1), median(self._lone_token_seconds))

    def token_by_step(self) -> float | None:
        """What a further prompt token costs by what a step costs whatever it holds; None while
        that is unknown."""
        further = self._further_token()
        return None if further is None else further / self._of_decodes.at(1)

    def tokens_between_decodes(
        self, num_decodes: int, num_stages: int, decode_rounds: float
    ) -> int | None:
        """Prompt tokens of each of the P - 1 steps between two that hold all decodes, if they may
        add so many times what a round of decodes takes while no prompt is at work; None where they
        would take less time than that step, or while that is unknown."""
        tokens = self._chunk_token_seconds or self._lone_token_seconds
        if not self._of_decodes or not tokens:
            return None
        together = self._of_decodes.at(num_decodes)
        # Fewer never cost more, whatever was seen of them in another time.
        part = min(together, self._of_decodes.at(-(-num_decodes // num_stages)))
        usual = one_by_one = num_stages * part
        if self._of_rounds:
            usual = self._of_rounds.at(num_decodes)
            usual = min(usual, one_by_one + _mean(self._rest_usual))
        # Few steps of all were seen at first, and none while they look too slow to be taken.
        least = min(together, one_by_one)
        # What all decodes in one step save over as many steps as stages is the prompts' too.
        seconds = ROUND_MARGIN * (1 + decode_rounds) * max(usual, least) - least
        if seconds < (num_stages - 1) * ALIKE * least:
            return None
        seconds -= _mean(self._rest_between or self._rest_usual)
        if self._of_decodes.times_seen(num_decodes) >= NUM_TRUSTED_STEPS:
            least = together
        # A round is as long as its longest step makes it: less for prompts helps nobody.
        return _quotient(max(seconds / (num_stages - 1), least), median(tokens))


class _BySize:
    """Seconds that were seen, by a number of decodes."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        """In order of when they were seen last."""

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, num_decodes: int, seconds: float) -> None:
        seen = self._seen.pop(num_decodes, None)
        if seen is None:
            seen = _recent()
            if len(self._seen) >= NUM_REMEMBERED_SIZES:
                del self._seen[next(iter(self._seen))]
        seen.append(seconds)
        self._seen[num_decodes] = seen

    def at(self, num_decodes: int) -> float:
        """For so many. Where none such was seen, the two sizes next to it say how time goes with
        them, at least not at all, at most in proportion; one alone is taken for half of each."""
        if (seen := self._seen.get(num_decodes)) is not None:
            return median(seen)
        near, *further = sorted(self._seen, key=lambda known: abs(known - num_decodes))[:2]
        seconds = median(self._seen[near])
        in_proportion = seconds * num_decodes / near
        if not further:
            return (seconds + in_proportion) / 2
        slope = (median(self._seen[further[0]]) - seconds) / (further[0] - near)
        low, high = sorted((seconds, in_proportion))
        return min(high, max(low, seconds + slope * (num_decodes - near)))

    def times_seen(self, num_decodes: int) -> int:
        return len(self._seen.get(num_decodes, ()))


def _mean(seconds: deque[float]) -> float:
    return fmean(seconds) if seconds else 0.0


def _quotient(seconds: float, each: float) -> int | None:
    return None if each <= 0 else int(seconds / each)


def _recent() -> deque[float]:
    return deque(maxlen=NUM_REMEMBERED_STEPS)
