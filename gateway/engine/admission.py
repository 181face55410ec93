"""Refuses what would wait behind a full queue, and says when to try again."""

from __future__ import annotations

from services.errors import InvalidRequest, Saturated

MIN_RETRY_AFTER_SECONDS = 1.0
MAX_RETRY_AFTER_SECONDS = 60.0
DURATION_WEIGHT = 0.1
"""Weight of the newest request in the mean duration behind Retry-After."""


class Admission:
    """The bound of one engine's queue."""

    def __init__(self, max_waiting: int, max_running: int) -> None:
        """Most sequences that wait, and that run."""
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._mean_duration_seconds = MIN_RETRY_AFTER_SECONDS

    def finished(self, seconds: float) -> None:
        """A request is over that took so long."""
        self._mean_duration_seconds += DURATION_WEIGHT * (seconds - self._mean_duration_seconds)

    def check(self, num_new: int, num_waiting: int, num_running: int) -> None:
        """Raises `Saturated` where so many more sequences are too many now, and `InvalidRequest`
        where they always are."""
        if num_new > self._max_waiting + self._max_running:
            raise InvalidRequest(
                f"n is {num_new}, but {self._max_running} sequences may run (--max-num-seqs) and "
                f"{self._max_waiting} wait (--max-queued-requests): ask for n of at most "
                f"{self._max_running + self._max_waiting}, or serve with higher limits",
                param="n",
            )
        free_slots = self._max_running - num_running
        if num_waiting + num_new <= self._max_waiting + free_slots:
            return
        rounds = (num_waiting + num_new) / self._max_running
        seconds = rounds * self._mean_duration_seconds
        raise Saturated(
            f"{num_waiting} sequences wait already and {num_new} more are over the limit of "
            f"{self._max_waiting} (--max-queued-requests): try again later",
            retry_after_seconds=min(max(seconds, MIN_RETRY_AFTER_SECONDS), MAX_RETRY_AFTER_SECONDS),
        )
