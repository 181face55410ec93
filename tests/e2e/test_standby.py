"""A spare takes over from a worker or rank that dies, again and again, and no client notices.

One mesh of simulated devices is hit over and over: what comes out shows whether a token was
lost or doubled, and whether anything of an old epoch was used.
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.topology.simulated_cost import StageCost
from tests.e2e.test_recovery import NOTICED_SECONDS, RECOVERED_SECONDS, epoch_of, gauge, is_ready
from tests.mesh_process import MeshProcess, is_running, wait_for
from tests.simulated_mesh import expected_outputs, generate_all, prompts_of, simulated_mesh
from tests.tiny_models import TinyShape, make_tiny_llama

PP_SIZE = 3
NUM_REQUESTS = 8
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    directory = tmp_path_factory.mktemp("standby") / "mesh"
    with simulated_mesh(directory, PP_SIZE, StageCost(0.01), "--standby", "1") as running:
        wait_for_spares(running, 1)
        yield running
    print(running.log())  # Shown where a test has failed.


def view(mesh: MeshProcess) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{mesh.url}/v1/mesh").json()
    return answer


def wait_for_spares(mesh: MeshProcess, count: int) -> None:
    def are_ready() -> bool:
        return [s["state"] for s in view(mesh)["standby"]].count("ready") == count

    wait_for(are_ready, RECOVERED_SECONDS, f"{count} ready spares")


def spare_pids(mesh: MeshProcess) -> list[int]:
    return [rank["pid"] for spare in view(mesh)["standby"] for rank in spare["ranks"]]


def ranks_of(mesh: MeshProcess, stage: int) -> list[psutil.Process]:
    ranks = next(s["ranks"] for s in view(mesh)["stages"] if s["pp_rank"] == stage)
    return [psutil.Process(rank["pid"]) for rank in ranks]


def rank_of(mesh: MeshProcess, stage: int) -> psutil.Process:
    (rank,) = ranks_of(mesh, stage)
    return rank


def worker_of(mesh: MeshProcess, stage: int) -> psutil.Process:
    worker = rank_of(mesh, stage).parent()
    assert worker is not None
    return worker


def take_over(mesh: MeshProcess, victim: psutil.Process, stage: int) -> None:
    """The victim is hit while requests run: the spare is at its place afterwards, all requests are
    answered as if nothing had happened, and there is a spare again."""
    (spare_pid,) = spare_pids(mesh)
    tree, epoch = len(mesh.tree()), epoch_of(mesh)
    prompts = prompts_of(NUM_REQUESTS, 8)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate_all, mesh, prompts, NUM_TOKENS)
        mesh.wait_until_running(NUM_REQUESTS)
        victim.kill()
        wait_for(lambda: epoch_of(mesh) > epoch, NOTICED_SECONDS, "another epoch")
        wait_for(lambda: not is_running(victim), NOTICED_SECONDS, "the end of the victim")
        wait_for(lambda: is_ready(mesh), RECOVERED_SECONDS, "readiness")
        assert rank_of(mesh, stage).pid == spare_pid
        assert answers.result(60) == expected_outputs(prompts, NUM_TOKENS)
    wait_for_spares(mesh, 1)
    assert gauge(mesh, "stagemesh_kv_free_blocks ") == gauge(mesh, "stagemesh_kv_blocks ")
    assert len(mesh.tree()) == tree, mesh.tree()


def test_a_killed_worker_s_place_is_taken_over_and_it_comes_back_as_the_spare(
    mesh: MeshProcess,
) -> None:
    """Twice: the second time by the worker that came back."""
    take_over(mesh, worker_of(mesh, 1), 1)
    take_over(mesh, worker_of(mesh, 1), 1)
    # The first was started again for its stage, whose place another has.
    assert mesh.log().count("another takes its place") >= 2
    assert "joined as a spare with devices 1" in mesh.log()


def test_a_worker_whose_rank_has_died_gives_its_place_up(mesh: MeshProcess) -> None:
    """It stays, starts its rank again, and is the next spare. Who is at its place now holds none of
    the blocks that the prefix cache knew."""
    cached = prompts_of(1, 200)
    assert generate_all(mesh, cached, 4) == expected_outputs(cached, 4)
    hits = gauge(mesh, "stagemesh_prefix_cache_hits_total")
    taken_over = gauge(mesh, 'stagemesh_takeovers_total{replica="0"}')
    worker = worker_of(mesh, 0)
    take_over(mesh, rank_of(mesh, 0), 0)
    assert is_running(worker)
    (spare,) = spare_pids(mesh)
    assert psutil.Process(spare).ppid() == worker.pid
    assert generate_all(mesh, cached, 4) == expected_outputs(cached, 4)
    assert gauge(mesh, "stagemesh_prefix_cache_hits_total") == hits
    assert gauge(mesh, 'stagemesh_takeovers_total{replica="0"}') == taken_over + 1
    assert gauge(mesh, 'stagemesh_standby_workers{state="ready"}') == 1


def test_the_death_of_a_spare_is_no_failure(mesh: MeshProcess) -> None:
    epoch, tree = epoch_of(mesh), len(mesh.tree())
    for kill_worker in (False, True):
        (pid,) = spare_pids(mesh)
        rank = psutil.Process(pid)
        worker = rank.parent()
        assert worker is not None
        (worker if kill_worker else rank).kill()
        wait_for(lambda p=pid: spare_pids(mesh) not in ([], [0], [p]), 10, "another spare")
        wait_for_spares(mesh, 1)
        (pid,) = spare_pids(mesh)
        assert (psutil.Process(pid).ppid() == worker.pid) is not kill_worker
    assert (epoch_of(mesh), is_ready(mesh)) == (epoch, True)
    assert len(mesh.tree()) == tree


def test_two_deaths_at_once_with_one_spare(mesh: MeshProcess) -> None:
    """The other place is taken by the worker that is started again."""
    ranks = [rank_of(mesh, stage) for stage in (0, 2)]
    prompts, epoch = prompts_of(NUM_REQUESTS, 8), epoch_of(mesh)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate_all, mesh, prompts, NUM_TOKENS)
        mesh.wait_until_running(NUM_REQUESTS)
        for rank in ranks:
            rank.kill()
        assert answers.result(60) == expected_outputs(prompts, NUM_TOKENS)
    assert epoch_of(mesh) > epoch
    wait_for_spares(mesh, 1)


def test_weights_that_a_spare_holds_are_not_read_again(tmp_path: Path) -> None:
    """Of a whole TP group, in a mesh of real weights; the next spare holds them in its turn."""
    model = make_tiny_llama(tmp_path / "tiny", tied=True, shape=TinyShape(num_layers=4))
    flags = ("-tp", "2", "--standby", "1", "--standby-stages", "0")
    with MeshProcess(model, *flags) as mesh:

        def holds() -> bool:
            return [spare["holds_stage"] for spare in view(mesh)["standby"]] == [0]

        undisturbed = mesh.completion(60)
        wait_for(holds, RECOVERED_SECONDS, "a spare with weights")
        wait_for_spares(mesh, 1)
        pids, epoch = spare_pids(mesh), epoch_of(mesh)
        read = re.findall(r"stage \d rank \d: .* loaded", mesh.log())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            interrupted = pool.submit(mesh.completion, 400)
            mesh.wait_until_running(1)
            ranks_of(mesh, 0)[1].kill()
            assert interrupted.result(60).startswith(undisturbed)
        assert epoch_of(mesh) > epoch
        assert [rank.pid for rank in ranks_of(mesh, 0)] == pids
        assert re.findall(r"stage \d rank \d: .* loaded", mesh.log()) == read
        assert mesh.completion(60) == undisturbed
        wait_for(holds, RECOVERED_SECONDS, "another spare with weights")
        assert gauge(mesh, "stagemesh_kv_free_blocks ") == gauge(mesh, "stagemesh_kv_blocks ")
