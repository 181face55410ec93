"""Several hosts on one machine: network namespaces with an address each, on one bridge.

Needs root and iproute2. Addresses are from a documentation range (RFC 5737), so
that they can be nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    namespace: str
    address: str
    switch: str
    port: str
    """Of the switch, which this host is plugged into."""

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Nothing goes in or out meanwhile, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")
        try:
            yield
        finally:
            _ip("-n", self.switch, "link", "set", self.port, "up")

    def run(self, *command: str) -> str:
        """Runs a command there and returns its output."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout

    def pids(self) -> set[int]:
        """Processes that run there."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return set(map(int, listed.stdout.split()))

    def start(self, log: Path, *arguments: str) -> HostProcess:
        """Starts `stagemesh ...` there."""
        return HostProcess(self, log, arguments)


class HostProcess:
    """One of our processes on a host; killed with its children at the end."""

    def __init__(self, host: Host, log: Path, arguments: tuple[str, ...]) -> None:
        self._command = [
            *("ip", "netns", "exec", host.namespace),
            *(sys.executable, "-m", "services.cli", *arguments),
        ]
        self._log = log

    def __enter__(self) -> HostProcess:
        with self._log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return self

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(encoding="utf-8")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        if kind is not None:
            print(self.log(), file=sys.stderr)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Makes the hosts, joined by a bridge in a namespace of its own; removes them at the end."""
    tag = f"{os.getpid() % 100000}"
    switch = f"sm-{tag}-switch"
    made = [
        Host(f"sm-{tag}-{index}", f"192.0.2.{index + 1}", switch, f"port{index}")
        for index in range(count)
    ]
    with contextlib.ExitStack() as stack:
        for namespace in (switch, *(host.namespace for host in made)):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "delete", namespace)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for index, host in enumerate(made):
            plug, socket = host.port, f"sm{tag}{index}"
            _ip("-n", switch, "link", "add", plug, "type", "veth", "peer", "name", socket)
            _ip("-n", switch, "link", "set", plug, "master", "bridge", "up")
            _ip("-n", switch, "link", "set", socket, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", socket)
            _ip("-n", host.namespace, "link", "set", socket, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
