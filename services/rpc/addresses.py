"""Addresses and the interfaces that carry them. Linux only where it asks the kernel."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Any

from services.errors import UsageError
from services.text import shown

HOST_IP_ENV = "VLLM_HOST_IP"
MASTER_ADDR_FLAG = "--master-addr"
OWN_ADDRESS = f"this node's address towards the head (or {HOST_IP_ENV})"
"""Names, in a message, what `own_address_towards` has found."""
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a named interface (netdevice(7))."""
_SHARED_SPACE = ipaddress.IPv4Network("100.64.0.0/10")
"""Of a carrier or an overlay network (RFC 6598): not private, and not reachable from outside."""
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
"""Sources only, never destinations (RFC 1122, 3.2.1.3)."""
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[socket.AddressFamily, socket.SocketKind, int, tuple[Any, ...]]
"""Family, kind, protocol and address, as `socket.socket` and its `bind` take them."""


def host_flag(port_flag: str) -> str:
    """The flag that names the host of a port: "--master-addr" for "--master-port"."""
    return "--master-addr" if port_flag == "--master-port" else "--host"


def resolve(host: str, port: int | None, *, flag: str, passive: bool = False) -> list[Endpoint]:
    """What a name or address stands for, of TCP; `passive` to listen on it.

    The one place where names are resolved. Raises `UsageError` with `flag`, the value and the
    reason where it stands for nothing.
    """
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:  # UnicodeError of a name that DNS cannot hold, or a NUL in it
        reason = "a name is labels of 1 to 63 characters with dots between them"
    else:
        return [(family, kind, protocol, at) for family, kind, protocol, _, at in found]
    raise UsageError(
        f"{flag} {shown(host)} is no address: {reason}; give an IP address, or a name that this "
        "node can resolve, without a port",
        param=flag,
    )


def addresses_of(host: str, *, flag: str) -> list[IpAddress]:
    """Every IP address of a host, IPv4 ones as such. Raises `UsageError` as `resolve`."""
    found = [ipaddress.ip_address(at[0]) for *_, at in resolve(host, None, flag=flag)]
    return [getattr(address, "ipv4_mapped", None) or address for address in found]


def check_dialable(host: str, *, flag: str) -> list[IpAddress]:
    """The addresses of a host that other nodes are to connect to. Raises `UsageError` for one
    that nobody can connect to, saying what it is."""
    addresses = addresses_of(host, flag=flag)
    for address in addresses:
        kind = _undialable(address)
        if kind is not None:
            raise UsageError(
                f"{flag} {shown(host)} is {kind}, which no other node can connect to; give one "
                "address of this mesh's network (`ip address` shows a node's)",
                param=flag,
            )
    return addresses


def _undialable(address: IpAddress) -> str | None:
    if address.is_unspecified:
        return "the unspecified address, that is all interfaces of a node"
    if address.is_multicast:
        return "a multicast address"
    if address == _BROADCAST:
        return "the broadcast address"
    if isinstance(address, ipaddress.IPv4Address) and address in _THIS_NETWORK:
        return 'an address of "this network" (0.0.0.0/8)'
    return None


def _is_public(address: IpAddress) -> bool:
    """Reachable from the Internet, as far as an address tells."""
    if isinstance(address, ipaddress.IPv4Address):
        return not address.is_private and address not in _SHARED_SPACE
    return not address.is_private and not address.is_site_local


