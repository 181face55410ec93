"""TLS between the SDK and the gRPC door, with a CA that only the test trusts."""

from __future__ import annotations

from pathlib import Path

import pytest
from front_doors import REPLY, FakeGateway

import stagemesh
from gateway.grpc_server.server import create_inference_server
from services.errors import ConfigError
from services.rpc import ClientTls, ServerTls, create_channel
from stagemesh import AsyncClient, TLSConfig
from stagemesh.v1 import inference_pb2, inference_pb2_grpc

FILES = Path(__file__).parent / "certificates"
SERVER = ServerTls(FILES / "server.pem", FILES / "server.key")


async def test_only_a_client_that_trusts_the_ca_gets_in(gateway: FakeGateway) -> None:
    server = create_inference_server(gateway.frontend)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls=SERVER)}"
    await server.start()
    async with AsyncClient(address, tls=TLSConfig(ca_file=FILES / "ca.pem"), timeout=5) as client:
        assert (await client.generate("stop", max_tokens=50)).text == REPLY
    for tls in (None, TLSConfig()):
        async with AsyncClient(address, tls=tls, max_retries=0, timeout=5) as client:
            with pytest.raises(stagemesh.PipelineUnavailable):
                await client.models()
    channel = create_channel(address, tls=ClientTls(ca=FILES / "ca.pem"))
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    assert (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)).models
    await channel.close()
    await server.stop(grace_seconds=0)


async def test_clients_without_a_certificate_are_refused_where_one_is_asked_for(
    gateway: FakeGateway,
) -> None:
    server = create_inference_server(gateway.frontend)
    tls = ServerTls(SERVER.certificate_chain, SERVER.private_key, client_ca=FILES / "ca.pem")
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls=tls)}"
    await server.start()
    without = TLSConfig(ca_file=FILES / "ca.pem")
    async with AsyncClient(address, tls=without, max_retries=0, timeout=5) as client:
        with pytest.raises(stagemesh.PipelineUnavailable):
            await client.models()
    own = TLSConfig(FILES / "ca.pem", FILES / "server.pem", FILES / "server.key")
    async with AsyncClient(address, tls=own, timeout=5) as client:
        assert await client.models()
    await server.stop(grace_seconds=0)


async def test_missing_files_are_named(gateway: FakeGateway, tmp_path: Path) -> None:
    server = create_inference_server(gateway.frontend)
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        server.bind("127.0.0.1", 0, tls=ServerTls(missing, SERVER.private_key))
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        create_channel("127.0.0.1:1", tls=ClientTls(ca=missing))
    with pytest.raises(stagemesh.ConfigError, match=r"missing\.pem"):
        AsyncClient(tls=TLSConfig(ca_file=missing))
    await server.stop(grace_seconds=0)
