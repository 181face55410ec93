"""A rank after thousands of steps that are noise, damaged or absurd: each is refused or run, the
process stays, and a right step gives its token."""

from __future__ import annotations

import io
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from services.errors import ConfigError
from services.topology.checkpoint import without_weights
from services.topology.families import read_model_facts
from services.topology.fingerprint import build_fingerprint
from services.topology.wire import shape_from_proto
from stage_worker import ipc
from stage_worker.plan_sizes import check_sizes
from stage_worker.rank_arguments import RankArguments
from stage_worker.rank_loop import RankLoop
from stage_worker.simulated.tokens import expected_tokens
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2
from tests.mutation import mutants, mutated_message
from tests.simulated_mesh import VOCAB_SIZE, make_model
from tests.stage_chain import stage_plan

CASES = 10_000
LOADS = 500
MAX_GROWTH_BYTES = 256 << 20
"""One table or cache that was taken at its word is larger."""
MOST_CPU_SECONDS = 1.0
"""For one step, whatever it says; of this thread, as others may have the machine."""
MOST_SECONDS = 20.0
"""For one that waits."""
ARGUMENTS = RankArguments(
    fd=-1,
    parent_pid=0,
    host="127.0.0.1",
    device="sim",
    device_index=0,
    num_threads=1,
    pp_rank=0,
    tp_rank=0,
    step_timeout_seconds=5.0,
)
PROMPT = [3, 1, 4, 1, 5]
SAMPLING = step_pb2.SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    seed=1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={3: 1.0},
    num_logprobs=2,
)
FIRST = step_pb2.Step(
    step_id=1,
    returns_tokens=True,
    starts=[
        step_pb2.SlotStart(
            slot=0, sampling=SAMPLING, prompt_length=len(PROMPT), history_token_ids=PROMPT
        )
    ],
    rows=[step_pb2.StepRow(token_ids=PROMPT, new_block_ids=[0], num_sampled=1)],
)
REFERENCE = step_pb2.QueryReference(reference=step_pb2.TokenReference(step_id=1))
SECOND = step_pb2.Step(
    step_id=2,
    rows=[
        step_pb2.StepRow(
            position=len(PROMPT),
            token_ids=[0],
            references=[REFERENCE],
            new_block_ids=[1],
            num_sampled=1,
        )
    ],
)


class Rank:
    """A rank's loop in this process, and the worker's end of its socket."""

    def __init__(self, loop: RankLoop, sock: socket.socket) -> None:
        self._loop, self._sock = loop, sock
        self._stream = sock.makefile("rb")

    def run(self, *bodies: bytes) -> list[rank_pb2.RankEvent]:
        """What the rank says to these commands, and that it comes to an end with them."""
        stop = rank_pb2.RankCommand(stop=rank_pb2.RankStop()).SerializeToString()
        for body in (*bodies, stop):
            self._sock.sendall(struct.pack(">I", len(body)) + body)
        started, cpu_started = time.monotonic(), time.thread_time()
        self._loop.run()
        assert time.thread_time() - cpu_started < MOST_CPU_SECONDS, bodies
        assert time.monotonic() - started < MOST_SECONDS, bodies
        # It answers before it comes to the next command, so all of it is here.
        self._loop._emit(rank_pb2.RankEvent(alive=rank_pb2.RankAlive()))
        events = []
        while (data := ipc.read_frame(self._stream)) is not None:
            event = rank_pb2.RankEvent.FromString(data)
            if event.WhichOneof("event") == "alive":
                break
            events.append(event)
        return events

    def forget(self) -> None:
        """As a new epoch does, whose groups would take longer than a step."""
        assert self._loop._runner is not None
        self._loop._runner.reset()
        self._loop._returned.clear()
        self._loop._last_step_id, self._loop._failed = 0, False


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    path = make_model(tmp_path_factory.mktemp("fuzz") / "model")
    with running_rank(path) as made:
        yield made


