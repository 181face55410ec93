"""What a doctor says of certificates and of clients' ways in, beside docs/doctor.md's examples."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from services.api_keys import add_key
from services.config import ServeConfig
from services.doctor import tls_check
from services.doctor.findings import Outcome
from services.doctor.tls_check import check_doors, check_mesh_address, check_tls
from services.errors import ConfigError
from services.launch.deployment import deploy
from services.rpc.roles import Role
from tests.certificates import Pki

HEAD = ServeConfig(model="m")
NODE = dataclasses.replace(HEAD, nnodes=2, node_rank=1, headless=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def said(config: ServeConfig, *, asks_head: bool = False) -> list[tuple[Outcome, str]]:
    return [(found.outcome, found.what) for found in check_tls(config, asks_head=asks_head)]


def test_every_role_of_the_node_is_looked_at(pki: Pki) -> None:
    tls = str(pki.tls_dir)
    assert said(HEAD) == []
    for config, asks_head, roles in (
        (HEAD, False, ["gateway", "stage-worker"]),
        (HEAD, True, ["gateway", "stage-worker", "operator"]),
        (NODE, True, ["stage-worker", "operator"]),
        (dataclasses.replace(HEAD, model=""), True, ["operator"]),
    ):
        found = said(dataclasses.replace(config, tls_dir=tls), asks_head=asks_head)
        assert [what.partition(": role ")[2].split()[0].strip(",") for _, what in found] == roles
        assert {outcome for outcome, _ in found} == {Outcome.OK}


def test_what_is_wrong_with_the_directory(pki: Pki, tmp_path: Path) -> None:
    pki.issue(Role.GATEWAY, tmp_path, days=3)
    (tmp_path / "ca.key").touch()
    found = said(dataclasses.replace(HEAD, tls_dir=str(tmp_path)))
    assert [outcome for outcome, _ in found] == [
        Outcome.WARNING,
        Outcome.WARNING,
        Outcome.WARNING,
    ]
    assert "gateway does not" in found[1][1] and "can sign any role" in found[2][1]
    ((outcome, what),) = said(dataclasses.replace(NODE, tls_dir=str(tmp_path)))[:1]
    assert outcome is Outcome.FAILED and "stage-worker.pem" in what


def test_what_clients_dial_is_in_the_gateways_certificate(pki: Pki) -> None:
    config = dataclasses.replace(HEAD, tls_dir=str(pki.tls_dir), host="10.0.0.9")
    outcome, what = said(config)[0]
    assert outcome is Outcome.FAILED and "peers dial 10.0.0.9" in what
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(ConfigError, match=r"gateway\.pem .*peers dial 10\.0\.0\.9"),
    ):
        deploy(config, stack, launch_workers=False)


def test_the_ways_in(pki: Pki, tmp_path: Path) -> None:
    def doors(**settings: object) -> list[tuple[Outcome, str]]:
        config = dataclasses.replace(HEAD, **settings)
        return [(found.outcome, found.what) for found in check_doors(config)]

    assert doors() == []
    ((outcome, what),) = doors(host="10.0.0.1")
    assert outcome is Outcome.WARNING and "no API key" in what
    ((outcome, what),) = doors(host="8.8.8.8")
    assert outcome is Outcome.FAILED and "is a public address" in what
    files = pki.files(Role.GATEWAY)
    add_key(tmp_path / "keys", "a")
    whole = {
        "host": "8.8.8.8",
        "tls_dir": str(pki.tls_dir),
        "ssl_certfile": str(files.certificate),
        "ssl_keyfile": str(files.private_key),
        "api_key_file": str(tmp_path / "keys"),
    }
    assert [outcome for outcome, _ in doors(**whole)] == [Outcome.OK, Outcome.OK]
    broken = whole | {"ssl_keyfile": str(tmp_path / "none"), "api_key_file": "/none"}
    assert [outcome for outcome, _ in doors(**broken)] == [Outcome.FAILED, Outcome.FAILED]
    assert list(check_doors(NODE)) == []


def mesh(config: ServeConfig, **settings: object) -> list[tuple[Outcome, str]]:
    found = check_mesh_address(dataclasses.replace(config, **settings))
    return [(each.outcome, each.what) for each in found]


@pytest.mark.parametrize(
    ("address", "without_tls", "with_tls"),
    [
        ("127.0.0.1", None, None),
        ("10.0.0.2", (Outcome.WARNING, "not encrypted and not authenticated"), None),
        (
            "8.8.8.8",
            (Outcome.FAILED, "is a public address"),
            (Outcome.WARNING, "8.8.8.8 is a public address: gRPC is protected by TLS"),
        ),
    ],
)
def test_a_nodes_own_address_is_judged_like_the_heads(
    address: str,
    without_tls: tuple[Outcome, str] | None,
    with_tls: tuple[Outcome, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_check, "own_address_towards", lambda _: address)
    for wanted, tls_dir in ((without_tls, None), (with_tls, "tls")):
        found = mesh(NODE, tls_dir=tls_dir)
        assert len(found) == (wanted is not None)
        for outcome, what in found:
            assert wanted is not None
            assert outcome is wanted[0] and wanted[1] in what and address in what
    if without_tls is not None:
        assert mesh(NODE, insecure=True)[0][0] is Outcome.WARNING
    # It is no matter of the head's own node.
    assert mesh(HEAD) == []


@pytest.mark.parametrize("chosen", ["0.0.0.0", "", "203.0.113.7"])
def test_a_chosen_address_that_no_worker_can_have_is_said(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", chosen)
    ((outcome, what),) = mesh(NODE)
    assert outcome is Outcome.FAILED and what.startswith("VLLM_HOST_IP")


def test_the_heads_address_is_judged_where_it_is_open() -> None:
    ((outcome, what),) = mesh(HEAD, master_addr="10.0.0.1")
    assert outcome is Outcome.WARNING and "10.0.0.1" in what
    # Refusals of it are the check of the head's.
    assert mesh(HEAD, master_addr="8.8.8.8") == []
    # Nor is it this node's business where somebody only looks.
    assert mesh(HEAD, model="", master_addr="10.0.0.1") == []
