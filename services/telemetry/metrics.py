"""Every metric of the gateway, in one registry of its own.

Names start with `stagemesh_` and carry base units (seconds, bytes, tokens).
Label sets are closed: endpoints, statuses, stages and phases are known sets,
never text from a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.telemetry.recovery_metrics import RecoveryMetrics
from services.telemetry.stage_metrics import StageMetrics

LATENCY_BUCKETS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""From an accelerator's step to a long queue."""

OTHER_ENDPOINT = "other"


class EngineGauges(Protocol):
    """What is read from the engine at each scrape (`gateway.engine.types.EngineStats`)."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def waiting_requests(self) -> int: ...
    @property
    def running_requests(self) -> int: ...
    @property
    def steps_in_flight(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prefix_cache_queries(self) -> int: ...
    @property
    def prefix_cache_hits(self) -> int: ...


class FinishedRequest(Protocol):
    """What is read of a finished request (`gateway.engine.stream.RequestTimings`)."""

    @property
    def queue_seconds(self) -> float: ...


class _EngineCollector(Collector):
    """Reads the engine when Prometheus asks, so that nothing is kept twice."""

    def __init__(self, stats: Callable[[], EngineGauges]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("stagemesh_kv_blocks", "KV blocks of the pipeline.", stats.num_blocks),
            ("stagemesh_kv_free_blocks", "KV blocks that no request holds.", stats.free_blocks),
            ("stagemesh_requests_waiting", "Requests in the queue.", stats.waiting_requests),
            ("stagemesh_requests_running", "Requests that hold slots.", stats.running_requests),
            ("stagemesh_steps_in_flight", "Steps on their way.", stats.steps_in_flight),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            (
                "stagemesh_preemptions",
                "Sequences that lost their KV blocks and were computed again.",
                stats.preemptions,
            ),
            (
                "stagemesh_prefix_cache_queries",
                "Prompt tokens that were looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            (
                "stagemesh_prefix_cache_hits",
                "Prompt tokens that were in the prefix cache and not computed.",
                stats.prefix_cache_hits,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)


class _TaskCollector(Collector):
    """What grows where something is started and never ended."""

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        try:
            count = len(asyncio.all_tasks())
        except RuntimeError:  # outside of an event loop
            return
        yield GaugeMetricFamily(
            "stagemesh_gateway_tasks", "Tasks of the gateway's event loop.", value=count
        )


class Metrics:
    """The gateway's metrics. One object, made at start-up and handed down."""

    def __init__(self) -> None:
        # Else every counter has a second series with the time of its first increment.
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=False)
        self._endpoints: set[str] = set()
        self.requests = Counter(
            "stagemesh_requests",
            "Requests that are over, by endpoint and HTTP status (gRPC calls count as the "
            "status of the same error).",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "stagemesh_request_seconds",
            "From a request's first byte to the end of its answer.",
            ("endpoint",),
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "stagemesh_prompt_tokens",
            "Tokens of prompts whose answers have begun.",
            registry=self.registry,
        )
        self.generation_tokens = Counter(
            "stagemesh_generation_tokens", "Tokens generated.", registry=self.registry
        )
        self.time_to_first_token_seconds = Histogram(
            "stagemesh_time_to_first_token_seconds",
            "From an accepted request to its first token.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.inter_token_seconds = Histogram(
            "stagemesh_inter_token_seconds",
            "Between two deliveries of one choice.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "stagemesh_queue_seconds",
            "From an accepted request to its first step.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.replica_requests = Counter(
            "stagemesh_replica_requests",
            "Requests that each data-parallel replica has taken.",
            ("replica",),
            registry=self.registry,
        )
        self.stages = StageMetrics(self.registry)
        self.registry.register(_TaskCollector())
        self.recovery = RecoveryMetrics(self.registry)

    def declare_endpoints(self, endpoints: Iterable[str]) -> None:
        """Names that `observe_request` keeps; others are counted as "other"."""
        self._endpoints.update(endpoints)

    def observe_request(self, endpoint: str, status: int, seconds: float) -> None:
        """A request is over."""
        label = endpoint if endpoint in self._endpoints else OTHER_ENDPOINT
        self.requests.labels(label, str(status)).inc()
        self.request_seconds.labels(label).observe(seconds)

    def observe_routing(self, replica: int) -> None:
        """A request went to a replica."""
        self.replica_requests.labels(str(replica)).inc()

    def on_request_finished(self, timings: FinishedRequest) -> None:
        """The engine is done with a request; makes this object an engine's observer."""
        self.queue_seconds.observe(timings.queue_seconds)

    def watch_engine(self, stats: Callable[[], EngineGauges]) -> None:
        """Reads the engine's state at each scrape. Once per `Metrics`."""
        self.registry.register(_EngineCollector(stats))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
