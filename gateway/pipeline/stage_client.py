"""One stage worker, as the gateway calls it.

Every call has a deadline and ends in an error of the tree that names the stage.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import grpc

from services.errors import ConfigError, StageFailed
from services.rpc.errors import error_from_rpc
from stagemesh.v1 import stage_worker_pb2, stage_worker_pb2_grpc, topology_pb2

RANKS_START_TIMEOUT_SECONDS = 120.0
LOAD_TIMEOUT_SECONDS = 1800.0
CALL_TIMEOUT_SECONDS = 5.0
FORM_TIMEOUT_SECONDS = 15.0
"""For ranks that are all started. A rank that waits for one that has died meanwhile is not free
before."""

_EXECUTE = "/stagemesh.v1.StageWorkerService/Execute"


class StageClient:
    """Calls one stage worker."""

    def __init__(self, channel: grpc.aio.Channel, address: str, pp_rank: int) -> None:
        self.address = address
        self.pp_rank = pp_rank
        self._channel = channel
        self._stub = stage_worker_pb2_grpc.StageWorkerServiceStub(channel)

    def failed(self, doing: str, error: grpc.aio.AioRpcError) -> StageFailed:
        """A call's failure with the stage's name in front of its cause."""
        cause = error_from_rpc(error).message
        return StageFailed(f"stage {self.pp_rank} at {self.address}: {doing} failed: {cause}")

    def gone(self, error: grpc.aio.AioRpcError) -> StageFailed:
        """The end of the step stream without a word of the worker's."""
        return StageFailed(
            f"the worker of stage {self.pp_rank} at {self.address} is gone: its step stream ended "
            f"with {error.code().name} ({error.details()})"
        )

    async def reset_ranks(
        self, epoch: int, placement: topology_pb2.Placement, *, replace: bool = False
    ) -> None:
        """Brings the stage's ranks to where they can join an epoch; see the RPC. Raises
        `StageFailed`."""
        request = stage_worker_pb2.ResetRanksRequest(
            epoch=epoch, replace=replace, placement=placement
        )
        try:
            await self._stub.ResetRanks(request, timeout=RANKS_START_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self.failed("starting its ranks", error) from None

    async def stand_by(self, epoch: int, *, replace: bool) -> None:
        """Tells the worker that another has taken over the place that it had in an epoch or before;
        one that does not hear it is no error."""
        request = stage_worker_pb2.ResetRanksRequest(epoch=epoch, replace=replace, standby=True)
        try:
            await self._stub.ResetRanks(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return

    async def open_store(self, epoch: int) -> str:
        """Lets the stage's first rank open the epoch's store. Raises `StageFailed`."""
        request = stage_worker_pb2.OpenStoreRequest(epoch=epoch)
        try:
            response = await self._stub.OpenStore(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self.failed("opening the store", error) from None
        return str(response.address)

    async def form_group(
        self, epoch: int, store_address: str, topology: topology_pb2.Topology
    ) -> None:
        """Lets the stage's ranks join the epoch's groups. Raises `StageFailed`."""
        request = stage_worker_pb2.FormGroupRequest(
            epoch=epoch,
            store_address=store_address,
            topology=topology,
            timeout_seconds=FORM_TIMEOUT_SECONDS,
        )
        # The ranks' own error says more than ours.
        timeout = FORM_TIMEOUT_SECONDS + CALL_TIMEOUT_SECONDS
        try:
            await self._stub.FormGroup(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self.failed(f"forming the groups of epoch {epoch}", error) from None

    async def load(
        self,
        plan: stage_worker_pb2.StagePlan,
        on_progress: Callable[[int, stage_worker_pb2.LoadProgress], None],
        *,
        in_advance: bool = False,
    ) -> list[stage_worker_pb2.RankReport]:
        """Brings the stage, or `in_advance` a spare, to a plan. Raises `StageFailed`, or
        `ConfigError` for a plan that it will never reach."""
        reports: list[stage_worker_pb2.RankReport] = []
        request = stage_worker_pb2.LoadRequest(plan=plan, in_advance=in_advance)
        call = self._stub.Load(request, timeout=LOAD_TIMEOUT_SECONDS)
        try:
            async for response in call:
                if response.WhichOneof("event") == "progress":
                    on_progress(self.pp_rank, response.progress)
                else:
                    reports.append(response.report)
        except grpc.aio.AioRpcError as error:
            failure = self.failed("loading", error)
            if isinstance(cause := error_from_rpc(error), ConfigError):
                raise ConfigError(failure.message, param=cause.param) from None
            raise failure from None
        return reports

    def execute(
        self, requests: AsyncIterator[bytes]
    ) -> grpc.aio.StreamStreamCall[bytes, stage_worker_pb2.ExecuteResponse]:
        """Opens the step stream. Requests are serialized once, for all stages."""
        method = self._channel.stream_stream(
            _EXECUTE,
            request_serializer=None,
            response_deserializer=stage_worker_pb2.ExecuteResponse.FromString,
        )
        return method(requests)

    async def status(self) -> stage_worker_pb2.StatusResponse:
        """What the worker and its ranks do now. Raises `StageFailed`."""
        request = stage_worker_pb2.StatusRequest()
        try:
            response: stage_worker_pb2.StatusResponse = await self._stub.Status(
                request, timeout=CALL_TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise self.failed("asking for its status", error) from None
        return response

    async def drain(self) -> None:
        """Tells the worker to leave, unless it waits for the next gateway; one that is gone already
        is no error."""
        request = stage_worker_pb2.DrainRequest(head_leaves=True)
        try:
            await self._stub.Drain(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
