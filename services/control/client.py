"""A worker's side of the control service: join, then heartbeats until it must leave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from services.errors import HeadLost as HeadLost
from services.errors import JoinRefused, NotAuthenticated, NotPermitted, StagemeshError
from services.rpc import reach
from services.rpc.addresses import join_host_port
from services.rpc.channel import create_channel
from services.rpc.errors import error_from_rpc
from services.rpc.tls import RenewedCredentials
from services.rpc.tls_files import TlsFiles
from stagemesh.v1 import control_pb2, control_pb2_grpc, stage_worker_pb2

log = logging.getLogger("stagemesh.control")

RETRY_SECONDS = 0.2
CALL_TIMEOUT_SECONDS = 3.0
RECONNECT_SECONDS = 10.0
"""Between channels while nobody answers: a certificate may be renewed meanwhile."""
OWN_STALL_SECONDS = 0.5
"""A heartbeat that takes longer than its deadlines say, by more than this: the process did not run
itself."""
REMINDER_SECONDS = 60.0
"""Between log lines that say what a worker waits for."""
_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # As many calls as its server takes at a time.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    # Something else than a head.
    grpc.StatusCode.UNIMPLEMENTED,
)
_REFUSALS = (JoinRefused, NotAuthenticated, NotPermitted)
"""A head's own; anything else may come from one that goes down or comes up."""


@dataclass(frozen=True, slots=True)
class _NotAnswered:
    error: StagemeshError
    code: grpc.StatusCode
    details: str


class _Reminder:
    """Says now and then that nobody answers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._due = time.monotonic() + REMINDER_SECONDS

    def waits(self, details: str) -> None:
        """An attempt was in vain."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REMINDER_SECONDS
            log.warning("still waiting for a head at %s (%s)", self._address, details)


class ControlClient:
    """Calls one head."""

    def __init__(self, host: str, port: int, tls: TlsFiles | None = None) -> None:
        """The head is at host:port. Raises `ConfigError` where a file of `tls` cannot be used."""
        self._host, self._port, self._tls = host, port, tls
        self._credentials = None if tls is None else RenewedCredentials(tls)
        self._address = join_host_port(host, port)
        self._connect()

    def _connect(self) -> None:
        self._channel = create_channel(self._address, tls=self._credentials)
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)
        self._connected_at = time.monotonic()

    async def _connect_again(self) -> None:
        """A new connection, with the certificate's files as they are now: a channel keeps those it
        was made with, and reconnects with them when they have long ended."""
        await self._channel.close()
        self._connect()

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()

    async def join(
        self, request: control_pb2.JoinRequest, timeout_seconds: float | None
    ) -> control_pb2.JoinResponse:
        """Joins, waiting for a head that is not up yet; None waits without limit.

        Raises `JoinRefused` with the head's reason, at once where the two sides do not agree on
        TLS; `HeadLost` naming the address that nobody answers at: another worker, started in
        the place of this one, would find nobody either.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
        said = _Reminder(self._address)
        while True:
            answer = await self._ask(request)
            if isinstance(answer, control_pb2.JoinResponse):
                return answer
            if answer.code not in _NO_ANSWER:
                raise answer.error
            if answer.code is grpc.StatusCode.UNIMPLEMENTED:
                raise JoinRefused(
                    f"what answers at {self._address} is no head of a mesh: compare "
                    '--master-addr and --master-port with the line "workers join at" in the '
                    "head's log"
                )
            await self._check_tls()
            if deadline is not None and loop.time() > deadline:
                raise HeadLost(
                    f"no head answers at {self._address} after {timeout_seconds:.0f} s "
                    f"({answer.details}). Check --master-addr and --master-port, and that "
                    "the gateway runs there"
                )
            await self._wait(said, answer)

    async def join_again(self, request: control_pb2.JoinRequest) -> control_pb2.JoinResponse:
        """Joins where the head has been, waiting for one without limit.

        What is in the way may be only the old head's end or the new one's start, so nothing but
        a head's own refusal ends this. Raises it: `JoinRefused`, `NotAuthenticated` or
        `NotPermitted`.
        """
        said = _Reminder(self._address)
        await self._connect_again()
        while True:
            answer = await self._ask(request)
            if isinstance(answer, control_pb2.JoinResponse):
                return answer
            if isinstance(answer.error, _REFUSALS):
                raise answer.error
            await self._wait(said, answer)

    async def _wait(self, said: _Reminder, answer: _NotAnswered) -> None:
        """Between two attempts to join."""
        said.waits(answer.details)
        if time.monotonic() - self._connected_at >= RECONNECT_SECONDS:
            await self._connect_again()
        await asyncio.sleep(RETRY_SECONDS)

    async def _ask(
        self, request: control_pb2.JoinRequest
    ) -> control_pb2.JoinResponse | _NotAnswered:
        """Once."""
        try:
            response: control_pb2.JoinResponse = await self._stub.Join(
                request, timeout=CALL_TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            return _NotAnswered(error_from_rpc(error), error.code(), error.details() or "")
        return response

    async def _check_tls(self) -> None:
        """Raises `JoinRefused` where it is TLS that is in the way: that does not change by
        itself, and gRPC says the same of it as of a head that is not there."""
        found = await reach.connect(self._host, self._port, CALL_TIMEOUT_SECONDS, self._tls)
        if found is not None and found.obstacle is reach.Obstacle.TLS:
            raise JoinRefused(
                f"no TLS connection to the head at {self._address}: {found.detail}. Start both "
                "sides with --tls-dir, or neither, with certificates of one CA (docs/security.md)"
            )

    async def heartbeats(
        self,
        joined: control_pb2.JoinResponse,
        status: Callable[[], stage_worker_pb2.StatusResponse],
        on_place_lost: Callable[[int], None],
    ) -> None:
        """Sends heartbeats until the head sends the worker away, which returns. `on_place_lost`
        hears with every answer up to which epoch another has taken over the place, if one has.

        Raises `HeadLost` when the head has been silent for its time-out, or another one answers
        in its place.
        """
        loop = asyncio.get_running_loop()
        longest = joined.heartbeat_interval_seconds + CALL_TIMEOUT_SECONDS + OWN_STALL_SECONDS
        answered_at = tried_at = loop.time()
        asked_again = False
        while True:
            request = control_pb2.HeartbeatRequest(worker_id=joined.worker_id, status=status())
            try:
                response = await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                before, tried_at = tried_at, loop.time()
                silent = tried_at - answered_at
                if silent > joined.head_timeout_seconds:
                    # Where it was stopped itself, the head's answer came meanwhile, or nobody has
                    # asked it: one more question.
                    if asked_again or tried_at - before <= longest:
                        raise HeadLost(
                            f"the head at {self._address} has not answered for {silent:.0f} s "
                            f"({error.details()})"
                        ) from None
                    asked_again = True
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    # After a cut TCP tries again up to as late as the cut was long. A new
                    # connection gets through at once.
                    await self._connect_again()
                    continue
            else:
                answered_at = tried_at = loop.time()
                asked_again = False
                if response.other_head:
                    raise HeadLost(
                        f"another head answers at {self._address}, and does not know this worker"
                    )
                if response.leave:
                    log.warning("the head sends this worker away: %s", response.leave_reason)
                    return
                if response.place_lost_epoch:
                    on_place_lost(response.place_lost_epoch)
            await asyncio.sleep(joined.heartbeat_interval_seconds)
