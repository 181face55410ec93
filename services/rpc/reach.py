"""What is in the way of a gRPC server: gRPC has one word for all that may go wrong.

Name, route, connection, TLS and HTTP/2 are tried by themselves, with their own deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from enum import Enum

from services.rpc.addresses import join_host_port
from services.rpc.certificate import client_context, reason
from services.rpc.tls_files import TlsFiles

# What a client of HTTP/2 sends first: the connection preface and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEAD_BYTES = 9
_FRAME_TYPE = 3
_SETTINGS_FRAME = 4


class Obstacle(str, Enum):
    """What is in the way of an answer."""

    NAME = "name"
    """The address does not resolve."""
    ROUTE = "route"
    """No way leads there."""
    SILENCE = "silence"
    """Nobody answers the connection in time."""
    REFUSED = "refused"
    """The machine is there and nothing listens on the port."""
    NOT_GRPC = "not gRPC"
    """Something listens that speaks another protocol."""
    TLS = "TLS"
    """The two sides do not agree on TLS: only one has it, or a certificate is refused."""
    ROLE = "role"
    """It answers, and not to a caller with this certificate."""
    OTHER_SERVICE = "other service"
    """A gRPC server without the control service, or of a version without diagnoses."""
    HUNG = "hung"
    """It takes the connection and does not answer."""
    ERROR = "error"
    """It is a head and answers with an error."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer, and why."""

    address: str
    obstacle: Obstacle
    detail: str


async def connect(
    host: str, port: int, timeout_seconds: float, tls: TlsFiles | None
) -> Unanswered | None:
    """Connects as a gRPC client does, and leaves again. None where nothing is in the way.

    Raises `ConfigError` where a file of `tls` cannot be used.
    """
    address = join_host_port(host, port)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_seconds):
            await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        return Unanswered(address, Obstacle.NAME, str(error))
    except TimeoutError:
        detail = f"the name server did not answer in {timeout_seconds:g} s"
        return Unanswered(address, Obstacle.NAME, detail)
    context = None if tls is None else client_context(tls)
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=None if context is None else host
            )
    except TimeoutError:
        return Unanswered(address, Obstacle.SILENCE, f"no answer in {timeout_seconds:g} s")
    except ConnectionRefusedError:
        return Unanswered(address, Obstacle.REFUSED, "connection refused")
    except ssl.SSLCertVerificationError as error:
        return Unanswered(address, Obstacle.TLS, f"its certificate is refused: {reason(error)}")
    except ssl.SSLError as error:
        return Unanswered(address, Obstacle.TLS, reason(error))
    except ConnectionResetError:
        what = "connection reset" if tls is None else "it ends the connection at TLS's greeting"
        return Unanswered(address, Obstacle.ROUTE if tls is None else Obstacle.TLS, what)
    except OSError as error:
        return Unanswered(address, Obstacle.ROUTE, error.strerror or str(error))
    try:
        async with asyncio.timeout(timeout_seconds):
            greeting = await _greet(reader, writer)
    except TimeoutError:
        return Unanswered(address, Obstacle.HUNG, f"no answer in {timeout_seconds:g} s")
    except ssl.SSLError as error:
        # With TLS 1.3 a server looks at our certificate when our side is through already.
        return Unanswered(address, Obstacle.TLS, reason(error))
    finally:
        await _hang_up(writer)
    if greeting[_FRAME_TYPE] == _SETTINGS_FRAME:
        return None
    if tls is None and await _speaks_tls(host, port, timeout_seconds):
        return Unanswered(address, Obstacle.TLS, "it speaks TLS, and this side does not")
    if tls is not None and not any(greeting):
        # gRPC says no more than that to a client whose certificate it does not take.
        detail = "it refuses our certificate: it trusts another CA, or its clock is wrong"
        return Unanswered(address, Obstacle.TLS, detail)
    return Unanswered(address, Obstacle.NOT_GRPC, "it does not speak HTTP/2")


async def _speaks_tls(host: str, port: int, timeout_seconds: float) -> bool:
    """Whether a server answers TLS's greeting; who it is does not matter here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_seconds):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return False
    await _hang_up(writer)
    return True


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """At once: TLS would wait for the other side's farewell, which gRPC does not send (uvloop
    waits for 30 s)."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of the first frame that the other side sends to a client of HTTP/2; a server's
    is SETTINGS (RFC 9113, 3.4). Something else where it speaks another protocol; what came of
    it, filled up with zeros, where it sends less. Raises `ssl.SSLError` for an alert."""
    try:
        writer.write(_PREFACE)
        await writer.drain()
        return await reader.readexactly(_FRAME_HEAD_BYTES)
    except asyncio.IncompleteReadError as error:
        return error.partial.ljust(_FRAME_HEAD_BYTES, b"\0")
    except ssl.SSLError:
        raise
    except OSError:
        return bytes(_FRAME_HEAD_BYTES)
