"""A node is cut off from the others and nobody closes a connection: for a while, and for good."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from services.topology.simulated_cost import StageCost
from stage_worker.simulated.tokens import expected_tokens
from tests.mesh_process import wait_for
from tests.simulated_mesh import VOCAB_SIZE, make_model
from tests.system.hosts import Host, hosts
from tests.system.test_two_hosts import MASTER_PORT, curl, wait_until_ready

pytestmark = pytest.mark.system

MORE_SECONDS = 2.0
"""Of the cut, after it was noticed: together less than the 8 s after which a worker leaves, and
TCP would be silent for as long again."""
RECOVERY_TIMEOUT_SECONDS = 12
NUM_TOKENS = 200
PROMPT = (1, 2, 3)
CLIENT = """
import json, sys
from stagemesh import Client
from stagemesh.errors import StagemeshError
prompt, num_tokens = json.loads(sys.argv[1])
received = []
with Client("127.0.0.1:8001", max_retries=0) as client:
    try:
        for chunk in client.stream(
            token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, timeout=28
        ):
            received += chunk.token_ids
        error = None
    except StagemeshError as caught:
        error = [type(caught).__name__, str(caught)]
print(json.dumps([received, error]))
"""


def stream(host: Host) -> tuple[list[int], list[str] | None]:
    """What came, and what ended it where that was an error: (name, message)."""
    tokens, error = json.loads(
        host.run(sys.executable, "-c", CLIENT, json.dumps([PROMPT, NUM_TOKENS]))
    )
    return tokens, error


def test_a_node_is_cut_off(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"every_stage": asdict(StageCost(0.01))}))
    expected = expected_tokens(PROMPT, NUM_TOKENS, VOCAB_SIZE)
    with (
        hosts(2) as (head, other),
        contextlib.ExitStack() as stack,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        sizes = ("-pp", "2", "--nnodes", "2", "--device", "sim")
        join = (f"--master-addr={head.address}", f"--master-port={MASTER_PORT}")
        flags = ("serve", str(model), *sizes, *join)
        own = ("--sim-cost", str(cost), f"--recovery-timeout-seconds={RECOVERY_TIMEOUT_SECONDS}")
        gateway = stack.enter_context(
            head.start(tmp_path / "head.log", *flags, *own, "--node-rank=0")
        )
        stack.enter_context(
            other.start(
                tmp_path / "node.log",
                *flags,
                "--headless",
                "--sim-cost",
                str(cost),
                "--node-rank=1",
            )
        )
        wait_until_ready(head, gateway)
        pids = head.pids(), other.pids()

        # For a while: the stream goes on where it was, and all processes are kept, also ranks that
        # waited for each other.
        answer = pool.submit(stream, head)
        time.sleep(1.5)
        with other.unplugged():
            wait_for(lambda: curl(head, "/ready")[0] == 503, 8, "the end of readiness")
            time.sleep(MORE_SECONDS)
            assert curl(head, "/health")[0] == 200
        assert answer.result(40) == (expected, None)
        wait_until_ready(head, gateway)
        assert (head.pids(), other.pids()) == pids

        # For good: a typed error at the limit, and then the end.
        answer = pool.submit(stream, head)
        time.sleep(1.5)
        with other.unplugged():
            tokens, error = answer.result(40)
            assert error is not None and error[0] == "StageFailed", error
            assert f"--recovery-timeout-seconds {RECOVERY_TIMEOUT_SECONDS}" in error[1]
            assert 0 < len(tokens) < NUM_TOKENS and tokens == expected[: len(tokens)]
            assert gateway.process.wait(20) == 1
