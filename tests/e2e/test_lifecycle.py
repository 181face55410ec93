"""How a mesh ends: by Ctrl-C, with its gateway, and with the first failure of a stage where it is
told not to recover."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.mesh_process import ENDLESS, MeshProcess, is_running, wait_for
from tests.tiny_models import make_tiny_llama

FLAGS = ("-pp", "2")
NO_RECOVERY = ("--max-recovery-attempts", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lifecycle") / "tiny"
    return make_tiny_llama(path, tied=True, shape=ENDLESS)


def test_ctrl_c_ends_everything_in_5_s(tiny: Path) -> None:
    with MeshProcess(tiny, *FLAGS) as mesh:
        tree = mesh.tree()
        assert len(tree) == 5
        mesh.process.send_signal(signal.SIGINT)
        wait_for(lambda: not any(is_running(p) for p in tree), 5.0, "the end of all processes")
        assert mesh.process.wait(1) == 0


def test_a_killed_gateway_leaves_no_process(tiny: Path) -> None:
    """F21, also with a rank that is stopped at that moment."""
    with MeshProcess(tiny, *FLAGS) as mesh:
        tree = mesh.tree()
        mesh.ranks()[1].suspend()
        mesh.process.kill()
        wait_for(lambda: not any(is_running(p) for p in tree), 10.0, "the end of all processes")


@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_dead_stage_reaches_clients_with_its_cause_in_3_s(tiny: Path, victim: str) -> None:
    """F1: no hang; a typed error that names the stage."""
    with (
        MeshProcess(tiny, *FLAGS, *NO_RECOVERY) as mesh,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        answers = [pool.submit(mesh.endless) for _ in range(4)]
        mesh.wait_until_running(4)
        killed = mesh.ranks()[1] if victim == "rank" else mesh.workers()[0]
        killed.kill()
        started = time.monotonic()
        responses = [answer.result(timeout=10) for answer in answers]
        assert time.monotonic() - started < 3.0
        for response in responses:
            error = response.json()["error"]
            assert response.status_code == 503, error
            assert error["type"] == "service_unavailable"
            assert ("stage 1" if victim == "rank" else "stage") in error["message"]
        wait_for(lambda: mesh.process.poll() is not None, 5.0, "the end of the gateway")
        assert mesh.process.returncode == 1


def test_a_stopped_rank_is_noticed(tiny: Path) -> None:
    """F13: SIGSTOP on a rank ends readiness within 5 s; liveness stays until the end."""
    with MeshProcess(tiny, *FLAGS, *NO_RECOVERY) as mesh:
        mesh.ranks()[0].suspend()

        def not_ready() -> bool:
            try:
                return httpx.get(f"{mesh.url}/ready", timeout=1).status_code == 503
            except httpx.TransportError:  # it has gone down already
                return True

        wait_for(not_ready, 5.0, "the end of readiness")
        wait_for(lambda: mesh.process.poll() is not None, 5.0, "the end of the gateway")
        assert "silent" in mesh.log()
