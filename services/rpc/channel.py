"""Channels to other services of the mesh."""

from __future__ import annotations

import grpc

from services.rpc.settings import (
    ClientTls,
    MessageLimits,
    channel_credentials,
    channel_options,
)


def create_channel(
    address: str, *, limits: MessageLimits | None = None, tls: ClientTls | None = None
) -> grpc.aio.Channel:
    """Opens a channel to "host:port" with the mesh's limits and keepalive.

    Returns at once: the connection is made by the first call. The caller closes
    it (`await channel.close()`) and gives every call a `timeout`.
    """
    options = channel_options(limits or MessageLimits())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)
