"""A rank's reader and what it answers to a plan, in this process, over a real socket pair."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist

from services.errors import StageFailed
from services.topology.checkpoint import inspect_checkpoint
from services.topology.facts import MeshShape
from services.topology.families import read_model_facts
from services.topology.fingerprint import build_fingerprint
from services.topology.wire import shape_from_proto
from stage_worker import ipc, stage_model
from stage_worker import rank_loop as rank_loop_module
from stage_worker.clock import StepClock
from stage_worker.data_plane import DataPlane
from stage_worker.pending_receive import NOTHING, PeerLost, PendingReceive
from stage_worker.rank_arguments import RankArguments
from stage_worker.rank_loop import RankLoop
from stage_worker.step_results import MAX_WAITING_RESULTS, DoneStep
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2, topology_pb2
from tests.stage_chain import make_runner, stage_plan
from tests.tiny_models import make_tiny_llama

ARGUMENTS = RankArguments(
    fd=-1,
    parent_pid=0,
    host="127.0.0.1",
    device="cpu",
    device_index=0,
    num_threads=1,
    pp_rank=0,
    tp_rank=0,
    step_timeout_seconds=7.5,
)
DEADLINE_SECONDS = 20.0


class Worker:
    """The worker's end of the socket, and the loop behind the other one."""

    def __init__(self, sock: socket.socket, loop: RankLoop) -> None:
        self.sock, self.loop = sock, loop
        self.stream = sock.makefile("rb")

    def send(self, command: rank_pb2.RankCommand) -> None:
        self.sock.sendall(ipc.encode(command))

    def event(self) -> rank_pb2.RankEvent:
        data = ipc.read_frame(self.stream)
        assert data is not None
        return rank_pb2.RankEvent.FromString(data)


@contextmanager
def rank_loop() -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_SECONDS)
    with ours, theirs:
        yield Worker(ours, RankLoop(ARGUMENTS, theirs))


@contextmanager
def reading(worker: Worker) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=worker.loop.read_commands)
    thread.start()
    yield thread
    worker.stream.close()
    worker.sock.close()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


def test_a_step_that_cannot_be_read_is_refused_and_the_reader_goes_on() -> None:
    with rank_loop() as worker, reading(worker):
        for body in (b"\x0a\x02\xff\xff", b"\xff"):
            worker.sock.sendall(struct.pack(">I", len(body)) + body)
            error = worker.event().error
            assert error.reason == "STAGE_FAILED"
            assert f"of {len(body)} bytes cannot be read" in error.message


def test_what_ends_the_reader_is_told_to_the_worker() -> None:
    """M9: a deaf rank whose heart beats would look healthy."""
    with rank_loop() as worker, reading(worker) as thread:
        worker.sock.sendall(struct.pack(">I", ipc.MAX_FRAME_BYTES + 1))
        error = worker.event().error
        assert "FrameError" in error.message
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def test_a_reset_ends_the_reader_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(stream: BinaryIO) -> bytes:
        raise ConnectionResetError

    monkeypatch.setattr(ipc, "read_frame", reset)
    with rank_loop() as worker:
        worker.loop.read_commands()
        worker.sock.settimeout(0)
        with pytest.raises(BlockingIOError):
            worker.sock.recv(1)


def test_waits_for_the_tensor_parallel_group_have_the_steps_time_out() -> None:
    with rank_loop() as worker:
        assert worker.loop._tensor_parallel.timeout_seconds == ARGUMENTS.step_timeout_seconds


class FakeRunner:
    max_num_batched_tokens = 8
    boundary_in = topology_pb2.BoundarySchema()


def step_of(num_tokens: int) -> rank_pb2.RankCommand:
    row = step_pb2.StepRow(token_ids=[1] * num_tokens)
    return rank_pb2.RankCommand(step=step_pb2.Step(step_id=1, rows=[row]))


def test_nothing_is_received_for_a_step_above_the_plans_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted = []

    def post(schema: topology_pb2.BoundarySchema, num_tokens: int) -> PendingReceive:
        posted.append(num_tokens)
        return NOTHING

    with rank_loop() as worker:
        monkeypatch.setattr(worker.loop, "_runner", FakeRunner())
        monkeypatch.setattr(worker.loop._plane, "post_receive", post)
        for num_tokens in (8, 9):
            worker.loop._post(step_of(num_tokens).step)
    assert posted == [8]


