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

from stagemesh.v1 import rank_pb2

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A step of 8,192 tokens with a full history takes well under 1 MB; more is a bug, not work."""


_STEP_TAG = (rank_pb2.RankCommand.STEP_FIELD_NUMBER << 3) | 2
"""Of a field that is a message."""
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


def step_frame(request: bytes) -> bytes:
    """The frame of a step, from a serialized `ExecuteRequest`.

    `RankCommand.step` has the number of `ExecuteRequest.step`, so the bytes are those of
    the command and nobody parses them on the way. Raises `FrameError` unless they are
    that one field and nothing else: no other command can come in by this door.
    """
    size = shift = 0
    for index, byte in enumerate(request[1 : 1 + _MAX_VARINT_BYTES], start=2):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if request[0] != _STEP_TAG or index + size != len(request):
                break
            return _LENGTH.pack(len(request)) + request
    raise FrameError(f"a request of {len(request)} bytes is not one step")


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
    except (asyncio.IncompleteReadError, ConnectionError):  # or a write has found it out
        return None
    try:
        return rank_pb2.RankEvent.FromString(body)
    except DecodeError:
        raise FrameError(f"an event of {len(body)} bytes cannot be read") from None
