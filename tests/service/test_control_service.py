"""Diagnose and Echo over real gRPC, and a doctor's questions to whatever listens on a port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from services.cli import main
from services.config import ServeConfig
from services.control import worker_reports
from services.control.diagnosis import MAX_ECHO_BYTES
from services.control.membership import Membership
from services.control.progress import ProgressTable, StageProgress
from services.control.server import CONTROL_MAX_REQUEST_BYTES, MAX_DOCTOR_CALLS, control_server
from services.control.service import ControlService
from services.doctor import examine
from services.doctor.findings import Check, Outcome
from services.doctor.gather import gather_node
from services.doctor.head import HeadFacts, ask_head
from services.doctor.mesh_checks import check_head
from services.errors import BodyTooLarge, InvalidRequest, Saturated
from services.rpc.channel import create_channel
from services.rpc.errors import error_from_rpc
from services.rpc.reach import Obstacle, Unanswered
from services.rpc.server import RpcServer
from services.topology.facts import MeshShape
from services.topology.fingerprint import stated_fingerprint
from services.topology.placement import NodeDevices, place
from stage_worker.service import SERVICE_NAME, StageWorker, add_to_server
from stagemesh.v1 import control_pb2, control_pb2_grpc, topology_pb2
from tests.unit.topology.model_directory import ModelDirectory

SHAPE = MeshShape(dp_size=1, tp_size=1, pp_size=2, pp_layer_partition=(3, 2))
FINGERPRINT = stated_fingerprint(SHAPE.pp_layer_partition, tp_size=1, pp_size=2)
TIMEOUT_SECONDS = 5.0


class ScriptedMesh:
    """What the head would drive: stages that answer when told to, at a clock of the test's."""

    def __init__(self) -> None:
        self.table = ProgressTable(0, range(SHAPE.pp_size))
        self.now = 0.0
        self.reason = ""

    def give(self, step_id: int) -> None:
        """To every stage, at time 0."""
        for pp_rank in range(SHAPE.pp_size):
            self.table.given(pp_rank, step_id, now=0.0)

    def progress(self) -> Sequence[StageProgress]:
        return self.table.stages(self.now)

    def not_ready_reason(self) -> str:
        return self.reason


@contextlib.asynccontextmanager
async def served(server: RpcServer) -> AsyncIterator[int]:
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace_seconds=0.0)


@contextlib.asynccontextmanager
async def head(
    mesh: ScriptedMesh | None = None, model_path: Path = Path("/no/such/model")
) -> AsyncIterator[tuple[ControlService, int]]:
    placements = place(SHAPE, [NodeDevices(0, "head", "cpu", None)])
    control = ControlService(Membership(SHAPE, placements, FINGERPRINT, "cpu", nodes_planned=False))
    if mesh is not None:
        control.tell_of(mesh, model_path)
    async with served(control_server(control)) as port:
        yield control, port
    await control.close()


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[int]:
    """A stage worker's service without ranks."""
    server = RpcServer([SERVICE_NAME])
    add_to_server(StageWorker(), server.grpc_server)
    async with served(server) as port:
        yield port


def join(control: ControlService, port: int, pp_rank: int) -> None:
    request = control_pb2.JoinRequest(
        node=socket.gethostname(),
        address=f"127.0.0.1:{port}",
        pid=1,
        device="cpu",
        fingerprint=FINGERPRINT,
        wanted=topology_pb2.Placement(pp_rank=pp_rank),
    )
    control.membership.join(request, asyncio.get_running_loop().time())


async def ask(port: int, timeout_seconds: float = TIMEOUT_SECONDS) -> HeadFacts | Unanswered:
    return await ask_head("127.0.0.1", port, 0, timeout_seconds)


async def heard(port: int) -> HeadFacts:
    found = await ask(port)
    assert isinstance(found, HeadFacts), found
    return found


async def test_the_head_tells_what_it_knows() -> None:
    mesh = ScriptedMesh()
    mesh.reason = "waiting for stage 1 to join"
    async with head(mesh) as (control, port), worker() as worker_port:
        join(control, worker_port, 0)
        found = await heard(port)
    answer = found.answer
    assert answer.node == socket.gethostname()
    assert not answer.is_doctor
    assert answer.fingerprint == FINGERPRINT
    assert (answer.topology.pp_size, answer.device) == (2, "cpu")
    assert {field.name for field in answer.versions} > {"stagemesh", "python", "torch"}
    assert list(answer.missing) == ["stage 1"]
    assert answer.not_ready_reason == mesh.reason
    (member,) = answer.members
    assert (member.address, member.pid) == (f"127.0.0.1:{worker_port}", 1)
    assert 0 < member.round_trip_seconds < 1
    assert member.HasField("status")
    assert member.silent_seconds < 5
    assert [(stage.pp_rank, stage.sent_step_id) for stage in answer.progress] == [(0, 0), (1, 0)]
    (peer,) = found.peers
    assert peer.round_trip_seconds is not None and 0 < peer.round_trip_seconds < 1


