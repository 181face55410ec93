"""A Ray cluster for tests: several nodes on this machine, on loopback only, in a process of
its own, so that no test process imports Ray.

    with RayCluster(cpus_per_node=(1, 1)) as cluster:
        subprocess.run([...], env={**os.environ, **cluster.environment})
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import psutil

AUTHENTICATION = {
    # A token of its own, so that Ray writes none to the home directory.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "stagemesh-test-" + "0" * 32,
    "RAY_USAGE_STATS_ENABLED": "0",
}
PRIVATE_CLUSTER = {
    **AUTHENTICATION,
    # Addresses of this machine only (see services/launch/ray_cluster.py).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
STOP_TIMEOUT_SECONDS = 20.0
_NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
cpus = json.loads(sys.argv[1])
options = {"object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **options})
for count in cpus[1:]:
    cluster.add_node(num_cpus=count, **options)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextlib.contextmanager
def own_cluster() -> Iterator[dict[str, str]]:
    """The environment in which a mesh starts a cluster for itself; Ray's files are removed."""
    directory = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets must be short
    yield {"RAY_TMPDIR": directory, "RAY_ADDRESS": ""}
    shutil.rmtree(directory, ignore_errors=True)


class RayCluster:
    """Nodes with so many CPUs each; ends with the block."""

    def __init__(self, cpus_per_node: Sequence[int]) -> None:
        self._cpus = tuple(cpus_per_node)
        self._process: subprocess.Popen[str] | None = None
        self._directory = ""
        self.environment: Mapping[str, str] = {}
        """What a process needs to join this cluster."""

    def __enter__(self) -> RayCluster:
        self._directory = tempfile.mkdtemp(prefix="ray-")
        own = {**PRIVATE_CLUSTER, "RAY_TMPDIR": self._directory}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NODES, json.dumps(self._cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **own},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("address "):
                self.environment = {**own, "RAY_ADDRESS": line.split()[1]}
                return self
        self.__exit__(None, None, None)
        raise AssertionError("the Ray cluster did not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        tree = self.tree()
        self._process.communicate(timeout=STOP_TIMEOUT_SECONDS)
        psutil.wait_procs(tree, timeout=STOP_TIMEOUT_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)

    def tree(self) -> list[psutil.Process]:
        """All processes of the cluster: its own, and those of the actors on it."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]