def test_a_receive_without_memory_is_the_ranks_own_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not `PEER_LOST`: that is an echo, and its cause would be looked for elsewhere."""

    def empty(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", empty)
    with rank_loop() as worker, reading(worker):
        monkeypatch.setattr(worker.loop, "_runner", FakeRunner())
        monkeypatch.setattr(worker.loop._plane, "_previous", 0)
        monkeypatch.setattr(
            FakeRunner,
            "boundary_in",
            topology_pb2.BoundarySchema(
                tensors=[topology_pb2.BoundaryTensor(trailing_shape=[4], dtype="float32")]
            ),
        )
        worker.send(step_of(3))
        error = worker.event().error
        assert error.reason == StageFailed.reason
        assert "no memory to receive 3 tokens: no room" in error.message


def test_a_receive_that_does_not_arrive_names_its_edge() -> None:
    """On an accelerator `work.wait` returns at once, and the device waits."""

    class Work:
        def wait(self, timeout: timedelta) -> None:
            self.timeout = timeout

    asked: list[float] = []

    def never(timeout_seconds: float) -> bool:
        asked.append(timeout_seconds)
        return False

    work = Work()
    receive = PendingReceive((torch.empty(1),), (work,), timedelta(seconds=3), "tokens", never)
    with pytest.raises(PeerLost, match="receiving tokens took more than 3 s"):
        receive.wait()
    assert asked == [3.0] and work.timeout == timedelta(seconds=3)


def test_more_sampled_tokens_than_query_tokens_are_not_received_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rank_loop() as worker:
        monkeypatch.setattr(worker.loop, "_runner", FakeRunner())
        monkeypatch.setattr(
            worker.loop._plane, "post_token_receive", lambda _: pytest.fail("was received for")
        )
        step = step_of(2).step
        step.returns_tokens, step.rows[0].num_sampled = True, 3
        assert worker.loop._post(step).tokens is NOTHING


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> stage_worker_pb2.StagePlan:
    path: Path = make_tiny_llama(tmp_path_factory.mktemp("rank-loop") / "tiny", tied=True)
    facts = inspect_checkpoint(path)
    plan = stage_plan(path, [read_model_facts(path).num_hidden_layers], 0)
    shape = shape_from_proto(plan.topology)
    plan.fingerprint.CopyFrom(
        build_fingerprint(facts, shape, dtype=plan.dtype, block_size=plan.block_size)
    )
    return plan


def load(worker: Worker, plan: stage_worker_pb2.StagePlan) -> rank_pb2.RankEvent:
    """The first event that is no progress."""
    worker.send(rank_pb2.RankCommand(load=plan))
    worker.send(rank_pb2.RankCommand(stop=rank_pb2.RankStop()))
    worker.loop.run()
    while (event := worker.event()).WhichOneof("event") == "load_progress":
        pass
    return event


def test_a_plan_is_acknowledged_with_its_digest(plan: stage_worker_pb2.StagePlan) -> None:
    with rank_loop() as worker, reading(worker):
        event = load(worker, plan)
        assert event.loaded.fingerprint_digest == plan.fingerprint.digest != ""


def test_a_plan_of_another_model_is_not_acknowledged(plan: stage_worker_pb2.StagePlan) -> None:
    other = stage_worker_pb2.StagePlan()
    other.CopyFrom(plan)
    other.block_size *= 2  # which the fingerprint holds too
    with rank_loop() as worker, reading(worker):
        event = load(worker, other)
        assert event.error.reason == "FINGERPRINT_MISMATCH"


def test_only_who_compares_acknowledges(plan: stage_worker_pb2.StagePlan) -> None:
    runner = make_runner(plan)
    assert runner.apply_plan(plan, lambda done, total: None).fingerprint_digest == ""


def test_a_spare_loads_where_it_is_told_to_stand(plan: stage_worker_pb2.StagePlan) -> None:
    """In no group: it learns the size of its TP group from the plan. As another TP rank it holds
    other slices, so nothing is kept; at another stage it keeps and loads by difference."""
    wide = stage_worker_pb2.StagePlan()
    wide.CopyFrom(plan)
    wide.topology.tp_size, wide.num_blocks = 2, 0
    del wide.placement.tp_ranks[:]
    wide.placement.tp_ranks.extend((0, 1))
    own = inspect_checkpoint(Path(wide.model_path))
    wide.fingerprint.CopyFrom(
        build_fingerprint(
            own,
            shape_from_proto(wide.topology),
            dtype=wide.dtype,
            block_size=wide.block_size,
        )
    )
    with rank_loop() as worker, reading(worker):
        reports = []
        for tp_rank in (1, 0):
            there = rank_pb2.TakePlace(pp_rank=0, tp_rank=tp_rank)
            worker.send(rank_pb2.RankCommand(take_place=there))
            event = load(worker, wide)
            assert event.HasField("place_taken")
            while (event := worker.event()).WhichOneof("event") == "load_progress":
                pass
            reports.append(event.loaded)
        assert [report.tp_rank for report in reports] == [1, 0]
        assert {report.num_blocks for report in reports} == {0}
        assert reports[0].weight_bytes > 0


@pytest.mark.parametrize("own", [True, False])
def test_groups_form_at_the_store_that_is_named(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """S10: whatever store this rank has opened before."""
    used: list[dist.PrefixStore] = []

    def init_process_group(backend: str, *, store: dist.PrefixStore, **_: object) -> None:
        used.append(store)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    planes = [
        DataPlane("gloo", "127.0.0.1", torch.device("cpu"), DEADLINE_SECONDS) for _ in range(2)
    ]
    addresses = [plane.open_store() for plane in planes]
    address = addresses[0 if own else 1]
    planes[0].form(1, address, MeshShape(1, 1, 1, (1,)), 0, 0, DEADLINE_SECONDS)
    (store,) = used
    assert store.underlying_store.port == int(address.rpartition(":")[2])


def test_arguments_survive_the_command_line() -> None:
    arguments = replace(ARGUMENTS, fd=5, device="cuda")
    assert RankArguments.parse(arguments.to_argv()) == arguments


def done(step_id: int) -> DoneStep:
    """A step that took as many nanoseconds as its id says."""
    return DoneStep(1, step_id, (), StepClock(0, 0, step_id, 0, 0, 0, 0))


def results_of(worker: Worker) -> list[int]:
    """Step ids that one event answers for."""
    result = worker.event().result
    return [*range(result.step_id - len(result.earlier_clocks), result.step_id + 1)]


def test_results_that_only_have_clocks_share_a_message_while_there_is_more_to_do() -> None:
    with rank_loop() as worker:
        worker.loop._next = rank_pb2.RankCommand()  # Something to go on with.
        for step_id in range(1, MAX_WAITING_RESULTS + 2):
            worker.loop._answer(done(step_id), may_wait=True)
        result = worker.event().result
        assert result.step_id == result.clock.compute_ns == MAX_WAITING_RESULTS + 1
        clocks = [clock.compute_ns for clock in result.earlier_clocks]
        assert clocks == list(range(1, MAX_WAITING_RESULTS + 1))


def test_no_result_waits_for_nothing() -> None:
    with rank_loop() as worker:
        worker.loop._answer(done(1), may_wait=True)  # Nothing is queued.
        assert results_of(worker) == [1]
        worker.loop._next = rank_pb2.RankCommand()
        worker.loop._answer(done(2), may_wait=False)
        assert results_of(worker) == [2]
        worker.loop._answer(done(3), may_wait=True)
        worker.loop.send_alive()
        assert results_of(worker) == [3]


def test_a_failure_comes_after_the_results_before_it() -> None:
    with rank_loop() as worker:
        worker.loop._next = rank_pb2.RankCommand()
        worker.loop._answer(done(1), may_wait=True)
        worker.loop._fail(StageFailed("broken"), "STAGE_FAILED", 2)
        assert results_of(worker) == [1]
        assert worker.event().error.message == "broken"


def test_the_same_plan_again_reads_nothing(
    plan: stage_worker_pb2.StagePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recovery: weights and caches stay."""
    with rank_loop() as worker, reading(worker):
        load(worker, plan)
        monkeypatch.setattr(
            rank_loop_module, "inspect_checkpoint", lambda _: pytest.fail("was read")
        )
        monkeypatch.setattr(stage_model, "WeightReader", lambda *_: pytest.fail("was read"))
        layers = worker.loop._runner
        event = load(worker, plan)
        assert event.loaded.fingerprint_digest == plan.fingerprint.digest
        assert worker.loop._runner is layers


