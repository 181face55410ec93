"""SIGTERM: not ready at once, nothing new, what runs goes on to its deadline, exit code 0."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.topology.simulated_cost import StageCost
from stagemesh import Client
from stagemesh.errors import PipelineUnavailable
from tests.mesh_process import MeshProcess, wait_for
from tests.simulated_mesh import expected_outputs, prompts_of, simulated_mesh

STREAMS = 4
TOKENS = 60
COST = StageCost(0.02)
"""Two seconds for `TOKENS` of one sequence on two stages."""
ENDLESS = 4000


def stream(mesh: MeshProcess, prompt: list[int], max_tokens: int) -> list[str]:
    """The data of all events of a streamed completion."""
    body = {
        **{"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    with httpx.stream("POST", f"{mesh.url}/v1/completions", json=body, timeout=60) as response:
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def grpc_health(mesh: MeshProcess) -> int:
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        request = health_pb2.HealthCheckRequest()
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


def test_streams_in_flight_are_finished(tmp_path: Path) -> None:
    prompts = prompts_of(STREAMS + 1, 8)
    with (
        simulated_mesh(tmp_path, 2, COST, "--drain-timeout", "30") as mesh,
        concurrent.futures.ThreadPoolExecutor() as pool,
        Client(mesh.grpc_address, timeout=60, max_retries=0) as client,
    ):
        assert grpc_health(mesh) == health_pb2.HealthCheckResponse.SERVING
        streams = [pool.submit(stream, mesh, prompt, TOKENS) for prompt in prompts[:STREAMS]]
        call = pool.submit(
            client.generate, token_ids=prompts[STREAMS], max_tokens=TOKENS, ignore_eos=True
        )
        mesh.wait_until_running(STREAMS + 1)
        mesh.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        wait_for(lambda: httpx.get(f"{mesh.url}/ready").status_code == 503, 0.5, "not ready")
        assert "draining" in httpx.get(f"{mesh.url}/ready").json()["reason"]
        assert httpx.get(f"{mesh.url}/health").status_code == 200
        assert grpc_health(mesh) == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = httpx.post(f"{mesh.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        with pytest.raises(PipelineUnavailable, match="shutting down"):
            client.generate("a", max_tokens=1)
        for one in streams:
            *_, last, usage, done = one.result(timeout=30)
            assert done == "[DONE]"
            assert json.loads(last)["choices"][0]["finish_reason"] == "length"
            assert json.loads(usage)["usage"]["completion_tokens"] == TOKENS
        assert list(call.result(timeout=30).token_ids) == expected_outputs(prompts, TOKENS)[-1]
        assert mesh.process.wait(10) == 0
        assert time.monotonic() - started < 25, "it waited for its deadline with nothing to do"


def test_a_second_signal_ends_what_still_runs(tmp_path: Path) -> None:
    with (
        simulated_mesh(tmp_path, 2, COST, "--drain-timeout", "60") as mesh,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        (prompt,) = prompts_of(1, 8)
        endless = pool.submit(stream, mesh, prompt, ENDLESS)
        mesh.wait_until_running(1)
        mesh.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert not endless.done(), "the stream was cut before the deadline"
        mesh.process.send_signal(signal.SIGTERM)
        *_, last = endless.result(timeout=5)
        assert json.loads(last)["error"]["type"] == "service_unavailable"
        assert mesh.process.wait(10) == 0
