"""Addresses and the interfaces that carry them. Linux only where it asks the kernel."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys

from services.errors import ConfigError

HOST_IP_ENV = "VLLM_HOST_IP"
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


def own_address_towards(master_addr: str) -> str:
    """This node's address as the head can dial it: the one that the route to the head uses.

    `VLLM_HOST_IP` overrides it, for nodes with several networks. Raises
    `ConfigError` when the head's name or address cannot be resolved.
    """
    if (chosen := os.environ.get(HOST_IP_ENV)) is not None:
        return chosen
    try:
        family, _, _, _, address = socket.getaddrinfo(master_addr, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # Chooses a route and sends nothing.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--master-addr {master_addr} cannot be reached from this node: "
            f"{error.strerror or error}",
            param="--master-addr",
        ) from None


def check_master_address(master_addr: str, *, insecure: bool) -> str | None:
    """What to say about mesh traffic without TLS to this address; None on loopback.

    Raises `ConfigError` for a public address unless that is allowed.
    """
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--master-addr {master_addr} is no address: {error.strerror or error}",
            param="--master-addr",
        ) from None
    address = ipaddress.ip_address(str(found[0][4][0]))
    if address.is_loopback:
        return None
    if address.is_private or insecure:
        return (
            f"traffic of this mesh to {master_addr} is not encrypted and not authenticated: keep "
            "the network closed to others, or set up TLS with stagemesh certs init"
        )
    raise ConfigError(
        f"--master-addr {master_addr} is a public address, and the mesh would use it without TLS; "
        "use a private address, or say --insecure",
        param="--master-addr",
    )


def join_host_port(host: str, port: int) -> str:
    """ "host:port", with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