async def test_links_and_clocks_are_measured() -> None:
    async with head() as (_, port):
        link = (await heard(port)).link
    assert 0 < link.round_trip_seconds < 1
    assert link.bytes_per_second > 1 << 20
    # It is one machine's clock.
    assert abs(link.clock_offset_seconds) <= link.clock_uncertainty_seconds + 0.05


async def test_a_step_that_hangs_is_explained_by_the_head() -> None:
    mesh = ScriptedMesh()
    mesh.give(1)
    mesh.table.answered(0, 1, now=0.5)
    mesh.now = 13.0
    async with head(mesh) as (control, port), worker() as first, worker() as second:
        join(control, first, 0)
        join(control, second, 1)
        found = await heard(port)
    config = ServeConfig(model="m", pipeline_parallel_size=2)
    findings = check_head(found, config, gather_node(), FINGERPRINT, "cpu")
    (hang,) = [finding for finding in findings if finding.outcome is Outcome.FAILED]
    assert hang.check is Check.PROGRESS
    assert hang.what == (
        "stage 1 has been silent for 13.0 s: it has done no step yet and holds step 1, whose "
        "activations stage 0 has sent: it computes, does not run, or they do not arrive"
    )


async def test_a_worker_that_does_not_answer_is_told_and_holds_nobody_up() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        async with head() as (control, port):
            join(control, deaf.getsockname()[1], 0)
            started = time.monotonic()
            found = await ask_head("127.0.0.1", port, 0, 4.0)
    assert time.monotonic() - started < 10
    assert isinstance(found, HeadFacts)
    (member,) = found.answer.members
    assert not member.HasField("status") and not member.HasField("round_trip_seconds")
    assert found.peers[0].round_trip_seconds is None


async def test_too_many_bytes_are_not_sent_back() -> None:
    async with head() as (_, port):
        channel = create_channel(f"127.0.0.1:{port}")
        stub = control_pb2_grpc.ControlServiceStub(channel)
        payload = bytes(MAX_ECHO_BYTES)
        answer = await stub.Echo(control_pb2.EchoRequest(payload=payload), timeout=5)
        assert answer.payload == payload
        assert abs(answer.clock_seconds - time.time()) < 5
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Echo(control_pb2.EchoRequest(payload=payload + b"x"), timeout=5)
        error = error_from_rpc(refusal.value)
        assert isinstance(error, InvalidRequest) and error.param == "payload"
        far_too_many = bytes(CONTROL_MAX_REQUEST_BYTES)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Echo(control_pb2.EchoRequest(payload=far_too_many), timeout=5)
        assert isinstance(error_from_rpc(refusal.value), BodyTooLarge)
        await channel.close()


async def test_a_doctor_with_little_time_is_not_told_that_the_head_hangs() -> None:
    """The worker hangs; half of the time is for the answer that says so."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        async with head() as (control, port):
            join(control, deaf.getsockname()[1], 0)
            found = await ask_head("127.0.0.1", port, 0, 1.0)
    assert isinstance(found, HeadFacts)
    assert not found.answer.members[0].HasField("status")


async def test_many_doctors_ask_each_worker_once_and_leave_room_for_workers() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        deaf.setblocking(False)
        async with head() as (control, port):
            join(control, deaf.getsockname()[1], 0)
            channel = create_channel(f"127.0.0.1:{port}")
            stub = control_pb2_grpc.ControlServiceStub(channel)
            asked = [
                stub.Diagnose(control_pb2.DiagnoseRequest(node_rank=rank), timeout=10)
                for rank in range(MAX_DOCTOR_CALLS)
            ]
            async with asyncio.timeout(5):
                while control._doctor_calls.running < MAX_DOCTOR_CALLS:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Echo(control_pb2.EchoRequest(), timeout=5)
            refusal = error_from_rpc(caught.value)
            assert isinstance(refusal, Saturated), refusal
            assert "16 calls of doctors are being answered here" in refusal.message
            beat = await stub.Heartbeat(control_pb2.HeartbeatRequest(worker_id="?"), timeout=5)
            assert beat.leave
            answers = [await one for one in asked]
            assert [len(answer.members) for answer in answers] == [1] * MAX_DOCTOR_CALLS
            # Their places are free again, also after a call that was refused.
            for _ in range(2 * MAX_DOCTOR_CALLS):
                await stub.Echo(control_pb2.EchoRequest(), timeout=5)
            await channel.close()
        connections = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.accept()[0].close()
                connections += 1
    assert connections == 1


def running_coroutines() -> set[str]:
    return {getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()}


async def test_questions_to_workers_end_with_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_reports, "WORKER_TIMEOUT_SECONDS", 4 * TIMEOUT_SECONDS)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        async with head() as (control, port):
            join(control, deaf.getsockname()[1], 0)
            channel = create_channel(f"127.0.0.1:{port}")
            stub = control_pb2_grpc.ControlServiceStub(channel)
            # Longer than this doctor waits, the worker is asked.
            doctor = stub.Diagnose(control_pb2.DiagnoseRequest(), timeout=TIMEOUT_SECONDS)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while "_ask" not in running_coroutines():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert control._doctor_calls.running == 1
                doctor.cancel()
                await channel.close()
                # It has noticed that.
                while control._doctor_calls.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert "_ask" in running_coroutines()
        assert "_ask" not in running_coroutines()


async def test_names_that_do_not_resolve() -> None:
    found = await ask_head("no.such.host.invalid", 29550, 0, TIMEOUT_SECONDS)
    assert isinstance(found, Unanswered) and found.obstacle is Obstacle.NAME


async def test_a_port_where_nothing_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = await ask(bound.getsockname()[1])
    assert isinstance(found, Unanswered) and found.obstacle is Obstacle.REFUSED


async def test_a_port_of_another_protocol() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    async with server:
        found = await ask(server.sockets[0].getsockname()[1])
    assert isinstance(found, Unanswered) and found.obstacle is Obstacle.NOT_GRPC


async def test_a_grpc_port_of_another_service() -> None:
    async with worker() as port:
        found = await ask(port)
    assert isinstance(found, Unanswered) and found.obstacle is Obstacle.OTHER_SERVICE


async def test_a_head_that_is_stopped() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        found = await ask(deaf.getsockname()[1], timeout_seconds=0.5)
    assert isinstance(found, Unanswered) and found.obstacle is Obstacle.HUNG


async def test_an_address_that_nobody_answers_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    found = await ask_head("127.0.0.1", 29550, 0, 0.1)
    assert isinstance(found, Unanswered) and found.obstacle is Obstacle.SILENCE


async def doctor(
    capfd: pytest.CaptureFixture[str], port: int, *flags: str
) -> tuple[int, dict[str, list[str]]]:
    """The command's exit code, and what failed by check."""
    own = ("--master-port", str(port), "--port", "0", "--grpc-port", "0", "--json")
    code = await asyncio.to_thread(main, ["doctor", *flags, *own])
    document = json.loads(capfd.readouterr().out)
    failed: dict[str, list[str]] = {}
    for finding in document["findings"]:
        if finding["outcome"] == "failed":
            failed.setdefault(finding["check"], []).append(finding["what"])
    assert (document["mesh"] is None) == ("head" in failed)
    return code, failed


