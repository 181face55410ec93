"""The shared gRPC set-up, on real servers: errors both ways, binding, health, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.control.client import ControlClient
from services.errors import (
    BodyTooLarge,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    JoinRefused,
    PipelineUnavailable,
    Saturated,
    StagemeshError,
    UsageError,
    all_errors,
)
from services.rpc import MessageLimits, RpcServer, create_channel, error_from_rpc, settings
from stagemesh.v1 import control_pb2, inference_pb2, inference_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
TIMEOUT_SECONDS = 5.0


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Raises what it is told to, or streams until its caller leaves."""

    def __init__(self) -> None:
        self.to_raise: Exception | None = None
        self.serving = True
        self.closed = asyncio.Event()

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        if self.to_raise is not None:
            raise self.to_raise
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(text="first")
            if self.to_raise is not None:
                raise self.to_raise
            while True:
                yield inference_pb2.GenerateResponse(text="more " * 1000)
        finally:
            self.closed.set()


class Running:
    def __init__(self, servicer: Scripted, server: RpcServer, port: int) -> None:
        self.servicer, self.server, self.port = servicer, server, port
        self.channel = create_channel(f"127.0.0.1:{port}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    servicer = Scripted()
    server = RpcServer(
        [SERVICE],
        limits=MessageLimits(receive_bytes=100_000),
        is_serving=lambda: servicer.serving,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc_server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    running = Running(servicer, server, port)
    yield running
    await running.channel.close()
    await server.stop(grace_seconds=0)


async def failed_tokenize(running: Running, text: str = "") -> StagemeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.Tokenize(
            inference_pb2.TokenizeRequest(text=text), timeout=TIMEOUT_SECONDS
        )
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("error_class", list(all_errors()), ids=lambda c: c.__name__)
async def test_every_error_of_the_tree_crosses_the_wire(
    running: Running, error_class: type[StagemeshError]
) -> None:
    running.servicer.to_raise = error_class("what to do: x", param="top_p")
    error = await failed_tokenize(running)
    assert type(error) is error_class
    assert (error.message, error.param) == ("what to do: x", "top_p")
    assert (error.retry_after_seconds is not None) == error_class.retryable


async def test_a_reason_of_a_newer_peer_falls_back_to_its_code(running: Running) -> None:
    newer = Saturated("full in a new way", retry_after_seconds=4)
    newer.reason = "OF_A_NEWER_PEER"  # type: ignore[misc]
    running.servicer.to_raise = newer
    error = await failed_tokenize(running)
    assert type(error) is Saturated
    assert (error.message, error.retry_after_seconds) == ("full in a new way", 4)


async def test_an_error_in_the_middle_of_a_stream_is_typed(running: Running) -> None:
    running.servicer.to_raise = PipelineUnavailable("stage 1 is gone", retry_after_seconds=2.5)
    call = running.stub.Generate(inference_pb2.GenerateRequest(), timeout=TIMEOUT_SECONDS)
    assert (await call.read()).text == "first"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = error_from_rpc(caught.value)
    assert isinstance(error, PipelineUnavailable)
    assert error.retry_after_seconds == 2.5


async def test_an_unforeseen_exception_becomes_internal_and_keeps_its_text(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.servicer.to_raise = ZeroDivisionError("secret prompt")
    error = await failed_tokenize(running)
    assert type(error) is StagemeshError
    assert "ZeroDivisionError" in error.message
    assert "secret" not in error.message
    assert "Tokenize failed" in caplog.text


async def test_a_caller_that_leaves_closes_the_generator(running: Running) -> None:
    call = running.stub.Generate(inference_pb2.GenerateRequest(), timeout=TIMEOUT_SECONDS)
    await call.read()
    call.cancel()
    await asyncio.wait_for(running.servicer.closed.wait(), TIMEOUT_SECONDS)


async def test_a_deadline_is_typed_on_the_client_and_closes_the_generator(
    running: Running,
) -> None:
    call = running.stub.Generate(inference_pb2.GenerateRequest(), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert isinstance(error_from_rpc(caught.value), DeadlineExceeded)
    await asyncio.wait_for(running.servicer.closed.wait(), TIMEOUT_SECONDS)


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
async def test_a_request_that_is_no_message_is_an_invalid_request(
    running: Running, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_call = (
        running.channel.unary_unary if method == "Tokenize" else running.channel.unary_stream
    )
    call = make_call(f"/{SERVICE}/{method}")(b"\xff\xff\xff", timeout=TIMEOUT_SECONDS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if method == "Tokenize":
            await call
        else:
            await call.read()
    error = error_from_rpc(caught.value)
    assert type(error) is InvalidRequest
    assert f"/{SERVICE}/{method}" in error.message
    assert "3 bytes" in error.message
    assert not caplog.records


async def test_an_oversized_message_is_refused_as_such(running: Running) -> None:
    error = await failed_tokenize(running, "x" * 200_000)
    assert isinstance(error, BodyTooLarge)


async def test_a_port_in_use_names_address_and_remedy(running: Running) -> None:
    other = RpcServer([])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{running.port}.*--grpc-port"):
        other.bind("127.0.0.1", running.port, flag="--grpc-port")
    await other.stop(grace_seconds=0)


async def test_unusable_addresses_are_config_errors() -> None:
    server = RpcServer([])
    with pytest.raises(ConfigError, match="all interfaces"):
        server.bind("", 0)
    with pytest.raises(ConfigError, match="70000"):
        server.bind("127.0.0.1", 70000)
    await server.stop(grace_seconds=0)


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    channel = create_channel("127.0.0.1:1")
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=TIMEOUT_SECONDS)
    assert isinstance(error_from_rpc(caught.value), PipelineUnavailable)
    await channel.close()


def health_status(serving: bool) -> int:
    name = "SERVING" if serving else "NOT_SERVING"
    return health_pb2.HealthCheckResponse.ServingStatus.Value(name)


async def test_health_says_what_is_so_at_that_moment(running: Running) -> None:
    stub = health_pb2_grpc.HealthStub(running.channel)
    for name in ("", SERVICE):
        for serving in (True, False, True):
            running.servicer.serving = serving
            request = health_pb2.HealthCheckRequest(service=name)
            answer = await stub.Check(request, timeout=TIMEOUT_SECONDS)
            assert answer.status == health_status(serving)


async def test_whoever_watches_health_hears_of_changes(running: Running) -> None:
    watch = health_pb2_grpc.HealthStub(running.channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_SECONDS
    )
    for serving in (True, False, True):
        running.servicer.serving = serving
        assert (await watch.read()).status == health_status(serving)
    watch.cancel()


async def test_a_caller_that_does_not_read_is_given_up(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its handler holds is freed; the connection and other calls on it go on."""
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", 1.5)
    call = running.stub.Generate(inference_pb2.GenerateRequest(), timeout=30)
    assert (await call.read()).text == "first"
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await running.servicer.closed.wait()
        await running.stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"))
    with pytest.raises(grpc.aio.AioRpcError, match="has not read its stream"):
        while await call.read():
            pass


async def test_reflection_lists_the_service(running: Running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=TIMEOUT_SECONDS
    )
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert SERVICE in names and "grpc.health.v1.Health" in names


async def test_a_worker_sent_to_another_port_is_told_what_to_compare(running: Running) -> None:
    address = f"127.0.0.1:{running.port}"
    client = ControlClient("127.0.0.1", running.port)
    with pytest.raises(JoinRefused, match=rf"{address} is no head.*--master-port.*workers join at"):
        await client.join(control_pb2.JoinRequest(), TIMEOUT_SECONDS)
    await client.close()


async def test_a_name_that_is_no_address_is_refused_by_the_flag_of_its_port() -> None:
    server = RpcServer([])
    for flag, host_flag in (("--grpc-port", "--host"), ("--master-port", "--master-addr")):
        with pytest.raises(UsageError, match=rf"^{host_flag} 10\.0\.\.1 is no address"):
            server.bind("10.0..1", 0, flag=flag)
    await server.stop(grace_seconds=0)


async def test_who_only_connects_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "HANDSHAKE_TIMEOUT_SECONDS", 0.3)
    server = RpcServer([])
    port = server.bind("127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await reader.read(1024):
            pass
    writer.close()
    await server.stop(grace_seconds=0)
