"""A worker's sign of life to whoever has started it: its launcher's pipe, or systemd's socket.

It beats on the event loop, so a loop that hangs is noticed as well as a process that is
stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

PULSE_SECONDS = 1.0
BEAT = b"."
JOINED = b"j"
"""Written once: the worker has its place in the mesh."""
NOTIFY_ENV = "NOTIFY_SOCKET"
WATCHDOG_ENV = "WATCHDOG_USEC"


class Pulse:
    """Beats while `run` runs, where anybody listens."""

    def __init__(self, fd: int | None) -> None:
        """`fd` is the write end of the launcher's pipe; None without a launcher."""
        self._fd = fd
        self._notify = os.environ.get(NOTIFY_ENV) if os.environ.get(WATCHDOG_ENV) else None

    async def run(self) -> None:
        """Beats until cancelled."""
        if self._fd is not None:
            os.set_blocking(self._fd, False)
        while True:
            self._write(BEAT)
            self._notify_systemd()
            await asyncio.sleep(PULSE_SECONDS)

    def joined(self) -> None:
        """Says that the worker has its place."""
        self._write(JOINED)

    def _write(self, data: bytes) -> None:
        if self._fd is not None:
            # A full pipe has a sign of life in it; a closed one is the lifeline's to notice.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._fd, data)

    def _notify_systemd(self) -> None:
        """See sd_notify(3); an address that begins with @ is an abstract one."""
        if self._notify is None:
            return
        address = "\0" + self._notify[1:] if self._notify.startswith("@") else self._notify
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.sendto(b"WATCHDOG=1", address)
