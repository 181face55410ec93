"""Accepts connections with TLS, a bounded number of handshakes at a time.

Until a handshake is over nothing else of ours knows of the connection. Who comes
while the most are under way waits for one to end; one that has lasted for a while makes
room, of the address that has most of them first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from gateway.frontend import limits
from services.errors import Saturated
from services.rpc.peers import group_of_host
from services.rpc.places import Place
from services.rpc.rooms import Room

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0
"""A handshake that is younger makes no room for others: it takes two round trips, and our part of
it a millisecond."""
_ACCEPT_RETRY_SECONDS = 1.0
"""After a connection could not be accepted, mostly for want of file descriptors."""


class TlsListener:
    """Like asyncio's own servers for whoever closes it; its tasks are its owner's."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Accepts from the next turn of the event loop on. `listener` does not block."""
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._tasks = tasks
        self._room = Room(limits.MAX_TLS_HANDSHAKES)
        self._one_over = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()
        """Connections whose handshake has not begun."""
        self._start(self._accept())

    def close(self) -> None:
        """Accepts nothing more; handshakes that are under way are given up."""
        for task in self._running:
            task.cancel()
        for connection in self._accepted:
            connection.close()

    async def wait_closed(self) -> None:
        """Returns when nothing of it runs any more."""
        while self._running:
            await asyncio.wait(self._running)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror or error)
                await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            self._accepted.add(connection)
            group = group_of_host(address[0])
            await self._wait_for_room(group)
            # It is displaced only when its handshake has lasted for a while.
            place = Place(self._room, group)
            self._start(self._shake_hands(connection, place))

    async def _wait_for_room(self, group: str) -> None:
        loop = asyncio.get_running_loop()
        while (holder := self._room.next_to_go(group)) is not None:
            patience = holder.since + PATIENCE_SECONDS - loop.time()
            if patience <= 0:
                return
            self._one_over.clear()
            with contextlib.suppress(TimeoutError):
                # `wait_for` of Python 3.11 can swallow a cancellation.
                async with asyncio.timeout(patience):
                    await self._one_over.wait()

    async def _shake_hands(self, connection: socket.socket, place: Place) -> None:
        loop = asyncio.get_running_loop()
        self._accepted.discard(connection)
        try:
            await place.holding(
                loop.connect_accepted_socket(
                    self._make_protocol,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=limits.HEAD_TIMEOUT_SECONDS,
                )
            )
        except (OSError, Saturated) as error:
            # Not TLS, not in time, gone, or too slow beside others.
            log.debug("a TLS handshake failed: %s", error)
        finally:
            place.leave()
            self._one_over.set()
