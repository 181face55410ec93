"""TLS of servers and channels: who gets in, renewal without a restart, unusable files."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from front_doors import REPLY, FakeGateway
from grpc_health.v1 import health_pb2, health_pb2_grpc

import stagemesh
from gateway.grpc_server.server import create_inference_server
from services.errors import ConfigError
from services.rpc import RpcServer, create_channel
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles
from stagemesh import AsyncClient, TLSConfig
from tests.certificates import Pki, issue_as_of

TIMEOUT_SECONDS = 5.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def sdk(files: TlsFiles) -> TLSConfig:
    return TLSConfig(files.ca, files.certificate, files.private_key)


async def test_only_a_client_with_the_role_gets_in(gateway: FakeGateway, pki: Pki) -> None:
    server = create_inference_server(gateway.frontend)
    files = pki.files(Role.CLIENT)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls=pki.files(Role.GATEWAY))}"
    await server.start()
    async with AsyncClient(address, tls=sdk(files), timeout=5) as client:
        assert (await client.generate("stop", max_tokens=50)).text == REPLY
    for tls in (None, TLSConfig(), TLSConfig(ca_file=files.ca)):
        async with AsyncClient(address, tls=tls, max_retries=0, timeout=5) as client:
            with pytest.raises(stagemesh.PipelineUnavailable):
                await client.models()
    operator = sdk(pki.files(Role.OPERATOR))
    async with AsyncClient(address, tls=operator, timeout=5) as client:
        with pytest.raises(stagemesh.NotPermitted, match=r"ListModels is for role client"):
            await client.models()
    await server.stop(grace_seconds=0)


async def check(address: str, files: TlsFiles) -> grpc.StatusCode:
    """The code of a health check over a new connection."""
    async with create_channel(address, tls=files) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_renewed_certificate_counts_from_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts with one that has expired meanwhile; its clients come back when it is
    replaced, and the connection from before the renewal stays."""
    pki = Pki(tmp_path)
    issue_as_of(monkeypatch, timedelta(days=-2))
    server_files = pki.issue(Role.GATEWAY, pki.tls_dir, days=1, force=True)
    monkeypatch.undo()
    server = RpcServer([])
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls=server_files)}"
    await server.start()
    client = pki.files(Role.OPERATOR)
    assert await check(address, client) is grpc.StatusCode.UNAVAILABLE
    pki.issue(Role.GATEWAY, pki.tls_dir, force=True)
    with caplog.at_level(logging.INFO):
        assert await check(address, client) is grpc.StatusCode.OK
        assert "renewed certificate" in caplog.text
    async with create_channel(address, tls=client) as kept:
        stub = health_pb2_grpc.HealthStub(kept)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        # Half a renewal: the key is another's. The last good pair stays in use.
        good = server_files.private_key.read_bytes()
        other = pki.issue(Role.GATEWAY, tmp_path / "other")
        os.replace(other.private_key, server_files.private_key)
        assert await check(address, client) is grpc.StatusCode.OK
        assert "stays in use" in caplog.text
        server_files.private_key.write_bytes(good)
        # Another CA: who shows a certificate of the old one is a stranger from now on.
        stranger = Pki(tmp_path / "another")
        os.replace(stranger.files(Role.GATEWAY).ca, server_files.ca)
        assert await check(address, pki.issue(Role.OPERATOR, tmp_path / "new")) is (
            grpc.StatusCode.UNAVAILABLE
        )
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
    await server.stop(grace_seconds=0)


async def test_clients_take_renewed_files_for_new_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path)
    server = RpcServer([])
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls=pki.files(Role.GATEWAY))}"
    await server.start()
    issue_as_of(monkeypatch, timedelta(days=-2))
    client = pki.issue(Role.OPERATOR, pki.tls_dir, days=1, force=True)
    monkeypatch.undo()
    assert await check(address, client) is grpc.StatusCode.UNAVAILABLE
    pki.issue(Role.OPERATOR, pki.tls_dir, force=True)
    assert await check(address, client) is grpc.StatusCode.OK
    await server.stop(grace_seconds=0)


async def test_files_that_cannot_be_used_are_named(pki: Pki, tmp_path: Path) -> None:
    good = pki.files(Role.GATEWAY)
    server = RpcServer([])
    missing, garbage = tmp_path / "missing.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate\n")
    readable = tmp_path / "readable.key"
    readable.write_bytes(good.private_key.read_bytes())
    readable.chmod(0o644)
    for files, words in (
        (TlsFiles(good.ca, missing, good.private_key), r"missing\.pem: No such file"),
        (TlsFiles(missing, good.certificate, good.private_key), r"missing\.pem"),
        (TlsFiles(good.ca, garbage, good.private_key), r"garbage\.pem .* it is no PEM file"),
        (
            TlsFiles(good.ca, good.certificate, pki.files(Role.CLIENT).private_key),
            r"client\.key cannot be used: the key is not that of the certificate",
        ),
        (TlsFiles(good.ca, good.certificate, readable), r"mode 0644\); chmod 600"),
    ):
        with pytest.raises(ConfigError, match=words):
            server.bind("127.0.0.1", 0, tls=files)
        with pytest.raises(ConfigError, match=words):
            create_channel("127.0.0.1:1", tls=files)
    with pytest.raises(stagemesh.ConfigError, match=r"missing\.pem"):
        AsyncClient(tls=TLSConfig(ca_file=missing))
    await asyncio.sleep(0)
    await server.stop(grace_seconds=0)
