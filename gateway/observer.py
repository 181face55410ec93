"""Who hears what a mesh does, step by step: metrics, and the trace where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.telemetry.metrics import Metrics
from services.telemetry.step_trace import StepTrace
from stagemesh.v1 import step_pb2

StageObserver = Callable[[int, step_pb2.StepResult], None]
"""Hears (stage, result) of every step of every stage of one replica."""
StepObserver = Callable[[float], None]
"""Hears the seconds from sending a step to its result."""

RecoveryObserver = Callable[[str, float, int], None]
"""Hears (reason, seconds, tokens that are computed again) of a replica that serves again."""


class MeshObserver(Protocol):
    """What a mesh tells. Must be quick and not raise."""

    def on_routed(self, replica: int) -> None:
        """A request goes to a replica."""
        ...

    def on_stage_step(self, replica: int, stage: int, result: step_pb2.StepResult) -> None:
        """A stage has done a step."""
        ...

    def on_step(self, replica: int, seconds: float) -> None:
        """A step is through all stages, so long after it was sent."""
        ...

    def on_recovered(self, replica: int, reason: str, seconds: float, replayed: int) -> None:
        """A replica serves again, so long after a failure."""
        ...

    def on_taken_over(self, replica: int) -> None:
        """A spare has taken over a place of a replica."""
        ...


class MeasuringObserver:
    """`MeshObserver` that feeds the metrics and, where there is one, the trace."""

    def __init__(self, metrics: Metrics, trace: StepTrace | None) -> None:
        self._metrics = metrics
        self._trace = trace

    def on_routed(self, replica: int) -> None:
        """See `MeshObserver`."""
        self._metrics.observe_routing(replica)

    def on_stage_step(self, replica: int, stage: int, result: step_pb2.StepResult) -> None:
        """See `MeshObserver`."""
        self._metrics.stages.observe_stage(replica, stage, result.clock)
        if self._trace is not None:
            self._trace.write(replica, stage, result)

    def on_step(self, replica: int, seconds: float) -> None:
        """See `MeshObserver`."""
        self._metrics.stages.observe_step(replica, seconds)

    def on_recovered(self, replica: int, reason: str, seconds: float, replayed: int) -> None:
        """See `MeshObserver`."""
        self._metrics.recovery.observe(replica, reason, seconds, replayed)

    def on_taken_over(self, replica: int) -> None:
        """See `MeshObserver`."""
        self._metrics.recovery.observe_takeover(replica)
