"""A stage that is only slow is left alone; one that dies during a drain takes no answer with it."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from services.topology.simulated_cost import StageCost
from tests.chaos.storm import MARKER, Target, find, marked_processes
from tests.e2e.test_recovery import epoch_of, is_ready
from tests.mesh_process import MeshProcess, wait_for
from tests.simulated_mesh import expected_outputs, generate_all, prompts_of, simulated_mesh

COST = StageCost(0.01)
SLOW_STEP_SECONDS = 3.2
"""Longer than a process may be silent."""
GATEWAY_STILL_SECONDS = 5.0
"""Longer than a silence that counts, shorter than the time after which workers leave."""
PULSE_SECONDS = 0.8
"""Stopped for so long, shorter than a silence that counts; and run for a tenth of it."""


def pulse(processes: list[psutil.Process], over: threading.Event) -> None:
    while not over.is_set():
        for process in processes:
            process.suspend()
        over.wait(PULSE_SECONDS)
        for process in processes:
            process.resume()
        over.wait(PULSE_SECONDS / 10)


def test_a_slow_stage_is_no_failure(tmp_path: Path) -> None:
    """Its steps take longer than any silence that counts, and a rank and a worker of other stages
    hardly run."""
    stages = {1: StageCost(SLOW_STEP_SECONDS)}
    with simulated_mesh(tmp_path / "mesh", 3, COST, stages=stages) as mesh:
        epoch, tree = epoch_of(mesh), {process.pid for process in mesh.tree()}
        prompts = prompts_of(1, 8)
        over = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pulsing = pool.submit(pulse, [mesh.ranks()[2], mesh.workers()[0]], over)
            try:
                assert generate_all(mesh, prompts, 2) == expected_outputs(prompts, 2)
            finally:
                over.set()
                pulsing.result(10)
            # The gateway itself stands still: what it has not heard meanwhile is no silence.
            answers = pool.submit(generate_all, mesh, prompts, 1)
            mesh.wait_until_running(1)
            mesh.process.send_signal(signal.SIGSTOP)
            time.sleep(GATEWAY_STILL_SECONDS)
            mesh.process.send_signal(signal.SIGCONT)
            assert answers.result(60) == expected_outputs(prompts, 1)
        assert epoch_of(mesh) == epoch
        assert {process.pid for process in mesh.tree()} == tree


def ends_in_order(mesh: MeshProcess, victim: psutil.Process) -> None:
    """A drain has begun, and a process is killed: what was asked is answered all the same."""
    num_calls = 6
    prompts = prompts_of(num_calls, 8)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate_all, mesh, prompts, 120)
        mesh.wait_until_running(num_calls)
        mesh.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not is_ready(mesh), 5, "the drain")
        victim.kill()
        assert answers.result(60) == expected_outputs(prompts, 120)
    assert mesh.process.wait(30) == 0


@pytest.mark.parametrize("target", ["rank", pytest.param("worker", marks=pytest.mark.chaos)])
def test_a_death_during_a_drain(tmp_path: Path, target: Target) -> None:
    mark = str(tmp_path)
    flags = ("--drain-timeout", "60")
    with simulated_mesh(tmp_path / "mesh", 3, COST, *flags, environment={MARKER: mark}) as mesh:
        victim = find(mesh, target, 1)
        assert victim is not None
        ends_in_order(mesh, victim)
    assert not marked_processes(mark)
