"""From the death of a rank or stage worker of the demo model to the next token, cold.

A greedy stream runs; a process is killed or stopped; the gap in the stream is what a client
sees. The gateway's log says how it is spent: noticing, starting ranks and forming groups,
loading weights, computing the request again. Limit: 10 s for each kill.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.served import DEMO_MODEL, served
from stagemesh import Client
from tests.mesh_process import MeshProcess, wait_for

LIMIT_SECONDS = 10.0
NUM_TOKENS = 240
TOKENS_BEFORE = 20
_UP = re.compile(
    r"is up in epoch (\d+): workers present after (\S+) s, ranks started and groups formed after "
    r"(\S+) s, weights loaded after (\S+) s"
)
_AFTER = re.compile(r"goes on in epoch (\d+) after (\S+) s; (\d+) tokens")


@dataclass
class Stream:
    """One client's view: when each token came."""

    address: str
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Reads the whole answer."""
        with Client(self.address) as client:
            asked = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
            with client.stream("Once upon a time", **asked) as deltas:  # type: ignore[arg-type]
                for delta in deltas:
                    self.token_ids.extend(delta.token_ids)
                    self.arrivals.extend([time.monotonic()] * len(delta.token_ids))


CASES = (
    ("rank of stage 0 killed", ("rank", 0), signal.SIGKILL),
    ("rank of stage 1 killed", ("rank", 1), signal.SIGKILL),
    ("worker of stage 0 killed", ("worker", 0), signal.SIGKILL),
    ("worker of stage 1 killed", ("worker", 1), signal.SIGKILL),
    ("rank of stage 1 stopped", ("rank", 1), signal.SIGSTOP),
    ("worker of stage 0 stopped", ("worker", 0), signal.SIGSTOP),
)


def victim_of(mesh: MeshProcess, kind: str, stage: int) -> psutil.Process:
    """The process that is hit."""
    if kind == "rank":
        return mesh.ranks()[stage]
    return next(w for w in mesh.workers() if f"--pp-rank={stage}" in w.cmdline())


def main() -> None:
    """Prints a line for each case."""
    with served(DEMO_MODEL, "-pp", "2") as mesh:
        undisturbed = Stream(mesh.grpc_address)
        undisturbed.run()
        for name, (kind, stage), signal_number in CASES:
            stream = Stream(mesh.grpc_address)
            reader = threading.Thread(target=stream.run)
            reader.start()
            wait_for(lambda s=stream: len(s.arrivals) >= TOKENS_BEFORE, 60, "the first tokens")
            hit_at = time.monotonic()
            victim_of(mesh, kind, stage).send_signal(signal_number)
            reader.join()
            print(f"{name}: {describe(mesh, stream, hit_at, undisturbed)}", flush=True)
        free = re.findall(
            r"^stagemesh_kv_(?:free_)?blocks (\S+)", httpx.get(f"{mesh.url}/metrics").text, re.M
        )
        print(f"KV blocks, free blocks afterwards: {', '.join(free)}")


def describe(mesh: MeshProcess, stream: Stream, hit_at: float, undisturbed: Stream) -> str:
    """Seconds by phase, and whether the text is the same."""
    next_token = next(
        (
            at
            for last, at in zip(stream.arrivals, stream.arrivals[1:], strict=False)
            if at > hit_at and at - last > 0.5
        ),
        hit_at,
    )
    seconds = next_token - hit_at
    log = mesh.log()
    _, waited, formed, loaded = _UP.findall(log)[-1]
    _, recovered, replayed = _AFTER.findall(log)[-1]
    noticed_and_replayed = seconds - float(recovered)
    same = "the same text" if stream.token_ids == undisturbed.token_ids else "ANOTHER TEXT"
    return (
        f"{seconds:.1f} s to the next token (limit {LIMIT_SECONDS:.0f} s): noticed and {replayed} "
        f"tokens computed again {noticed_and_replayed:.1f}, worker back {waited}, ranks started "
        f"and groups formed {formed}, weights loaded {loaded}; {same}"
    )
