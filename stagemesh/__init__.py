"""Client SDK of Stagemesh.

    from stagemesh import Client

    with Client("127.0.0.1:8001") as client:
        answer = client.generate(messages=[{"role": "user", "content": "Hello!"}])
        print(answer.text)

        for chunk in client.stream("Once upon a time", max_tokens=64):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Everything that goes wrong is a
`StagemeshError`; no gRPC type appears in this API.

Names are imported when first used: servers of this project share the package
`stagemesh.v1` and need not load the clients with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stagemesh.version import __version__

if TYPE_CHECKING:
    from stagemesh.async_client import AsyncChunkStream, AsyncClient
    from stagemesh.client import ChunkStream, Client
    from stagemesh.errors import (
        BodyTooLarge,
        ConfigError,
        ContextTooLong,
        DeadlineExceeded,
        InvalidRequest,
        ModelNotFound,
        NotAuthenticated,
        NotPermitted,
        PipelineUnavailable,
        RequestAborted,
        Saturated,
        StageFailed,
        StagemeshError,
    )
    from stagemesh.types import (
        ChatMessage,
        Choice,
        Chunk,
        Generation,
        ModelInfo,
        TLSConfig,
        Tokenization,
        TokenLogprob,
        Usage,
    )

_MODULE_OF = {
    "AsyncChunkStream": "async_client",
    "AsyncClient": "async_client",
    "ChunkStream": "client",
    "Client": "client",
    "BodyTooLarge": "errors",
    "ConfigError": "errors",
    "ContextTooLong": "errors",
    "DeadlineExceeded": "errors",
    "InvalidRequest": "errors",
    "ModelNotFound": "errors",
    "NotAuthenticated": "errors",
    "NotPermitted": "errors",
    "PipelineUnavailable": "errors",
    "RequestAborted": "errors",
    "Saturated": "errors",
    "StageFailed": "errors",
    "StagemeshError": "errors",
    "ChatMessage": "types",
    "Choice": "types",
    "Chunk": "types",
    "Generation": "types",
    "ModelInfo": "types",
    "TLSConfig": "types",
    "TokenLogprob": "types",
    "Tokenization": "types",
    "Usage": "types",
}

__all__ = [
    "AsyncChunkStream",
    "AsyncClient",
    "BodyTooLarge",
    "ChatMessage",
    "Choice",
    "Chunk",
    "ChunkStream",
    "Client",
    "ConfigError",
    "ContextTooLong",
    "DeadlineExceeded",
    "Generation",
    "InvalidRequest",
    "ModelInfo",
    "ModelNotFound",
    "NotAuthenticated",
    "NotPermitted",
    "PipelineUnavailable",
    "RequestAborted",
    "Saturated",
    "StageFailed",
    "StagemeshError",
    "TLSConfig",
    "TokenLogprob",
    "Tokenization",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'stagemesh' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stagemesh.{module}"), name)
