"""Serves an ASGI application with uvicorn, inside somebody else's event loop.

Unlike `uvicorn.run` it installs no signal handlers, never exits the process,
and binds before it starts, so that the port is known and a clash is an error
of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway.rest.handshakes import TlsListener
from gateway.rest.protocol import Protocol
from services.errors import ConfigError
from services.rpc import settings
from services.rpc.addresses import host_flag, join_host_port, resolve
from services.rpc.server import check_address

KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than common clients' pools keep them, so that the
client is the one to close."""

LISTEN_BACKLOG = 1024
DATE_HEADER_SECONDS = 1.0
CANCELLED_TASKS_SECONDS = 1.0
"""What is cancelled at the end of the grace gets this long to clean up."""


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's own signals, and without its ten wake-ups a second; with bounds for TLS
    handshakes."""

    def __init__(
        self, config: uvicorn.Config, stop: asyncio.Event, tasks: asyncio.TaskGroup
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._tasks = tasks

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn's own leaves a handshake asyncio's minute, and takes any number of them, during
        # which nothing else of ours bounds the connection.
        await self.lifespan.startup()
        self.servers = [await self._serve_on(listener) for listener in sockets or ()]
        self.started = True

    async def _serve_on(self, listener: socket.socket) -> Any:
        config = self.config

        def make_protocol() -> Protocol:
            return Protocol(config, self.server_state, self.lifespan.state)

        if config.ssl is not None:
            return TlsListener(listener, config.ssl, make_protocol, self._tasks)
        loop = asyncio.get_running_loop()
        return await loop.create_server(make_protocol, sock=listener, backlog=config.backlog)

    async def main_loop(self) -> None:
        # Tick 0 renews the Date header, and says whether it is time to go.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), DATE_HEADER_SECONDS)
                self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RestServer:
    """One HTTP server: `bind`, then `run` in a task."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._tls = tls
        self._socket: socket.socket | None = None

    def bind(self, host: str, port: int, *, flag: str = "--port") -> int:
        """Listens on the address and returns the real port (0 takes a free one).

        Raises `ConfigError` naming address and `flag` where it cannot be had.
        """
        check_address(host, port, flag)
        family, kind, proto, address = resolve(host, port, flag=host_flag(flag), passive=True)[0]
        listener = socket.socket(family, kind, proto)
        try:
            # Only skips the wait after an earlier server's end; two servers still clash,
            # because listening follows at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. Whoever takes nothing of what is sent for so long is cut
            # off by the system, which also covers answers that were written whole.
            listener.setsockopt(
                socket.IPPROTO_TCP,
                socket.TCP_USER_TIMEOUT,
                int(settings.SLOW_READER_SECONDS * 1000),
            )
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {join_host_port(host, port)}: {error.strerror or error}; choose "
                f"another with {flag} (0 takes a free port)",
                param=flag,
            ) from error
        listener.setblocking(False)
        self._socket = listener
        return int(listener.getsockname()[1])

    async def run(self, stop: asyncio.Event, *, grace_seconds: float = 3.0) -> None:
        """Serves until `stop` is set; then takes nothing new, lets running requests go on
        for the grace and cancels the rest. Cancelling this coroutine closes at once."""
        if self._socket is None:
            raise ConfigError("the REST server was started before it was bound")
        listener, self._socket = self._socket, None
        async with asyncio.TaskGroup() as tasks:
            server = _Uvicorn(
                uvicorn.Config(
                    self._app,
                    http=Protocol,
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    timeout_keep_alive=KEEP_ALIVE_SECONDS,
                    timeout_graceful_shutdown=max(1, round(grace_seconds)),
                ),
                stop,
                tasks,
            )
            server.config.load()
            server.config.ssl = self._tls
            try:
                await server.serve(sockets=[listener])
            finally:
                listener.close()
                await _end_requests(server)

    def close(self) -> None:
        """Gives the port back where `run` was never called."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def _end_requests(server: uvicorn.Server) -> None:
    for task in server.server_state.tasks:
        task.cancel()
    if server.server_state.tasks:
        await asyncio.wait(list(server.server_state.tasks), timeout=CANCELLED_TASKS_SECONDS)
