"""The services of one mesh on two hosts, started one by one as systemd would."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.system.hosts import Host, HostProcess, two_hosts
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.system

MASTER_PORT = 29550


def curl(host: Host, path: str, body: object | None = None) -> tuple[int, str]:
    """Asks the gateway from its own host: (status, body); status 0 while nobody answers."""
    script = (
        "import sys, httpx\n"
        "url, body = sys.argv[1:]\n"
        "try:\n"
        "    kind = {'content-type': 'application/json'}\n"
        "    asked = ('POST', url) if body else ('GET', url)\n"
        "    r = httpx.request(*asked, content=body, headers=kind, timeout=20)\n"
        "    print(r.status_code, r.text)\n"
        "except httpx.TransportError:\n"
        "    print(0)\n"
    )
    text = json.dumps(body) if body is not None else ""
    output = host.run(sys.executable, "-c", script, f"http://127.0.0.1:8000{path}", text)
    status, _, rest = output.partition(" ")
    return int(status), rest


def wait_until_ready(host: Host, gateway: HostProcess) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if curl(host, "/ready")[0] == 200:
            return
        assert gateway.process.poll() is None, gateway.log()
        time.sleep(0.2)
    raise AssertionError(f"not ready:\n{gateway.log()}")


def listeners(host: Host) -> set[str]:
    """Addresses that somebody listens on, without ports; IPv4 in IPv6 form as plain IPv4."""
    lines = host.run("ss", "-Hltn").splitlines()
    found = (line.split()[3].rpartition(":")[0] for line in lines)
    return {address.strip("[]").removeprefix("::ffff:") for address in found}


def test_two_hosts_serve_and_listen_on_their_own_addresses_only(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny", tied=True)
    with two_hosts() as (head, other):
        join = (f"--master-addr={head.address}", f"--master-port={MASTER_PORT}")
        with (
            head.start(
                tmp_path / "gateway.log",
                *("gateway", str(model), "-pp", "2", "--max-model-len", "256", *join),
            ) as gateway,
            head.start(
                tmp_path / "stage-0.log",
                *("stage-worker", *join, f"--host={head.address}", "--pp-rank=0"),
            ),
            other.start(
                tmp_path / "stage-1.log",
                *("stage-worker", *join, f"--host={other.address}", "--pp-rank=1"),
            ) as stage_1,
        ):
            wait_until_ready(head, gateway)
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
            status, answer = curl(head, "/v1/completions", body)
            assert status == 200, answer
            assert json.loads(answer)["usage"]["completion_tokens"] == 8
            assert listeners(head) <= {"127.0.0.1", head.address}
            assert listeners(other) <= {other.address}
            stage_1.process.kill()  # with its ranks: they die with their parent
            started = time.monotonic()
            while gateway.process.poll() is None and time.monotonic() - started < 10:
                time.sleep(0.05)
            assert gateway.process.returncode == 1
            assert "stage 1" in gateway.log()
