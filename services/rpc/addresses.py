"""Addresses and the interfaces that carry them. Linux only where it asks the kernel."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a named interface (netdevice(7))."""


def interface_of(host: str) -> str | None:
    """Name of the network interface that carries an address, for example "lo".

    None where it cannot be told: then the collective library chooses by itself.
    """
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    if sys.platform != "linux" or ":" in str(address):
        return None
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def join_host_port(host: str, port: int) -> str:
    """ "host:port", with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
