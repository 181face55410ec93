"""What a mesh has been through: recoveries, what they took, and the present epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RECOVERY_BUCKETS_SECONDS = (
    0.5,
    1.0,
    2.0,
    4.0,
    6.0,
    8.0,
    10.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
"""From a standby that is there to a stage that is read from a slow file system."""


class _EpochCollector(Collector):
    def __init__(self, epochs: Callable[[], Iterable[tuple[int, int]]]) -> None:
        self._epochs = epochs

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "stagemesh_epoch", "Epoch of a replica's groups.", labels=("replica",)
        )
        for replica, epoch in self._epochs():
            gauge.add_metric((str(replica),), epoch)
        yield gauge


class _StandbyCollector(Collector):
    def __init__(self, spares: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._spares = spares

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "stagemesh_standby_workers", "Spare stage workers, by state.", labels=("state",)
        )
        for state, count in self._spares():
            gauge.add_metric((state,), count)
        yield gauge


class RecoveryMetrics:
    """Part of `Metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._recoveries = Counter(
            "stagemesh_recoveries",
            "Times that a replica served again after a failure, by the failure's reason.",
            ("replica", "reason"),
            registry=registry,
        )
        self._seconds = Histogram(
            "stagemesh_recovery_seconds",
            "From a failure that was noticed until the replica served again.",
            ("replica",),
            buckets=RECOVERY_BUCKETS_SECONDS,
            registry=registry,
        )
        self._takeovers = Counter(
            "stagemesh_takeovers",
            "Times that a spare worker took over the place of one that was lost.",
            ("replica",),
            registry=registry,
        )
        self._replayed = Counter(
            "stagemesh_replayed_tokens",
            "Tokens that the stages had been sent and were sent again after a failure.",
            ("replica",),
            registry=registry,
        )

    def observe(self, replica: int, reason: str, seconds: float, replayed_tokens: int) -> None:
        """A replica serves again. `reason` is of a closed set."""
        self._recoveries.labels(str(replica), reason).inc()
        self._seconds.labels(str(replica)).observe(seconds)
        self._replayed.labels(str(replica)).inc(replayed_tokens)

    def observe_takeover(self, replica: int) -> None:
        """A spare has taken over a place."""
        self._takeovers.labels(str(replica)).inc()

    def watch_standby(self, spares: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Reads (state, spares in it) at each scrape. Once."""
        self._registry.register(_StandbyCollector(spares))

    def watch_epochs(self, epochs: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Reads (replica, epoch) at each scrape. Once."""
        self._registry.register(_EpochCollector(epochs))
