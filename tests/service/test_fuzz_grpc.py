"""Services after thousands of calls whose messages are noise, damaged or absurd: every call is
answered with a typed error or served, nothing is raised inside, nothing is left, and the next
valid call is answered."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from front_doors import FakeGateway
from google.protobuf.message import Message

from gateway.grpc_server.server import create_inference_server
from services.control.membership import Membership
from services.control.server import control_server
from services.control.service import ControlService
from services.rpc import RpcServer, create_channel
from services.topology.facts import MeshShape
from services.topology.placement import NodeDevices, place
from stage_worker.service import SERVICE_NAME, add_to_server
from stagemesh.v1 import (
    control_pb2,
    inference_pb2,
    stage_worker_pb2,
    step_pb2,
    topology_pb2,
)
from tests.mutation import mutants
from tests.service.odd_rank import STORM_IS_OVER
from tests.service.worker_stage import stage

REPOSITORY = str(Path(__file__).resolve().parents[2])
CASES = 10_000
WORKERS = 5
AT_A_TIME = 24
CALL_SECONDS = 5.0
STORM_SECONDS = 60.0
MAX_GROWTH_BYTES = 64 << 20
"""Of this process, which is client and service: far below one message that was taken at its
word."""
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}


def raw(data: bytes) -> bytes:
    return data


async def call(channel: grpc.aio.Channel, method: str, data: bytes, *, streams: bool) -> None:
    """One call with these bytes; fails for an answer that no service of ours gives."""
    try:
        if streams:
            stream = channel.unary_stream(method, raw, raw)(data, timeout=CALL_SECONDS)
            async for _ in stream:
                pass
        else:
            await channel.unary_unary(method, raw, raw)(data, timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        assert error.code() in TYPED, (method, data, error)


async def storm(
    channel: grpc.aio.Channel,
    methods: Mapping[str, Sequence[Message]],
    streaming: Sequence[str],
    count: int = CASES,
    seed: int = 0,
) -> None:
    """So many calls over all methods, `AT_A_TIME`."""
    share = count // len(methods) + 1
    cases = iter(
        [
            (method, data)
            for index, (method, messages) in enumerate(methods.items())
            for data in mutants(messages, share, seed=100 * seed + index)
        ]
    )

    async def work() -> None:
        for method, data in cases:
            await call(channel, method, data, streams=method in streaming)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_A_TIME):
            tasks.create_task(work())


@asynccontextmanager
async def unharmed(
    server: RpcServer, valid: tuple[str, Message], caplog: pytest.LogCaptureFixture
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the server. At the end the valid call must be answered, without an
    error in the log, a task that is left, or memory that has been taken."""
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with create_channel(f"127.0.0.1:{port}") as channel:
            method, request = valid
            ask = channel.unary_unary(method, raw, raw)
            await ask(request.SerializeToString(), timeout=CALL_SECONDS)
            tasks, before = len(asyncio.all_tasks()), max_rss()
            yield channel
            await ask(request.SerializeToString(), timeout=CALL_SECONDS)
            async with asyncio.timeout(CALL_SECONDS):
                while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110 (gRPC's end later)
                    await asyncio.sleep(0.05)
            assert max_rss() - before < MAX_GROWTH_BYTES
    finally:
        await server.stop(grace_seconds=0)
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not wrong, [record.getMessage() for record in wrong[:5]]


def max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_the_control_service(caplog: pytest.LogCaptureFixture) -> None:
    shape = MeshShape(1, 2, 1, (1, 1))
    fact = topology_pb2.FingerprintField(name="torch", value="1")
    fingerprint = topology_pb2.Fingerprint(digest="d", fields=[fact])
    placements = place(shape, [NodeDevices(0, "head", "cpu", None)])
    control = ControlService(
        Membership(shape, placements, fingerprint, "cpu", nodes_planned=False, name="head")
    )
    join = control_pb2.JoinRequest(
        node="n",
        address="127.0.0.1:9",
        pid=1,
        device="cpu",
        num_devices=4,
        fingerprint=fingerprint,
        last_epoch=1,
        wanted=topology_pb2.Placement(pp_rank=1, tp_ranks=[0]),
    )
    status = stage_worker_pb2.StatusResponse(
        epoch=1, ranks=[stage_worker_pb2.RankStatus(tp_rank=0)], error=step_pb2.StageError()
    )
    service = "/stagemesh.v1.ControlService"
    methods = {
        f"{service}/Join": [join, control_pb2.JoinRequest()],
        f"{service}/Heartbeat": [
            control_pb2.HeartbeatRequest(worker_id="worker-1@head", status=status)
        ],
        f"{service}/Diagnose": [control_pb2.DiagnoseRequest(node="n", node_rank=1)],
        f"{service}/Echo": [control_pb2.EchoRequest(payload=b"x" * 100)],
    }
    valid = (f"{service}/Echo", control_pb2.EchoRequest(payload=b"x"))
    async with unharmed(control_server(control), valid, caplog) as channel:
        await storm(channel, methods, ())
    await control.close()


@pytest.mark.parametrize("round_", range(WORKERS))
async def test_a_stage_worker(
    round_: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank is a made-up one that believes everything. Several, because the epochs of a worker
    only go up: one call with a high one ends what the next calls may ask for."""
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    topology = topology_pb2.Topology(dp_size=1, tp_size=1, pp_size=1, pp_layer_partition=[2])
    service = f"/{SERVICE_NAME}"
    form = stage_worker_pb2.FormGroupRequest(
        epoch=3, store_address="127.0.0.1:9", topology=topology, timeout_seconds=1
    )
    plan = stage_worker_pb2.StagePlan(topology=topology, model_path="/m", num_blocks=3)
    methods = {
        f"{service}/FormGroup": [form],
        f"{service}/Load": [stage_worker_pb2.LoadRequest(plan=plan)],
        f"{service}/Status": [stage_worker_pb2.StatusRequest()],
    }
    valid = (f"{service}/Status", stage_worker_pb2.StatusRequest())
    async with stage() as running:
        server = RpcServer([SERVICE_NAME])
        add_to_server(running.worker, server.grpc_server)
        async with unharmed(server, valid, caplog) as channel:
            await storm(channel, methods, [f"{service}/Load"], CASES // WORKERS, round_)
        status = await running.status()
        assert status.state != stage_worker_pb2.COMPONENT_STATE_FAILED
        await running.load()


@pytest.mark.parametrize("noise", ["noise", "quiet"])
async def test_a_stage_worker_whose_rank_makes_no_sense(
    noise: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    command = (sys.executable, "-m", "tests.service.odd_rank", "1", str(CASES // 2), noise)
    async with stage(command=command) as running:
        await running.pid()

        async def is_over() -> bool:
            async with asyncio.timeout(CALL_SECONDS):
                status = await running.status()
            if noise == "noise":
                return status.error.reason == "RANK_FAILED"
            assert not status.HasField("error"), status
            return status.ranks[0].memory_peak_bytes == STORM_IS_OVER

        async with asyncio.timeout(STORM_SECONDS):
            while not await is_over():  # noqa: ASYNC110 - what is waited for is another process
                await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_the_inference_service(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    service = "/stagemesh.v1.InferenceService"
    request = inference_pb2.GenerateRequest(
        text="hello",
        n=2,
        request_id="r",
        sampling=step_pb2.SamplingParams(
            temperature=0.5, top_p=0.5, seed=1, logit_bias={1: 1.0}, num_logprobs=2
        ),
        stop=inference_pb2.StopConditions(max_tokens=2, stop=["x"], stop_token_ids=[1]),
    )
    turn = inference_pb2.ChatMessage(role="user", content="hello")
    chat = inference_pb2.ChatPrompt(messages=[turn])
    tokens = inference_pb2.TokenPrompt(token_ids=[5, 6])
    methods = {
        f"{service}/Generate": [
            request,
            inference_pb2.GenerateRequest(chat=chat, stop=request.stop),
            inference_pb2.GenerateRequest(tokens=tokens, stop=request.stop),
        ],
        f"{service}/Tokenize": [
            inference_pb2.TokenizeRequest(text="hello", return_token_strs=True),
            inference_pb2.TokenizeRequest(chat=chat),
        ],
        f"{service}/Detokenize": [inference_pb2.DetokenizeRequest(token_ids=[5, 6])],
        f"{service}/ListModels": [inference_pb2.ListModelsRequest()],
    }
    valid = (f"{service}/Tokenize", inference_pb2.TokenizeRequest(text="hello"))
    server = create_inference_server(gateway.frontend)
    async with unharmed(server, valid, caplog) as channel:
        await storm(channel, methods, [f"{service}/Generate"])
