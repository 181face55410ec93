"""What a rank's actor finds out on its node, and how its end is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.config import ServeConfig
from services.errors import FingerprintMismatch, ModelError
from services.launch import ray_launcher, ray_rank, silence
from services.launch.launcher import WorkerExit
from services.launch.ray_bundles import RankPlace
from services.launch.ray_cluster import RankRun
from services.launch.ray_launcher import RayLauncher
from services.launch.ray_rank import RankActor, RankEnd, RankOrder, fingerprint_here, visible_device
from services.mesh_plan import make_plan
from services.topology.fingerprint import require_equal
from services.topology.placement import StagePlacement
from tests.unit.topology.model_directory import ModelDirectory

PLACEMENT = StagePlacement(0, 0, 1, (0,), (0,), 2, 3)
CONFIG = ServeConfig(
    model="m",
    pipeline_parallel_size=2,
    device="cpu",
    api_key=("secret",),
    api_key_file="/keys",
    tls_dir="/tls",
)


def order(model_path: Path) -> RankOrder:
    return RankOrder(PLACEMENT, CONFIG, str(model_path), "10.0.0.1", 29550, "10.0.0.2", {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = ModelDirectory(tmp_path / "model")
    directory.write_single()
    return directory.path


def test_an_order_can_be_sent(model: Path) -> None:
    assert pickle.loads(pickle.dumps(order(model))) == order(model)


def test_a_node_with_the_same_model_agrees_with_the_head(model: Path) -> None:
    head = make_plan(CONFIG, model, "head", own_devices=False).fingerprint
    require_equal(head, fingerprint_here(order(model), None))


def test_a_partition_in_the_nodes_environment_is_compared(model: Path) -> None:
    head = make_plan(CONFIG, model, "head", own_devices=False).fingerprint
    with pytest.raises(FingerprintMismatch, match=r"pp_layer_partition differs: .*2,1.*1,2"):
        require_equal(head, fingerprint_here(order(model), "1,2"))


def test_a_model_that_is_not_on_the_node_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        fingerprint_here(order(tmp_path / "nowhere"), None)
    end = RankActor().run(order(tmp_path / "nowhere"))
    assert end.code is None
    assert "nowhere" in end.why


def test_a_rank_sees_the_device_that_ray_gives_it() -> None:
    ids = {"NPU": ["3"], "GPU": [], "TPU": []}
    assert visible_device("npu", ids) == {"ASCEND_RT_VISIBLE_DEVICES": "3"}
    assert visible_device("cuda", {"GPU": ["5"]}) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert visible_device("cuda", ids) == {}
    assert visible_device("cpu", ids) == {}


class ActorDied(Exception):
    """Stands for Ray's."""


class FakeCluster:
    """Runs no actor: a test ends them."""

    errors = ActorDied

    def __init__(self) -> None:
        self.orders: list[RankOrder] = []
        self.runs: list[RankRun] = []
        self.killed: list[RankRun] = []

    def run_rank(self, place: RankPlace, order: RankOrder, start: int) -> RankRun:
        run = RankRun(actor=None, end=concurrent.futures.Future())
        self.orders.append(order)
        self.runs.append(run)
        return run

    def kill(self, run: RankRun) -> None:
        self.killed.append(run)
        if not run.end.done():
            run.end.set_exception(ActorDied("killed"))


def launcher_of(cluster: Any, model: Path) -> RayLauncher:
    places = [RankPlace(PLACEMENT, bundle, "10.0.0.2") for bundle in range(2)]
    return RayLauncher(cluster, CONFIG, model, places)


async def test_ranks_are_told_where_and_what_but_no_key(model: Path) -> None:
    cluster = FakeCluster()
    launcher = launcher_of(cluster, model)
    await launcher.start("10.0.0.1", 4711)
    (first, _) = cluster.orders
    assert (first.master_addr, first.master_port, first.host) == ("10.0.0.1", 4711, "10.0.0.2")
    assert first.config.api_key == ()
    assert first.config.api_key_file is None
    assert first.config.tls_dir == CONFIG.tls_dir
    for run in cluster.runs:
        run.end.set_result(RankEnd(0))
    await launcher.stop()
    assert cluster.killed == []


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (RankEnd(1), "on 10.0.0.2 exited with 1"),
        (RankEnd(-9), "on 10.0.0.2 was ended by SIGKILL"),
        (RankEnd(None, "no such model"), "on 10.0.0.2 could not be started (no such model)"),
        (ActorDied("node\n died"), "on 10.0.0.2 ended with its actor (node died)"),
    ],
)
async def test_the_first_end_is_told_in_words_and_the_rest_is_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch, end: RankEnd | ActorDied, how: str
) -> None:
    monkeypatch.setattr(ray_launcher, "STOP_TIMEOUT_SECONDS", 0.05)
    cluster = FakeCluster()
    launcher = launcher_of(cluster, model)
    await launcher.start("10.0.0.1", 4711)
    if isinstance(end, RankEnd):
        cluster.runs[1].end.set_result(end)
    else:
        cluster.runs[1].end.set_exception(end)
    async with asyncio.timeout(5):
        exit_ = await launcher.watch(lambda ended: False, lambda ended: True)
    assert (exit_.how, exit_.dismissed) == (how, False)
    await launcher.stop()
    assert cluster.killed == [cluster.runs[0]]


async def test_another_actor_takes_the_place_of_one_that_has_ended(model: Path) -> None:
    cluster = FakeCluster()
    launcher = launcher_of(cluster, model)
    await launcher.start("10.0.0.1", 4711)
    ends: list[str] = []

    def goes_on(ended: WorkerExit) -> bool:
        ends.append(ended.how)
        return len(ends) < 2

    watching = asyncio.ensure_future(launcher.watch(goes_on, lambda ended: True))
    cluster.runs[1].end.set_result(RankEnd(-9))
    async with asyncio.timeout(5):
        while len(cluster.runs) < 3:  # noqa: ASYNC110 - what is waited for is the launcher
            await asyncio.sleep(0.01)
        cluster.runs[2].end.set_exception(ActorDied("node died"))
        assert (await watching).how == "on 10.0.0.2 ended with its actor (node died)"
    assert cluster.orders[2] == cluster.orders[1]
    assert cluster.killed == [cluster.runs[1]]
    cluster.runs[0].end.set_result(RankEnd(0))
    await launcher.stop()


CHILD = """
import os, signal, sys, time
os.write(int(sys.argv[1]), b".")
if os.environ["KIND"] == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(int(os.environ["SHOWN"]))
"""


@pytest.mark.parametrize(("kind", "code"), [("ends", 5), ("stops", -9)])
def test_an_actor_ends_a_worker_that_is_stopped(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    monkeypatch.setattr(silence, "FROZEN_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(silence, "CONFIRM_SECONDS", 0.1)

    def command(*_: object, pulse_fd: int, **__: object) -> list[str]:
        return [sys.executable, "-S", "-c", CHILD, str(pulse_fd)]

    monkeypatch.setattr(ray_rank, "worker_command", command)
    monkeypatch.setattr(ray_rank, "_accelerator_ids", dict)
    monkeypatch.setattr(ray_rank, "visible_device", lambda *_: {"SHOWN": "5"})
    before = len(os.listdir("/proc/self/fd"))
    end = RankActor().run(replace(order(model), environment={"KIND": kind}))
    assert end == RankEnd(code)
    assert len(os.listdir("/proc/self/fd")) == before
