"""A stage dies or stops and no client notices: one mesh of simulated devices, hit again and again.

What comes out shows whether a token was lost or doubled, and whether anything of an old epoch
was used; the real arithmetic after a recovery is tested with the tiny model.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from services.control.member import MISSED_SECONDS
from services.topology.simulated_cost import StageCost
from tests.mesh_process import MeshProcess, is_running, wait_for
from tests.simulated_mesh import expected_outputs, generate_all, prompts_of, simulated_mesh

PP_SIZE = 3
NUM_REQUESTS = 8
NUM_TOKENS = 60
FLAGS = ("--max-num-batched-tokens", "1024")
HANGING = Path(__file__).resolve().parents[1] / "hanging"
"""With this on its path, the main thread of a process hangs when it gets SIGUSR1."""
NOTICED_SECONDS = 5.0
STUCK_SECONDS = 15.0
LATE_SECONDS = 2.0
"""From when a step counts as stuck to the end of readiness: two looks, and a busy machine."""
RECOVERED_SECONDS = 30.0
"""On a busy machine; `benchmarks recovery` measures how fast it is."""

Hit = Callable[[MeshProcess], psutil.Process]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    directory = tmp_path_factory.mktemp("recovery") / "mesh"
    paths = (str(HANGING), os.environ.get("PYTHONPATH", ""))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    cost = StageCost(0.01)
    with simulated_mesh(directory, PP_SIZE, cost, *FLAGS, environment=environment) as running:
        yield running
    print(running.log())  # Shown where a test has failed.


def epoch_of(mesh: MeshProcess) -> int:
    return int(httpx.get(f"{mesh.url}/v1/mesh").json()["epoch"])


def is_ready(mesh: MeshProcess) -> bool:
    return httpx.get(f"{mesh.url}/ready").status_code == 200


def gauge(mesh: MeshProcess, name: str) -> float:
    lines = httpx.get(f"{mesh.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def hit_rank(stage: int, signal_number: int) -> Hit:
    def hit(mesh: MeshProcess) -> psutil.Process:
        rank = mesh.ranks()[stage]
        rank.send_signal(signal_number)
        return rank

    return hit


def hit_worker(stage: int, signal_number: int) -> Hit:
    def hit(mesh: MeshProcess) -> psutil.Process:
        (worker,) = [w for w in mesh.workers() if f"--pp-rank={stage}" in w.cmdline()]
        worker.send_signal(signal_number)
        return worker

    return hit


def serve_through(
    mesh: MeshProcess,
    hits: list[Hit],
    prompt_tokens: int = 8,
    noticed_seconds: float = NOTICED_SECONDS,
    ended_seconds: float = NOTICED_SECONDS,
) -> list[float]:
    """Requests run while the mesh is hit; all are answered as if nothing had happened. Returns
    how many seconds after each hit the mesh was no longer ready."""
    tree, noticed = len(mesh.tree()), []
    prompts = prompts_of(NUM_REQUESTS, prompt_tokens)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate_all, mesh, prompts, NUM_TOKENS)
        mesh.wait_until_running(NUM_REQUESTS)
        for hit in hits:
            epoch = epoch_of(mesh)
            victim = hit(mesh)
            noticed.append(
                wait_for(lambda: not is_ready(mesh), noticed_seconds, "the end of readiness")
            )
            wait_for(lambda v=victim: not is_running(v), ended_seconds, "the end of the victim")
            wait_for(lambda: is_ready(mesh), RECOVERED_SECONDS, "readiness")
            assert epoch_of(mesh) > epoch
        assert answers.result(60) == expected_outputs(prompts, NUM_TOKENS)
    assert gauge(mesh, "stagemesh_kv_free_blocks ") == gauge(mesh, "stagemesh_kv_blocks ")
    assert len(mesh.tree()) == tree, mesh.tree()
    return noticed


@pytest.mark.parametrize("stage", range(PP_SIZE))
def test_a_killed_rank(mesh: MeshProcess, stage: int) -> None:
    """F24, while requests decode: the first, a middle and the last stage."""
    serve_through(mesh, [hit_rank(stage, signal.SIGKILL)])


@pytest.mark.parametrize("stage", [0, PP_SIZE - 1])
def test_a_killed_worker(mesh: MeshProcess, stage: int) -> None:
    """Its launcher starts another, which takes the place in the mesh."""
    serve_through(mesh, [hit_worker(stage, signal.SIGKILL)])


def test_a_stopped_worker(mesh: MeshProcess) -> None:
    """Its launcher ends it, and with it its ranks."""
    serve_through(mesh, [hit_worker(1, signal.SIGSTOP)])
    assert "was stopped or hung: silent for" in mesh.log()


def test_a_worker_that_is_told_to_leave(mesh: MeshProcess) -> None:
    """By somebody who does not know that it is needed."""
    serve_through(mesh, [hit_worker(1, signal.SIGTERM)])


def test_a_stopped_rank(mesh: MeshProcess) -> None:
    """Noticed within 3 s by its silence, and ended."""
    started = time.monotonic()
    serve_through(mesh, [hit_rank(1, signal.SIGSTOP)])
    assert "RANK_FROZEN" in mesh.log()
    assert time.monotonic() - started < RECOVERED_SECONDS


def test_a_step_that_does_not_end(mesh: MeshProcess) -> None:
    """Its rank beats and reads, so only the step tells: after 3 s, or 5 times what steps take
    here. That rank is replaced, and its neighbours, which wait for it, keep their weights."""
    generate_all(mesh, prompts_of(NUM_REQUESTS, 16), 20)  # So it is known what steps take.
    ranks, name = mesh.ranks(), 'stagemesh_recoveries_total{reason="STEP_STUCK",replica="0"}'
    before = gauge(mesh, name)
    (noticed,) = serve_through(mesh, [hit_rank(1, signal.SIGUSR1)], noticed_seconds=STUCK_SECONDS)
    limit = float(
        re.findall(r"stage 1 has been silent .*\(a step may take (.*) s\)", mesh.log())[-1]
    )
    assert limit - 0.5 < noticed < limit + LATE_SECONDS
    assert gauge(mesh, name) == before + 1
    same = [old == new for old, new in zip(ranks, mesh.ranks(), strict=True)]
    assert same == [True, False, True]


def test_a_step_that_does_not_end_while_its_worker_is_not_heard_of(mesh: MeshProcess) -> None:
    """Whether the step counts as stuck or the worker as silent first is chance. The rank is
    replaced soon after it is heard of again, and not after what a rank that computes gets."""
    generate_all(mesh, prompts_of(NUM_REQUESTS, 16), 20)
    ranks = mesh.ranks()

    def hit(mesh: MeshProcess) -> psutil.Process:
        rank = hit_rank(1, signal.SIGUSR1)(mesh)
        time.sleep(1.0)
        worker = hit_worker(1, signal.SIGSTOP)(mesh)
        time.sleep(MISSED_SECONDS + 0.3)
        # On a busy machine the launcher may have found it silent and ended it, its rank too.
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)
        return rank

    serve_through(mesh, [hit], noticed_seconds=STUCK_SECONDS, ended_seconds=STUCK_SECONDS)
    same = [old == new for old, new in zip(ranks, mesh.ranks(), strict=True)]
    assert same == [True, False, True]


def test_a_kill_while_prompts_are_computed(mesh: MeshProcess) -> None:
    serve_through(mesh, [hit_rank(1, signal.SIGKILL)], prompt_tokens=512)


def test_two_stages_at_once(mesh: MeshProcess) -> None:
    def hit(mesh: MeshProcess) -> psutil.Process:
        ranks = mesh.ranks()
        for rank in (ranks[0], ranks[2]):
            rank.kill()
        return ranks[0]

    serve_through(mesh, [hit])


def test_a_kill_during_the_recovery(mesh: MeshProcess) -> None:
    """The first as soon as the gateway knows of the failure, the next when ranks are back."""

    def hit(mesh: MeshProcess) -> psutil.Process:
        first = mesh.ranks()[0]
        first.kill()
        wait_for(lambda: not is_ready(mesh), NOTICED_SECONDS, "the end of readiness")
        second = mesh.ranks()[-1]
        second.kill()
        return second

    serve_through(mesh, [hit])


def test_a_rank_that_runs_out_of_memory(mesh: MeshProcess) -> None:
    """An exception that nobody foresaw: another process takes the place of the one that had it."""
    rank, epoch = mesh.ranks()[0], epoch_of(mesh)
    rank.rlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    prompts = prompts_of(4, 2048)
    assert generate_all(mesh, prompts, 4) == expected_outputs(prompts, 4)
    assert epoch_of(mesh) > epoch
    assert "STEP_FAILED" in mesh.log()
    assert not is_running(rank)


def test_what_has_happened_is_counted(mesh: MeshProcess) -> None:
    """By reason, with the time it took."""
    before = gauge(mesh, 'stagemesh_recoveries_total{reason="RANK_DIED",replica="0"}')
    serve_through(mesh, [hit_rank(1, signal.SIGKILL)])
    assert gauge(mesh, 'stagemesh_recoveries_total{reason="RANK_DIED",replica="0"}') == before + 1
    assert gauge(mesh, 'stagemesh_recovery_seconds_count{replica="0"}') >= 1
    assert gauge(mesh, 'stagemesh_replayed_tokens_total{replica="0"}') >= 8 * NUM_REQUESTS
    assert gauge(mesh, 'stagemesh_epoch{replica="0"}') == epoch_of(mesh)


def test_what_was_cached_before_is_computed_again(mesh: MeshProcess) -> None:
    """A new stage holds none of the blocks that the prefix cache knew."""
    prompts = prompts_of(1, 200)
    assert generate_all(mesh, prompts, 4) == expected_outputs(prompts, 4)
    mesh.ranks()[2].kill()
    wait_for(lambda: not is_ready(mesh), NOTICED_SECONDS, "the end of readiness")
    wait_for(lambda: is_ready(mesh), RECOVERED_SECONDS, "readiness")
    hits = gauge(mesh, "stagemesh_prefix_cache_hits_total")
    assert generate_all(mesh, prompts, 4) == expected_outputs(prompts, 4)
    assert gauge(mesh, "stagemesh_prefix_cache_hits_total") == hits
