"""What is in the way of a gRPC server, found by connecting to real ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from pathlib import Path

import pytest
import uvloop

from services.rpc import RpcServer
from services.rpc.reach import Obstacle, Unanswered, connect
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles
from tests.certificates import Pki, issue_as_of

TIMEOUT_SECONDS = 5.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@contextlib.asynccontextmanager
async def served(tls: TlsFiles | None) -> AsyncIterator[int]:
    server = RpcServer([])
    port = server.bind("127.0.0.1", 0, tls=tls)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace_seconds=0)


async def tried(
    server: TlsFiles | None, client: TlsFiles | None, host: str = "127.0.0.1"
) -> Unanswered | None:
    async with served(server) as port:
        return await connect(host, port, TIMEOUT_SECONDS, client)


async def test_nothing_is_in_the_way(pki: Pki) -> None:
    assert await tried(None, None) is None
    for role in Role:
        assert await tried(pki.files(Role.GATEWAY), pki.files(role)) is None


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_it_leaves_at_once(pki: Pki, run: Callable[[Coroutine[None, None, float]], float]) -> None:
    """A worker asks between two attempts to join; gRPC's server says no farewell."""

    async def seconds() -> float:
        async with served(pki.files(Role.GATEWAY)) as port:
            started = time.monotonic()
            for tls in (pki.files(Role.STAGE_WORKER), None):
                await connect("127.0.0.1", port, TIMEOUT_SECONDS, tls)
            return time.monotonic() - started

    assert run(seconds()) < TIMEOUT_SECONDS


async def test_only_one_side_has_tls(pki: Pki) -> None:
    for server, client, words in (
        (pki.files(Role.GATEWAY), None, "it speaks TLS, and this side does not"),
        (None, pki.files(Role.OPERATOR), "it does not speak TLS"),
    ):
        found = await tried(server, client)
        assert found is not None and (found.obstacle, found.detail) == (Obstacle.TLS, words)


@pytest.mark.parametrize(
    ("offset", "words"),
    [(timedelta(days=-40), "it has expired"), (timedelta(days=5), "it is not valid yet")],
)
async def test_the_servers_dates(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: timedelta, words: str
) -> None:
    issue_as_of(monkeypatch, offset)
    server = pki.issue(Role.GATEWAY, tmp_path, days=10)
    found = await tried(server, pki.files(Role.OPERATOR))
    assert found is not None and found.obstacle is Obstacle.TLS
    assert found.detail.startswith(f"its certificate is refused: {words}")


async def test_the_servers_names_ca_and_purpose(pki: Pki, tmp_path: Path) -> None:
    operator = pki.files(Role.OPERATOR)
    stranger = Pki(tmp_path / "other").files(Role.GATEWAY)
    other_host = pki.files(Role.GATEWAY)
    for server, host, words in (
        (stranger, "127.0.0.1", "it was signed by another CA"),
        (other_host, "127.0.0.2", "its names do not match the address"),
        (pki.files(Role.CLIENT), "127.0.0.1", "it is not made for this purpose"),
    ):
        listen = RpcServer([])
        port = listen.bind(host, 0, tls=server)
        await listen.start()
        found = await connect(host, port, TIMEOUT_SECONDS, operator)
        await listen.stop(grace_seconds=0)
        assert found is not None and found.obstacle is Obstacle.TLS, words
        assert words in found.detail


async def test_our_certificate_is_refused(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue_as_of(monkeypatch, timedelta(days=-40))
    expired = pki.issue(Role.OPERATOR, tmp_path / "expired", days=10)
    monkeypatch.undo()
    stranger = Pki(tmp_path / "other").files(Role.OPERATOR)
    stranger.ca.write_bytes(pki.files(Role.OPERATOR).ca.read_bytes())
    for client in (expired, stranger):
        found = await tried(pki.files(Role.GATEWAY), client)
        assert found is not None and found.obstacle is Obstacle.TLS
        assert "it refuses our certificate" in found.detail


async def test_what_is_no_grpc_server_is_no_matter_of_tls(pki: Pki) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = await connect("127.0.0.1", port, TIMEOUT_SECONDS, None)
    assert found is not None and found.obstacle is Obstacle.NOT_GRPC
    found = await connect("127.0.0.1", port, TIMEOUT_SECONDS, pki.files(Role.OPERATOR))
    assert found is not None and found.detail == "it does not speak TLS"
    server.close()
    await server.wait_closed()
    found = await connect("127.0.0.1", port, TIMEOUT_SECONDS, pki.files(Role.OPERATOR))
    assert found is not None and found.obstacle is Obstacle.REFUSED
