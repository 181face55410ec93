"""Kills and stops at random: which, where and when is a matter of a seed.

A storm is spread over the tokens of its traffic, not over time, so that all of it falls
while requests run, however fast the machine is. Some blows fall during the recovery from the
one before.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx
import psutil

from tests.chaos.traffic import Traffic
from tests.mesh_process import MeshProcess, is_running

NOTICED_SECONDS = 8.0
"""From a blow to the end of readiness: 3 s of silence, and a busy machine."""
SETTLED_SECONDS = 60.0
POLL_SECONDS = 0.02
MOST_DELAY_SECONDS = 2.0
"""Into a recovery; it lasts about as long."""

Target = Literal["rank", "worker"]


@dataclass(frozen=True, slots=True)
class Blow:
    """One process that is killed or stopped."""

    signal_number: signal.Signals
    target: Target
    stage: int
    due: float
    """Share of the traffic's tokens that are there when it falls."""
    into_recovery_seconds: float | None = None
    """Not while serving, but so long after the end of readiness that the one before brings."""

    def __str__(self) -> str:
        into = self.into_recovery_seconds
        when = "" if into is None else f", {into:.1f} s into the recovery"
        return f"{self.signal_number.name} to the {self.target} of stage {self.stage}{when}"


def plan_storm(seed: int, pp_size: int, *, kills: int, stops: int) -> list[Blow]:
    """So many of each, in random order; a third falls into the recovery from the one before."""
    rng = random.Random(seed)
    signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    rng.shuffle(signals)
    count = len(signals)
    targets: tuple[Target, ...] = ("rank", "worker")
    return [
        Blow(
            signal_number,
            rng.choice(targets),
            rng.randrange(pp_size),
            due=(index + rng.uniform(0.1, 0.9)) / (count + 1),
            into_recovery_seconds=(
                rng.uniform(0.0, MOST_DELAY_SECONDS) if index and rng.random() < 1 / 3 else None
            ),
        )
        for index, signal_number in enumerate(signals)
    ]


@dataclass(slots=True)
class Storm:
    """Lets blows fall on a mesh, and watches that its gateway stays healthy."""

    mesh: MeshProcess
    blows: Sequence[Blow]
    traffic: Traffic
    fallen: list[Blow] = field(default_factory=list)

    async def run(self) -> None:
        """Until all blows have fallen."""
        started = time.monotonic()
        for blow in self.blows:
            if blow.into_recovery_seconds is None:
                await self.traffic.until(blow.due)
            else:
                await self._until_noticed()
                await asyncio.sleep(blow.into_recovery_seconds)
            pid = await self._strike(blow)
            self.fallen.append(blow)
            passed, percent = time.monotonic() - started, 100 * self.traffic.share
            print(f"[{passed:5.1f} s, {percent:3.0f} %] {blow} (pid {pid})", flush=True)

    async def _until_noticed(self) -> None:
        deadline = time.monotonic() + NOTICED_SECONDS
        async with httpx.AsyncClient() as client:
            while (await client.get(f"{self.mesh.url}/ready")).status_code == 200:
                if time.monotonic() > deadline:
                    return  # Recovered between two looks: then it is one more while serving.
                await asyncio.sleep(POLL_SECONDS)

    async def _strike(self, blow: Blow) -> int:
        deadline = time.monotonic() + SETTLED_SECONDS
        while time.monotonic() < deadline:
            victim = find(self.mesh, blow.target, blow.stage)
            if victim is not None:
                victim.send_signal(blow.signal_number)
                return victim.pid
            await asyncio.sleep(POLL_SECONDS)
        raise AssertionError(f"there was no {blow.target} of stage {blow.stage} to be hit")

    async def watch_health(self) -> None:
        """Until cancelled: `/health` answers 200 at any time."""
        async with httpx.AsyncClient(timeout=5.0) as client:
            while True:
                answer = await client.get(f"{self.mesh.url}/health")
                assert answer.status_code == 200, answer.text
                await asyncio.sleep(0.2)


def find(mesh: MeshProcess, target: Target, stage: int) -> psutil.Process | None:
    """The process that is there now, if one is: also one that has only been started."""
    for process in mesh.tree():
        try:
            if is_running(process) and _is_of(process.cmdline(), target, stage):
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def _is_of(command: Sequence[str], target: Target, stage: int) -> bool:
    if target == "worker":
        return "stage-worker" in command and f"--pp-rank={stage}" in command
    ranks = "stage_worker.rank_main" in command
    return ranks and command[command.index("--pp-rank") + 1] == str(stage)


@dataclass(frozen=True, slots=True)
class Condition:
    """Of a mesh at rest: what has to be as it was before."""

    free_blocks: float
    processes: int
    running: float
    waiting: float
    zombies: int

    @classmethod
    def of(cls, mesh: MeshProcess) -> Condition:
        lines = httpx.get(f"{mesh.url}/metrics").text.splitlines()
        values = {line.split()[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}
        statuses = []
        for process in mesh.tree():
            try:
                statuses.append(process.status())
            except psutil.NoSuchProcess:
                continue
        return cls(
            values["stagemesh_kv_free_blocks"],
            len(statuses),
            values["stagemesh_requests_running"],
            values["stagemesh_requests_waiting"],
            statuses.count(psutil.STATUS_ZOMBIE),
        )


def wait_until_as_before(mesh: MeshProcess, before: Condition) -> None:
    """Until the mesh is ready, and its blocks and processes are what they were."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while httpx.get(f"{mesh.url}/ready").status_code != 200 or Condition.of(mesh) != before:
        assert time.monotonic() < deadline, f"{Condition.of(mesh)} where {before} was"
        time.sleep(0.1)


MARKER = "STAGEMESH_TEST_STORM"


def marked_processes(mark: str) -> list[psutil.Process]:
    """Everything that was started below a process with this mark, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == mark and is_running(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
