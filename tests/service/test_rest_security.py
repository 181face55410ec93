"""The REST door against strangers: TLS, keys that change, slow heads, connections, CORS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from front_doors import MESH, FakeGateway, Rest

from gateway.door_security import DoorSecurity, door_security
from gateway.frontend import limits
from gateway.rest import handshakes, protocol
from gateway.rest.app import RestConfig, create_rest_app
from gateway.rest.server import RestServer
from services.api_keys import add_key, revoke_key
from services.config import ServeConfig
from services.errors import ConfigError
from services.file_watch import SETTLE_SECONDS
from services.rpc.roles import Role
from tests.certificates import Pki

PATH = "/v1/models"


@contextlib.asynccontextmanager
async def door(
    gateway: FakeGateway, security: DoorSecurity, origins: tuple[str, ...] = ()
) -> AsyncIterator[int]:
    app = create_rest_app(
        gateway.frontend,
        gateway.engine,
        lambda: MESH,
        gateway.metrics,
        RestConfig(security.keys, origins),
    )
    server = RestServer(app, None if security.rest_tls is None else security.rest_tls.context)
    port = server.bind("127.0.0.1", 0)
    stop = asyncio.Event()
    with security.renewed():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run(stop, grace_seconds=1))
            yield port
            stop.set()


async def test_tls_and_its_renewal(gateway: FakeGateway, tmp_path: Path) -> None:
    pki, other = Pki(tmp_path / "a"), Pki(tmp_path / "b")
    files = pki.files(Role.GATEWAY)
    config = ServeConfig(
        model="m", ssl_certfile=str(files.certificate), ssl_keyfile=str(files.private_key)
    )
    trust = [ssl.create_default_context(cafile=each.files(Role.CLIENT).ca) for each in (pki, other)]

    async def get(port: int, verify: ssl.SSLContext) -> int:
        async with httpx.AsyncClient(verify=verify, timeout=5) as http:
            return (await http.get(f"https://127.0.0.1:{port}{PATH}")).status_code

    async with door(gateway, door_security(config)) as port:
        assert await get(port, trust[0]) == 200
        with pytest.raises(httpx.HTTPError):
            await get(port, trust[1])
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(verify=False, timeout=5) as http:
                await http.get(f"http://127.0.0.1:{port}{PATH}")
        theirs = other.files(Role.GATEWAY)
        files.private_key.write_bytes(theirs.private_key.read_bytes())
        await asyncio.sleep(2 * SETTLE_SECONDS)
        assert await get(port, trust[0]) == 200, "half a renewal must not spoil what serves"
        files.certificate.write_bytes(theirs.certificate.read_bytes())
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if await get(port, trust[1]) == 200:
                        break
                await asyncio.sleep(0.05)


async def test_a_handshake_that_never_ends_is_given_up(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.2)
    files = Pki(tmp_path).files(Role.GATEWAY)
    config = ServeConfig(
        model="m", ssl_certfile=str(files.certificate), ssl_keyfile=str(files.private_key)
    )
    async with door(gateway, door_security(config)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_handshakes_that_are_not_gone_on_with_make_room(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TLS_HANDSHAKES", 4)
    monkeypatch.setattr(handshakes, "PATIENCE_SECONDS", 0.3)
    pki = Pki(tmp_path)
    files = pki.files(Role.GATEWAY)
    config = ServeConfig(
        model="m", ssl_certfile=str(files.certificate), ssl_keyfile=str(files.private_key)
    )
    trust = ssl.create_default_context(cafile=pki.files(Role.CLIENT).ca)
    loop = asyncio.get_running_loop()
    async with door(gateway, door_security(config)) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        started = loop.time()
        async with httpx.AsyncClient(verify=trust, timeout=5) as http:
            for _ in range(3):
                assert (await http.get(f"https://127.0.0.1:{port}{PATH}")).status_code == 200
        assert loop.time() - started > 0.2
        # Two for those who came after the fourth, one for the client.
        for reader, _ in silent[:3]:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for reader, writer in silent[3:]:
            assert not reader.at_eof()
            writer.close()

        # A burst of honest ones is not cut.
        async def get() -> int:
            async with httpx.AsyncClient(verify=trust, timeout=5) as http:
                return (await http.get(f"https://127.0.0.1:{port}{PATH}")).status_code

        assert await asyncio.gather(*(get() for _ in range(20))) == [200] * 20
        # What still shakes hands does not hold up the end.
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    for _, each in silent[:3]:
        each.close()
    writer.close()


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    files = pki.files(Role.GATEWAY)
    wrong = pki.files(Role.CLIENT).private_key
    for certificate, key, words in (
        (tmp_path / "none.pem", files.private_key, "No such file"),
        (files.certificate, wrong, "the key is not that of the certificate"),
    ):
        config = ServeConfig(model="m", ssl_certfile=str(certificate), ssl_keyfile=str(key))
        with pytest.raises(ConfigError, match=f"--ssl-certfile {certificate}.*{words}"):
            door_security(config)


async def test_keys_of_a_file_count_while_they_stand_there(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    key = add_key(path, "first")
    security = door_security(ServeConfig(model="m", api_key_file=str(path)))
    async with (
        door(gateway, security) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http,
    ):

        async def status(key: str) -> int:
            return (await http.get(PATH, headers={"authorization": f"Bearer {key}"})).status_code

        async def becomes(key: str, wanted: int) -> None:
            async with asyncio.timeout(5):
                while await status(key) != wanted:
                    pass

        assert (await status(key), await status("another")) == (200, 401)
        second = add_key(path, "second")
        await becomes(second, 200)
        revoke_key(path, "first")
        await becomes(key, 401)
        assert await status(second) == 200
        for path_ in ("/health", "/ready", "/metrics"):
            assert (await http.get(path_)).status_code == 200
        for path_ in ("/v1/mesh", "/version", "/openapi.json", "/tokenize"):
            assert (await http.get(path_)).status_code == 401


async def opened(rest: Rest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(rest.url.rsplit(":", 1)[1]))


@pytest.mark.parametrize(
    "sent", [b"", b"GET /", b"GET /health HTTP/1.1\r\nhost: x\r\n"], ids=["none", "line", "head"]
)
async def test_a_head_that_never_ends_is_given_up(
    rest: Rest, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.2)
    reader, writer = await opened(rest)
    writer.write(sent)
    for _ in range(3):
        # A byte now and then does not buy more time.
        writer.write(sent and b"x")
        await asyncio.sleep(0.05)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert (await rest.http.get("/health")).status_code == 200


async def test_the_second_request_of_a_connection_has_its_own_time(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.3)
    reader, writer = await opened(rest)
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(request)
    assert b"200" in await asyncio.wait_for(reader.readuntil(b"}"), 2)
    await asyncio.sleep(0.5)  # Idle between requests: no head is under way.
    writer.write(request)
    assert b"200" in await asyncio.wait_for(reader.readuntil(b"}"), 2)
    writer.write(request[:20])
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_a_long_answer_is_no_slow_head(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.1)
    rest.gateway.engine.delay_seconds = 0.03
    body = {"prompt": "x", "max_tokens": 20}
    assert (await rest.http.post("/v1/completions", json=body)).status_code == 200


async def test_too_many_connections_are_429(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "most_connections", lambda with_tls: 2)
    connections = [await opened(rest) for _ in range(3)]
    answer = await asyncio.wait_for(connections[2][0].read(), 10)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "saturated"
    for _, writer in connections[1:]:
        writer.close()
        await writer.wait_closed()
    async with asyncio.timeout(10):
        while True:
            if (await rest.http.get("/health")).status_code == 200:
                break
    connections[0][1].close()


async def test_scripts_of_other_pages_are_not_let_in_unless_told(
    gateway: FakeGateway, rest: Rest
) -> None:
    origin = "https://chat.example"
    ask = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    closed = await rest.http.options("/v1/chat/completions", headers=ask)
    assert "access-control-allow-origin" not in closed.headers and closed.status_code == 405
    security = door_security(ServeConfig(model="m", api_key=("k",)))
    async with (
        door(gateway, security, (origin,)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http,
    ):
        allowed = await http.options("/v1/chat/completions", headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == origin
        other = await http.options("/v1/models", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = await http.get("/v1/models", headers={"origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin
