"""Frames between a stage worker and its rank processes.

A frame is a 4-byte big-endian length and a serialized `RankCommand` or
`RankEvent`. The socket is a pair made by the worker and inherited by the rank,
so nothing listens and nobody else can speak on it.
"""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO

from google.protobuf.message import DecodeError

from stagemesh.v1 import rank_pb2, stage_worker_pb2

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A step of 8,192 tokens with a full history takes well under 1 MB; more is a bug, not work."""
MAX_STEPS_OF_A_REQUEST = 256
"""A gateway gathers at most the steps in flight: one for each stage, of which there are no more
than layers, and a few (`services.ranges.MAX_BATCH_DEPTH`). An empty step takes two bytes of a
request and a hundred times as much as a frame."""

_MESSAGE = 2
"""Wire type of a field that is a message."""
_STEP_TAG = (rank_pb2.RankCommand.STEP_FIELD_NUMBER << 3) | _MESSAGE
_FURTHER_STEP_TAG = (stage_worker_pb2.ExecuteRequest.FURTHER_STEPS_FIELD_NUMBER << 3) | _MESSAGE
_STEP_KEY = bytes([_STEP_TAG])
_MAX_VARINT_BYTES = 5
"""Lengths are below 2**35."""


class FrameError(Exception):
    """The other side sent something that is not a frame."""


def encode(message: rank_pb2.RankCommand | rank_pb2.RankEvent) -> bytes:
    """One frame, ready to be written in one piece."""
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


def _checked_length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)


def step_frames(request: bytes) -> bytes:
    """The frames of the steps in a serialized `ExecuteRequest`, ready to be written in one piece.

    `RankCommand.step` has the number of `ExecuteRequest.step`, so the bytes of each step are
    those of a command, and nobody parses them on the way. Raises `FrameError` unless they are one
    step, further ones up to `MAX_STEPS_OF_A_REQUEST` in all, and nothing else: no other command
    can come in by this door.
    """
    frames: list[bytes] = []
    num_steps = 0
    start, tag = 0, _STEP_TAG
    while start < len(request) or not frames:
        end = _field_end(request, start, tag)
        num_steps += 1
        if num_steps > MAX_STEPS_OF_A_REQUEST:
            raise FrameError(
                f"a request of {len(request)} bytes holds more than {MAX_STEPS_OF_A_REQUEST} steps "
                "(step and further_steps): send fewer at a time"
            )
        frames += (_LENGTH.pack(end - start), _STEP_KEY, request[start + 1 : end])
        start, tag = end, _FURTHER_STEP_TAG
    return b"".join(frames)


def _field_end(request: bytes, start: int, tag: int) -> int:
    """Where a field with this tag ends that is a message. Raises `FrameError` where none begins."""
    size = shift = 0
    for index in range(start + 1, min(len(request), start + 1 + _MAX_VARINT_BYTES)):
        byte = request[index]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            end = index + 1 + size
            if request[start] != tag or end > len(request):
                break
            return end
    raise FrameError(f"a request of {len(request)} bytes is not steps alone, at byte {start}")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Blocks for the body of the next frame; None when the other side has closed its end.

    Raises `FrameError`, and `ConnectionError` where that end is broken.
    """
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    length = _checked_length(header)
    body = stream.read(length)
    return body if len(body) == length else None


async def read_event(reader: asyncio.StreamReader) -> rank_pb2.RankEvent | None:
    """The rank's next event; None when the rank has closed its end or died.

    Raises `FrameError` for what is no event.
    """
    try:
        header = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_checked_length(header))
    except (asyncio.IncompleteReadError, ConnectionError):  # or a write has found it out
        return None
    try:
        return rank_pb2.RankEvent.FromString(body)
    except DecodeError:
        raise FrameError(f"an event of {len(body)} bytes cannot be read") from None
