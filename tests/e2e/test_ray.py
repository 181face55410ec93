"""A mesh as Ray actors: on a cluster that `serve` starts for itself, and on one of two nodes.

The two nodes are two raylets on this machine, as Ray's own tests have them; Ray places
bundles on them as it would on two machines (tests/system has two hosts).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from services.rpc.roles import Role
from tests.certificates import Pki
from tests.e2e.test_oracle import PROMPTS, Answer, Oracle, ask_all, check
from tests.e2e.test_recovery import is_ready
from tests.mesh_process import ENDLESS, MeshProcess, is_running, wait_for
from tests.ray_cluster import PRIVATE_CLUSTER, RayCluster, own_cluster
from tests.tiny_models import make_tiny_llama

RAY = ("--distributed-executor-backend", "ray")
END_SECONDS = 10.0
"""In which nothing is left of a mesh whose gateway has been killed."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "tiny"
    return make_tiny_llama(path, tied=True, shape=ENDLESS)


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@pytest.fixture
def alone() -> Iterator[dict[str, str]]:
    with own_cluster() as environment:
        yield environment


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RayCluster]:
    with RayCluster(cpus_per_node=(2, 2)) as cluster:
        yield cluster


def command(model: Path, *flags: str) -> list[str]:
    serve = [sys.executable, "-m", "services.cli", "serve", str(model)]
    return [*serve, "--port", "0", "--grpc-port", "0", *RAY, *flags]


def on(cluster: RayCluster, model: Path, *flags: str) -> MeshProcess:
    return MeshProcess(model, command=command(model, *flags), environment=cluster.environment)


def ask(mesh: MeshProcess, oracle: Oracle, count: int) -> list[Answer]:
    prompts = [oracle.encode(text[:60]) for text in PROMPTS[:count]]
    return asyncio.run(ask_all(mesh, prompts))


def refused(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**os.environ, **environment}
    )
    return done.returncode, done.stderr.splitlines()[-1]


def test_on_a_cluster_of_its_own(tiny: Path, oracle: Oracle, alone: dict[str, str]) -> None:
    """Nothing is left of mesh and cluster when the gateway is killed."""
    words = command(tiny, "-pp", "2", "--cpu-devices", "2")
    with MeshProcess(tiny, command=words, environment=alone) as mesh:
        check(oracle, ask(mesh, oracle, 8))
        tree = mesh.tree()
        assert sum("raylet" in process.name() for process in tree) == 1
        of_ray = {process.pid for process in tree}
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid in of_ray
        }
        assert listening == {"127.0.0.1"}
        # Ray's agents take a minute to believe that their killed cluster is gone.
        rest = [process for process in tree if not process.name().endswith("Agent")]
        assert len(tree) - len(rest) <= 2
        mesh.process.kill()
        wait_for(lambda: not any(is_running(p) for p in rest), END_SECONDS, "the end of the rest")
        for agent in set(tree) - set(rest):
            agent.kill()


def test_unmet_bundles_are_named(tiny: Path, alone: dict[str, str]) -> None:
    code, line = refused(command(tiny, "-pp", "3", "--cpu-devices", "2"), alone)
    assert code == 2
    assert "3 of 3 bundles of Ray's placement group are unmet" in line
    assert "(bundles 0, 1, 2: 1 CPU each, one for each rank)" in line
    assert "TP 1 x PP 3 x DP 1 needs 3 CPU, and Ray sees 2 CPU" in line
    assert "RAY_ADDRESS is not set" in line
    assert not list(Path(alone["RAY_TMPDIR"]).rglob("auth_token"))


def test_two_nodes(tiny: Path, oracle: Oracle, two_nodes: RayCluster) -> None:
    """TP 2 x PP 2: each TP group on one node, the pipeline across both."""
    with on(two_nodes, tiny, "-tp", "2", "-pp", "2") as mesh:
        check(oracle, ask(mesh, oracle, 8))
        stages = httpx.get(f"{mesh.url}/v1/mesh").json()["stages"]
        raylets = [{raylet_of(rank["pid"]) for rank in stage["ranks"]} for stage in stages]
        assert [len(nodes) for nodes in raylets] == [1, 1]
        assert raylets[0] != raylets[1]
        # Ray's own driver connection apart, the gateway has started nothing.
        assert mesh.ranks() == []


def raylet_of(pid: int) -> int:
    return next(p.pid for p in psutil.Process(pid).parents() if p.name().startswith("raylet"))


