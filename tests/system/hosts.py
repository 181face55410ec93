"""Two hosts on one machine: network namespaces with an address each, joined by a veth pair.

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

    def run(self, *command: str) -> str:
        """Runs a command there and returns its output."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout

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
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes both hosts and removes them at the end."""
    tag = f"{os.getpid() % 100000}"
    hosts = (Host(f"sm-a-{tag}", "192.0.2.1"), Host(f"sm-b-{tag}", "192.0.2.2"))
    cables = (f"sma{tag}", f"smb{tag}")
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(hosts, cables, strict=True):
            _ip("link", "set", cable, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", cable)
            _ip("-n", host.namespace, "link", "set", cable, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
