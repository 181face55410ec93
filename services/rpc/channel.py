"""Channels to other services of the mesh."""

from __future__ import annotations

import grpc

from services.rpc.settings import MessageLimits, channel_options
from services.rpc.tls import RenewedCredentials, channel_credentials
from services.rpc.tls_files import TlsFiles


def create_channel(
    address: str,
    *,
    limits: MessageLimits | None = None,
    tls: TlsFiles | RenewedCredentials | None = None,
) -> grpc.aio.Channel:
    """Opens a channel to "host:port" with the mesh's limits and keepalive.

    Returns at once: the connection is made by the first call. The caller closes
    it (`await channel.close()`) and gives every call a `timeout`. Raises `ConfigError` where a
    file of `tls` cannot be used.
    """
    options = channel_options(limits or MessageLimits())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = tls.now() if isinstance(tls, RenewedCredentials) else channel_credentials(tls)
    return grpc.aio.secure_channel(address, credentials, options=options)
