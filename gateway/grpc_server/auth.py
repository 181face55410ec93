"""API keys over gRPC: metadata `authorization: Bearer KEY`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import grpc

from gateway.frontend.api_keys import ApiKeys


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of one service that show none of the keys; health and reflection are open."""

    def __init__(self, keys: ApiKeys, service_name: str) -> None:
        self._keys = keys
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(self._prefix):
            self._check(handler_call_details.invocation_metadata)
        return await continuation(handler_call_details)

    def _check(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> None:
        value = next((v for k, v in metadata or () if k == "authorization"), "")
        shown = value.encode() if isinstance(value, str) else value
        self._keys.check(shown, "metadata 'authorization: Bearer KEY'")