def interface_of(host: str) -> str | None:
    """Name of the network interface that carries an address, for example "lo".

    None where it cannot be told: then the collective library chooses by itself.
    """
    address = resolve(host, None, flag="--host")[0][3][0]
    if sys.platform != "linux" or ":" in address:
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
    `UsageError` where the one or the other is no address that can be connected to.
    """
    if (chosen := os.environ.get(HOST_IP_ENV)) is not None:
        if not chosen:
            raise UsageError(
                f"{HOST_IP_ENV} is empty; set it to an address of this node (`ip address` shows "
                "them), or unset it",
                param=HOST_IP_ENV,
            )
        check_dialable(chosen, flag=HOST_IP_ENV)
        _check_own(chosen, flag=HOST_IP_ENV)
        return chosen
    family, _, _, address = resolve(master_addr, 9, flag="--master-addr")[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # Chooses a route and sends nothing.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"--master-addr {master_addr} cannot be reached from this node: "
            f"{error.strerror or error}",
            param="--master-addr",
        ) from None


def _check_own(host: str, *, flag: str) -> None:
    """Raises `UsageError` unless this node can listen on the address. Binding is the probe, of a
    UDP port that nobody hears of."""
    family, _, _, address = resolve(host, 0, flag=flag)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            raise UsageError(
                f"{flag} {shown(host)} cannot be listened on here: {error.strerror or error}; set "
                "it to an address of this node (`ip address` shows them), or unset it",
                param=flag,
            ) from None


def check_master_address(master_addr: str, *, insecure: bool, tls: bool) -> str | None:
    """What to say about mesh traffic to this address; None on loopback, and with TLS where the
    address is not public.

    Raises `UsageError` for one that nobody can connect to, and for a public address without TLS
    unless that is allowed. A name is as public as the most public of its addresses.
    """
    return check_mesh_addresses(((MASTER_ADDR_FLAG, master_addr),), insecure=insecure, tls=tls)


def check_mesh_addresses(
    named: Iterable[tuple[str, str]], *, insecure: bool, tls: bool
) -> str | None:
    """The same of several addresses that the mesh's parts listen on, each with the name of what
    chose it, for example a flag: one warning for all of them."""
    open_hosts, public_hosts = [], []
    for flag, host in named:
        addresses = check_dialable(host, flag=flag)
        if all(address.is_loopback for address in addresses):
            continue
        public = [address for address in addresses if _is_public(address)]
        if public and not tls and not insecure:
            which = "" if str(public[0]) == host else f" ({public[0]})"
            raise UsageError(
                f"{flag} {shown(host)}{which} is a public address, and the mesh would use it "
                "without TLS; use a private address, set up TLS (--tls-dir), or say --insecure",
                param=flag,
            )
        open_hosts.append(host)
        public_hosts += [host] if public else []
    if tls and public_hosts:
        hosts = " and ".join(dict.fromkeys(public_hosts))
        return (
            f"{hosts} is a public address: gRPC is protected by TLS, and the activations "
            "between ranks, which go over the collective library, are not (docs/security.md)"
        )
    if open_hosts and not tls:
        hosts = " and ".join(dict.fromkeys(open_hosts))
        return (
            f"traffic of this mesh to {hosts} is not encrypted and not authenticated: keep "
            "the network closed to others, or set up TLS (docs/security.md)"
        )
    return None


def check_door_address(
    host: str, *, insecure: bool, rest_tls: bool, grpc_tls: bool, keys: bool
) -> str | None:
    """What to say about clients' traffic to the front doors at this address; None on loopback,
    and where nothing is open.

    Raises `UsageError` for a public address without TLS unless that is allowed. All interfaces
    of a node (0.0.0.0) may be a container's or behind a proxy: they get the warning.
    """
    addresses = addresses_of(host, flag="--host")
    if all(address.is_loopback for address in addresses):
        return None
    open_doors = []
    if not rest_tls:
        open_doors.append("REST is not encrypted (--ssl-certfile)")
    if not grpc_tls:
        open_doors.append("gRPC is not encrypted (--tls-dir)")
    if open_doors and not insecure:
        for address in addresses:
            if not address.is_unspecified and _is_public(address):
                raise UsageError(
                    f"--host {shown(host)} is a public address: {', '.join(open_doors)}; use a "
                    "private address, set up TLS, or say --insecure",
                    param="--host",
                )
    if not keys:
        open_doors.append("no API key is asked for (--api-key-file)")
    if not open_doors:
        return None
    return f"clients reach --host {shown(host)} from other machines: {', '.join(open_doors)}"


def gateway_names(master_addr: str, host: str) -> tuple[str, ...]:
    """What peers dial the gateway by: workers the head's address, clients the front doors' host,
    unless that says nothing of how they do (all interfaces) or only this machine does."""
    addresses = addresses_of(host, flag="--host")
    says_nothing = all(each.is_unspecified or each.is_loopback for each in addresses)
    return (master_addr,) if says_nothing or host == master_addr else (master_addr, host)


def join_host_port(host: str, port: int) -> str:
    """ "host:port", with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
