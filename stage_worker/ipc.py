"""Frames between a stage worker and its rank processes.

A frame is a 4-byte big-endian length and a serialized `RankCommand` or
`RankEvent`. The socket is a pair made by the worker and inherited by the rank,
so nothing listens and nobody else can speak on it.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from stagemesh.v1 import rank_pb2

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


def read_command(sock: socket.socket) -> rank_pb2.RankCommand | None:
    """Blocks for the next command; None when the worker has closed its end."""
    header = _read_exactly(sock, _LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(sock, _checked_length(header))
    return None if body is None else rank_pb2.RankCommand.FromString(body)


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


async def read_event(reader: asyncio.StreamReader) -> rank_pb2.RankEvent | None:
    """The rank's next event; None when the rank has closed its end or died."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_checked_length(header))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    return rank_pb2.RankEvent.FromString(body)
