"""Frames between a stage worker and its rank processes.

A frame is a 4-byte big-endian length and a serialized `RankCommand` or
`RankEvent`. The socket is a pair made by the worker and inherited by the rank,
so nothing listens and nobody else can speak on it.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from google.protobuf.message import DecodeError

from stagemesh.v1 import rank_pb2, stage_worker_pb2

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A step of 8,192 tokens with a full history takes well under 1 MB; more is a bug, not work."""


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


def step_frame(request: stage_worker_pb2.ExecuteRequest) -> bytes:
    """The frame of a step. `RankCommand.step` has the number of `ExecuteRequest.step`, so
    the request's bytes are the command's, and nothing is copied into another message."""
    body = request.SerializeToString()
    return _LENGTH.pack(len(body)) + body


def read_frame(sock: socket.socket) -> bytes | None:
    """Blocks for the body of the next frame; None when the other side has closed its end.

    Raises `FrameError`, and `ConnectionError` where that end is broken.
    """
    header = _read_exactly(sock, _LENGTH.size)
    return None if header is None else _read_exactly(sock, _checked_length(header))


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


async def read_event(reader: asyncio.StreamReader) -> rank_pb2.RankEvent | None:
    """The rank's next event; None when the rank has closed its end or died.

    Raises `FrameError` for what is no event.
    """
    try:
        header = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_checked_length(header))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    try:
        return rank_pb2.RankEvent.FromString(body)
    except DecodeError:
        raise FrameError(f"an event of {len(body)} bytes cannot be read") from None
