"""A gateway dies or is restarted, and the next one takes its workers over, with their weights."""

from __future__ import annotations

import concurrent.futures
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.mesh_process import ENDLESS, MeshProcess, is_running, wait_for
from tests.tiny_models import make_tiny_llama

COMMAND = (sys.executable, "-m", "services.cli")
NUM_TOKENS = 12
READY_SECONDS = 20.0
"""For a gateway to start and take over, on a busy machine; alone it takes about 3 s."""
LOADED = "% loaded"
"""In the log of a gateway whose stages read weights."""


class Workers:
    """Two stage workers, started by hand."""

    def __init__(self, port: int, log: Path) -> None:
        flags = ("--device", "cpu", "--cpu-devices", "4", "--wait-for-head")
        head = ("--master-port", str(port))
        with log.open("wb") as file:
            self.processes = [
                subprocess.Popen(
                    [*COMMAND, "stage-worker", *head, *flags, "--pp-rank", str(stage)],
                    stderr=file,
                    stdin=subprocess.DEVNULL,
                )
                for stage in range(2)
            ]

    def pids(self) -> list[int]:
        """Of workers and ranks."""
        trees = [psutil.Process(p.pid) for p in self.processes]
        return [p.pid for tree in trees for p in (tree, *tree.children(recursive=True))]


@contextmanager
def workers_of(port: int, log: Path) -> Iterator[Workers]:
    workers = Workers(port, log)
    try:
        yield workers
    finally:
        for process in workers.processes:
            process.terminate()
        for process in workers.processes:
            process.wait(10)


def command_of(model: Path, port: int, *flags: str) -> list[str]:
    mesh = ("-pp", "2", "--device", "cpu", "--master-port", str(port))
    return [*COMMAND, "gateway", str(model), *mesh, "--port", "0", "--grpc-port", "0", *flags]


def gateway(model: Path, port: int) -> MeshProcess:
    return MeshProcess(model, command=command_of(model, port))


def epoch_of(mesh: MeshProcess) -> int:
    return int(httpx.get(f"{mesh.url}/v1/mesh").json()["epoch"])


def test_the_next_gateway_takes_the_workers_over(tmp_path: Path) -> None:
    """Killed under load, then restarted as an operator does, then with another plan."""
    model = make_tiny_llama(tmp_path / "tiny", tied=True, shape=ENDLESS)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with workers_of(port, tmp_path / "workers.log") as workers:
        with gateway(model, port) as first:
            text = first.completion(NUM_TOKENS)
            pids = workers.pids()
            assert len(pids) == 4
            assert LOADED in first.log()
            epoch = epoch_of(first)
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(first.endless) for _ in range(4)]
                first.wait_until_running(4)
                first.process.kill()
                for answer in answers:
                    with pytest.raises(httpx.TransportError):
                        answer.result(timeout=10)
        for stop in (signal.SIGTERM, signal.SIGINT):
            with gateway(model, port) as next_one:
                assert next_one.ready_seconds < READY_SECONDS
                assert next_one.completion(NUM_TOKENS) == text
                assert workers.pids() == pids
                assert LOADED not in next_one.log()
                assert epoch_of(next_one) > epoch
                epoch = epoch_of(next_one)
                next_one.process.send_signal(stop)
                assert next_one.process.wait(10) == 0
            # They have been told that the head leaves; this is not for them.
            time.sleep(0.5)
            assert workers.pids() == pids
        refusing = subprocess.Popen(
            command_of(model, port, "--block-size", "32"),
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        try:
            assert [process.wait(READY_SECONDS) for process in workers.processes] == [1, 1]
        finally:
            refusing.kill()
            refusing.wait(10)
    said = (tmp_path / "workers.log").read_text()
    assert "block_size differs: the head has" in said
    wait_for(
        lambda: not any(psutil.pid_exists(p) and is_running(psutil.Process(p)) for p in pids),
        5.0,
        "the end of the ranks",
    )
