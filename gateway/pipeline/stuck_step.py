"""When a step that no stage answers is stuck, and not only long: from what steps have taken. Pure.

Generous on purpose. A stage that is ended for nothing costs its weights, and a step that
is long for a good reason (a larger chunk than any before, a busy machine) must not look
like a failure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LEAST_SECONDS = 3.0
TIMES_PREDICTED = 5.0
UNKNOWN_SECONDS = 75.0
"""While a stage has done few steps in this epoch: its first ones compile and allocate. Above the
ranks' own step time-out, whose message says more."""
LEAST_KNOWN_STEPS = 4
NUM_REMEMBERED_STEPS = 64


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A step that a stage holds, and how long it may."""

    pp_rank: int
    since: float
    """From when on the stage has held it, by `loop.time()`."""
    limit_seconds: float
    """From when on it is stuck."""


class StepTimes:
    """What the last steps of one stage took, by their number of tokens."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps = deque[tuple[int, float]](maxlen=NUM_REMEMBERED_STEPS)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step is done that the stage has held for so long: what `stuck_after` is compared with,
        so its transfer and its wait for answers of the same stage count as well."""
        self._steps.append((num_tokens, seconds))

    def predict(self, num_tokens: int) -> float | None:
        """Seconds that a step takes at most; None while too little is known.

        The slowest of the last steps, and in proportion more where the step is larger than all of
        them: its fixed costs are counted more than once, and so is an outlier.
        """
        if len(self._steps) < LEAST_KNOWN_STEPS:
            return None
        most_tokens = max(tokens for tokens, _ in self._steps)
        slowest = max(seconds for _, seconds in self._steps)
        return slowest * max(1.0, num_tokens / max(1, most_tokens))

    def stuck_after(self, num_tokens: int) -> float:
        """Seconds after which a step of so many tokens is stuck."""
        predicted = self.predict(num_tokens)
        if predicted is None:
            return UNKNOWN_SECONDS
        return min(max(LEAST_SECONDS, TIMES_PREDICTED * predicted), UNKNOWN_SECONDS)
