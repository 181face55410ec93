"""An end to the connections of peers, found among this process's open files."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from services.rpc.peers import close_connections


class Door:
    """A port of this process, with connections to it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepted: list[socket.socket] = []

    def client(self, source_port: int = 0) -> socket.socket:
        client = socket.socket()
        client.settimeout(5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind(("127.0.0.1", source_port))
        client.connect(("127.0.0.1", self.port))
        self._accepted.append(self._listener.accept()[0])
        return client

    def close(self) -> None:
        for one in (self._listener, *self._accepted):
            one.close()


@pytest.fixture
def doors() -> Iterator[tuple[Door, Door]]:
    doors = Door(), Door()
    yield doors
    for door in doors:
        door.close()


def peer_of(client: socket.socket) -> str:
    return f"ipv4:127.0.0.1:{client.getsockname()[1]}"


def is_open(client: socket.socket) -> bool:
    client.settimeout(0)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    finally:
        client.settimeout(5)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_the_connections_of_all_named_peers_are_closed_and_no_others(
    doors: tuple[Door, Door],
) -> None:
    door, _ = doors
    clients = [door.client() for _ in range(3)]
    nobody = "ipv4:10.0.0.1:" + peer_of(clients[2]).rpartition(":")[2]
    peers = [peer_of(client) for client in clients[:2]]
    closed = close_connections([*peers, nobody, "unix:/x.sock"], {door.port})
    assert closed == frozenset(peers)
    assert [is_open(client) for client in clients] == [False, False, True]
    for client in clients:
        client.close()


def test_a_source_port_may_have_connections_to_other_ports_of_the_process(
    doors: tuple[Door, Door],
) -> None:
    for door, spared in (doors, doors[::-1]):
        # The other one comes first among the open files.
        twin = spared.client()
        client = door.client(twin.getsockname()[1])
        assert peer_of(client) == peer_of(twin)
        assert close_connections([peer_of(client)], {door.port})
        assert not is_open(client)
        assert is_open(twin)
        client.close()
        twin.close()


def test_a_connection_is_closed_when_no_descriptor_is_left(doors: tuple[Door, Door]) -> None:
    door, _ = doors
    client = door.client()
    with no_descriptor_left():
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir("/")
        assert close_connections([peer_of(client)], {door.port}) == {peer_of(client)}
    assert not is_open(client)
    client.close()


def test_open_files_that_are_no_connections_stay_as_they_are(
    doors: tuple[Door, Door],
) -> None:
    door, _ = doors
    pair = socket.socketpair()
    client = door.client()
    assert close_connections([peer_of(client)], {door.port})
    pair[0].send(b"x")
    assert pair[1].recv(1) == b"x"
    other = door.client()  # It listens still.
    assert is_open(other)
    for one in (*pair, client, other):
        one.close()
