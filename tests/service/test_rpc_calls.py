"""Who may hold what of a gRPC server: calls without a message, watches, answers that nobody
takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from front_doors import until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import HEADERS, takes_nothing

from services.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    InvalidRequest,
    NotAuthenticated,
    Saturated,
    StagemeshError,
)
from services.rpc import RpcServer, create_channel, error_from_rpc, settings
from stagemesh.v1 import inference_pb2, inference_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
TIMEOUT_SECONDS = 5.0
MAX_CALLS = 4
LARGE_BYTES = 1 << 20
"""Far more than gRPC buffers for a caller that does not read."""
MOST_BYTES = 2 * LARGE_BYTES
CHECK = "/grpc.health.v1.Health/Check"


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers at once, or when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running = 0
        self.answers = 0
        self.serving = True

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.text == "large":
            yield inference_pb2.GenerateResponse(text="x" * (MOST_BYTES + 1))
        yield inference_pb2.GenerateResponse(text="x")
        if request.text == "waits":
            await self.go.wait()
            yield inference_pb2.GenerateResponse(text="y")

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        self.running += 1
        try:
            await self.go.wait()
        finally:
            self.running -= 1
            self.answers += 1
        return inference_pb2.DetokenizeResponse(text="x" * LARGE_BYTES)


class RefusesOneMethod(grpc.aio.ServerInterceptor):
    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.endswith("/ListModels"):
            raise NotAuthenticated("no key was shown")
        return await continuation(handler_call_details)


class Running:
    def __init__(self, servicer: Servicer, port: int) -> None:
        self.servicer = servicer
        self.port = port
        self.channel = create_channel(f"127.0.0.1:{port}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def tokenize(self) -> list[int]:
        request = inference_pb2.TokenizeRequest(text="abc")
        return list((await self.stub.Tokenize(request, timeout=TIMEOUT_SECONDS)).token_ids)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    servicer = Servicer()
    server = RpcServer(
        [SERVICE],
        max_calls=MAX_CALLS,
        limits=settings.MessageLimits(send_bytes=MOST_BYTES),
        interceptors=[RefusesOneMethod()],
        is_serving=lambda: servicer.serving,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc_server)
    running = Running(servicer, server.bind("127.0.0.1", 0))
    await server.start()
    yield running
    await running.channel.close()
    await server.stop(grace_seconds=0)


def silent_call(running: Running, method: str) -> grpc.aio.StreamStreamCall[Any, Any]:
    """Opens a call, and sends no message."""
    return running.channel.stream_stream(f"/{SERVICE}/{method}")(timeout=60)


async def error_of(call: grpc.aio.StreamStreamCall[Any, Any]) -> StagemeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while await call.read() is not grpc.aio.EOF:
                pass
    return error_from_rpc(caught.value)


async def test_calls_without_a_message_take_no_place_of_others(running: Running) -> None:
    calls = [silent_call(running, "Tokenize") for _ in range(10 * MAX_CALLS)]
    for call in calls:
        await call.wait_for_connection()
    for _ in range(MAX_CALLS):
        assert await running.tokenize() == [3]
    # As many wait as are served; others have made room.
    await until(lambda: sum(call.done() for call in calls) >= 9 * MAX_CALLS)
    for call in calls:
        if call.done():
            error = await error_of(call)
            assert type(error) is Saturated and "newer calls took the place" in error.message
        call.cancel()


async def test_a_message_that_does_not_come_ends_its_call(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "REQUEST_TIMEOUT_SECONDS", 0.2)
    error = await error_of(silent_call(running, "Tokenize"))
    assert type(error) is DeadlineExceeded and "within 0.2 s" in error.message


async def test_who_ends_without_a_message_is_told(running: Running) -> None:
    call = silent_call(running, "Tokenize")
    await call.done_writing()
    error = await error_of(call)
    assert type(error) is InvalidRequest and "without a message" in error.message


async def test_calls_above_the_limit_are_refused_and_probes_are_not(running: Running) -> None:
    request = inference_pb2.DetokenizeRequest()
    calls = [running.stub.Detokenize(request, timeout=60) for _ in range(MAX_CALLS)]
    await until(lambda: running.servicer.running == MAX_CALLS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.tokenize()
    error = error_from_rpc(caught.value)
    assert type(error) is Saturated and error.message.startswith(f"{MAX_CALLS} calls")
    stub = health_pb2_grpc.HealthStub(running.channel)
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
    running.servicer.go.set()
    for call in calls:
        assert len((await call).text) == LARGE_BYTES
    assert await running.tokenize() == [3]


async def test_watches_without_end_keep_nobody_from_asking(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest()
    watches = []
    for _ in range(settings.MAX_PROBE_CALLS + 3):
        watches.append(stub.Watch(request, timeout=60))
        await watches[-1].read()
    for watch in watches[:3]:
        assert type(await error_of(watch)) is Saturated
    assert not any(watch.done() for watch in watches[3:])
    await stub.Check(request, timeout=TIMEOUT_SECONDS)
    assert await running.tokenize() == [3]
    for watch in watches:
        watch.cancel()


async def test_a_watcher_that_does_not_read_is_in_nobodys_way(running: Running) -> None:
    stub = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest()
    async with takes_nothing("127.0.0.1", running.port) as client:
        client.call("/grpc.health.v1.Health/Watch")
        await asyncio.sleep(0.1)
        for serving in (False, True):
            running.servicer.serving = serving
            answer = await stub.Check(request, timeout=TIMEOUT_SECONDS)
            assert (answer.status == health_pb2.HealthCheckResponse.SERVING) == serving


@pytest.mark.parametrize(
    ("method", "periods"),
    [(f"/{SERVICE}/Tokenize", 1), (CHECK, 1), (f"/{SERVICE}/Generate", 2)],
)
async def test_an_answer_that_nobody_takes_is_given_up_with_its_connection(
    running: Running, monkeypatch: pytest.MonkeyPatch, method: str, periods: int
) -> None:
    """A stream is ended first, and then has as long to take its end."""
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", 0.4)
    async with takes_nothing("127.0.0.1", running.port) as client:
        started = asyncio.get_running_loop().time()
        client.call(method)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await client.closed()
        assert asyncio.get_running_loop().time() - started > 0.4 * periods - 0.05
    assert await running.tokenize() == [3]


async def test_answers_that_nobody_takes_hold_no_place_for_long(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", 0.3)
    running.servicer.go.set()
    async with takes_nothing("127.0.0.1", running.port) as client:
        for _ in range(MAX_CALLS):
            client.call(f"/{SERVICE}/Detokenize")
        await until(lambda: running.servicer.answers == MAX_CALLS)
        with pytest.raises(grpc.aio.AioRpcError, match="4 calls are being answered"):
            await running.tokenize()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await client.closed()
        for _ in range(MAX_CALLS):
            assert await running.tokenize() == [3]


async def test_probes_whose_answer_nobody_takes_are_in_nobodys_way(running: Running) -> None:
    """Not waiting for the time that a slow reader has."""
    async with takes_nothing("127.0.0.1", running.port) as client:
        for _ in range(settings.MAX_PROBE_CALLS + 1):
            client.call(CHECK)
        stub = health_pb2_grpc.HealthStub(running.channel)
        for _ in range(settings.MAX_PROBE_CALLS):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        # Nor does it cost the connection, which may have other calls.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.closed()


async def test_a_burst_of_probes_costs_no_connection(running: Running) -> None:
    """Nor a watch its place: they are not answered at the same time."""
    stub = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest()
    watch = stub.Watch(request, timeout=60)
    await watch.read()
    stream = running.stub.Generate(inference_pb2.GenerateRequest(text="waits"), timeout=60)
    assert (await stream.read()).text == "x"
    await asyncio.gather(*(stub.Check(request, timeout=60) for _ in range(300)))
    running.servicer.go.set()
    assert (await stream.read()).text == "y"
    assert await stream.read() is grpc.aio.EOF
    assert not watch.done()
    watch.cancel()


async def test_streams_beyond_the_places_hear_why_they_are_refused(running: Running) -> None:
    """gRPC's own refusal (RST_STREAM) comes first only for many more on one connection."""
    counted = 2 * MAX_CALLS + settings.MAX_PROBE_CALLS
    async with takes_nothing("127.0.0.1", running.port) as client:
        for _ in range(2 * counted - 1):
            client.call(f"/{SERVICE}/Detokenize")
        refused = 2 * counted - 1 - MAX_CALLS
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert set(await client.ends_of_calls(refused)) == {HEADERS}


async def test_a_message_that_is_too_large_to_send_is_in_the_log(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    request = inference_pb2.GenerateRequest(text="large")
    error = await error_of(
        running.channel.stream_stream(
            f"/{SERVICE}/Generate",
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
        )(iter([request]), timeout=60)
    )
    assert type(error) is BodyTooLarge
    (record,) = (one for one in caplog.records if "was not sent" in one.message)
    assert record.levelname == "WARNING"
    assert f"/{SERVICE}/Generate to ipv4:127.0.0.1:" in record.message


async def test_a_refusal_waits_for_no_message(running: Running) -> None:
    error = await error_of(running.channel.stream_stream(f"/{SERVICE}/ListModels")(timeout=60))
    assert type(error) is NotAuthenticated
