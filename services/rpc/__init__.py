"""gRPC set-up that every Stagemesh service and client shares.

A service:

    server = RpcServer([CONTROL.full_name])            # inside a running event loop
    add_ControlServiceServicer_to_server(servicer, server.grpc_server)
    port = server.bind(host, port)                     # real port, or ConfigError
    await server.start()                               # health says SERVING
    ...
    await server.stop(grace_seconds=2.0)

Handlers raise `services.errors` and nothing else; the client turns the
`AioRpcError` that it sees back into the same class with `error_from_rpc`.
"""

from __future__ import annotations

from services.rpc.channel import create_channel
from services.rpc.errors import error_from_rpc, error_from_wire, rpc_status
from services.rpc.server import RpcServer, bind
from services.rpc.settings import (
    INFERENCE_MAX_REQUEST_BYTES,
    INFERENCE_MAX_RESPONSE_BYTES,
    MESH_MAX_MESSAGE_BYTES,
    MessageLimits,
)
from services.rpc.tls_files import TlsFiles, tls_files

__all__ = [
    "INFERENCE_MAX_REQUEST_BYTES",
    "INFERENCE_MAX_RESPONSE_BYTES",
    "MESH_MAX_MESSAGE_BYTES",
    "MessageLimits",
    "RpcServer",
    "TlsFiles",
    "bind",
    "create_channel",
    "error_from_rpc",
    "error_from_wire",
    "rpc_status",
    "tls_files",
]
