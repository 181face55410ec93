"""Spares that no gateway has started: by hand, and on another node; a worker that wakes up after
its place was taken over. Simulated devices: their answers show what comes of an old epoch.
"""

from __future__ import annotations

import concurrent.futures
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.test_gateway_loss import COMMAND
from tests.e2e.test_recovery import NOTICED_SECONDS, RECOVERED_SECONDS, epoch_of, gauge, is_ready
from tests.e2e.test_standby import rank_of, spare_pids, view, wait_for_spares, worker_of
from tests.mesh_process import MeshProcess, is_running, wait_for
from tests.simulated_mesh import expected_outputs, generate_all, make_model, prompts_of

PROMPTS = prompts_of(4, 8)


@contextmanager
def workers_by_hand(port: int, log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Of stages 0 and 1, and a spare; they wait for their head."""
    flags = ("--device", "sim", "--cpu-devices", "4", "--wait-for-head", "--master-port", str(port))
    with log.open("wb") as file:
        processes = [
            subprocess.Popen(
                [*COMMAND, "stage-worker", *flags, *own], stderr=file, stdin=subprocess.DEVNULL
            )
            for own in (("--pp-rank", "0"), ("--pp-rank", "1"), ("--standby",))
        ]
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in processes:
            process.wait(10)


def gateway(model: Path, port: int) -> MeshProcess:
    sizes = ("-pp", "2", "--device", "sim", "--master-port", str(port))
    doors = ("--port", "0", "--grpc-port", "0")
    return MeshProcess(model, command=[*COMMAND, "gateway", str(model), *sizes, *doors])


def test_a_worker_that_wakes_up_after_a_takeover_is_a_spare(tmp_path: Path) -> None:
    """It was stopped, and nobody has ended it. Then it takes its place back, since the other is
    killed; and the next gateway finds it there."""
    model = make_model(tmp_path / "model")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with workers_by_hand(port, tmp_path / "workers.log") as (_, old, spare):
        with gateway(model, port) as mesh, concurrent.futures.ThreadPoolExecutor(1) as pool:
            wait_for_spares(mesh, 1)
            ranks = [rank_of(mesh, 1).pid, spare_pids(mesh)[0]]
            answers = pool.submit(generate_all, mesh, PROMPTS, 2000)
            mesh.wait_until_running(len(PROMPTS))
            epoch = epoch_of(mesh)
            old.send_signal(signal.SIGSTOP)
            wait_for(lambda: epoch_of(mesh) > epoch, 2 * NOTICED_SECONDS, "a takeover")
            wait_for(lambda: is_ready(mesh), RECOVERED_SECONDS, "readiness")
            assert rank_of(mesh, 1).pid == ranks[1]
            old.send_signal(signal.SIGCONT)
            wait_for_spares(mesh, 1)
            assert spare_pids(mesh) == [ranks[0]], "the same process, with the same rank"
            assert answers.result(60) == expected_outputs(PROMPTS, 2000)
            epoch = epoch_of(mesh)
            spare.kill()
            wait_for(lambda: epoch_of(mesh) > epoch, NOTICED_SECONDS, "another takeover")
            wait_for(lambda: is_ready(mesh), RECOVERED_SECONDS, "readiness")
            assert rank_of(mesh, 1).pid == ranks[0]
            assert generate_all(mesh, PROMPTS, 20) == expected_outputs(PROMPTS, 20)
            epoch = epoch_of(mesh)
            mesh.process.send_signal(signal.SIGTERM)
            assert mesh.process.wait(10) == 0
        with gateway(model, port) as mesh:
            assert rank_of(mesh, 1).pid == ranks[0]
            assert epoch_of(mesh) > epoch
            assert generate_all(mesh, PROMPTS, 20) == expected_outputs(PROMPTS, 20)
            mesh.process.send_signal(signal.SIGTERM)
            assert mesh.process.wait(10) == 0


def test_a_spare_of_another_node_takes_over_for_any_replica(tmp_path: Path) -> None:
    """The other replica serves meanwhile. Whoever comes back on the head's node is the spare."""
    model = make_model(tmp_path / "model")
    sizes = ("-dp", "2", "-pp", "2", "--nnodes", "2", "--device", "sim")
    node = [*sizes, "--node-rank", "1", "--standby", "1"]
    with MeshProcess(model, "--master-port", "0", *sizes, nodes=[node]) as mesh:
        wait_for_spares(mesh, 1)
        tree = len(mesh.tree())
        (there,) = spare_pids(mesh)
        assert mesh.node_processes[0].pid in [p.pid for p in psutil.Process(there).parents()]
        victim, epoch = worker_of(mesh, 1), epoch_of(mesh)
        victim.kill()
        wait_for(lambda: epoch_of(mesh) > epoch, NOTICED_SECONDS, "another epoch")
        assert is_ready(mesh)
        wait_for(
            lambda: {replica["state"] for replica in view(mesh)["replicas"]} == {"serving"},
            RECOVERED_SECONDS,
            "both replicas",
        )
        assert rank_of(mesh, 1).pid == there
        assert not is_running(victim)
        assert generate_all(mesh, PROMPTS, 20) == expected_outputs(PROMPTS, 20)
        wait_for_spares(mesh, 1)
        (here,) = spare_pids(mesh)
        assert mesh.process.pid in [p.pid for p in psutil.Process(here).parents()]
        assert len(mesh.tree()) == tree
        assert gauge(mesh, "stagemesh_kv_free_blocks ") == gauge(mesh, "stagemesh_kv_blocks ")
