"""From the death of a rank or stage worker of the demo model to the next token: cold, with a spare,
and with a spare that holds the stage's weights.

A greedy stream runs; a process is killed or stopped; the gap in the stream is what a client
sees. The gateway's log says how it is spent: waiting for a worker, starting ranks and forming
groups, loading weights; the rest is noticing and computing the request again.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import psutil

from benchmarks.served import DEMO_MODEL, served
from stagemesh import Client
from tests.mesh_process import MeshProcess, wait_for

NUM_TOKENS = 120
TOKENS_BEFORE = 20
SPARE_READY_SECONDS = 60.0
_UP = re.compile(
    r"is up in epoch (\d+): workers present after (\S+) s, ranks started and groups formed after "
    r"(\S+) s, weights loaded after (\S+) s"
)
_AFTER = re.compile(r"goes on in epoch (\d+) after (\S+) s; (\d+) tokens")


@dataclass(frozen=True)
class Mode:
    """One way to serve, and what is promised of it."""

    name: str
    flags: tuple[str, ...]
    limit_seconds: float
    """For each kill and stop."""
    num_spares: int = 0
    holds: bool = False


MODES = (
    Mode("cold", (), 10.0),
    Mode("standby", ("--standby", "1"), 4.0, 1),
    Mode(
        "standby, weights held", ("--standby", "2", "--standby-stages", "0,1"), 4.0, 2, holds=True
    ),
)
CASES = (
    ("rank of stage 0 killed", ("rank", 0), signal.SIGKILL),
    ("rank of stage 1 killed", ("rank", 1), signal.SIGKILL),
    ("worker of stage 0 killed", ("worker", 0), signal.SIGKILL),
    ("worker of stage 1 killed", ("worker", 1), signal.SIGKILL),
    ("rank of stage 1 stopped", ("rank", 1), signal.SIGSTOP),
    ("worker of stage 0 stopped", ("worker", 0), signal.SIGSTOP),
)


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


@dataclass(frozen=True)
class Gap:
    """What a failure has cost a client."""

    seconds: float
    detail: str


def view_of(mesh: MeshProcess) -> dict[str, Any]:
    """`/v1/mesh`."""
    view: dict[str, Any] = httpx.get(f"{mesh.url}/v1/mesh").json()
    return view


def victim_of(mesh: MeshProcess, kind: str, stage: int) -> psutil.Process:
    """The process that is hit: whoever is at the stage now."""
    (rank,) = next(s["ranks"] for s in view_of(mesh)["stages"] if s["pp_rank"] == stage)
    process = psutil.Process(rank["pid"])
    worker = process.parent()
    assert worker is not None
    return process if kind == "rank" else worker


def wait_for_spares(mesh: MeshProcess, mode: Mode) -> None:
    """Until all spares are back, with weights where they hold some."""

    def are_there() -> bool:
        ready = [spare for spare in view_of(mesh)["standby"] if spare["state"] == "ready"]
        held = {spare["holds_stage"] for spare in ready} - {None}
        return len(ready) >= mode.num_spares and (not mode.holds or len(held) == mode.num_spares)

    wait_for(are_there, SPARE_READY_SECONDS, "the spares")


def main() -> None:
    """Prints a line for each failure in each mode, then a table."""
    gaps: dict[tuple[str, str], Gap] = {}
    for mode in MODES:
        with served(DEMO_MODEL, "-pp", "2", *mode.flags) as mesh:
            undisturbed = Stream(mesh.grpc_address)
            undisturbed.run()
            for name, (kind, stage), signal_number in CASES:
                wait_for_spares(mesh, mode)
                gap = measure(mesh, victim_of(mesh, kind, stage), signal_number, undisturbed)
                gaps[name, mode.name] = gap
                print(f"{mode.name}: {name}: {gap.detail}", flush=True)
            free = re.findall(
                r"^stagemesh_kv_(?:free_)?blocks (\S+)", httpx.get(f"{mesh.url}/metrics").text, re.M
            )
            print(f"{mode.name}: KV blocks, free blocks afterwards: {', '.join(free)}", flush=True)
    print_table(gaps)


def measure(
    mesh: MeshProcess, victim: psutil.Process, signal_number: int, undisturbed: Stream
) -> Gap:
    """Hits a process while a stream runs."""
    stream = Stream(mesh.grpc_address)
    reader = threading.Thread(target=stream.run)
    reader.start()
    wait_for(lambda: len(stream.arrivals) >= TOKENS_BEFORE, 60, "the first tokens")
    epoch = view_of(mesh)["epoch"]
    hit_at = time.monotonic()
    victim.send_signal(signal_number)
    reader.join()
    assert view_of(mesh)["epoch"] > epoch, "nothing had to recover"
    return gap_of(mesh, stream, hit_at, undisturbed)


def gap_of(mesh: MeshProcess, stream: Stream, hit_at: float, undisturbed: Stream) -> Gap:
    """The longest pause after the hit, by phase, and whether the text is the same."""
    after = [at for at in stream.arrivals if at > hit_at]
    before = [at for at in stream.arrivals if at <= hit_at][-1:]
    arrivals = [*before, *after]
    _, end = max(pairwise(arrivals), key=lambda pause: pause[1] - pause[0])
    seconds = end - hit_at
    log = mesh.log()
    _, waited, formed, loaded = _UP.findall(log)[-1]
    _, recovered, replayed = _AFTER.findall(log)[-1]
    same = "the same text" if stream.token_ids == undisturbed.token_ids else "ANOTHER TEXT"
    return Gap(
        seconds,
        f"{seconds:.1f} s to the next token: noticed and {replayed} tokens computed again "
        f"{seconds - float(recovered):.1f}, worker present {waited}, ranks started and groups "
        f"formed {formed}, weights loaded {loaded}; {same}",
    )


def print_table(gaps: dict[tuple[str, str], Gap]) -> None:
    """Cold and warm side by side, in seconds to the next token."""
    print("| seconds to the next token | " + " | ".join(mode.name for mode in MODES) + " |")
    print("| --- |" + " --- |" * len(MODES))
    for name, _, _ in CASES:
        cells = [f"{gaps[name, mode.name].seconds:.1f}" for mode in MODES]
        print(f"| {name} | {' | '.join(cells)} |")
    for mode in MODES:
        worst = max(gaps[name, mode.name].seconds for name, _, _ in CASES)
        killed = max(gaps[name, mode.name].seconds for name, _, by in CASES if by == signal.SIGKILL)
        verdict = "met" if killed <= mode.limit_seconds else "MISSED"
        print(
            f"{mode.name}: killed {killed:.1f} s at most (limit {mode.limit_seconds:.0f} s: "
            f"{verdict}); killed or stopped {worst:.1f} s"
        )
