"""One mesh on a Ray cluster of two hosts, each with its own address."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_oracle import PROMPTS, Oracle, check
from tests.ray_cluster import AUTHENTICATION
from tests.system.hosts import Host, hosts
from tests.system.test_two_hosts import ask_all, curl, wait_until_ready
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.system

RAY = Path(sys.executable).with_name("ray")
RAY_PORT = 6379
START_TIMEOUT_SECONDS = 60.0


def end(processes: Sequence[psutil.Process], signal_number: int) -> Sequence[psutil.Process]:
    """Signals all and returns those that are still there a little later."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal_number)
    _, left = psutil.wait_procs(processes, timeout=10)
    return left


@contextlib.contextmanager
def ray_node(host: Host, log: Path, *flags: str) -> Iterator[None]:
    """A Ray node with one CPU on a host; all that runs there is ended with it."""
    command = [
        *("ip", "netns", "exec", host.namespace, str(RAY), "start", "--block"),
        *(f"--node-ip-address={host.address}", "--num-cpus=1", "--object-store-memory=80000000"),
        *flags,
    ]
    with log.open("w", encoding="utf-8") as output:
        node = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while "Ray runtime started" not in (said := log.read_text("utf-8")):
            assert node.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
        yield
    finally:
        node.terminate()
        node.wait(20)
        end([psutil.Process(pid) for pid in host.pids() if psutil.pid_exists(pid)], signal.SIGKILL)


def test_stages_listen_and_meet_on_the_addresses_that_ray_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PP 2 over two hosts with one CPU each: Ray has no other way than one stage on each."""
    model = make_tiny_llama(tmp_path / "tiny", tied=True)
    oracle = Oracle(model)
    directory = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets must be short
    for name, value in AUTHENTICATION.items():
        monkeypatch.setenv(name, value)
    with hosts(2) as (head, other), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        address = f"{head.address}:{RAY_PORT}"
        at_head = (
            *("--head", f"--port={RAY_PORT}", f"--temp-dir={directory}"),
            "--include-dashboard=false",
        )
        stack.enter_context(ray_node(head, tmp_path / "head.log", *at_head))
        stack.enter_context(ray_node(other, tmp_path / "other.log", f"--address={address}"))
        monkeypatch.setenv("RAY_ADDRESS", address)
        serve = head.start(
            tmp_path / "serve.log",
            *("serve", str(model), "-pp", "2", "--distributed-executor-backend", "ray"),
        )
        with serve as gateway:
            wait_until_ready(head, gateway)
            check(oracle, ask_all(head, [oracle.encode(text[:60]) for text in PROMPTS[:4]]))
            stages = json.loads(curl(head, "/v1/mesh")[1])["stages"]
            for host, stage in zip((head, other), stages, strict=True):
                assert {rank["pid"] for rank in stage["ranks"]} <= host.pids()
            log = gateway.log()
            assert f"workers join at {head.address}:" in log
            assert log.count("is not encrypted") == 1
            for stage, host in enumerate((head, other)):
                assert re.search(rf"stage {stage} joined: node \S+ at {host.address}:", log)
            ours = [
                process
                for host in (head, other)
                for pid in host.pids()
                if "stage_worker.rank_main" in (process := psutil.Process(pid)).cmdline()
            ]
            assert len(ours) == 2
            gateway.process.send_signal(signal.SIGINT)
            assert gateway.process.wait(20) == 0
        _, left = psutil.wait_procs(ours, timeout=10)
        assert not left
        assert "Ray runtime started" in (tmp_path / "other.log").read_text("utf-8")
