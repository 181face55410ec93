"""`stagemesh doctor --listen`: answers other nodes' doctors in the place of a head that is not
there yet, so that two nodes can be compared before anything is served."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import grpc

from services.config import DEFAULT_MASTER_PORT, ServeConfig
from services.control.diagnosis import echo, hash_to_proto, version_fields
from services.control.server import DoctorCalls, control_server
from services.doctor.examine import Examination
from services.errors import PipelineUnavailable
from services.models.content_hash import ContentHash
from services.rpc.addresses import check_master_address, join_host_port
from services.rpc.certificate import own_identity
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles
from services.topology.wire import shape_to_proto
from stagemesh.v1 import control_pb2, control_pb2_grpc

STOP_GRACE_SECONDS = 1.0
MAX_NAMED_NODES = 256
"""Who asks is named once; after so many, who is new is answered and not named."""
_SHOWN_CHARACTERS = 64


class ListeningDoctor(control_pb2_grpc.ControlServiceServicer):
    """Tells what its node is like; takes nobody into a mesh."""

    def __init__(
        self,
        answer: control_pb2.DiagnoseResponse,
        weights: ContentHash | None,
        say: Callable[[str], None],
    ) -> None:
        """`weights` is None where this node has no model to hash."""
        self._answer = answer
        self._weights = weights
        self._say = say
        self._named: set[tuple[int, str]] = set()
        self._doctor_calls = DoctorCalls()

    async def Diagnose(
        self, request: control_pb2.DiagnoseRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.DiagnoseResponse:
        """A doctor on another node asks."""
        self._doctor_calls.enter(context)
        self._name(request)
        answer = control_pb2.DiagnoseResponse()
        answer.CopyFrom(self._answer)
        if request.hash_weights:
            answer.content_hash.CopyFrom(hash_to_proto(self._weights))
        return answer

    def _name(self, request: control_pb2.DiagnoseRequest) -> None:
        """As ASCII in quotes: it is said on a terminal, and anybody may have sent it."""
        asking = (request.node_rank, ascii(request.node[:_SHOWN_CHARACTERS]))
        if asking in self._named or len(self._named) == MAX_NAMED_NODES:
            return
        self._named.add(asking)
        self._say(f"node {asking[0]} ({asking[1]}) asks")
        if len(self._named) == MAX_NAMED_NODES:
            self._say(f"{MAX_NAMED_NODES} nodes have asked; further ones are not named")

    async def Echo(
        self, request: control_pb2.EchoRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.EchoResponse:
        """It measures."""
        self._doctor_calls.enter(context)
        return echo(request)

    async def Join(
        self, request: control_pb2.JoinRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.JoinResponse:
        """A worker was started too early; it tries again by itself."""
        raise _no_head()

    async def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.HeartbeatResponse:
        """Nobody is a member."""
        raise _no_head()


def _no_head() -> PipelineUnavailable:
    return PipelineUnavailable(
        "a doctor listens here, and no head: end stagemesh doctor --listen and start stagemesh "
        "serve"
    )


def listen(config: ServeConfig, examination: Examination, say: Callable[[str], None]) -> None:
    """Answers until SIGINT or SIGTERM; `say` hears who asks. Raises `ConfigError` for an address
    that must not or cannot be listened on."""
    has_tls = config.tls_dir is not None
    check_master_address(config.master_addr, insecure=config.insecure, tls=has_tls)
    # In the place of a head, it shows the head's certificate.
    tls = own_identity(config.tls_dir, Role.GATEWAY, (config.master_addr,))
    port = DEFAULT_MASTER_PORT if config.master_port is None else config.master_port
    asyncio.run(_listen(config.master_addr, port, tls, examination, say))


async def _listen(
    host: str,
    port: int,
    tls: TlsFiles | None,
    examination: Examination,
    say: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    path = examination.model_path
    weights = None if path is None else ContentHash(path)
    server = control_server(ListeningDoctor(told_to_others(examination), weights, say))
    bound = server.bind(host, port, tls=tls, flag="--master-port")
    await server.start()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stop.set)
    say(f"answering doctors at {join_host_port(host, bound)}; Ctrl-C ends it")
    try:
        await stop.wait()
    finally:
        await server.stop(grace_seconds=STOP_GRACE_SECONDS)
        if weights is not None:
            weights.close()


def told_to_others(examination: Examination) -> control_pb2.DiagnoseResponse:
    """What a listening doctor answers."""
    shape = examination.shape
    return control_pb2.DiagnoseResponse(
        node=examination.report.facts.host,
        is_doctor=True,
        topology=None if shape is None else shape_to_proto(shape),
        fingerprint=examination.fingerprint,
        versions=version_fields(),
        device=examination.device,
    )
