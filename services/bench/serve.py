"""One run of `stagemesh bench serve`, from settings to printed figures."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from services.bench.arrivals import arrival_times
from services.bench.endpoint import Endpoint
from services.bench.load import LoadRun, run_load
from services.bench.mesh import PipelineReport, pipeline_report, read_mesh, read_stage_seconds
from services.bench.progress import show_progress
from services.bench.prompts import make_requests
from services.bench.report import (
    BenchResult,
    as_json,
    details_json,
    mean_concurrency,
    summarize,
)
from services.bench.settings import BenchSettings
from services.bench.text import render
from services.errors import StagemeshError

EXIT_FAILED = 1
METRICS_PATH = "/metrics"
MESH_PATH = "/v1/mesh"


def run(settings: BenchSettings) -> int:
    """Measures and prints; 1 where every request failed.

    Raises `StagemeshError` where there is no endpoint or the result cannot be written.
    """
    load, result = uvloop.run(measure(settings))
    document = as_json(result, date=datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
    if settings.save_result:
        details = details_json(load.outcomes) if settings.save_detailed else {}
        path = _save(settings, {**document, **details})
        sys.stderr.write(f"saved {path}\n")
    text = json.dumps(document, indent=2) + "\n" if settings.json else render(result)
    sys.stdout.write(text)
    return EXIT_FAILED if result.completed == 0 else 0


async def measure(settings: BenchSettings) -> tuple[LoadRun, BenchResult]:
    """Sends the whole load and returns what became of it."""
    endpoint = Endpoint(settings)
    try:
        return await _measure(settings, endpoint)
    finally:
        endpoint.close()


async def _measure(settings: BenchSettings, endpoint: Endpoint) -> tuple[LoadRun, BenchResult]:
    # Two of them, so that the times do not depend on how prompts are drawn.
    prompt_rng = random.Random(f"prompts {settings.seed}")
    time_rng = random.Random(f"times {settings.seed}")
    model = await endpoint.model()
    total = settings.num_warmups + settings.num_prompts
    requests, exact = await make_requests(endpoint, settings, model, total, prompt_rng)
    warmups, counted = requests[: settings.num_warmups], requests[settings.num_warmups :]
    times = arrival_times(len(counted), settings.request_rate, settings.burstiness, time_rng)
    if warmups:
        start = [0.0] * len(warmups)
        warm_up = LoadRun(total=len(warmups))
        await run_load(warmups, start, settings.max_concurrency, endpoint.send, warm_up)
    size = read_mesh(await endpoint.try_to_ask("GET", MESH_PATH))
    clocks = await endpoint.text(METRICS_PATH) if size else None
    load = LoadRun(total=len(counted))
    used = time.process_time()
    async with asyncio.TaskGroup() as group:
        progress = group.create_task(show_progress(load, sys.stderr))
        await run_load(counted, times, settings.max_concurrency, endpoint.send, load)
        progress.cancel()
    used = time.process_time() - used
    pipeline: PipelineReport | None = None
    if size is not None:
        concurrency = mean_concurrency(load)
        after = await endpoint.text(METRICS_PATH)
        pipeline = pipeline_report(
            size, concurrency, read_stage_seconds(clocks), read_stage_seconds(after)
        )
    result = summarize(
        settings,
        endpoint.address,
        model,
        load,
        exact_prompts=exact,
        client_cpu_seconds=used,
        pipeline=pipeline,
    )
    return load, result


def _save(settings: BenchSettings, document: dict[str, object]) -> Path:
    name = settings.result_filename
    if name is None:
        rate = document["request_rate"]
        model = re.sub(r"[^\w.-]+", "-", str(document["model_id"]))
        name = f"stagemesh-{rate}qps-{model}-{document['date']}.json"
    path = Path(settings.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document) + "\n", "utf-8")
    except OSError as error:
        raise StagemeshError(f"the result cannot be written to {path}: {error.strerror}") from None
    return path