@contextmanager
def running_rank(path: Path) -> Iterator[Rank]:
    plan = stage_plan(path, [read_model_facts(path).num_hidden_layers], 0)
    shape = shape_from_proto(plan.topology)
    plan.fingerprint.CopyFrom(
        build_fingerprint(
            without_weights(path), shape, dtype=plan.dtype, block_size=plan.block_size
        )
    )
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        loop = RankLoop(ARGUMENTS, theirs)
        reader = threading.Thread(target=loop.read_commands)
        reader.start()
        made = Rank(loop, ours)
        (loaded,) = [
            event
            for event in made.run(rank_pb2.RankCommand(load=plan).SerializeToString())
            if event.HasField("loaded") or event.HasField("error")
        ]
        assert loaded.HasField("loaded"), loaded
        yield made
        ours.shutdown(socket.SHUT_RDWR)  # Its stream holds it open.
        reader.join(20)
        assert not reader.is_alive()


def max_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def body(step: step_pb2.Step) -> bytes:
    return rank_pb2.RankCommand(step=step).SerializeToString()


def assert_works(rank: Rank) -> None:
    rank.forget()
    first, second = rank.run(body(FIRST), body(SECOND))
    tokens = [*first.result.rows[0].token_ids, *second.result.rows[0].token_ids]
    assert tokens == expected_tokens(PROMPT, 2, VOCAB_SIZE)


def bodies_of(data: bytes) -> list[bytes]:
    """What a stage worker passes on; it refuses the rest by itself (`test_fuzz_grpc`)."""
    try:
        stream = io.BytesIO(ipc.step_frames(data))
    except ipc.FrameError:
        return []
    return list(iter(partial(ipc.read_frame, stream), None))


def test_a_rank_survives_any_step(rank: Rank) -> None:
    assert_works(rank)
    generator = random.Random(1)
    requests = [stage_worker_pb2.ExecuteRequest(step=step) for step in (FIRST, SECOND)]
    done = {"result": 0, "error": 0}
    num_cases = 0
    for bodies in filter(None, map(bodies_of, mutants(requests, 3 * CASES // 2, seed=1))):
        num_cases += 1
        rank.forget()
        before = [body(FIRST)] if generator.random() < 0.5 else []
        for event in rank.run(*before, *bodies):
            done[event.WhichOneof("event") or ""] += 1
    assert num_cases >= CASES
    assert min(done.values()) > CASES / 10
    assert_works(rank)


def test_a_rank_survives_any_plan(rank: Rank) -> None:
    """Sizes are looked at before anything is allocated for them."""
    runner = rank._loop._runner
    assert runner is not None
    plan, before = runner._plan, max_rss_bytes()
    done: Counter[str] = Counter()
    generator = random.Random(3)
    for _ in range(LOADS):
        rank.forget()
        command = rank_pb2.RankCommand(load=mutated_message(generator, plan))
        done.update(
            event.WhichOneof("event") or "" for event in rank.run(command.SerializeToString())
        )
    assert done["loaded"] > LOADS / 20 and done["error"] > LOADS / 20
    assert max_rss_bytes() - before < MAX_GROWTH_BYTES
    rank.forget()
    (event,) = rank.run(rank_pb2.RankCommand(load=plan).SerializeToString())
    assert event.HasField("loaded")
    assert_works(rank)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 2**32 - 1}, "max_model_len is 4294967295"),
        ({"max_num_seqs": 2**20, "max_model_len": 2**20}, "lower --max-num-seqs"),
    ],
)
def test_sizes_that_no_rank_can_serve_are_named(change: dict[str, int], words: str) -> None:
    plan = stage_worker_pb2.StagePlan(
        block_size=16, max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=64
    )
    check_sizes(plan)
    for name, value in change.items():
        setattr(plan, name, value)
    with pytest.raises(ConfigError, match=words):
        check_sizes(plan)
