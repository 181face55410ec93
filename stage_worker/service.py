"""The stage worker's gRPC service: one stage on one node.

It supervises rank processes and never computes, so it can always answer. Steps
go to every rank as bytes that are not parsed here; the first rank's results go back.
The first error of any rank ends the stream at once, with its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial

import grpc

from services.errors import (
    ECHO_REASON,
    ConfigError,
    InvalidRequest,
    PipelineUnavailable,
    StageFailed,
)
from services.rpc.edge import write
from stage_worker import ipc
from stage_worker.answers import Answers
from stage_worker.loading import load_ranks
from stage_worker.rank_process import STOP_TIMEOUT_SECONDS, RankProcess
from stage_worker.rank_supervisor import RankSupervisor
from stage_worker.standing import Standing, check_placement, rank_places
from stagemesh.v1 import stage_worker_pb2, stage_worker_pb2_grpc, step_pb2, topology_pb2

log = logging.getLogger("stagemesh.stage_worker")

MAX_DRAIN_SECONDS = 60.0
MAX_WORKER_RPCS = 64
"""Calls at a time. A gateway has one stream and one call open, doctors a few."""
MAX_FORM_SECONDS = 600.0
"""For the ranks of a mesh to meet; who waits longer waits for nothing."""
PLACE_TIMEOUT_SECONDS = 5.0
"""How long a call waits for the worker to learn its place."""
SERVICE_NAME = stage_worker_pb2.DESCRIPTOR.services_by_name["StageWorkerService"].full_name


def add_to_server(worker: StageWorker, server: grpc.aio.Server) -> None:
    """Registers the service. Unlike the generated function it leaves the requests of
    `Execute` as bytes: they are a rank's to parse."""
    stage_worker_pb2_grpc.add_StageWorkerServiceServicer_to_server(worker, server)
    execute = grpc.stream_stream_rpc_method_handler(
        worker.Execute, response_serializer=stage_worker_pb2.ExecuteResponse.SerializeToString
    )
    # What is registered last takes the place of what was there.
    server.add_registered_method_handlers(SERVICE_NAME, {"Execute": execute})


