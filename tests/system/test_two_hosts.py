"""One mesh on several hosts: with vLLM's flags, and service by service as systemd would."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.rpc.roles import Role
from tests.certificates import Pki
from tests.e2e.test_oracle import NUM_TOKENS, PROMPTS, Answer, Oracle, check
from tests.system.hosts import Host, HostProcess, hosts
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


def ask_all(host: Host, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Greedy continuations with logprobs, asked from the gateway's own host with the SDK."""
    script = (
        "import json, sys\n"
        "from stagemesh import Client\n"
        "prompts, num_tokens = json.loads(sys.argv[1])\n"
        "asked = {'temperature': 0, 'max_tokens': num_tokens, 'ignore_eos': True, 'logprobs': 0}\n"
        "with Client('127.0.0.1:8001') as client:\n"
        "    done = [client.generate(token_ids=p, timeout=20, **asked) for p in prompts]\n"
        "print(json.dumps([(d.token_ids, [e.logprob for e in d.logprobs]) for d in done]))\n"
    )
    output = host.run(sys.executable, "-c", script, json.dumps([prompts, NUM_TOKENS]))
    return [
        Answer(prompt, tuple(tokens), tuple(logprobs))
        for prompt, (tokens, logprobs) in zip(prompts, json.loads(output), strict=True)
    ]


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
    pki = Pki(tmp_path / "pki")
    with hosts(2) as (head, other):
        join = (f"--master-addr={head.address}", f"--master-port={MASTER_PORT}")
        # As docs/security.md has it: a directory for each node, with what runs there.
        tls = {host: tmp_path / f"tls-{host.address}" for host in (head, other)}
        pki.issue(Role.GATEWAY, tls[head], head.address)
        for host, directory in tls.items():
            pki.issue(Role.STAGE_WORKER, directory, host.address)
        with (
            head.start(
                tmp_path / "gateway.log",
                *("gateway", str(model), "-pp", "2", "--max-model-len", "256", *join),
                f"--tls-dir={tls[head]}",
            ) as gateway,
            head.start(
                tmp_path / "stage-0.log",
                *("stage-worker", *join, f"--host={head.address}", "--pp-rank=0"),
                *(f"--tls-dir={tls[head]}", "--require-tls"),
            ),
            other.start(
                tmp_path / "stage-1.log",
                *("stage-worker", *join, f"--host={other.address}", "--pp-rank=1"),
                *(f"--tls-dir={tls[other]}", "--require-tls"),
            ) as stage_1,
        ):
            wait_until_ready(head, gateway)
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0}
            body["ignore_eos"] = True
            status, answer = curl(head, "/v1/completions", body)
            assert status == 200, answer
            assert json.loads(answer)["usage"]["completion_tokens"] == 8
            assert listeners(head) <= {"127.0.0.1", head.address}
            assert listeners(other) <= {other.address}
            stage_1.process.kill()  # with its ranks: they die with their parent
            # As systemd does; the mesh takes it in and goes on.
            with other.start(
                tmp_path / "stage-1-again.log",
                *("stage-worker", *join, f"--host={other.address}", "--pp-rank=1"),
                *(f"--tls-dir={tls[other]}", "--require-tls"),
            ):
                status, again = curl(head, "/v1/completions", body)
                assert status == 200, again
                texts = [json.loads(text)["choices"][0]["text"] for text in (answer, again)]
                assert texts[0] == texts[1]
            assert gateway.process.poll() is None


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, ("-pp", "2")), (2, ("-tp", "2", "-pp", "2")), (4, ("-pp", "4"))],
    ids=["2-nodes-pp2", "2-nodes-tp2-pp2", "4-nodes-pp4"],
)
def test_nodes_with_vllms_flags(tmp_path: Path, count: int, sizes: Sequence[str]) -> None:
    """F9: each node on a host of its own, the same text as `transformers` in one process."""
    model = make_tiny_llama(tmp_path / "tiny", tied=True)
    oracle = Oracle(model)
    prompts = [oracle.encode(text[:60]) for text in PROMPTS[:8]]
    with hosts(count) as made, contextlib.ExitStack() as stack:
        head = made[0]
        for rank in reversed(range(count)):
            flags = [*("serve", str(model), *sizes, "--nnodes", str(count)), f"--node-rank={rank}"]
            flags += [f"--master-addr={head.address}", f"--master-port={MASTER_PORT}"]
            flags += ["--cpu-devices=2", *(["--headless"] if rank else [])]
            log = tmp_path / f"node-{rank}.log"
            node = stack.enter_context(made[rank].start(log, *flags))
        wait_until_ready(head, node)
        answers = ask_all(head, prompts)
        stages = json.loads(curl(head, "/v1/mesh")[1])["stages"]
        pids = [{rank["pid"] for rank in stage["ranks"]} for stage in stages]
        share = len(stages) // count
        for index, host in enumerate(made):
            own = set().union(*pids[index * share : (index + 1) * share])
            assert own <= host.pids()
    check(oracle, answers)
