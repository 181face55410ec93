"""The workers of one node: with whose end the node or the mesh ends, and who is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from services.launch import headless, local
from services.launch.launcher import WorkerExit
from services.launch.local import LocalLauncher, LocalWorkers
from services.launch.process import EXIT_HEAD_LOST
from services.launch.restarts import RestartLimits
from services.topology.placement import StagePlacement
from stagemesh.v1 import topology_pb2

STAGES = tuple(StagePlacement(1, 0, stage, (0,), (stage,), stage, stage + 1) for stage in (0, 1))
TIMEOUT_SECONDS = 5.0
TOGETHER_SECONDS = 0.05


class FakeProcess:
    """A worker process that ends when it is told to."""

    def __init__(
        self, placement: StagePlacement | None, command: object, *, node_rank: int
    ) -> None:
        self.placement = placement
        self.starts = 0
        self.has_joined = True
        self.code: asyncio.Future[int]

    async def start(self, *fds: int) -> None:
        self.starts += 1
        self.code = asyncio.get_running_loop().create_future()

    @property
    def is_running(self) -> bool:
        return not self.code.done()

    def end(self, code: int) -> None:
        self.code.set_result(code)

    async def exited(self) -> None:
        await asyncio.wait([self.code])

    async def ended(self) -> WorkerExit:
        await self.exited()
        code = self.code.result()
        how = f"exited with {code}"
        return WorkerExit(self.placement, 1, how, code=code, had_joined=self.has_joined)

    def kill(self) -> None:
        if self.is_running:
            self.end(-9)

    def close(self) -> None:
        """Nothing to close."""


class Node:
    """A node with two stages and a spare, kept as `serve --headless` does."""

    def __init__(self, limits: RestartLimits) -> None:
        fingerprint = topology_pb2.Fingerprint()
        workers = LocalWorkers("127.0.0.1", STAGES, "cpu", 3, fingerprint, num_spares=1)
        self.launcher = LocalLauncher(workers, limits, together_seconds=TOGETHER_SECONDS)

    @property
    def processes(self) -> list[FakeProcess]:
        return self.launcher._processes  # type: ignore[return-value]

    async def start(self) -> asyncio.Task[WorkerExit]:
        await self.launcher.start("127.0.0.1", 1)
        watch = self.launcher.watch(
            partial(headless._goes_on, self.launcher), partial(headless._is_missed, self.launcher)
        )
        return asyncio.create_task(watch)

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not happened():  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WorkerProcess", FakeProcess)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["a stage", "another", "the spare"])
async def test_one_that_alone_was_sent_away_is_started_again(which: int) -> None:
    """Another has its place, or its devices, since nothing was heard of it for a while."""
    node = Node(RestartLimits())
    watching = await node.start()
    sent_away = node.processes[which]
    sent_away.end(0)
    await node.until(lambda: sent_away.starts == 2)
    assert not watching.done()
    assert [process.starts for process in node.processes].count(1) == 2
    watching.cancel()
    await asyncio.wait([watching])
    await node.launcher.stop()


async def test_a_node_that_is_sent_away_ends() -> None:
    """The spare first, the stages just after it: none of them is started again."""
    node = Node(RestartLimits())
    watching = await node.start()
    for process in reversed(node.processes):
        process.end(0)
        await asyncio.sleep(TOGETHER_SECONDS / 10)
    assert (await asyncio.wait_for(watching, TIMEOUT_SECONDS)).dismissed
    assert [process.starts for process in node.processes] == [1, 1, 1]
    await node.launcher.stop()


async def test_one_that_cannot_be_kept_does_not_end_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A spare may hold its place; it is the head that knows. The node ends with the last one."""
    node = Node(RestartLimits(most=0))
    watching = await node.start()
    broken, other, spare = node.processes
    broken.end(1)
    await node.until(lambda: "the worker of stage 0 exited with 1, after 0" in caplog.text)
    assert "start stagemesh stage-worker --standby on this node" in caplog.text
    spare.end(7)
    await node.until(lambda: "a spare worker exited with 7, after 0" in caplog.text)
    assert not watching.done()
    other.end(9)
    ended = await asyncio.wait_for(watching, TIMEOUT_SECONDS)
    assert ended.how.startswith("exited with 9, after 0 restarts")
    await node.launcher.stop()


async def test_a_node_whose_other_workers_were_never_in_the_mesh_ends_too() -> None:
    """The head goes while they start: they would look for it in vain."""
    node = Node(RestartLimits())
    watching = await node.start()
    first, *others = node.processes
    for other in others:
        other.has_joined = False
    first.end(0)
    assert (await asyncio.wait_for(watching, TOGETHER_SECONDS * 50)).dismissed
    assert first.starts == 1
    await node.launcher.stop()


@pytest.mark.parametrize(("code", "had_joined"), [(EXIT_HEAD_LOST, True), (1, False)])
async def test_a_head_that_is_gone_or_refuses_a_stage_ends_the_node(
    code: int, had_joined: bool
) -> None:
    node = Node(RestartLimits())
    watching = await node.start()
    node.processes[0].has_joined = had_joined
    node.processes[0].end(code)
    assert (await asyncio.wait_for(watching, TIMEOUT_SECONDS)).code == code
    assert [process.starts for process in node.processes] == [1, 1, 1]
    await node.launcher.stop()
