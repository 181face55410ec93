"""Numbers and options of every gRPC server and channel."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024

MESH_MAX_MESSAGE_BYTES = 64 * MIB
"""Between gateway and stage workers, either way, where a server sets no limit of its own. The
largest message is a step that starts many replayed sequences with their token history."""

INFERENCE_MAX_REQUEST_BYTES = 8 * MIB
"""From a client; the same as the REST body limit."""

INFERENCE_MAX_RESPONSE_BYTES = 64 * MIB
"""To a client: the token ids of the largest text that a request may hold."""

KEEPALIVE_SECONDS = 10.0
"""An idle connection is pinged this often, so that a silent network cut is seen.
Faster detection is the heartbeat's task, not the transport's."""

KEEPALIVE_TIMEOUT_SECONDS = 5.0
"""A ping that is not answered for so long closes the connection."""

HANDSHAKE_TIMEOUT_SECONDS = 20.0
"""A connection on which TLS and HTTP/2 have not been agreed upon by then is closed (gRPC's own
default is 120 s), so that who only connects holds nothing for long."""

REQUEST_TIMEOUT_SECONDS = 30.0
"""From the start of a call until its one message must be there; as for the body of a REST
request."""

MAX_CALLS = 256
"""Calls that a server answers at a time, where it sets no limit of its own."""

MAX_PROBE_CALLS = 64
"""Calls of health and reflection at a time, watches among them: beside a server's own calls."""

MIN_CONCURRENT_STREAMS = 1024
"""Streams that one connection may have open at least. The server counts one for a moment longer
than its client does, which may have begun the next by then."""

MIN_PING_INTERVAL_SECONDS = 5.0
"""A client that pings faster than this is disconnected."""

INITIAL_RECONNECT_SECONDS = 0.1
MAX_RECONNECT_SECONDS = 1.0
"""A restarted peer is found again within this time (gRPC's own default is 120 s)."""

SLOW_READER_SECONDS = 60.0
"""A client that takes nothing of its answer for so long is cut off, on REST and gRPC alike. One
that does not take a single answer of gRPC, or the end of a stream, loses its connection then."""

CONNECT_TIMEOUT_SECONDS = 3.0
"""For one attempt to connect; a machine that starts many processes at once takes a second.
An attempt that is refused does not wait for it."""


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Largest message of one side, bytes."""

    receive_bytes: int = MESH_MAX_MESSAGE_BYTES
    send_bytes: int = MESH_MAX_MESSAGE_BYTES


INFERENCE_SERVER_LIMITS = MessageLimits(
    receive_bytes=INFERENCE_MAX_REQUEST_BYTES, send_bytes=INFERENCE_MAX_RESPONSE_BYTES
)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def server_options(limits: MessageLimits, max_calls: int) -> list[tuple[str, int]]:
    """Channel arguments of a server that answers so many calls at a time."""
    return [
        # gRPC's own refusal says nothing of why, so the edge's must come first: this is well above
        # what it lets be answered and wait for a message.
        (
            "grpc.max_concurrent_streams",
            max(MIN_CONCURRENT_STREAMS, 2 * (2 * max_calls + MAX_PROBE_CALLS)),
        ),
        # Two servers on one port would share its connections in silence.
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_TIMEOUT_SECONDS)),
        ("grpc.max_receive_message_length", limits.receive_bytes),
        ("grpc.max_send_message_length", limits.send_bytes),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_SECONDS)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_TIMEOUT_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            _milliseconds(MIN_PING_INTERVAL_SECONDS),
        ),
    ]


def channel_options(limits: MessageLimits) -> list[tuple[str, int]]:
    """Channel arguments of a client inside the mesh."""
    return [
        ("grpc.max_receive_message_length", limits.receive_bytes),
        ("grpc.max_send_message_length", limits.send_bytes),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_SECONDS)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_TIMEOUT_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(INITIAL_RECONNECT_SECONDS)),
        # By this name gRPC means the time-out of an attempt.
        ("grpc.min_reconnect_backoff_ms", _milliseconds(CONNECT_TIMEOUT_SECONDS)),
        ("grpc.max_reconnect_backoff_ms", _milliseconds(MAX_RECONNECT_SECONDS)),
        # A new channel is a new connection: where one is dead, another with its options is too
        # where they share it.
        ("grpc.use_local_subchannel_pool", 1),
        # Who retries what is decided above the transport, where it is known what is safe.
        ("grpc.enable_retries", 0),
        # Mesh traffic never leaves through a web proxy that the environment names.
        ("grpc.enable_http_proxy", 0),
    ]
