"""Who is at the other end of a gRPC call, as gRPC names it ("ipv4:10.0.0.1:4711"), and an end to
the connection of one who leaves no other way."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote

_OPEN_FILES = Path("/proc/self/fd")
_IPV6_SITE_BITS = 64
"""What one machine or home is given of IPv6; each holds as many addresses as it likes."""

Endpoint = tuple[str, int]


def group_of(peer: str) -> str:
    """Whom a peer is counted with: see `group_of_host`; all that are no TCP connection together."""
    endpoint = endpoint_of(peer)
    return peer.partition(":")[0] if endpoint is None else group_of_host(endpoint[0])


def group_of_host(host: str) -> str:
    """Whom a host's address is counted with: an IPv4 address for itself, an IPv6 address with the
    network of its site. Raises `ValueError` for what is no address."""
    address = ipaddress.ip_address(_endpoint(host, 0)[0])
    if address.version == 6:
        return str(ipaddress.ip_network((int(address), _IPV6_SITE_BITS), strict=False))
    return str(address)


def endpoint_of(peer: str) -> Endpoint | None:
    """Address and port of a peer; None where it is no TCP connection."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    try:
        return _endpoint(host.strip("[]"), int(port))
    except ValueError:
        return None


def _endpoint(host: str, port: int) -> Endpoint:
    """The same for both ways to write an IPv4 address. Raises `ValueError` for no address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address), port


def close_connections(peers: Collection[str], ports: Collection[int]) -> frozenset[str]:
    """Ends the TCP connections that peers have to these ports of this process; gives those peers
    of whom one was found.

    gRPC's Python API can end a call only behind what its caller has not read, and lets nobody
    reset one. So the sockets are looked up among this process's files (Linux) and shut down, which
    gRPC sees as peers that have left: all calls of such a connection end.

    Takes a few microseconds for each open file, and no file descriptor: callers who leave their
    answers unread may be why there is none.
    """
    endpoints = {peer: endpoint for peer in peers if (endpoint := endpoint_of(peer)) is not None}
    if not endpoints or not _OPEN_FILES.is_dir():
        return frozenset()
    wanted: dict[int, set[Endpoint]] = {}  # By port: to read an address takes longest.
    for host, port in endpoints.values():
        wanted.setdefault(port, set()).add((host, port))
    found = {_shut_down(fd, wanted, ports) for fd in _open_files()}
    return frozenset(peer for peer, endpoint in endpoints.items() if endpoint in found)


def _open_files() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError as error:
        if error.errno != errno.EMFILE:
            return ()  # The whole system has none left; it would take longest to look then.
        # Every number is taken.
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _shut_down(
    fd: int, wanted: Mapping[int, Collection[Endpoint]], ports: Collection[int]
) -> Endpoint | None:
    """Whose connection it was, where it was one of the wanted."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return None  # No socket, or closed meanwhile.
    # gRPC's threads might close it here and open another under its number. A descriptor of our
    # own would be safe from that, and is what may not be had.
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if connection.getsockname()[1] not in ports:
            return None
        host, port = connection.getpeername()[:2]
        if port not in wanted or (endpoint := _endpoint(host, port)) not in wanted[port]:
            return None
        connection.shutdown(socket.SHUT_RDWR)
        return endpoint
    except OSError:
        return None  # Listening, or its peer has left.
    finally:
        connection.detach()
