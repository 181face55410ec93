"""This node's certificates, each looked at as a peer will, and the ways in: for the mesh's other
nodes, and for clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.api_keys import read_keys
from services.config import ServeConfig
from services.doctor.findings import Check, Finding, ok, refused, warning
from services.errors import StagemeshError
from services.rpc.addresses import (
    MASTER_ADDR_FLAG,
    OWN_ADDRESS,
    check_door_address,
    check_mesh_addresses,
    gateway_names,
    own_address_towards,
)
from services.rpc.certificate import check_certificate, rest_context
from services.rpc.roles import Role
from services.rpc.tls_files import tls_files
from services.units import counted

CA_KEY_FILE = "ca.key"


def check_tls(config: ServeConfig, *, asks_head: bool) -> Iterator[Finding]:
    """The certificate of every role that this node needs: of its gateway and its workers, and
    the operator's where the doctor asks a head."""
    if config.tls_dir is None:
        return
    for role, hosts in _needed(config, asks_head=asks_head):
        path = tls_files(config.tls_dir, role).certificate
        if role is Role.STAGE_WORKER and config.node_rank == 0 and not path.exists():
            yield warning(
                Check.TLS,
                f"{path} is not here: serve needs it for the workers that it starts, gateway "
                "does not",
                "stagemesh certs issue --role stage-worker makes one",
            )
            continue
        yield check_role(config.tls_dir, role, hosts)
    if (Path(config.tls_dir) / CA_KEY_FILE).exists():
        yield warning(
            Check.TLS,
            f"{Path(config.tls_dir) / CA_KEY_FILE} is here: who reads it can sign any role",
            "move it to where certificates are issued, off the serving nodes",
        )


def check_mesh_address(config: ServeConfig) -> Iterator[Finding]:
    """What `serve` would say of the addresses between this node and the others: the head's, and
    on another node its own."""
    if not config.model:
        return
    own: list[tuple[str, str]] = []
    try:
        if config.node_rank > 0:
            own.append((OWN_ADDRESS, own_address_towards(config.master_addr)))
        said = check_mesh_addresses(
            ((MASTER_ADDR_FLAG, config.master_addr), *own),
            insecure=config.insecure,
            tls=config.tls_dir is not None,
        )
    except StagemeshError as error:
        if error.param != MASTER_ADDR_FLAG:  # The check of the head says what is wrong with that.
            yield refused(Check.TLS, error)
    else:
        if said is not None:
            remedy = "set up TLS, and keep the network of the ranks closed to others"
            yield warning(Check.TLS, said, remedy)


def check_doors(config: ServeConfig) -> Iterator[Finding]:
    """What `serve` would say of clients' ways in: what is open at the address, the REST door's
    certificate, the file of keys."""
    if not config.model or config.node_rank > 0:
        return
    has_rest_tls = config.ssl_certfile is not None and config.ssl_keyfile is not None
    try:
        said = check_door_address(
            config.host,
            insecure=config.insecure,
            rest_tls=has_rest_tls,
            grpc_tls=config.tls_dir is not None,
            keys=bool(config.api_key) or config.api_key_file is not None,
        )
    except StagemeshError as error:
        yield refused(Check.TLS, error)
    else:
        if said is not None:
            yield warning(Check.TLS, said, "set them up, or keep the network closed to others")
    try:
        if config.ssl_certfile is not None and config.ssl_keyfile is not None:
            rest_context(Path(config.ssl_certfile), Path(config.ssl_keyfile))
            yield ok(Check.TLS, f"{config.ssl_certfile}: the REST API's")
    except StagemeshError as error:
        yield refused(Check.TLS, error)
    try:
        if config.api_key_file is not None:
            count = len(read_keys(Path(config.api_key_file)))
            yield ok(Check.TLS, f"{config.api_key_file}: {counted(count, 'API key')}")
    except StagemeshError as error:
        yield refused(Check.TLS, error)


def _needed(config: ServeConfig, *, asks_head: bool) -> Iterator[tuple[Role, tuple[str, ...]]]:
    # Without a model somebody looks at a mesh elsewhere, and runs no part of it here.
    if config.model and config.node_rank == 0:
        try:
            yield Role.GATEWAY, gateway_names(config.master_addr, config.host)
        except StagemeshError:
            yield Role.GATEWAY, (config.master_addr,)  # The check of the doors says what is wrong.
        yield Role.STAGE_WORKER, (config.master_addr,)
    elif config.model:
        try:
            yield Role.STAGE_WORKER, (own_address_towards(config.master_addr),)
        except StagemeshError:
            yield Role.STAGE_WORKER, ()  # Other checks say what is wrong with it.
    if asks_head:
        yield Role.OPERATOR, ()


def check_role(directory: str, role: Role, hosts: tuple[str, ...]) -> Finding:
    """One certificate; `hosts` are what peers dial."""
    path = tls_files(directory, role).certificate
    try:
        facts = check_certificate(directory, role, hosts)
    except StagemeshError as error:
        return refused(Check.TLS, error)
    names = f" for {', '.join(facts.names)}" if facts.names else ""
    what = f"{path}: role {role.value}{names}, until {facts.end}"
    if facts.ends_soon:
        return warning(Check.TLS, what, "renew it: stagemesh certs issue --force")
    return ok(Check.TLS, what)
