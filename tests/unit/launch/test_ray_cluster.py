"""How the mesh asks Ray for places, with a Ray that answers as it is told."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from services.errors import ConfigError, StageFailed
from services.launch import ray_cluster
from services.launch.ray_cluster import RayCluster, connect
from services.topology.facts import MeshShape

TWO_NODES = {"a": 2.0, "b": 2.0}


class FakeRay:
    """Ray's calls that a placement takes. Places a bundle on the first node that holds it;
    what does not fit is INFEASIBLE, as on an idle cluster."""

    def __init__(self, cpus: dict[str, float]) -> None:
        self.cpus = cpus
        self.asked: list[list[dict[str, int]]] = []
        self.removed: list[FakeGroup] = []
        self.util = SimpleNamespace(
            placement_group=self.placement_group,
            remove_placement_group=self.removed.append,
            placement_group_table=lambda group: group.table,
            get_node_ip_address=lambda: "10.0.0.a",
        )
        self._private = SimpleNamespace(state=self)
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.is_down = False

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"NodeID": "gone", "NodeManagerAddress": "10.0.0.9", "Alive": False}
        alive = [
            {
                "NodeID": name,
                "NodeManagerAddress": f"10.0.0.{name}",
                "Alive": True,
                "Resources": {"CPU": count},
            }
            for name, count in self.cpus.items()
        ]
        return [{**gone, "Resources": {"CPU": 99.0}}, *alive]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return {"a": {"CPU": 1.0, "memory": 1e9}, "b": {"memory": 1e9}}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "a")

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> FakeGroup:
        assert strategy == "PACK"
        self.asked.append(bundles)
        free = dict(self.cpus)
        places = {}
        for index, bundle in enumerate(bundles):
            fitting = [name for name, count in free.items() if count >= bundle["CPU"]]
            places[index] = fitting[0] if fitting else ""
            if fitting:
                free[fitting[0]] -= bundle["CPU"]
        return FakeGroup(places)

    def shutdown(self) -> None:
        self.is_down = True


class FakeGroup:
    def __init__(self, places: dict[int, str]) -> None:
        self.is_placed = all(places.values())
        if not self.is_placed:  # Ray places all or nothing
            places = dict.fromkeys(places, "")
        state = "FINISHED" if self.is_placed else "INFEASIBLE"
        self.table = {"bundles_to_node_id": places, "stats": {"scheduling_state": state}}

    def wait(self, timeout_seconds: float) -> bool:
        return self.is_placed


def shape(tp: int, pp: int) -> MeshShape:
    return MeshShape(dp_size=1, tp_size=tp, pp_size=pp, pp_layer_partition=(1,) * pp)


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "PLACEMENT_TIMEOUT_SECONDS", 0.02)


def test_a_bundle_for_each_tp_group() -> None:
    ray = FakeRay(TWO_NODES)
    places = RayCluster(ray, is_ours=False).place(shape(tp=2, pp=2), "cpu")
    assert ray.asked == [[{"CPU": 2}, {"CPU": 2}]]
    assert [p.address for p in places] == ["10.0.0.a", "10.0.0.a", "10.0.0.b", "10.0.0.b"]


def test_a_bundle_for_each_rank_where_no_node_holds_a_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray = FakeRay({"a": 1.0, "b": 3.0})
    with caplog.at_level(logging.WARNING):
        places = RayCluster(ray, is_ours=False).place(shape(tp=4, pp=1), "cpu")
    assert ray.asked == [[{"CPU": 4}], [{"CPU": 1}] * 4]
    assert len(ray.removed) == 1  # the first way holds nothing while the second is tried
    assert [p.placement.tp_ranks for p in places] == [(0,), (1,), (2,), (3,)]
    assert [p.placement.node_rank for p in places] == [0, 1, 1, 1]
    assert "TP crosses nodes" in caplog.text


def test_a_node_is_told_with_what_is_free_on_it() -> None:
    first, second = RayCluster(FakeRay(TWO_NODES), is_ours=False).nodes()
    assert (first.node_id, first.resources["CPU"], first.free["CPU"]) == ("a", 2.0, 1.0)
    assert (second.resources["CPU"], second.free.get("CPU", 0)) == (2.0, 0)


def test_an_unmet_placement_is_refused_with_what_ray_sees() -> None:
    ray = FakeRay(TWO_NODES)
    cluster = RayCluster(ray, is_ours=False)
    with pytest.raises(StageFailed) as refused:
        cluster.place(shape(tp=1, pp=5), "cpu")
    assert "5 of 5 bundles of Ray's placement group are unmet" in refused.value.message
    assert "needs 5 CPU, and Ray sees 4 CPU, 1 of them free" in refused.value.message
    assert "2 on 10.0.0.a, 2 on 10.0.0.b)" in refused.value.message
    assert "ray status" in refused.value.message
    cluster.close()
    assert len(ray.removed) == 1
    assert ray.is_down


def test_on_a_cluster_of_our_own_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "OWN_PLACEMENT_TIMEOUT_SECONDS", 1000.0)
    with pytest.raises(ConfigError, match=r"needs 4 CPU.*RAY_ADDRESS is not set.*--cpu-devices"):
        RayCluster(FakeRay({"a": 1.0}), is_ours=True).place(shape(tp=2, pp=2), "cpu")


@pytest.mark.parametrize(
    ("address", "cpu_devices", "message"),
    [
        ("ray://10.0.0.1:10001", None, "run it on a node of the cluster"),
        ("10.0.0.1:6379", 4, "--cpu-devices 4 has no effect"),
        ("10.0.0.1", None, "is no host:port"),
        (":6379", None, "is no host:port"),
        ("head:gcs", None, "is no host:port"),
        ("127.0.0.1:99999", None, "is no host:port"),
    ],
)
def test_what_cannot_work_is_refused_before_ray_is_imported(
    monkeypatch: pytest.MonkeyPatch, address: str, cpu_devices: int | None, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=message), connect(cpu_devices):
        pass
    assert "ray" not in sys.modules
    assert dict(os.environ) == before


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (unused_address(), "Connection refused"),
        ("nowhere.invalid:6379", "not known|resolution"),
    ],
    ids=["nobody listens", "no such host"],
)
def test_ray_is_not_asked_to_join_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, address: str, reason: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    message = rf"RAY_ADDRESS={address} cannot be used: .*({reason})"
    with pytest.raises(StageFailed, match=message), connect(None):
        pass
    assert "ray" not in sys.modules


def test_silence_at_the_address_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "DIAL_TIMEOUT_SECONDS", 0.1)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        waiting = [socket.socket() for _ in range(3)]  # more than its queue takes
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        with pytest.raises(StageFailed, match=r"nobody answers in 0\.1 s"), connect(None):
            pass
        for client in waiting:
            client.close()


JOIN_FOR_EVER = """
import sys, time
from types import SimpleNamespace
from services.launch import ray_cluster
ray_cluster.JOIN_TIMEOUT_SECONDS = 0.2
ray_cluster.check_installed = lambda: None
ray_cluster._import_ray = lambda: SimpleNamespace(
    init=lambda **_: time.sleep(60), exceptions=SimpleNamespace(RayError=OSError)
)
with ray_cluster.connect(None):
    pass
"""


def test_a_cluster_that_ray_does_not_join_ends_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", JOIN_FOR_EVER],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "RAY_ADDRESS": address},
        )
    assert done.returncode == 1
    assert f"stagemesh: error: the Ray cluster at RAY_ADDRESS={address} cannot" in done.stderr
    assert "Ray has not joined it in 0.2 s" in done.stderr


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'stagemesh\[ray\]'"), connect(None):
        pass
