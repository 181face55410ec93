"""What Ray says of the mesh: room, unmet bundles in the words of `serve`, and nothing started."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from services.cli import main
from services.config import ServeConfig
from services.doctor import ray_check
from services.doctor.findings import Outcome
from services.errors import ConfigError, StageFailed
from services.launch.ray_bundles import RankPlace, RayNode, choose_device, number_ranks
from services.topology.facts import MeshShape

SHAPE = MeshShape(1, 2, 2, (1, 1))
RAY = ServeConfig(model="m", distributed_executor_backend="ray")
NODES = (RayNode("a", "10.0.0.1", {"CPU": 2}), RayNode("b", "10.0.0.2", {"CPU": 2}))


@dataclass
class ScriptedCluster:
    """A cluster of two nodes, with room or without."""

    has_room: bool = True
    left: bool = False

    def nodes(self) -> tuple[RayNode, ...]:
        return NODES

    def choose_device(self, asked: str) -> str:
        return choose_device(asked, NODES)

    def place(self, shape: MeshShape, device: str) -> tuple[RankPlace, ...]:
        if not self.has_room:
            raise StageFailed("insufficient resources: 1 of 2 bundles are unmet")
        return number_ranks(shape, NODES, "a")

    @contextlib.contextmanager
    def connect(self, cpu_devices: int | None) -> Iterator[ScriptedCluster]:
        yield self
        self.left = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    scripted = ScriptedCluster()
    monkeypatch.setattr(ray_check, "connect", scripted.connect)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return scripted


def test_room_is_told_by_node_and_stage(cluster: ScriptedCluster) -> None:
    finding, device = ray_check.check_ray(RAY, SHAPE)
    assert (finding.outcome, device) == (Outcome.OK, "cpu")
    assert finding.what == (
        "Ray at 10.0.0.1:6379 sees 2 CPU on 10.0.0.1, 2 CPU on 10.0.0.2, and has room: stage 0 on "
        "10.0.0.1; stage 1 on 10.0.0.2"
    )
    assert cluster.left


def test_unmet_bundles_are_told_in_the_words_of_serve(
    cluster: ScriptedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.has_room = False
    flags = ("--distributed-executor-backend", "ray", "--port", "0", "--grpc-port", "0", "--json")
    assert main(["doctor", "-tp", "2", "-pp", "2", *flags]) == 1
    findings = json.loads(capfd.readouterr().out)["findings"]
    failed = [(f["check"], f["what"]) for f in findings if f["outcome"] == "failed"]
    assert failed == [("ray", "insufficient resources: 1 of 2 bundles are unmet")]
    # Nothing is said about this node's devices: no rank need run here.
    assert "devices" not in {f["check"] for f in findings}


def test_a_cluster_that_does_not_answer(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(cpu_devices: int | None) -> None:
        raise StageFailed("the Ray cluster at RAY_ADDRESS=10.0.0.1:6379 cannot be used")

    monkeypatch.setattr(ray_check, "connect", none)
    finding, device = ray_check.check_ray(RAY, SHAPE)
    assert (finding.outcome, device) == (Outcome.FAILED, None)
    assert "cannot be used" in finding.what


def test_without_a_cluster_none_is_started(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    finding, device = ray_check.check_ray(RAY, SHAPE)
    assert (finding.outcome, device) == (Outcome.OK, None)
    assert "serve starts one on this machine" in finding.what
    assert not cluster.left

    def missing() -> None:
        raise ConfigError("Ray is not installed")

    monkeypatch.setattr(ray_check, "check_installed", missing)
    finding, _ = ray_check.check_ray(RAY, SHAPE)
    assert finding.outcome is Outcome.FAILED


def test_a_mesh_of_processes_is_nothing_to_ray(cluster: ScriptedCluster) -> None:
    assert not ray_check.names_cluster(ServeConfig(model="m"))
    assert ray_check.names_cluster(RAY)
