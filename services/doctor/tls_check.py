"""This node's certificates, each looked at as a peer will."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.config import ServeConfig
from services.doctor.findings import Check, Finding, ok, refused, warning
from services.errors import StagemeshError
from services.rpc.addresses import own_address_towards
from services.rpc.certificate import check_certificate
from services.rpc.roles import Role
from services.rpc.tls import tls_files

CA_KEY_FILE = "ca.key"


def check_tls(config: ServeConfig, *, asks_head: bool) -> Iterator[Finding]:
    """The certificate of every role that this node needs: of its gateway and its workers, and
    the operator's where the doctor asks a head."""
    if config.tls_dir is None:
        return
    for role, hosts in _needed(config, asks_head=asks_head):
        yield check_role(config.tls_dir, role, hosts)
    if (Path(config.tls_dir) / CA_KEY_FILE).exists():
        yield warning(
            Check.TLS,
            f"{Path(config.tls_dir) / CA_KEY_FILE} is here: who reads it can sign any role",
            "move it to where certificates are issued, off the serving nodes",
        )


def _needed(config: ServeConfig, *, asks_head: bool) -> Iterator[tuple[Role, tuple[str, ...]]]:
    # Without a model somebody looks at a mesh elsewhere, and runs no part of it here.
    if config.model and config.node_rank == 0:
        yield Role.GATEWAY, (config.master_addr,)
        yield Role.STAGE_WORKER, (config.master_addr,)
    elif config.model:
        try:
            yield Role.STAGE_WORKER, (own_address_towards(config.master_addr),)
        except StagemeshError:
            yield Role.STAGE_WORKER, ()  # The check of the head says what is wrong with it.
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
