"""Runs `stagemesh serve` as a user would: a process of its own, found by its banner.

    with MeshProcess(model, "-pp", "2") as mesh:
        httpx.get(f"{mesh.url}/v1/mesh")

Leaving the block ends it with SIGINT and fails the test when a process is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from tests.tiny_models import TinyShape

READY_TIMEOUT_SECONDS = 60.0
"""CI machines are slow and shared; how fast a start has to be is a test of its own."""
CTRL_C_SECONDS = 5.0
CPU_DEVICES = 16
"""Ranks that a test may run, however few cores there are."""
ENDLESS_TOKENS = 16_000
"""More than a tiny model makes while anything is waited for."""
ENDLESS = TinyShape(max_position_embeddings=ENDLESS_TOKENS + 512)
"""A tiny model that can be asked for them."""
_JOIN_AT = re.compile(r"workers join at ([^:]+):(\d+)")
_BANNER = re.compile(r"serves (\S+) at (https?://\S+) \(gRPC (\S+)\)")


class MeshProcess:
    """One served mesh and all its processes."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        command: Sequence[str] | None = None,
        nodes: Sequence[Sequence[str]] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` starts a mesh in another way, and must print the same banner;
        `environment` is added to the process's own. For each
        of `nodes` a `stagemesh serve --headless` with these flags is started as soon as the
        head's control service is there; their logs go to the mesh's."""
        self._command = command or [
            *(sys.executable, "-m", "services.cli", "serve", str(model)),
            *("--port", "0", "--grpc-port", "0", "--cpu-devices", str(CPU_DEVICES), *flags),
        ]
        self._nodes = nodes
        self._environment = {**os.environ, **(environment or {})}
        self._node_processes: list[subprocess.Popen[bytes]] = []
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed in __exit__
            prefix="stagemesh-test-", suffix=".log"
        )
        self._log_text = ""
        self.output = ""
        """What the gateway has written to stdout."""
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.model_name = ""
        self.url = ""
        self.grpc_address = ""
        self.ready_seconds = 0.0
        self.join_flags: list[str] = []
        """Where a node finds the head; empty where there are no `nodes`."""

    def __enter__(self) -> MeshProcess:
        started = time.monotonic()
        self._start()
        if self._nodes:
            self._start_nodes()
        if not self._ready.wait(READY_TIMEOUT_SECONDS) or not self.url:
            self._end()
            raise AssertionError(f"the mesh did not become ready; its log:\n{self.log()}")
        self.ready_seconds = time.monotonic() - started
        return self

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _wait_for_head(self) -> list[str]:
        """Flags with which a node finds the head; none when it has ended."""
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        while (found := _JOIN_AT.search(self.log())) is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                return []
            time.sleep(0.05)
        return ["--master-addr", found.group(1), "--master-port", found.group(2)]

    def _start_nodes(self) -> None:
        self.join_flags = self._wait_for_head()
        for flags in self._nodes:
            command = [*self._command[:5], "--headless", *self.join_flags, *flags]
            self._node_processes.append(
                subprocess.Popen(
                    [*command, "--cpu-devices", str(CPU_DEVICES)],
                    stdout=self._log,
                    stderr=self._log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    @property
    def node_processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """The headless nodes, in the order of `nodes`."""
        return self._node_processes

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.output += line
                if (found := _BANNER.search(line)) is not None:
                    self.model_name, self.url, self.grpc_address = found.groups()
                    self._ready.set()
        self._ready.set()

    @property
    def process(self) -> subprocess.Popen[str]:
        """The gateway."""
        assert self._process is not None
        return self._process

    def tree(self) -> list[psutil.Process]:
        """The gateway, the headless nodes, and everything below them."""
        roots = [psutil.Process(p.pid) for p in (self.process, *self._node_processes)]
        return [p for root in roots for p in (root, *root.children(recursive=True))]

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, in order of stage."""
        found = [p for p in self.tree() if "stage_worker.rank_main" in p.cmdline()]
        return sorted(found, key=lambda p: int(p.cmdline()[p.cmdline().index("--pp-rank") + 1]))

    def workers(self) -> list[psutil.Process]:
        """The stage worker processes."""
        return [p for p in self.tree() if "stage-worker" in p.cmdline()]

    def completion(self, num_tokens: int) -> str:
        """The greedy text of so many tokens."""
        body = {"model": self.model_name, "prompt": "a", "max_tokens": num_tokens, "temperature": 0}
        answer = httpx.post(
            f"{self.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def endless(self) -> httpx.Response:
        """A request that runs until something ends it: its model has the shape `ENDLESS`."""
        body = {"model": self.model_name, "prompt": "a", "max_tokens": ENDLESS_TOKENS}
        return httpx.post(
            f"{self.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=30
        )

    def wait_until_running(self, count: int) -> None:
        """Until so many requests hold slots."""
        line = f"stagemesh_requests_running {float(count)}\n"
        wait_for(
            lambda: line in httpx.get(f"{self.url}/metrics").text, 10.0, f"{count} requests running"
        )

    def log(self) -> str:
        """What all processes have written to stderr."""
        if not self._log.closed:
            self._log_text = Path(self._log.name).read_text(encoding="utf-8")
        return self._log_text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tree = self.tree() if self.process.poll() is None else []
        log = self._end()
        left = [p for p in tree if is_running(p)]
        for process in left:
            process.kill()
        if kind is None:
            assert not left, f"processes are left: {left}; log:\n{log}"
        elif log:
            print(log, file=sys.stderr)

    def _end(self) -> str:
        if self.process.poll() is None:
            # To the group, as a terminal sends Ctrl-C.
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(CTRL_C_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(CTRL_C_SECONDS)
        for node in self._node_processes:
            try:
                node.wait(CTRL_C_SECONDS)  # the head dismisses them
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait(CTRL_C_SECONDS)
        log = self.log()
        self._log.close()
        return log


class HeadProcess(MeshProcess):
    """A head that waits for its nodes: entered as soon as they can join."""

    def __init__(self, model: Path | str, *flags: str) -> None:
        super().__init__(model, "--master-port", "0", *flags)

    def __enter__(self) -> HeadProcess:
        self._start()
        self.join_flags = self._wait_for_head()
        if not self.join_flags:
            raise AssertionError(f"the head has ended; its log:\n{self._end()}")
        return self


def is_running(process: psutil.Process) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Waits until a condition holds; returns the seconds it took, or fails naming it."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if condition():
            return time.monotonic() - started
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")
