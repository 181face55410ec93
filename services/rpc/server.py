"""A gRPC server with everything that each of ours has: message limits, keepalive,
typed errors, health and reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.errors import ConfigError
from services.ranges import MAX_PORT
from services.rpc.addresses import host_flag, join_host_port, resolve
from services.rpc.edge import Edge
from services.rpc.health import Health
from services.rpc.roles import check_role
from services.rpc.settings import MAX_CALLS, MessageLimits, server_options
from services.rpc.tls import server_credentials
from services.rpc.tls_files import TlsFiles


def check_address(host: str, port: int, flag: str) -> None:
    """Raises `ConfigError` for what is no address to listen on, whoever would bind it."""
    if not host:
        flag = host_flag(flag)
        raise ConfigError(f"an empty {flag} would listen on all interfaces; name one", param=flag)
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"{flag} {port} is no port: 0 to {MAX_PORT} are", param=flag)


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    *,
    tls: TlsFiles | None = None,
    flag: str = "--port",
) -> int:
    """Binds the server and returns the real port (port 0 takes a free one).

    Binding is the probe: there is no check beforehand that could be outdated.
    Raises `ConfigError` naming address and `flag` where the address cannot be had.
    """
    check_address(host, port, flag)
    resolve(host, port, flag=host_flag(flag), passive=True)
    address = join_host_port(host, port)
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, server_credentials(tls)))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the address is not this "
            f"machine's; choose another with {flag} (0 takes a free port)",
            param=flag,
        ) from error


class RpcServer:
    """One gRPC server with health and reflection. Made inside a running event loop."""

    def __init__(
        self,
        service_names: Sequence[str],
        *,
        limits: MessageLimits | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_calls: int = MAX_CALLS,
        is_serving: Callable[[], bool] = lambda: True,
    ) -> None:
        """`service_names` are full names ("stagemesh.v1.ControlService"), for health and
        reflection. Interceptors run inside the error edge: they may raise the error tree's
        classes. So many calls as `max_calls` are answered at a time (`services.rpc.calls`), more
        are refused with `Saturated`; health and reflection are not counted with them.
        `is_serving` is what health says while the server runs."""
        self.service_names = tuple(service_names)
        self._edge = Edge(max_calls)
        self.grpc_server: grpc.aio.Server = grpc.aio.server(
            interceptors=[self._edge, *interceptors],
            # gRPC's own limit counts calls that have sent nothing, and those whose caller takes
            # no answer; ours is the edge's.
            options=server_options(limits or MessageLimits(), max_calls),
        )
        self._health = Health(self.service_names, is_serving)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        reflection.enable_server_reflection(
            (*self.service_names, health.SERVICE_NAME, reflection.SERVICE_NAME),
            self.grpc_server,
        )

    def bind(
        self, host: str, port: int, *, tls: TlsFiles | None = None, flag: str = "--port"
    ) -> int:
        """See `bind` of this module. With TLS every method asks for a role from then on
        (`services.rpc.roles`)."""
        if tls is not None:
            self._edge.check_caller = check_role
        bound = bind(self.grpc_server, host, port, tls=tls, flag=flag)
        self._edge.listens_on(bound)
        return bound

    async def start(self) -> None:
        """Starts to answer."""
        await self.grpc_server.start()

    async def stop(self, *, grace_seconds: float) -> None:
        """Refuses new calls at once, lets running ones go on for the grace, then cancels them."""
        self._health.leave()
        await self.grpc_server.stop(grace_seconds)
