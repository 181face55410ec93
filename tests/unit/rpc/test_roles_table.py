"""Who may call what is said for every method that there is."""

from __future__ import annotations

import pytest

from services.errors import NotAuthenticated, NotPermitted
from services.rpc.roles import ROLES_OF_METHOD, Role, check_role, roles_in
from tests.service_methods import every_method

JOIN = "/stagemesh.v1.ControlService/Join"


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    methods = every_method()
    assert len(methods) > 15
    without = sorted(methods.keys() - ROLES_OF_METHOD.keys())
    assert not without, f"say in services/rpc/roles.py who may call {', '.join(without)}"
    assert ROLES_OF_METHOD.keys() == methods.keys()
    assert all(ROLES_OF_METHOD.values())


def test_a_method_without_a_rule_is_nobodys() -> None:
    for role in Role:
        with pytest.raises(NotPermitted, match="no rule"):
            check_role("/stagemesh.v1.New/Method", {"peer_uri": [role.uri.encode()]})


def test_a_role_among_other_uris_counts() -> None:
    mesh_of_others = [b"https://example", Role.STAGE_WORKER.uri.encode(), b"\xff"]
    check_role(JOIN, {"peer_uri": mesh_of_others})
    for uris in ([], [b"\xff"], [Role.STAGE_WORKER.uri.upper().encode()]):
        with pytest.raises(NotAuthenticated, match="names no role"):
            check_role(JOIN, {"peer_uri": uris})
    with pytest.raises(NotAuthenticated):
        check_role(JOIN, {})
    assert roles_in([f"{Role.GATEWAY.uri}/x", f"x{Role.GATEWAY.uri}"]) == frozenset()
