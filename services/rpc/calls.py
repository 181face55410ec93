"""What calls may hold of one server, in each part of their life.

A call waits for its message, bounded in time and, by a `Room`, in number. Only then, and only
where its caller may make it, is it one of the calls that are answered; beyond their number it is
refused. It stays one until its caller has taken the end of it, which is bounded in time.
Probes have a room of their own, which they leave with their handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from services.errors import DeadlineExceeded, InvalidRequest, Saturated
from services.rpc import settings
from services.rpc.endings import Endings
from services.rpc.peers import group_of
from services.rpc.places import Place
from services.rpc.rooms import Room

T = TypeVar("T")

_PROBES = ("/grpc.health.", "/grpc.reflection.")
"""Methods of every server beside its own. Watches stay as long as they like."""


def is_probe(method: str) -> bool:
    """Whether it asks how a server is, and takes no place of the server's own calls."""
    return method.startswith(_PROBES)


class Calls:
    """One for each server, used inside its event loop."""

    def __init__(self, most: int) -> None:
        """`most` calls are answered at a time, and as many wait for their message."""
        self._most = most
        self._answered = 0
        self._waiting = Room(most)
        self._probes = Room(settings.MAX_PROBE_CALLS)
        self._endings = Endings()

    async def message_of(self, context: grpc.aio.ServicerContext, method: str) -> bytes:
        """The one message of a call, as bytes. Raises `DeadlineExceeded` where it does not come,
        `Saturated` where newer calls need the place, `InvalidRequest` where the caller ends
        without one."""
        seconds = settings.REQUEST_TIMEOUT_SECONDS
        place = Place(self._waiting, group_of(context.peer()))
        try:
            try:
                async with asyncio.timeout(seconds):
                    message = await place.holding(context.read())
            finally:
                place.leave()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{method}: no message came within {seconds:g} s of the call"
            ) from None
        if message is grpc.aio.EOF:
            raise InvalidRequest(f"{method} was called without a message")
        return bytes(message)

    async def answer(
        self, context: grpc.aio.ServicerContext, method: str, answering: Coroutine[Any, Any, T]
    ) -> T:
        """Runs the handler of a call. Raises `Saturated` where as many are answered as may be,
        for a probe where newer ones need the place."""
        if is_probe(method):
            place = Place(self._probes, group_of(context.peer()))
            try:
                return await place.holding(answering)
            finally:
                place.leave()
        if self._answered >= self._most:
            answering.close()
            raise Saturated(f"{self._most} calls are being answered here; try again in a moment")
        self._answered += 1
        _task().add_done_callback(self._over)
        return await answering

    def _over(self, _: object) -> None:
        self._answered -= 1

    def listens_on(self, port: int) -> None:
        """The server takes calls there."""
        self._endings.ports.add(port)

    def ends(self, context: grpc.aio.ServicerContext) -> None:
        """The handler is done; its single answer, or what it has written of a stream, and the
        status behind it are gRPC's to send. A caller who does not take it loses the connection
        after a while."""
        self._endings.begin(_task(), context.peer())


def _task() -> asyncio.Task[Any]:
    """gRPC's for this call: it ends when the call is over, its status sent. The context's own
    callbacks hold the context, which would keep every call until a collection of garbage."""
    task = asyncio.current_task()
    assert task is not None  # Nobody else awaits handlers.
    return task