class StageWorker(stage_worker_pb2_grpc.StageWorkerServiceServicer):
    """One stage's ranks on this node, behind `StageWorkerService`."""

    def __init__(self, *, waits_for_head: bool = False) -> None:
        """With `waits_for_head` a head that goes does not take this worker with it."""
        self.ranks: list[RankSupervisor] = []
        self.leave = asyncio.Event()
        """Set when the worker has to go; the owner of the service waits for it."""
        self.placed = asyncio.Event()
        """Set when `ranks` are those of the worker's place, or of a spare."""
        self.standing = Standing()
        self.drain_seconds = 0.0
        self._waits_for_head = waits_for_head
        self._plan_fingerprint: topology_pb2.Fingerprint | None = None
        self._answers: Answers | None = None
        self._error: step_pb2.StageError | None = None
        self._epoch = 0
        self._times_left = 0
        """How often it has left an epoch: groups whose forming began before are none of it."""

    @property
    def epoch(self) -> int:
        """The last one whose groups were formed; 0 before the first."""
        return self._epoch

    @property
    def plan_fingerprint(self) -> topology_pb2.Fingerprint | None:
        """Of the plan whose weights the ranks hold; None before the first."""
        return self._plan_fingerprint

    def on_result(self, tp_rank: int, result: step_pb2.StepResult) -> None:
        """A rank has done a step. Only the first rank of this worker answers for the stage."""
        if tp_rank == self.ranks[0].process.tp_rank:
            self._answer(stage_worker_pb2.ExecuteResponse(result=result))

    def on_failure(self, error: step_pb2.StageError) -> None:
        """A rank has failed. The first error is kept; later ones are mostly its echo."""
        level = logging.WARNING if error.reason == ECHO_REASON else logging.ERROR
        log.log(level, "%s: %s", error.reason, error.message)
        if self._error is None:
            self._error = error
        self._answer(stage_worker_pb2.ExecuteResponse(error=error))

    def _answer(self, response: stage_worker_pb2.ExecuteResponse) -> None:
        if self._answers is None:
            return
        if not self._answers.is_full:
            self._answers.put(response)
            return
        # What the gateway has missed cannot be made good.
        message = "the gateway does not read the answers to its steps"
        error = step_pb2.StageError(reason="STEP_FAILED", message=message, epoch=self._epoch)
        self._end_stream(instead=stage_worker_pb2.ExecuteResponse(error=error))

    def _end_stream(self, instead: stage_worker_pb2.ExecuteResponse | None = None) -> None:
        """Ends the step stream, if there is one, after what waits in it; another may come."""
        if self._answers is not None:
            self._answers.close(instead)
            self._answers = None

    async def _ranks_or_refuse(self) -> list[RankSupervisor]:
        if self.leave.is_set():
            raise PipelineUnavailable("this stage worker is leaving the mesh")
        if not self.ranks:
            # The head may call as soon as it has answered the join, before the answer is read here.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.placed.wait(), PLACE_TIMEOUT_SECONDS)
        if not self.ranks:
            raise PipelineUnavailable("this stage worker has not been given a place yet; try again")
        return self.ranks

    async def _ranks_of_epoch(self) -> list[RankProcess]:
        """The processes that are in the present epoch: all, or the call is refused."""
        self._refuse_spare()
        processes = [rank.process for rank in await self._ranks_or_refuse()]
        for process in processes:
            if process.epoch != self._epoch and not process.is_ending:
                raise StageFailed(
                    f"the process of TP rank {process.tp_rank} was started after the groups of "
                    f"epoch {self._epoch} were formed, or has left them; they must be formed again"
                )
        return processes

    async def OpenStore(
        self,
        request: stage_worker_pb2.OpenStoreRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.OpenStoreResponse:
        """Opens the rendezvous store of an epoch in this worker's first rank."""
        address = await (await self._ranks_or_refuse())[0].process.open_store(request)
        return stage_worker_pb2.OpenStoreResponse(address=address)

    async def ResetRanks(
        self,
        request: stage_worker_pb2.ResetRanksRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.ResetRanksResponse:
        """Brings every rank to where it can join an epoch's groups, at a place."""
        if request.standby:
            news = self.standing.lose(request.epoch)
            # Who has heard of it before, with a heartbeat, did not hear that its ranks are stuck.
            if news or (request.replace and self.standing.is_spare and self._are_in_group):
                await self.become_spare(replace=request.replace)
            return stage_worker_pb2.ResetRanksResponse()
        self._refuse_old(request.epoch)
        ranks = await self._ranks_or_refuse()
        if request.HasField("placement"):
            self.standing.take(request.epoch, request.placement, len(ranks))
        self._refuse_spare()
        self._end_stream()
        self._error = None
        async with asyncio.TaskGroup() as tasks:
            for rank in ranks:
                tasks.create_task(rank.reset(replace=request.replace))
        if request.HasField("placement"):
            await self._take_places(ranks, request.placement)
        return stage_worker_pb2.ResetRanksResponse()

    async def _take_places(
        self, ranks: list[RankSupervisor], placement: topology_pb2.Placement
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for rank, place in zip(ranks, rank_places(placement), strict=True):
                tasks.create_task(rank.take_place(place))

    async def become_spare(self, *, replace: bool = False) -> None:
        """Another worker has taken over this one's place: its ranks leave their groups, or are
        replaced. They do so as well where nobody waits for it any longer."""
        log.warning("another worker has taken over the place of this one, which is a spare now")
        self._end_stream()
        self._error = None
        self._times_left += 1
        for rank in self.ranks:
            if not replace:
                rank.process.leave_epoch()
        begun = [rank.begin_reset(replace=replace) for rank in self.ranks]
        if resets := [reset for reset in begun if reset is not None]:
            await asyncio.wait(resets)

    @property
    def _are_in_group(self) -> bool:
        return any(rank.process.is_in_group for rank in self.ranks)

    def _refuse_spare(self) -> None:
        if self.standing.is_spare:
            raise PipelineUnavailable(
                "this stage worker is a spare and has no place in the mesh until a stage is lost; "
                "call the worker that /v1/mesh names for the stage"
            )

    def _refuse_old(self, epoch: int) -> None:
        if epoch <= self._epoch:
            raise ConfigError(f"epoch {epoch} is not above the present one, {self._epoch}")

    async def FormGroup(
        self,
        request: stage_worker_pb2.FormGroupRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.FormGroupResponse:
        """Forms the groups of an epoch on every rank."""
        if not 0 < request.timeout_seconds <= MAX_FORM_SECONDS:  # NaN is not, either
            raise InvalidRequest(
                f"'timeout_seconds' is {request.timeout_seconds}; above 0 and at most "
                f"{MAX_FORM_SECONDS:g} work",
                param="timeout_seconds",
            )
        self._refuse_old(request.epoch)
        self._refuse_spare()
        self._end_stream()
        self._error = None
        times_left = self._times_left
        async with asyncio.TaskGroup() as tasks:
            for rank in await self._ranks_or_refuse():
                tasks.create_task(rank.process.form_group(request))
        if self._times_left != times_left:
            raise StageFailed(
                f"this stage worker has left the epoch before its groups, of {request.epoch}, were "
                "formed"
            )
        self._epoch = request.epoch
        return stage_worker_pb2.FormGroupResponse(epoch=request.epoch)

    async def Load(
        self,
        request: stage_worker_pb2.LoadRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Brings every rank to a plan, with progress, then a report for each rank."""
        ranks = await self._ranks_to_load(request)
        self.standing.load(request.plan.placement)
        reports = await load_ranks(ranks, request.plan, partial(write, context))
        self._plan_fingerprint = request.plan.fingerprint
        self.standing.loaded(request.plan.placement)
        for report in reports:
            await write(context, stage_worker_pb2.LoadResponse(report=report))

    async def _ranks_to_load(self, request: stage_worker_pb2.LoadRequest) -> list[RankProcess]:
        """Those of the present epoch; of a spare all, which stand where the plan says. What comes
        late, when the worker has another place or none, is refused."""
        placement = request.plan.placement
        if not request.in_advance:
            processes = await self._ranks_of_epoch()
            self.standing.check_own(placement)
            return processes
        self.standing.check_spare()
        ranks = await self._ranks_or_refuse()
        check_placement(placement, len(ranks))
        await self._take_places(ranks, placement)
        self.standing.check_spare()
        return [rank.process for rank in ranks]

    async def Execute(
        self,
        request_iterator: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Runs steps in order, over one stream for each epoch.

        Requests are serialized (see `add_to_server`).
        """
        ranks = await self._ranks_of_epoch()
        if self._answers is not None:
            raise ConfigError(
                f"the steps of epoch {self._epoch} come over another stream already; a new epoch "
                "ends it"
            )
        if self._error is not None:
            await write(context, stage_worker_pb2.ExecuteResponse(error=self._error))
            return
        answers = self._answers = Answers()
        try:
            async with asyncio.TaskGroup() as tasks:
                forward = tasks.create_task(self._forward(request_iterator, ranks, answers))
                forward.add_done_callback(lambda _: answers.close())
                async for response in answers:
                    await write(context, response)
                    if response.WhichOneof("event") == "error":
                        break
                forward.cancel()
        finally:
            if self._answers is answers:
                self._answers = None

    async def _forward(
        self, requests: AsyncIterator[bytes], ranks: list[RankProcess], answers: Answers
    ) -> None:
        async for request in requests:
            if self._answers is not answers:
                return  # Steps of an epoch that is over.
            try:
                frames = ipc.step_frames(request)
            except ipc.FrameError as error:
                raise InvalidRequest(f"Execute: {error}", param="step") from None
            for rank in ranks:
                await rank.send_steps(frames)

    async def Status(
        self,
        request: stage_worker_pb2.StatusRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.StatusResponse:
        """What the worker is doing, at once."""
        return self.status()

    def status(self) -> stage_worker_pb2.StatusResponse:
        """The same for the heartbeat."""
        status = self.standing.status(
            [rank.process.status() for rank in self.ranks],
            all_hold=all(rank.process.has_loaded for rank in self.ranks),
            in_group=self._are_in_group,
            leaving=self.leave.is_set(),
        )
        status.epoch = self._epoch
        status.last_step_id = min((rank.process.last_step_id for rank in self.ranks), default=0)
        if self._error is not None:
            status.error.CopyFrom(self._error)
        return status

    async def Drain(
        self,
        request: stage_worker_pb2.DrainRequest,
        context: grpc.aio.ServicerContext,
    ) -> stage_worker_pb2.DrainResponse:
        """Lets the ranks finish what is queued, then leaves."""
        # In this order NaN is 0 too.
        self.drain_seconds = max(0.0, min(request.timeout_seconds, MAX_DRAIN_SECONDS))
        if request.head_leaves and self._waits_for_head:
            log.info("the head leaves; this worker waits for another")
        else:
            self.leave.set()
        return stage_worker_pb2.DrainResponse()

    async def leave_epoch(self) -> None:
        """The head is gone: nobody waits for steps any more. Ranks leave their groups as soon as
        they can, so that none of them waits for a neighbour, and keep their weights."""
        self._end_stream()
        self._error = None
        self._times_left += 1
        for rank in self.ranks:
            # From now on in none: what would still come for the old one is refused, and not lost.
            rank.process.leave_epoch()
        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks:
                tasks.create_task(rank.leave_group())

    async def stop_ranks(self) -> None:
        """Stops all ranks at once, each with the time that Drain has given."""
        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks:
                tasks.create_task(rank.stop(max(self.drain_seconds, STOP_TIMEOUT_SECONDS)))
        self._end_stream()
