"""Who is at the other end of a gRPC call, as gRPC names it ("ipv4:10.0.0.1:4711"), and an end to
the connection of one who leaves no other way."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
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


def close_connection(peer: str) -> bool:
    """Ends the TCP connection that a peer has to this process; False where none was found.

    gRPC's Python API can end a call only behind what its caller has not read, and lets nobody
    reset one. So the socket is looked up among this process's files (Linux) and shut down, which
    gRPC sees as a peer that has left: all calls of the connection end.
    """
    wanted = endpoint_of(peer)
    if wanted is None or not _OPEN_FILES.is_dir():
        return False
    return any(_shut_down(int(name), wanted) for name in os.listdir(_OPEN_FILES))


def _shut_down(fd: int, wanted: Endpoint) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        # A descriptor of our own: the number may be another file's by the next line.
        with socket.socket(fileno=os.dup(fd)) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            host, port = own.getpeername()[:2]
            if _endpoint(host, port) != wanted:
                return False
            own.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # Closed meanwhile, or listening.
