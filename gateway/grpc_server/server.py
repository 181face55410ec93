"""Makes the gRPC front door's server."""

from __future__ import annotations

from gateway.frontend import limits
from gateway.frontend.api_keys import ApiKeys
from gateway.frontend.frontend import Frontend
from gateway.grpc_server.auth import ApiKeyInterceptor
from gateway.grpc_server.service import SERVICE_NAME, InferenceService
from services.rpc import RpcServer
from services.rpc.settings import INFERENCE_SERVER_LIMITS
from stagemesh.v1 import inference_pb2_grpc


def create_inference_server(
    frontend: Frontend,
    *,
    keys: ApiKeys | None = None,
) -> RpcServer:
    """The server, not bound and not started yet; see `services.rpc`.

    Its health is the engine's readiness. Without keys everyone is let in. Made inside a running
    event loop.
    """
    server = RpcServer(
        [SERVICE_NAME],
        limits=INFERENCE_SERVER_LIMITS,
        interceptors=[ApiKeyInterceptor(keys or ApiKeys(), SERVICE_NAME)],
        max_calls=frontend.max_requests + limits.SPARE_RPCS,
        is_serving=lambda: frontend.engine.ready,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceService(frontend), server.grpc_server
    )
    return server
