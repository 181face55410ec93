"""Names, units and closed labels of the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from services.telemetry import Metrics


@dataclass
class Stats:
    num_blocks: int = 100
    free_blocks: int = 90
    waiting_requests: int = 1
    running_requests: int = 2
    steps_in_flight: int = 3
    preemptions: int = 4
    prefix_cache_queries: int = 500
    prefix_cache_hits: int = 320


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_every_name_has_the_prefix() -> None:
    metrics = Metrics()
    metrics.watch_engine(Stats)
    metrics.observe_request("/v1/models", 200, 0.1)
    assert all(name.startswith("stagemesh_") for name in samples(metrics))


def test_the_engine_is_read_at_the_scrape() -> None:
    metrics, stats = Metrics(), Stats()
    metrics.watch_engine(lambda: stats)
    stats.free_blocks = 7
    found = samples(metrics)
    assert found["stagemesh_kv_free_blocks{}"] == 7
    assert found["stagemesh_kv_blocks{}"] == 100
    assert found["stagemesh_preemptions_total{}"] == 4
    assert found["stagemesh_prefix_cache_queries_total{}"] == 500
    assert found["stagemesh_prefix_cache_hits_total{}"] == 320


def test_queue_time_comes_from_the_engine() -> None:
    @dataclass
    class Timings:
        queue_seconds: float

    metrics = Metrics()
    metrics.on_request_finished(Timings(0.25))
    metrics.on_request_finished(Timings(0.5))
    found = samples(metrics)
    assert found["stagemesh_queue_seconds_sum{}"] == 0.75
    assert found["stagemesh_queue_seconds_count{}"] == 2
    assert not any("_created" in name for name in found)


def test_unknown_paths_share_one_label() -> None:
    metrics = Metrics()
    metrics.declare_endpoints(["/health"])
    metrics.observe_request("/health", 200, 0.0)
    metrics.observe_request("/../etc", 404, 0.0)
    metrics.observe_request("/random", 404, 0.0)
    found = samples(metrics)
    assert found["stagemesh_requests_total{endpoint=other,status=404}"] == 2
    assert found["stagemesh_requests_total{endpoint=/health,status=200}"] == 1