def test_a_rank_that_leaves_drops_what_is_queued(plan: stage_worker_pb2.StagePlan) -> None:
    """Its neighbours may be gone: no step of the old epoch is tried, and none of it is told."""
    with rank_loop() as worker, reading(worker):
        load(worker, plan)
        worker.loop._epoch = 1
        for step_id in (1, 2):
            worker.send(rank_pb2.RankCommand(step=step_pb2.Step(epoch=1, step_id=step_id, rows=[])))
        worker.send(rank_pb2.RankCommand(leave_group=rank_pb2.LeaveGroup()))
        while not worker.loop._failed:  # The reader sees the command before its turn.
            time.sleep(0.01)
        worker.send(rank_pb2.RankCommand(stop=rank_pb2.RankStop()))
        worker.loop.run()
        assert worker.event().WhichOneof("event") == "group_left"


def test_a_late_step_of_an_older_epoch_is_dropped(plan: stage_worker_pb2.StagePlan) -> None:
    """Of a newer one it is a failure: this rank has missed something."""
    with rank_loop() as worker, reading(worker):
        load(worker, plan)
        worker.loop._epoch = 2
        for epoch in (1, 3):
            worker.send(rank_pb2.RankCommand(step=step_pb2.Step(epoch=epoch, step_id=9)))
        worker.send(rank_pb2.RankCommand(stop=rank_pb2.RankStop()))
        worker.loop.run()
        assert "step 9 is of epoch 3" in worker.event().error.message
