"""What one run of `stagemesh bench serve` is asked. Names and units are those of `vllm bench
serve` where it has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.config import DEFAULT_HOST, DEFAULT_PORT

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token after it, gap between two deliveries, and
end-to-end latency, all from the client's side."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Those that one request has one value of."""
CHAT_SUFFIX = "/chat/completions"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Fields are the flags' names with underscores."""

    base_url: str = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    endpoint: str = "/v1/completions"
    model: str | None = None
    """None takes the first that `/v1/models` names."""
    api_key: str | None = None
    num_prompts: int = 100
    num_warmups: int = 0
    """Requests that are sent first and not counted."""
    request_rate: float = math.inf
    """Requests per second; infinite sends as fast as `max_concurrency` lets."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps; 1 is a Poisson process."""
    max_concurrency: int | None = None
    request_timeout_seconds: float = 3600.0
    dataset_name: str = "random"
    """"random", "sharegpt" (a file) or "sharegpt-like" (lengths like those of the file)."""
    dataset_path: str | None = None
    sharegpt_output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    """Lengths are uniform in [len * (1 - ratio), len * (1 + ratio)]."""
    random_prefix_len: int = 0
    """Tokens that all prompts begin with, before those of `random_input_len`."""
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] | None = None
    """Fields that are added to every request's body."""
    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = (90.0, 99.0)
    goodput: tuple[tuple[str, float], ...] = ()
    """(metric of GOODPUT_METRICS, most milliseconds): a request that keeps all is good."""
    json: bool = False
    save_result: bool = False
    save_detailed: bool = False
    """The file also has every request's times and lengths."""
    result_dir: str = "."
    result_filename: str | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the endpoint takes messages."""
        return self.endpoint.endswith(CHAT_SUFFIX)
