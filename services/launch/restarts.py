"""How often, and how soon, a process that has ended is started again. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SETTLED_SECONDS = 10.0
"""A process that has lived for so long was no false start: the next one comes at once."""
FIRST_DELAY_SECONDS = 0.5
MOST_DELAY_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """More restarts than `most` within `window_seconds` are none."""

    most: int = 10
    window_seconds: float = 120.0


DEFAULT_LIMITS = RestartLimits()


class RestartBudget:
    """The restarts of one process. No clock of its own: callers pass the time."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._restarts = deque[float]()
        self._false_starts = 0

    def next_delay(self, lived_seconds: float, now: float) -> float | None:
        """Seconds until the next start of a process that has lived for so long; None where the
        restarts of the window are used up."""
        while self._restarts and now - self._restarts[0] > self._limits.window_seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._limits.most:
            return None
        self._restarts.append(now)
        if lived_seconds >= SETTLED_SECONDS:
            self._false_starts = 0
            return 0.0
        # The first that ends early may have been unlucky; the second is a pattern.
        self._false_starts += 1
        if self._false_starts == 1:
            return 0.0
        doubled: float = FIRST_DELAY_SECONDS * 2 ** (self._false_starts - 2)
        return min(doubled, MOST_DELAY_SECONDS)

    def used_up(self) -> str:
        """The limit in words."""
        return f"{self._limits.most} restarts within {self._limits.window_seconds:.0f} s"
