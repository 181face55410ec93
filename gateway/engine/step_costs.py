"""What steps and rounds of decodes have been seen to take."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import NamedTuple

MIN_CHUNK_TOKENS = 8
"""Of a prompt while others decode, whatever steps cost: every step has its fixed costs too."""
NUM_REMEMBERED_STEPS = 15
"""Of each kind. Their median is not moved by a few outliers (a first step, a busy moment)."""
NUM_LAST_STEPS = 256
"""Rounds have fewer: as many as stages, and batches beyond them."""
ROUND_MARGIN = 0.95
"""Of the time that a round may take: prompts' steps vary, and contexts grow meanwhile."""
ALIKE = 0.85
"""Steps whose times differ by less keep stages waiting for little."""


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
        "_decode_seconds",
        "_last",
        "_mixed_token_seconds",
        "_of_decodes",
        "_of_rounds",
        "_prompt_token_seconds",
        "_rest_seconds",
    )

    def __init__(self) -> None:
        self._last = deque[SeenStep](maxlen=NUM_LAST_STEPS)
        self._decode_seconds = _recent()
        self._of_decodes: dict[int, deque[float]] = {}
        """A step of decodes alone, by their number, which slots bound."""
        self._of_rounds: dict[int, deque[float]] = {}
        """From a token to the next while no prompt is at work, by the number of all decodes."""
        self._rest_seconds = _recent()
        """Of a round with steps of prompts alone, what the last stage did not compute: mostly
        nothing and now and then much, so their mean counts. None is taken for more than the step
        of all decodes."""
        self._mixed_token_seconds = _recent()
        """A prompt token's beside decodes, which are not counted."""
        self._prompt_token_seconds = _recent()
        """A prompt token's in a step of prompts alone, with its part of what every step costs."""

    def observe(self, step: SeenStep) -> None:
        """The next step is done."""
        num_prompt_tokens, num_decodes, seconds, _, _ = step
        if seconds <= 0:
            return
        self._last.append(step)
        if num_prompt_tokens == 0:
            self._decode_seconds.append(seconds)
            self._of_decodes.setdefault(num_decodes, _recent()).append(seconds)
            self._observe_round(step)
        elif num_prompt_tokens < MIN_CHUNK_TOKENS:
            return  # It is the fixed costs that would be measured.
        elif num_decodes == 0:
            self._prompt_token_seconds.append(seconds / num_prompt_tokens)
        elif self._of_decodes:
            beside = _at(self._of_decodes, num_decodes)
            self._mixed_token_seconds.append(max(0.0, seconds - beside) / num_prompt_tokens)

    def _observe_round(self, latest: SeenStep) -> None:
        """It ends with a step of decodes alone; of those in it that had one before."""
        if not 0 < latest.round_steps < len(self._last):
            return
        round_seconds = latest.end_seconds - self._last[-1 - latest.round_steps].end_seconds
        if round_seconds <= 0:
            return
        steps = [self._last[-back] for back in range(1, latest.round_steps + 1)]
        if all(step.num_prompt_tokens == 0 for step in steps):
            num_decodes = sum(step.num_decodes for step in steps)
            self._of_rounds.setdefault(num_decodes, _recent()).append(round_seconds)
        elif all(step.num_decodes == 0 for step in steps[1:]):
            rest = round_seconds - sum(step.seconds for step in steps)
            self._rest_seconds.append(min(max(0.0, rest), latest.seconds))

    def tokens_beside_decodes(self, num_decodes: int, decode_steps: float) -> int | None:
        """Prompt tokens that add as much to a step of so many decodes as `decode_steps` of these
        take; None while that is unknown."""
        tokens = self._mixed_token_seconds or self._prompt_token_seconds
        if not self._of_decodes or not tokens:
            return None
        return _quotient(decode_steps * _at(self._of_decodes, num_decodes), median(tokens))

    def tokens_alone(self, decode_steps: float) -> int | None:
        """Prompt tokens that take as long, in a step of their own, as so many steps of decodes
        alone; None while that is unknown."""
        tokens = self._prompt_token_seconds or self._mixed_token_seconds
        if not self._decode_seconds or not tokens:
            return None
        return _quotient(decode_steps * median(self._decode_seconds), median(tokens))

    def tokens_between_decodes(
        self, num_decodes: int, num_stages: int, decode_rounds: float
    ) -> int | None:
        """Prompt tokens of each of the P - 1 steps between two that hold all decodes, if they may
        add so many times what a round of decodes takes while no prompt is at work; None where they
        would take less time than that step, or while that is unknown."""
        tokens = self._prompt_token_seconds or self._mixed_token_seconds
        if not self._of_decodes or not tokens:
            return None
        one_by_one = num_stages * _at(self._of_decodes, -(-num_decodes // num_stages))
        # Few such steps were seen at first, and none while they look too slow to be taken.
        together = min(_at(self._of_decodes, num_decodes), one_by_one)
        usual = _at(self._of_rounds, num_decodes) if self._of_rounds else one_by_one
        # What all decodes in one step save over as many steps as stages is the prompts' too.
        seconds = ROUND_MARGIN * (1 + decode_rounds) * max(usual, together) - together
        if seconds < (num_stages - 1) * ALIKE * together:
            return None
        if self._rest_seconds:
            seconds = max(0.0, seconds - fmean(self._rest_seconds))
        return _quotient(seconds / (num_stages - 1), median(tokens))


def _at(seconds: dict[int, deque[float]], num_decodes: int) -> float:
    """For so many decodes; where none such was seen, half of it is taken to be in proportion to
    them."""
    known = min(seconds, key=lambda known: abs(known - num_decodes))
    return median(seconds[known]) * (1 + num_decodes / known) / 2


def _quotient(seconds: float, each: float) -> int | None:
    return None if each <= 0 else int(seconds / each)


def _recent() -> deque[float]:
    return deque(maxlen=NUM_REMEMBERED_STEPS)