def test_another_actor_takes_the_place_of_a_dead_one(
    tiny: Path, two_nodes: RayCluster, tmp_path: Path
) -> None:
    """Requests go on; afterwards the cluster is as it was, and has room for the next mesh. With
    TLS: every actor finds its node's certificates at the head's path."""
    pki = Pki(tmp_path)
    addresses = [a.address for own in psutil.net_if_addrs().values() for a in own]
    addresses = [a for a in addresses if a.count(".") == 3]
    for role in (Role.GATEWAY, Role.STAGE_WORKER):
        pki.issue(role, pki.tls_dir, *addresses, force=True)
    known = set(two_nodes.tree())
    started: set[psutil.Process] = set()
    with (
        on(two_nodes, tiny, "-pp", "2", "--tls-dir", str(pki.tls_dir)) as mesh,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        started |= set(two_nodes.tree()) - known
        actors = [p for p in started if "RankActor" in p.cmdline()[0]]
        assert len(actors) == 2
        alone = mesh.completion(300)
        answers = [pool.submit(mesh.completion, 300) for _ in range(4)]
        mesh.wait_until_running(4)
        actors[0].kill()
        wait_for(lambda: not is_ready(mesh), END_SECONDS, "the end of readiness")
        wait_for(lambda: is_ready(mesh), 2 * END_SECONDS, "readiness")
        started |= set(two_nodes.tree()) - known
        assert [answer.result(timeout=60) for answer in answers] == [alone] * 4
    wait_for(lambda: not any(is_running(p) for p in started), END_SECONDS, "the end of ranks")


def test_a_killed_gateway_leaves_the_cluster_and_nothing_on_it(
    tiny: Path, two_nodes: RayCluster
) -> None:
    known = set(two_nodes.tree())
    with on(two_nodes, tiny, "-pp", "2") as mesh:
        started = [p for p in two_nodes.tree() if p not in known]
        ranks = [p for p in started if "stage_worker.rank_main" in p.cmdline()]
        assert len(ranks) == 2
        ranks[1].suspend()
        mesh.process.kill()
        wait_for(lambda: not any(is_running(p) for p in started), END_SECONDS, "the end of ranks")
    assert all(is_running(p) for p in known if "raylet" in p.name())


@pytest.mark.slow
def test_a_tp_group_larger_than_a_node(tiny: Path, oracle: Oracle) -> None:
    with RayCluster(cpus_per_node=(1, 1)) as cluster:
        with on(cluster, tiny, "-tp", "2") as mesh:
            check(oracle, ask(mesh, oracle, 4))
            assert "TP crosses nodes" in mesh.log()
        code, line = refused(command(tiny, "-pp", "3"), dict(cluster.environment))
        assert code == 1  # others may leave, or a node be added: trying again makes sense
        assert "unmet after 30 s" in line
        assert "1 on 127.0.0.1, 1 on 127.0.0.1" in line


def test_no_cluster_at_the_address(tiny: Path) -> None:
    started = time.monotonic()
    code, line = refused(command(tiny), {**PRIVATE_CLUSTER, "RAY_ADDRESS": "127.0.0.1:9"})
    assert time.monotonic() - started < 15
    assert code == 1
    assert "the Ray cluster at RAY_ADDRESS=127.0.0.1:9 cannot be used" in line
    assert "Connection refused" in line


@pytest.mark.slow
def test_something_else_at_the_address(tiny: Path) -> None:
    """It takes connections and says nothing, so that Ray itself would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        code, line = refused(command(tiny), {**PRIVATE_CLUSTER, "RAY_ADDRESS": address})
        assert time.monotonic() - started < 40
    assert code == 1
    assert f"the Ray cluster at RAY_ADDRESS={address} cannot be used" in line


def test_the_doctor_asks_the_cluster(tiny: Path, two_nodes: RayCluster) -> None:
    """It says what Ray sees and whether the mesh finds room, and asks for nothing."""
    words = [sys.executable, "-m", "services.cli", "doctor", str(tiny), "--json", *RAY]
    for _ in range(2):
        done = subprocess.run(
            [*words, "-tp", "2", "-pp", "2", "--port", "0", "--grpc-port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **two_nodes.environment},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        findings = json.loads(done.stdout)["findings"]
        (found,) = [f["what"] for f in findings if f["check"] == "ray"]
        # All four CPUs: had the first one taken any, the second would not find them.
        assert "sees 2 CPU on 127.0.0.1, 2 CPU on 127.0.0.1, and has room: 2 bundles of" in found
        assert not [f for f in findings if f["check"] in ("devices", "memory")]
