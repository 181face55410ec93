"""How many connections the REST door takes, and what ends its wait for a handshake."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl

import pytest

from gateway.frontend import limits
from gateway.rest.handshakes import TlsListener
from gateway.rest.protocol import most_connections


@pytest.mark.parametrize(
    ("soft", "with_tls", "most"),
    [
        (1024, False, 1024 - 256),
        (1024, True, 1024 - 256 - limits.MAX_TLS_HANDSHAKES),
        (100, True, 1),
        (1 << 20, True, limits.MAX_CONNECTIONS),
        (resource.RLIM_INFINITY, False, limits.MAX_CONNECTIONS),
    ],
)
def test_files_are_kept_for_handshakes_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, soft: int, with_tls: bool, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert most_connections(with_tls=with_tls) == most


async def test_a_listener_closes_in_the_moment_in_which_a_handshake_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_TLS_HANDSHAKES", 1)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    port = listening.getsockname()[1]
    async with asyncio.TaskGroup() as tasks:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        listener = TlsListener(listening, context, asyncio.Protocol, tasks)
        _, shakes = await asyncio.open_connection("127.0.0.1", port)
        _, waits = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.1)
        listener._one_over.set()
        listener.close()
        async with asyncio.timeout(5):
            await listener.wait_closed()
        for writer in (shakes, waits):
            writer.close()
    listening.close()
