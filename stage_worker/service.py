"""The stage worker's gRPC service: one stage on one node.

It supervises rank processes and never computes, so it can always answer. Steps
go to every rank as the bytes of one frame; the first rank's results go back.
The first error of any rank ends the stream at once, with its cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from services.errors import ConfigError, PipelineUnavailable
from stage_worker import ipc
from stage_worker.rank_process import STOP_TIMEOUT_SECONDS, RankProcess
from stagemesh.v1 import stage_worker_pb2, stage_worker_pb2_grpc, step_pb2

log = logging.getLogger("stagemesh.stage_worker")

_SEVERITY = (
    stage_worker_pb2.COMPONENT_STATE_READY,
    stage_worker_pb2.COMPONENT_STATE_LOADING,
    stage_worker_pb2.COMPONENT_STATE_STARTING,
    stage_worker_pb2.COMPONENT_STATE_DRAINING,
    stage_worker_pb2.COMPONENT_STATE_FAILED,
)
"""From best to worst: a worker is in the state of its worst rank."""

MAX_PENDING_ANSWERS = 1024
"""Steps in flight are far fewer; beyond this the gateway does not read, and the stream ends."""
MAX_DRAIN_SECONDS = 60.0


class StageWorker(stage_worker_pb2_grpc.StageWorkerServiceServicer):
    """One stage's ranks on this node, behind `StageWorkerService`."""

    def __init__(self) -> None:
        self.ranks: list[RankProcess] = []
        self.leave = asyncio.Event()
        """Set when the worker has to go; the owner of the service waits for it."""
        self.drain_seconds = 0.0
        self._answers: asyncio.Queue[stage_worker_pb2.ExecuteResponse | None] | None = None
        self._error: step_pb2.StageError | None = None
        self._epoch = 0

    def on_result(self, tp_rank: int, result: step_pb2.StepResult) -> None:
        """A rank has done a step. Only the first rank of this worker answers for the stage."""
        if tp_rank == self.ranks[0].tp_rank:
            self._answer(stage_worker_pb2.ExecuteResponse(result=result))

    def on_failure(self, error: step_pb2.StageError) -> None:
        """A rank has failed. The first error is kept; later ones are mostly its echo."""
        log.error("%s: %s", error.reason, error.message)
        if self._error is None:
            self._error = error
        self._answer(stage_worker_pb2.ExecuteResponse(error=error))

    def _answer(self, response: stage_worker_pb2.ExecuteResponse) -> None:
        answers = self._answers
        if answers is None:
            return
        if answers.full():
            # The gateway does not read. What it has missed cannot be made good: the stream ends.
            while not answers.empty():
                answers.get_nowait()
            message = f"{MAX_PENDING_ANSWERS} answers wait and the gateway does not read them"
            error = step_pb2.StageError(reason="STEP_FAILED", message=message, epoch=self._epoch)
            response = stage_worker_pb2.ExecuteResponse(error=error)
        answers.put_nowait(response)

    def _ranks_or_refuse(self) -> list[RankProcess]:
        if not self.ranks:
            raise PipelineUnavailable("this stage worker has not been given a place yet; try again")
        return self.ranks

    async def OpenStore(
        self,
        request: stage_worker_pb2.OpenStoreRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.OpenStoreResponse:
        """Opens the rendezvous store of an epoch in this worker's first rank."""
        address = await self._ranks_or_refuse()[0].open_store(request)
        return stage_worker_pb2.OpenStoreResponse(address=address)

    async def FormGroup(
        self,
        request: stage_worker_pb2.FormGroupRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.FormGroupResponse:
        """Forms the groups of an epoch on every rank."""
        if request.epoch <= self._epoch:
            raise ConfigError(f"epoch {request.epoch} is not above the present one, {self._epoch}")
        if self._answers is not None:
            self._answers.put_nowait(None)
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks_or_refuse():
                tasks.create_task(rank.form_group(request))
        self._epoch, self._error = request.epoch, None
        return stage_worker_pb2.FormGroupResponse(epoch=request.epoch)

    async def Load(
        self,
        request: stage_worker_pb2.LoadRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Brings every rank to a plan, with progress, then a report for each rank."""
        ranks = self._ranks_or_refuse()
        # One entry for each rank is enough: newer progress makes older worthless.
        progress: dict[int, stage_worker_pb2.LoadProgress] = {}
        changed = asyncio.Event()

        def on_progress(event: stage_worker_pb2.LoadProgress) -> None:
            progress[event.tp_rank] = event
            changed.set()

        async with asyncio.TaskGroup() as tasks:
            loads = [tasks.create_task(rank.load(request.plan, on_progress)) for rank in ranks]
            for load in loads:
                load.add_done_callback(lambda _: changed.set())
            while not all(load.done() for load in loads):
                await changed.wait()
                changed.clear()
                while progress:
                    _, event = progress.popitem()
                    await context.write(stage_worker_pb2.LoadResponse(progress=event))
        for load in loads:
            await context.write(stage_worker_pb2.LoadResponse(report=load.result()))

    async def Execute(
        self,
        request_iterator: AsyncIterator[stage_worker_pb2.ExecuteRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Runs steps in order, over one stream for each epoch."""
        ranks = self._ranks_or_refuse()
        answers: asyncio.Queue[stage_worker_pb2.ExecuteResponse | None] = asyncio.Queue(
            MAX_PENDING_ANSWERS
        )
        if self._answers is not None:
            raise ConfigError(
                f"the steps of epoch {self._epoch} come over another stream already; a new epoch "
                "ends it"
            )
        if self._error is not None:
            await context.write(stage_worker_pb2.ExecuteResponse(error=self._error))
            return
        self._answers = answers
        try:
            async with asyncio.TaskGroup() as tasks:
                forward = tasks.create_task(self._forward(request_iterator, ranks))
                forward.add_done_callback(lambda _: answers.put_nowait(None))
                while (response := await answers.get()) is not None:
                    await context.write(response)
                    if response.WhichOneof("event") == "error":
                        break
                forward.cancel()
        finally:
            if self._answers is answers:
                self._answers = None

    async def _forward(
        self,
        steps: AsyncIterator[stage_worker_pb2.ExecuteRequest],
        ranks: list[RankProcess],
    ) -> None:
        async for request in steps:
            frame = ipc.step_frame(request)
            for rank in ranks:
                rank.send(frame)

    async def Status(
        self,
        request: stage_worker_pb2.StatusRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.StatusResponse:
        """What the worker is doing, at once."""
        return self.status()

    def status(self) -> stage_worker_pb2.StatusResponse:
        """The same for the heartbeat."""
        ranks = [rank.status() for rank in self.ranks]
        worst = max((rank.state for rank in ranks), key=_SEVERITY.index, default=None)
        return stage_worker_pb2.StatusResponse(
            state=worst or stage_worker_pb2.COMPONENT_STATE_STARTING,
            epoch=self._epoch,
            last_step_id=min((rank.last_step_id for rank in self.ranks), default=0),
            ranks=ranks,
            error=self._error,
        )

    async def Drain(
        self,
        request: stage_worker_pb2.DrainRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.DrainResponse:
        """Lets the ranks finish what is queued, then leaves."""
        self.drain_seconds = min(request.timeout_seconds, MAX_DRAIN_SECONDS)
        self.leave.set()
        return stage_worker_pb2.DrainResponse()

    async def stop_ranks(self) -> None:
        """Stops all ranks at once, each with the time that Drain has given."""
        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks:
                tasks.create_task(rank.stop(max(self.drain_seconds, STOP_TIMEOUT_SECONDS)))
