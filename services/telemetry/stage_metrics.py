"""What the stages of a mesh report, as metrics.

Labels are `replica` (0 without data parallelism) and `stage`, the PP rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stagemesh.v1 import step_pb2

STAGE_PHASES = ("control_wait", "receive", "compute", "send")
"""The four phases of a stage's clock; they add up to wall time."""
STAGE_LABELS = ("replica", "stage")
BUBBLE_WINDOW_SECONDS = 10
"""Long against a step, short against what an operator waits for."""
STEP_BUCKETS_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""From one decode step on an accelerator to the ranks' step time-out."""
NANOSECONDS = 1e-9

StageMemory = tuple[int, int, int]
"""(replica, stage, peak bytes of the stage's largest rank)."""
StageStall = tuple[int, int, float]
"""(replica, stage, seconds for which it has had work and answered nothing)."""


@dataclass(slots=True)
class BusyWindow:
    """How long a stage has computed in the last seconds, second by second."""

    now: Callable[[], float] = time.monotonic
    _since: float | None = None
    _busy_seconds: dict[int, float] = field(default_factory=dict)

    def add(self, busy_seconds: float) -> None:
        """The stage has just computed for so long."""
        now = self.now()
        if self._since is None:
            self._since = now - busy_seconds
        second = int(now)
        self._busy_seconds[second] = self._busy_seconds.get(second, 0.0) + busy_seconds
        self._forget(second)

    def bubble_ratio(self) -> float:
        """Share of the last `BUBBLE_WINDOW_SECONDS`, or of the time since the first step, in
        which the stage did not compute. 1 where it has done nothing."""
        if self._since is None:
            return 1.0
        now = self.now()
        self._forget(int(now))
        # The oldest second is one that the window may have left in part.
        window = min(now - self._since, BUBBLE_WINDOW_SECONDS - 1 + now % 1.0)
        busy = sum(self._busy_seconds.values())
        return min(max(1.0 - busy / window, 0.0), 1.0) if window > 0 else 0.0

    def _forget(self, second: int) -> None:
        oldest = second - BUBBLE_WINDOW_SECONDS + 1
        for old in [s for s in self._busy_seconds if s < oldest]:
            del self._busy_seconds[old]


@dataclass(slots=True)
class _StageSeries:
    """The series of one stage. Plain numbers, which become counters when they are asked for: they
    move with every step, and incrementing five counters took the gateway as long as sending it."""

    window: BusyWindow
    steps: int = 0
    phases_ns: list[int] = field(default_factory=lambda: [0] * len(STAGE_PHASES))


class StageMetrics:
    """Clocks, latency, bubble, memory and progress of all stages."""

    def __init__(
        self, registry: CollectorRegistry, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._stages: dict[tuple[int, int], _StageSeries] = {}
        self._memory: Callable[[], Iterable[StageMemory]] = tuple
        self._stalls: Callable[[], Iterable[StageStall]] = tuple
        self._step_seconds = Histogram(
            "stagemesh_step_seconds",
            "From sending a step to its result: through all stages.",
            ("replica",),
            buckets=STEP_BUCKETS_SECONDS,
            registry=registry,
        )
        registry.register(_StageCollector(self))

    def observe_stage(self, replica: int, stage: int, clock: step_pb2.StageClock) -> None:
        """A stage has done a step."""
        series = self._stages.get((replica, stage))
        if series is None:
            series = self._stages[replica, stage] = _StageSeries(BusyWindow(self._now))
        series.steps += 1
        phases = series.phases_ns
        phases[0] += clock.control_wait_ns
        phases[1] += clock.receive_ns
        phases[2] += clock.compute_ns
        phases[3] += clock.send_ns
        series.window.add(clock.compute_ns * NANOSECONDS)

    def observe_step(self, replica: int, seconds: float) -> None:
        """A step has passed all stages."""
        self._step_seconds.labels(str(replica)).observe(seconds)

    def watch_memory(self, memory: Callable[[], Iterable[StageMemory]]) -> None:
        """Reads the stages' memory at each scrape."""
        self._memory = memory

    def watch_progress(self, stalls: Callable[[], Iterable[StageStall]]) -> None:
        """Reads how long the stages have answered nothing at each scrape."""
        self._stalls = stalls

    def collected(self) -> Iterator[Metric]:
        """What is computed at a scrape."""
        steps = CounterMetricFamily(
            "stagemesh_stage_steps", "Steps that a stage has done.", labels=STAGE_LABELS
        )
        spent = CounterMetricFamily(
            "stagemesh_stage_seconds",
            "A stage's time by phase; the phases add up to wall time.",
            labels=(*STAGE_LABELS, "phase"),
        )
        for (replica, stage), series in self._stages.items():
            labels = (str(replica), str(stage))
            steps.add_metric(labels, series.steps)
            for phase, total_ns in zip(STAGE_PHASES, series.phases_ns, strict=True):
                spent.add_metric((*labels, phase), total_ns * NANOSECONDS)
        bubble = GaugeMetricFamily(
            "stagemesh_stage_bubble_ratio",
            f"Share of the last {BUBBLE_WINDOW_SECONDS} s in which a stage did not compute.",
            labels=STAGE_LABELS,
        )
        for (replica, stage), series in self._stages.items():
            bubble.add_metric((str(replica), str(stage)), series.window.bubble_ratio())
        peak = GaugeMetricFamily(
            "stagemesh_stage_memory_peak_bytes",
            "Most memory that a rank of the stage has held: of its device, on a CPU of its "
            "process.",
            labels=STAGE_LABELS,
        )
        for replica, stage, peak_bytes in self._memory():
            peak.add_metric((str(replica), str(stage)), peak_bytes)
        stall = GaugeMetricFamily(
            "stagemesh_progress_stalled_seconds",
            "For how long a stage has had work and answered no step; 0 while it has none.",
            labels=STAGE_LABELS,
        )
        for replica, stage, seconds in self._stalls():
            stall.add_metric((str(replica), str(stage)), seconds)
        yield from (steps, spent, bubble, peak, stall)


class _StageCollector(Collector):
    def __init__(self, metrics: StageMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collected()
