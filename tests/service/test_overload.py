"""Too many requests, too little time, clients that do not read: both doors over the real engine,
whose stages answer at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from front_doors import MODEL, until

from gateway.engine.engine import EngineConfig, MeshEngine
from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.types import EngineStats
from gateway.frontend.frontend import Frontend, load_assets
from gateway.grpc_server.server import create_inference_server
from gateway.rest.app import RestConfig, create_rest_app
from gateway.rest.server import RestServer
from services.config import ServeConfig
from services.errors import StageFailed
from services.rpc import settings
from services.telemetry import Metrics
from stagemesh import AsyncClient
from stagemesh.errors import DeadlineExceeded, PipelineUnavailable, Saturated, StagemeshError
from stagemesh.v1 import inference_pb2, inference_pb2_grpc, step_pb2
from tests.instant_stages import InstantStages
from tests.tiny_models import VOCAB_SIZE, make_tokenizer

NUM_BLOCKS = 4096
BLOCK_SIZE = 16
SLOTS = 2
PLACES = 2
"""In the queue."""
ENDLESS = 20_000
CHOICES = 16
TOKENS_EACH = 1_500
"""With 20 log probabilities each, many megabytes: far more than fits between a service and a
client that does not read."""
STEP_SECONDS = 0.001
SLOW_READER_SECONDS = 6.0


@dataclass
class Service:
    """Both doors, and what is behind them."""

    engine: MeshEngine
    frontend: Frontend
    http: httpx.AsyncClient
    port: int
    grpc_address: str
    client: AsyncClient

    def complete(self, max_tokens: int, **fields: object) -> Awaitable[httpx.Response]:
        body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, **fields}
        return self.http.post("/v1/completions", json=body)

    def is_empty(self) -> bool:
        stats = self.engine.stats()
        return (stats.free_blocks, stats.running_requests, stats.waiting_requests) == (
            NUM_BLOCKS,
            0,
            0,
        )


@asynccontextmanager
async def service(
    directory: Path, stages: InstantStages, slots: int = SLOTS
) -> AsyncIterator[Service]:
    """At the end nothing may be left in the engine."""
    make_tokenizer(directory)
    assets = load_assets(ServeConfig(model=str(directory)), directory)
    limits = SchedulerLimits(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=slots,
        max_num_batched_tokens=64,
        num_stages=1,
    )
    metrics = Metrics()
    engine = MeshEngine(stages, assets.tokenizer.backend, EngineConfig(limits, PLACES), metrics)
    frontend = Frontend(
        engine,
        assets,
        model_names=(MODEL,),
        max_model_len=ENDLESS + 16,
        vocab_size=VOCAB_SIZE,
        metrics=metrics,
        max_requests=100,
    )
    rest = RestServer(create_rest_app(frontend, engine, dict, metrics, RestConfig()))
    rest_port = rest.bind("127.0.0.1", 0)
    door = create_inference_server(frontend)
    grpc_address = f"127.0.0.1:{door.bind('127.0.0.1', 0)}"
    await door.start()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(rest.run(stop, grace_seconds=1))
    running = asyncio.ensure_future(engine.run())
    try:
        async with (
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{rest_port}", timeout=20, verify=False
            ) as http,
            AsyncClient(grpc_address, timeout=20, max_retries=0) as client,
        ):
            made = Service(engine, frontend, http, rest_port, grpc_address, client)
            yield made
        if engine.error is None:
            await until(made.is_empty)
    finally:
        running.cancel()
        stop.set()
        await asyncio.wait([serving, running])
        await door.stop(grace_seconds=0)
        frontend.close()


@asynccontextmanager
async def occupied(made: Service, count: int) -> AsyncIterator[None]:
    """So many requests that do not end by themselves; closed at the end."""
    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(consume(made)) for _ in range(count)]
        stats = made.engine.stats
        await until(lambda: stats().running_requests + stats().waiting_requests == count)
        yield
        for one in requests:
            one.cancel()


async def consume(made: Service) -> None:
    async with made.client.stream("a", max_tokens=ENDLESS, ignore_eos=True) as stream:
        async for _ in stream:
            pass


def len_of(stats: EngineStats) -> int:
    return stats.running_requests + stats.waiting_requests


async def grpc_error(made: Service, seconds: float = 20.0) -> StagemeshError:
    with pytest.raises(StagemeshError) as caught:
        await made.client.generate("a", max_tokens=ENDLESS, ignore_eos=True, timeout=seconds)
    return caught.value


def assert_rest(response: httpx.Response, status: int, kind: str, code: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code), error


async def test_full_late_and_down_are_three_answers(tmp_path: Path) -> None:
    """F22: on both doors, each with its own code, and a time to come back where that helps."""
    async with service(tmp_path, InstantStages(STEP_SECONDS)) as made:
        async with occupied(made, SLOTS + PLACES - 1):
            late = await made.complete(1, timeout=0.2)
            assert_rest(late, 504, "timeout_error", "deadline_exceeded")
            assert "retry-after" not in late.headers
            assert isinstance(await grpc_error(made, seconds=0.2), DeadlineExceeded)
        async with occupied(made, SLOTS + PLACES):
            full = await made.complete(1)
            assert_rest(full, 429, "rate_limit_error", "saturated")
            assert int(full.headers["retry-after"]) >= 1
            error = await grpc_error(made)
            assert type(error) is Saturated and (error.retry_after_seconds or 0) >= 1
        await until(made.is_empty)
        made.engine.fail(StageFailed("stage 1 failed (RANK_DIED): gone"))
        down = await made.complete(1)
        assert_rest(down, 503, "service_unavailable", "pipeline_unavailable")
        assert int(down.headers["retry-after"]) >= 1
        error = await grpc_error(made)
        assert type(error) is PipelineUnavailable and (error.retry_after_seconds or 0) >= 1
        assert "stage 1" in error.message


class CountingStages(InstantStages):
    """Counts the steps that it is sent."""

    steps = 0

    def send(self, step: step_pb2.Step) -> None:
        self.steps += 1
        super().send(step)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_the_prompts_of_a_call_are_taken_together_or_not_at_all(
    tmp_path: Path, stream: bool
) -> None:
    stages = CountingStages(STEP_SECONDS)
    async with service(tmp_path, stages) as made:
        full = await made.complete(1, prompt=["a"] * (SLOTS + PLACES + 1), stream=stream)
        assert_rest(full, 429, "rate_limit_error", "saturated")
        assert stages.steps == 0
        fits = await made.complete(1, prompt=["a"] * (SLOTS + PLACES))
        assert len(fits.json()["choices"]) == SLOTS + PLACES
        # More than could ever be taken is no matter of waiting.
        made.frontend.max_requests = SLOTS + PLACES
        never = await made.complete(1, prompt=["a"] * (SLOTS + PLACES + 1), stream=stream)
        assert_rest(never, 400, "invalid_request_error", "invalid_request")
        assert never.json()["error"]["param"] == "prompt"


async def test_a_client_comes_back_when_it_is_told_to(tmp_path: Path) -> None:
    async with service(tmp_path, InstantStages(STEP_SECONDS)) as made:
        async with (
            AsyncClient(made.grpc_address, timeout=20, max_retries=3) as patient,
            occupied(made, SLOTS + PLACES),
        ):
            answer = asyncio.ensure_future(patient.generate("a", max_tokens=3, ignore_eos=True))
            await asyncio.sleep(0.3)
            assert not answer.done()
        async with AsyncClient(made.grpc_address, timeout=20, max_retries=3) as patient:
            assert len((await patient.generate("a", max_tokens=3, ignore_eos=True)).token_ids) == 3


@pytest.mark.parametrize("prompt_tokens", [1, 4000], ids=["decode", "prefill"])
async def test_a_deadline_frees_what_the_request_held(tmp_path: Path, prompt_tokens: int) -> None:
    """Whether it decodes or is still a prompt: 4,000 tokens are 63 steps of 64."""
    async with service(tmp_path, InstantStages(0.01)) as made:
        token_ids = [40] * prompt_tokens
        late = await made.complete(ENDLESS - 4000, prompt=token_ids, timeout=0.2)
        assert_rest(late, 504, "timeout_error", "deadline_exceeded")
        await until(made.is_empty)
        with pytest.raises(DeadlineExceeded):
            await made.client.generate(
                token_ids=token_ids, max_tokens=ENDLESS - 4000, ignore_eos=True, timeout=0.2
            )
        await until(made.is_empty)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_closed_connection_frees_what_the_request_held(
    tmp_path: Path, where: str, stream: bool
) -> None:
    """A step takes 10 ms: what is left of the request would take minutes."""
    async with service(tmp_path, InstantStages(0.01)) as made, AsyncExitStack() as stack:
        if where == "queue":
            await stack.enter_async_context(occupied(made, SLOTS))
        prompt = [40] * (4000 if where == "prefill" else 1)
        before = made.engine.stats()
        request = asyncio.ensure_future(made.complete(ENDLESS - 4000, prompt=prompt, stream=stream))
        await until(lambda: made.frontend.num_requests > len_of(before))
        await asyncio.sleep(0.1)
        stats = made.engine.stats()
        assert (stats.waiting_requests, stats.running_requests) == (
            (1, SLOTS) if where == "queue" else (0, 1)
        )
        request.cancel()
        await until(lambda: made.frontend.num_requests == len_of(before), 1.0)
        if where != "queue":
            await until(made.is_empty, 1.0)


async def test_a_deadline_in_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async with service(tmp_path, InstantStages(STEP_SECONDS)) as made:
        response = await made.complete(ENDLESS, stream=True, timeout=0.3)
        events = response.text.strip().split("\n\n")
        assert response.status_code == 200 and len(events) > 10
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["type"] == "timeout_error"
        await until(made.is_empty)


@pytest.mark.parametrize("seconds", [0, -1, 3601, 1e300])
async def test_what_is_no_deadline_is_refused(tmp_path: Path, seconds: float) -> None:
    async with service(tmp_path, InstantStages(STEP_SECONDS)) as made:
        response = await made.complete(1, timeout=seconds)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "timeout"


def open_silent(port: int) -> socket.socket:
    """A client of REST that asks for a long stream and reads nothing of it."""
    body = json.dumps(
        {
            **{"prompt": "a", "max_tokens": TOKENS_EACH, "n": CHOICES, "logprobs": 20},
            **{"stream": True, "ignore_eos": True},
        }
    ).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    return client


async def seconds_of(work: Callable[[], Awaitable[object]]) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await work()
    return loop.time() - started


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SLOW_READER_SECONDS", SLOW_READER_SECONDS)


@pytest.mark.quiet
@pytest.mark.usefixtures("impatient")
async def test_a_rest_client_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    """Its answer is computed to the end, which gives slot and blocks back; then it is cut off."""
    async with service(tmp_path, InstantStages(0.0, num_logprobs=20), 2 * CHOICES) as made:
        with open_silent(made.port) as client:
            await until(lambda: made.engine.stats().running_requests)
            beside = await seconds_of(lambda: made.complete(200))
            assert beside < SLOW_READER_SECONDS / 2, "it has waited for who does not read"
            await until(made.is_empty, 20)
            assert made.frontend.num_requests == 1, "it has been sent more than fits"
            await until(lambda: not made.frontend.num_requests, 5 * SLOW_READER_SECONDS)
            client.settimeout(5)
            with pytest.raises(OSError, match=r"reset|timed out"):
                while client.recv(1 << 20):
                    pass
                raise OSError("the stream was complete, or closed without a reset")


@pytest.mark.quiet
@pytest.mark.usefixtures("impatient")
async def test_a_grpc_client_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    async with service(tmp_path, InstantStages(0.0, num_logprobs=20), 2 * CHOICES) as made:
        request = inference_pb2.GenerateRequest(text="a", n=CHOICES)
        request.stop.max_tokens, request.stop.ignore_eos = TOKENS_EACH, True
        request.sampling.num_logprobs = 20
        # Else the client's library takes megabytes before anybody reads them.
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(made.grpc_address, options) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
            await call.read()
            alone = await seconds_of(lambda: made.complete(200))
            assert alone < 3
            await until(made.is_empty, 20)
            await until(lambda: not made.frontend.num_requests, 5 * SLOW_READER_SECONDS)
            with pytest.raises(grpc.aio.AioRpcError, match="has not read its stream"):
                while await call.read():
                    pass
