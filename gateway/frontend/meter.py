"""Token counts and latencies of one request, from its deltas."""

from __future__ import annotations

import time

from gateway.engine.types import ChoiceDelta
from services.telemetry import Metrics


class Meter:
    """Made when the engine has admitted a request; `count` is called with each delta."""

    __slots__ = ("_last_delivery", "_metrics", "_started")

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        metrics.prompt_tokens.inc(prompt_tokens)
        self._started = time.monotonic()
        self._last_delivery: dict[int, float] = {}

    def count(self, delta: ChoiceDelta) -> None:
        """Adds what is new."""
        if not delta.token_ids:
            return
        now = time.monotonic()
        self._metrics.generation_tokens.inc(len(delta.token_ids))
        before = self._last_delivery.get(delta.choice_index)
        if before is not None:
            self._metrics.inter_token_seconds.observe(now - before)
        elif not self._last_delivery:
            self._metrics.time_to_first_token_seconds.observe(now - self._started)
        self._last_delivery[delta.choice_index] = now
