"""Liveness, readiness and progress are three things (F13), told alike on both doors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.topology.simulated_cost import StageCost
from tests.mesh_process import MeshProcess, wait_for
from tests.simulated_mesh import expected_outputs, generate_all, prompts_of, simulated_mesh

NOT_READY_SECONDS = 5.0
RECOVERED_SECONDS = 30.0
LONG = 200
"""Tokens; 4 s of two stages of 10 ms."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    directory = tmp_path_factory.mktemp("health")
    with simulated_mesh(directory, 2, StageCost(0.01)) as running:
        yield running


@contextmanager
def watched(mesh: MeshProcess) -> Iterator[list[int]]:
    """What gRPC's health says from now on, every change."""
    seen: list[int] = []
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        def read() -> None:
            try:
                for answer in watch:
                    seen.append(answer.status)
            except grpc.RpcError:
                return  # The end of the test.

        reader = threading.Thread(target=read)
        reader.start()
        yield seen
        watch.cancel()
        reader.join(5)


def ready(mesh: MeshProcess) -> bool:
    return httpx.get(f"{mesh.url}/ready", timeout=5).status_code == 200


def stalled_seconds(mesh: MeshProcess) -> float:
    lines = httpx.get(f"{mesh.url}/metrics", timeout=5).text.splitlines()
    name = "stagemesh_progress_stalled_seconds{"
    return max(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def end_readiness(mesh: MeshProcess, statuses: list[int], stopped: psutil.Process) -> None:
    """Within 5 s, with a reason, while the gateway lives."""
    wait_for(lambda: statuses == [SERVING], 5.0, "the first answer of health")
    stopped.suspend()
    wait_for(lambda: not ready(mesh), NOT_READY_SECONDS, "the end of readiness")
    answer = httpx.get(f"{mesh.url}/ready", timeout=5)
    assert answer.json()["reason"] or answer.status_code == 200
    assert httpx.get(f"{mesh.url}/health", timeout=5).status_code == 200
    wait_for(lambda: statuses[1:2] == [NOT_SERVING], 2.0, "NOT_SERVING")


@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_stopped_process_ends_readiness_of_an_idle_mesh(mesh: MeshProcess, victim: str) -> None:
    stopped = (mesh.ranks() if victim == "rank" else mesh.workers())[1]
    with watched(mesh) as statuses:
        end_readiness(mesh, statuses, stopped)
        wait_for(lambda: ready(mesh), RECOVERED_SECONDS, "readiness")
        wait_for(lambda: statuses[-1] == SERVING, 2.0, "SERVING")
    prompts = prompts_of(1, 8)
    assert generate_all(mesh, prompts, 4) == expected_outputs(prompts, 4)


def test_steps_that_do_not_move_are_seen_before_readiness_ends(mesh: MeshProcess) -> None:
    prompts = prompts_of(1, 8)
    outputs: list[list[list[int]]] = []
    running = threading.Thread(target=lambda: outputs.append(generate_all(mesh, prompts, LONG)))
    running.start()
    mesh.wait_until_running(1)
    assert stalled_seconds(mesh) < 0.5
    started = time.monotonic()
    mesh.ranks()[0].suspend()
    wait_for(lambda: stalled_seconds(mesh) > 0.5, 3.0, "a stage that does not move")
    assert time.monotonic() - started < 2.5 and ready(mesh)
    stages = httpx.get(f"{mesh.url}/v1/mesh", timeout=5).json()["stages"]
    assert max(stage["stalled_seconds"] for stage in stages) > 0.5
    assert max(stage["last_step_id"] for stage in stages) > 0
    running.join(60)
    assert outputs == [expected_outputs(prompts, LONG)]
