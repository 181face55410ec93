"""What Ray says of the mesh: room, now or later, unmet bundles, and nothing asked for."""

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
from services.launch.ray_bundles import RayNode, choose_device
from services.topology.facts import MeshShape

SHAPE = MeshShape(1, 2, 2, (1, 1))
RAY = ServeConfig(model="m", distributed_executor_backend="ray")
FLAGS = ("--distributed-executor-backend", "ray", "--port", "0", "--grpc-port", "0", "--json")


def cpus(number: int, total: float, free: float) -> RayNode:
    return RayNode(f"id-{number}", f"10.0.0.{number}", {"CPU": total}, {"CPU": free})


@dataclass
class ScriptedCluster:
    """A cluster of two nodes. It can be looked at; nothing can be asked of it."""

    seen: tuple[RayNode, ...] = (cpus(1, 2, 2), cpus(2, 2, 2))
    left: bool = False

    def nodes(self) -> tuple[RayNode, ...]:
        return self.seen

    def choose_device(self, asked: str) -> str:
        return choose_device(asked, self.seen)

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


def test_room_is_told_by_node(cluster: ScriptedCluster) -> None:
    finding, device = ray_check.check_ray(RAY, SHAPE)
    assert (finding.outcome, device) == (Outcome.OK, "cpu")
    assert finding.what == (
        "Ray at 10.0.0.1:6379 sees 2 CPU on 10.0.0.1, 2 CPU on 10.0.0.2, and has room: 2 bundles "
        "of 2 CPU, one for each TP group"
    )
    assert cluster.left


def test_a_mesh_that_runs_is_no_failure(
    cluster: ScriptedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.seen = (cpus(1, 2, 0), cpus(2, 2, 2))
    assert main(["doctor", "-tp", "2", "-pp", "2", *FLAGS]) == 0
    findings = json.loads(capfd.readouterr().out)["findings"]
    (found,) = [finding for finding in findings if finding["check"] == "ray"]
    assert found["outcome"] == "warning"
    assert found["what"] == (
        "Ray at 10.0.0.1:6379 has 2 of 4 CPU in use (2 of 2 on 10.0.0.1, 0 of 2 on 10.0.0.2), and "
        "room for 1 of 2 bundles of 2 CPU, one for each TP group"
    )
    assert "perhaps this one" in found["remedy"]


@pytest.mark.parametrize(
    ("nodes", "outcome", "text"),
    [
        # No node ever holds a TP group.
        ((cpus(1, 1, 1), cpus(2, 3, 3)), Outcome.WARNING, "TP would cross nodes"),
        # One will when others leave, and single ranks find room now.
        ((cpus(1, 4, 3), cpus(2, 4, 1)), Outcome.WARNING, "TP would cross nodes"),
        # Room for single ranks alone, once others leave.
        ((cpus(1, 1, 1), cpus(2, 3, 2)), Outcome.WARNING, "room for 3 of 4 bundles of 1 CPU"),
        ((cpus(1, 2, 2), cpus(2, 1, 1)), Outcome.FAILED, "1 of 4 bundles would be unmet even if"),
        ((cpus(1, 2, 2),), Outcome.FAILED, "2 of 4 bundles would be unmet even if"),
    ],
)
def test_room_now_room_later_and_none(
    nodes: tuple[RayNode, ...], outcome: Outcome, text: str
) -> None:
    finding = ray_check.room_finding(SHAPE, "CPU", nodes, "10.0.0.1:6379")
    assert finding.outcome is outcome
    assert text in finding.what


def test_unmet_bundles_are_named(
    cluster: ScriptedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.seen = cluster.seen[:1]
    assert main(["doctor", "-tp", "2", "-pp", "2", *FLAGS]) == 1
    findings = json.loads(capfd.readouterr().out)["findings"]
    ((check, what),) = [(f["check"], f["what"]) for f in findings if f["outcome"] == "failed"]
    assert check == "ray"
    assert "(bundles 2, 3: 1 CPU each, one for each rank)" in what
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
