"""Who may call what: one table for every method of every service, health and reflection too.

A certificate carries its holder's role as a URI in its subject alternative names,
`spiffe://stagemesh/role/ROLE`. The table is asked on every call of a server that
has TLS; a method without a rule is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from services.errors import NotAuthenticated, NotPermitted

ROLE_URI_PREFIX = "spiffe://stagemesh/role/"
_URI_PROPERTY = "peer_uri"
"""gRPC's name, in the authentication context of a call, for the URIs of the peer's certificate."""


class Role(str, Enum):
    """What the holder of a certificate is. The value stands in the certificate."""

    GATEWAY = "gateway"
    """Drives stage workers."""
    STAGE_WORKER = "stage-worker"
    """Joins a mesh."""
    OPERATOR = "operator"
    """Asks how a mesh is: `stagemesh doctor`, reflection."""
    CLIENT = "client"
    """Generates."""

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"{ROLE_URI_PREFIX}{self.value}"

    @property
    def listens(self) -> bool:
        """Whether the holder is a server too, so that its certificate names its hosts."""
        return self in (Role.GATEWAY, Role.STAGE_WORKER)


_EVERY_ROLE = frozenset(Role)
_GATEWAY = frozenset((Role.GATEWAY,))
_STAGE_WORKER = frozenset((Role.STAGE_WORKER,))
_OPERATOR = frozenset((Role.OPERATOR,))
_CLIENT = frozenset((Role.CLIENT,))

ROLES_OF_METHOD: Mapping[str, frozenset[Role]] = {
    "/stagemesh.v1.ControlService/Join": _STAGE_WORKER,
    "/stagemesh.v1.ControlService/Heartbeat": _STAGE_WORKER,
    "/stagemesh.v1.ControlService/Diagnose": _OPERATOR,
    "/stagemesh.v1.ControlService/Echo": _OPERATOR,
    "/stagemesh.v1.StageWorkerService/ResetRanks": _GATEWAY,
    "/stagemesh.v1.StageWorkerService/OpenStore": _GATEWAY,
    "/stagemesh.v1.StageWorkerService/FormGroup": _GATEWAY,
    "/stagemesh.v1.StageWorkerService/Load": _GATEWAY,
    "/stagemesh.v1.StageWorkerService/Execute": _GATEWAY,
    "/stagemesh.v1.StageWorkerService/Status": _GATEWAY,
    "/stagemesh.v1.StageWorkerService/Drain": _GATEWAY,
    "/stagemesh.v1.InferenceService/Generate": _CLIENT,
    "/stagemesh.v1.InferenceService/Tokenize": _CLIENT,
    "/stagemesh.v1.InferenceService/Detokenize": _CLIENT,
    "/stagemesh.v1.InferenceService/ListModels": _CLIENT,
    # Says only whether a server serves; probes of every kind ask it.
    "/grpc.health.v1.Health/Check": _EVERY_ROLE,
    "/grpc.health.v1.Health/List": _EVERY_ROLE,
    "/grpc.health.v1.Health/Watch": _EVERY_ROLE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}
"""Full method name to the roles that may call it."""


def roles_in(uris: Iterable[str]) -> frozenset[Role]:
    """The roles that a certificate's URIs name; what is no role of ours is left out."""
    by_uri = {role.uri: role for role in Role}
    return frozenset(by_uri[uri] for uri in uris if uri in by_uri)


def check_role(method: str, auth_context: Mapping[str, Iterable[bytes]]) -> None:
    """Lets a call pass, or raises.

    `auth_context` is gRPC's, of a connection with TLS. Raises `NotAuthenticated` where the
    peer has shown no role, `NotPermitted` where it has another than the method asks for.
    """
    allowed = ROLES_OF_METHOD.get(method, frozenset())
    shown = roles_in(uri.decode("utf-8", "replace") for uri in auth_context.get(_URI_PROPERTY, ()))
    if shown & allowed:
        return
    wanted = _names(allowed)
    if not allowed:
        raise NotPermitted(
            f"{method} has no rule in the table of roles (services/rpc/roles.py), so nobody may "
            "call it"
        )
    if not shown:
        raise NotAuthenticated(
            f"{method} is for role {wanted}, and the caller's certificate names no role; use one "
            "from stagemesh certs issue --role"
        )
    raise NotPermitted(
        f"{method} is for role {wanted}, and the caller's certificate has role {_names(shown)}; "
        f"use one from stagemesh certs issue --role {min(allowed).value}"
    )


def _names(roles: Iterable[Role]) -> str:
    return " or ".join(sorted(role.value for role in roles))