async def test_the_command_asks_the_head(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = ScriptedMesh()
    async with head(mesh) as (control, port), worker() as first, worker() as second:
        join(control, first, 0)
        join(control, second, 1)
        assert await doctor(capfd, port) == (0, {})
        mesh.give(1)
        mesh.now = 20.0
        code, failed = await doctor(capfd, port)
    assert code == 1
    assert list(failed) == ["progress"]
    assert "stage 0 has been silent for 20.0 s" in failed["progress"][0]


async def test_who_looks_from_another_node_needs_no_port_of_its_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = dataclasses.replace(gather_node(), host="elsewhere")
    monkeypatch.setattr(examine, "gather_node", lambda: elsewhere)
    async with head(ScriptedMesh()) as (control, port), worker() as first, worker() as second:
        join(control, first, 0)
        join(control, second, 1)
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = ("--port", str(other.getsockname()[1]), "--grpc-port", "0")
            looks = ["doctor", "--master-port", str(port), *taken, "--json"]
            assert await asyncio.to_thread(main, looks) == 0
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert [f["what"] for f in findings if f["check"] == "ports"] == [
        "looking at another node's mesh takes no port here"
    ]


async def test_the_command_names_all_that_keeps_a_worker_out(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = ModelDirectory(tmp_path / "tiny")
    model.write_single()
    async with head() as (_, port):
        code, failed = await doctor(
            capfd,
            port,
            *(str(model.path), "-tp", "2", "-pp", "3", "--cpu-devices", "8"),
            *("--nnodes", "2", "--node-rank", "1", "--headless", "--pp-layer-partition", "1,1,1"),
        )
    assert code == 1
    assert list(failed) == ["join"]
    differing = [what.partition(" differs")[0] for what in failed["join"]]
    assert differing == ["tp_size", "pp_size", "pp_layer_partition"]
    assert "the head has 3,2 and node 1" in failed["join"][2]


async def test_a_public_address_is_not_asked(capfd: pytest.CaptureFixture[str]) -> None:
    code, failed = await doctor(capfd, 29550, "--master-addr", "8.8.8.8")
    assert code == 1
    assert "is a public address" in failed["head"][0]


async def test_every_byte_of_the_weights_is_compared(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here, there = ModelDirectory(tmp_path / "here"), ModelDirectory(tmp_path / "there")
    for model in (here, there):
        model.write_single()
        (model.path / "tokenizer.json").write_text("{}")
    flags = (str(here.path), "--deep")
    async with head(ScriptedMesh(), there.path) as (_, port):
        _, failed = await doctor(capfd, port, *flags)
    assert "weights" not in failed
    # Same headers, same sizes, another byte: only a full hash sees it.
    weights = there.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    async with head(ScriptedMesh(), there.path) as (_, port):
        code, failed = await doctor(capfd, port, *flags)
    assert code == 1
    assert "model.safetensors differs" in failed["weights"][0]
    async with head() as (_, port):
        _, failed = await doctor(capfd, port, *flags)
    assert "there is no model here to hash" in failed["weights"][0]
