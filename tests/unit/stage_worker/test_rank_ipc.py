"""Frames between worker and rank, and which bytes may pass as a step."""

from __future__ import annotations

import asyncio
import socket
import struct
import tracemalloc

import pytest

from stage_worker import ipc
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2


def step_of(num_tokens: int, step_id: int = 2) -> step_pb2.Step:
    row = step_pb2.StepRow(token_ids=[7] * num_tokens)
    return step_pb2.Step(epoch=1, step_id=step_id, rows=[row])


def request_of(num_tokens: int) -> bytes:
    return stage_worker_pb2.ExecuteRequest(step=step_of(num_tokens)).SerializeToString()


FURTHER = stage_worker_pb2.ExecuteRequest(further_steps=[step_of(1)]).SerializeToString()


@pytest.mark.parametrize("num_tokens", [0, 1, 100, 20_000, 3_000_000])
def test_the_bytes_of_a_request_are_those_of_the_command(num_tokens: int) -> None:
    request = request_of(num_tokens)
    frame = ipc.step_frames(request)
    command = rank_pb2.RankCommand.FromString(frame[4:])
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert command.step == stage_worker_pb2.ExecuteRequest.FromString(request).step
    assert frame == ipc.encode(command)


@pytest.mark.parametrize("sizes", [(1, 1), (0, 20_000, 3), (5,) * 9])
def test_each_step_of_a_request_is_a_command(sizes: tuple[int, ...]) -> None:
    steps = [step_of(size, step_id) for step_id, size in enumerate(sizes, 1)]
    request = stage_worker_pb2.ExecuteRequest(step=steps[0], further_steps=steps[1:])
    frames = ipc.step_frames(request.SerializeToString())
    assert frames == b"".join(ipc.encode(rank_pb2.RankCommand(step=step)) for step in steps)


STOP = rank_pb2.RankCommand(stop=rank_pb2.RankStop()).SerializeToString()
NO_STEPS = {
    "nothing": b"",
    "a tag": b"\x0a",
    "another command": STOP,
    "another command behind the step": request_of(1) + STOP,
    "another command before the step": STOP + request_of(1),
    "two steps in the place of one": request_of(1) * 2,
    "a further step before any": FURTHER,
    "a further step before the first": FURTHER + request_of(1),
    "another command between two steps": request_of(1) + STOP + FURTHER,
    "another command behind a further step": request_of(1) + FURTHER + STOP,
    "a further step cut short": (request_of(1) + FURTHER)[:-1],
    "a tag behind the step": request_of(1) + FURTHER[:1],
    "cut short": request_of(100)[:-1],
    "a length without end": b"\x0a" + b"\x80" * 20,
    "a length above the request's": b"\x0a\xff\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("request_bytes", NO_STEPS.values(), ids=NO_STEPS)
def test_no_other_command_passes_as_a_step(request_bytes: bytes) -> None:
    with pytest.raises(ipc.FrameError, match="is not steps alone"):
        ipc.step_frames(request_bytes)


def test_a_request_of_too_many_steps_is_refused_before_they_are_taken() -> None:
    """A step without anything in it is two bytes: 2 MB of them were a million frames."""
    empty = stage_worker_pb2.ExecuteRequest(step=step_pb2.Step()).SerializeToString()
    further = stage_worker_pb2.ExecuteRequest(further_steps=[step_pb2.Step()]).SerializeToString()
    most = empty + further * (ipc.MAX_STEPS_OF_A_REQUEST - 1)
    step = ipc.encode(rank_pb2.RankCommand(step=step_pb2.Step()))
    assert ipc.step_frames(most) == step * ipc.MAX_STEPS_OF_A_REQUEST
    million = empty + further * 999_999
    tracemalloc.start()
    try:
        for request in (most + further, million):
            with pytest.raises(ipc.FrameError, match="holds more than 256 steps"):
                ipc.step_frames(request)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:
        theirs.sendall((ipc.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ipc.FrameError, match="over the limit"):
            ipc.read_frame(stream)
        theirs.close()
        assert ipc.read_frame(stream) is None


@pytest.mark.parametrize("kept", [0, 2, 4, 9])
def test_a_frame_that_is_cut_short_is_the_end(kept: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:
        theirs.sendall((struct.pack(">I", 6) + b"abcdef")[:kept])
        theirs.close()
        assert ipc.read_frame(stream) is None


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError])
async def test_a_rank_that_dies_between_two_frames_is_no_error(error: type[OSError]) -> None:
    """A write may be what finds it out, and the reader hears of it."""
    reader = asyncio.StreamReader()
    reader.set_exception(error())
    assert await ipc.read_event(reader) is None
