"""API keys over gRPC: metadata `authorization: Bearer KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

import grpc

from services.errors import NotAuthenticated


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of one service that show none of the keys; health and reflection are open."""

    def __init__(self, keys: Sequence[str], service_name: str) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if self._keys and handler_call_details.method.startswith(self._prefix):
            self._check(handler_call_details.invocation_metadata)
        return await continuation(handler_call_details)

    def _check(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> None:
        value = next((v for k, v in metadata or () if k == "authorization"), "")
        text = value if isinstance(value, str) else ""
        scheme, _, key = text.partition(" ")
        given = key.strip().encode()
        # Every key is compared in full, so that time tells nothing about any of them.
        matches = [hmac.compare_digest(given, one) for one in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise NotAuthenticated(
                "the API key is missing or wrong; send metadata 'authorization: Bearer KEY'"
            )
