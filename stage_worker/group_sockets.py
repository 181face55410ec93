"""Ends whatever this process waits for in gloo's groups, from any thread.

Gloo offers no way to break a wait. But to its own event loop a connection that is shut down here
looks like a neighbour that has died, so every operation on it fails at once, in this process as in
the neighbour. Without that a rank whose neighbour is cut off waits for TCP, which tries
again up to twice as late as the cut was long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def tcp_connections() -> frozenset[int]:
    """The inodes of this process's TCP connections; what only listens is none."""
    return frozenset(inode for inode, _ in _each())


def shut_down_connections(*, but: frozenset[int]) -> None:
    """Shuts down the TCP connections of this process `but` those with these inodes.

    A rank has no others than those of its groups and their store: its worker is at a Unix socket.
    """
    for inode, connection in _each():
        if inode not in but:
            with contextlib.suppress(OSError):  # Not connected yet, or no more.
                connection.shutdown(socket.SHUT_RDWR)


def _each() -> Iterator[tuple[int, socket.socket]]:
    """Inode and a socket of our own, closed after its turn, for each of them."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            held = os.dup(int(name))
        except OSError:  # Closed since it was listed.
            continue
        try:
            found = socket.socket(fileno=held)
        except OSError:  # No socket.
            os.close(held)
            continue
        with found:
            if _is_connection(found):
                yield os.fstat(held).st_ino, found


def _is_connection(found: socket.socket) -> bool:
    internet = found.family in (socket.AF_INET, socket.AF_INET6)
    if not internet or found.type != socket.SOCK_STREAM:
        return False
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
