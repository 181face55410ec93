"""Certificates are judged as a peer judges them, and what is wrong is said in words."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from gateway import app
from services.cli import main
from services.errors import ConfigError
from services.launch import headless
from services.rpc.certificate import check_certificate, own_identity
from services.rpc.roles import Role
from services.rpc.tls_files import tls_files
from stage_worker import service_main
from tests.certificates import Pki, issue_as_of
from tests.unit.topology.model_directory import ModelDirectory


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize("role", Role)
def test_what_was_issued_is_good(pki: Pki, role: Role) -> None:
    hosts = ("127.0.0.1", "localhost", "::1") if role.listens else ()
    facts = check_certificate(pki.tls_dir, role, hosts)
    assert facts.roles == {role}
    assert len(facts.names) == len(hosts)
    assert not facts.ends_soon


def test_another_host_is_named(pki: Pki, tmp_path: Path) -> None:
    pki.issue(Role.GATEWAY, tmp_path, "10.0.0.1", "head.example")
    for host in ("10.0.0.1", "head.example", "127.0.0.1"):
        check_certificate(tmp_path, Role.GATEWAY, (host,))
    for host in ("10.0.0.2", "other.example"):
        with pytest.raises(ConfigError, match=f"is for .*10.0.0.1.*peers dial {host}"):
            check_certificate(tmp_path, Role.GATEWAY, (host,))


@pytest.mark.parametrize(
    ("offset", "words"),
    [(timedelta(days=-40), "it has expired"), (timedelta(days=5), "it is not valid yet")],
)
def test_dates(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: timedelta, words: str
) -> None:
    issue_as_of(monkeypatch, offset)
    pki.issue(Role.OPERATOR, tmp_path, days=10)
    with pytest.raises(ConfigError, match=rf"operator\.pem is refused .*{words}"):
        check_certificate(tmp_path, Role.OPERATOR)


def test_wrong_role_wrong_ca_and_what_is_missing(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    ours, theirs = pki.files(Role.GATEWAY), other.files(Role.GATEWAY)
    os.replace(theirs.ca, tmp_path / "their-ca.pem")
    theirs.ca.write_bytes(ours.ca.read_bytes())
    with pytest.raises(ConfigError, match="signed by another CA"):
        check_certificate(other.tls_dir, Role.GATEWAY)
    worker = tls_files(tmp_path / "wrong", Role.STAGE_WORKER)
    worker.ca.parent.mkdir()
    worker.ca.write_bytes(ours.ca.read_bytes())
    worker.certificate.write_bytes(ours.certificate.read_bytes())
    worker.private_key.write_bytes(ours.private_key.read_bytes())
    with pytest.raises(ConfigError, match="has role gateway, not stage-worker"):
        check_certificate(tmp_path / "wrong", Role.STAGE_WORKER)
    with pytest.raises(ConfigError, match=r"client\.pem .*No such file"):
        check_certificate(tmp_path / "wrong", Role.CLIENT)


def test_a_certificate_that_ends_soon_is_said_at_the_start(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert own_identity(None, Role.GATEWAY) is None
    pki.issue(Role.CLIENT, tmp_path, days=3)
    assert own_identity(tmp_path, Role.CLIENT) == tls_files(tmp_path, Role.CLIENT)
    assert "renew it" in caplog.text
    caplog.clear()
    own_identity(pki.tls_dir, Role.CLIENT)
    assert not caplog.text


def run(*arguments: object) -> int:
    return main(["certs", *map(str, arguments)])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca, out = tmp_path / "ca", tmp_path / "tls"
    assert run("init", "--ca", ca) == 0
    issue = ("issue", "--ca", ca, "--role", "gateway", "--host", "127.0.0.1", "--out", out)
    assert run(*issue) == 0
    assert "until" in capsys.readouterr().out
    check_certificate(out, Role.GATEWAY, ("127.0.0.1",))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (*ca.iterdir(), *out.iterdir())}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "gateway.pem": 0o644, "gateway.key": 0o600}
    before = tls_files(out, Role.GATEWAY).certificate.read_bytes()
    for again in (issue, ("init", "--ca", ca)):
        assert run(*again) == 2
        assert "is there already; --force replaces it" in capsys.readouterr().err
    assert tls_files(out, Role.GATEWAY).certificate.read_bytes() == before
    assert run(*issue, "--force") == 0
    assert tls_files(out, Role.GATEWAY).certificate.read_bytes() != before
    assert run("init", "--ca", tmp_path / "second") == 0
    assert run("issue", "--ca", tmp_path / "second", "--role", "client", "--out", out) == 2
    assert "holds another CA" in capsys.readouterr().err


def test_a_bundle_of_two_cas_outlives_a_renewal(tmp_path: Path) -> None:
    """The change of CAs: both in every ca.pem, then new certificates of the new one."""
    old, new = Pki(tmp_path / "old"), Pki(tmp_path / "new")
    bundle = old.files(Role.GATEWAY).ca
    both = bundle.read_bytes() + (new.ca / "ca.pem").read_bytes()
    bundle.write_bytes(both)
    new.issue(Role.GATEWAY, old.tls_dir, force=True)
    assert bundle.read_bytes() == both
    check_certificate(old.tls_dir, Role.GATEWAY)
    Pki(tmp_path / "third").issue(Role.GATEWAY, old.tls_dir, force=True)
    assert bundle.read_bytes() == (tmp_path / "third" / "ca" / "ca.pem").read_bytes()


@pytest.mark.parametrize(("days", "code"), [(-40, 1), (5, 1), (None, 2)])
@pytest.mark.parametrize("command", ["gateway", "headless", "stage-worker"])
def test_a_supervisor_tries_again_what_time_may_heal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, days: int | None, code: int
) -> None:
    """Dates that are wrong now are exit code 1; what stays wrong, here the host, is 2."""
    pki = Pki(tmp_path)
    model = ModelDirectory(tmp_path / "tiny")
    model.write_config()
    model.write_single()
    for module in (app, headless, service_main):
        monkeypatch.setattr(module, "setup_logging", lambda process: None)
        monkeypatch.setattr(module, "allow_late_timers", lambda seconds: None)
    with monkeypatch.context() as then:
        if days is not None:
            issue_as_of(then, timedelta(days=days))
        hosts = ("127.0.0.1",) if days is not None else ("10.0.0.9",)
        for role in (Role.GATEWAY, Role.STAGE_WORKER):
            pki.issue(role, pki.tls_dir, *hosts, days=10, force=True)
    at = "127.0.0.1" if days is not None else "127.0.0.2"
    words = {
        "gateway": ("gateway", model.path, "--master-addr", at),
        "headless": (
            *("serve", model.path, "--nnodes", "2", "--node-rank", "1", "--headless"),
            *("-pp", "2", "--cpu-devices", "2", "--master-addr", "127.0.0.1"),
        ),
        "stage-worker": ("stage-worker", "--host", at),
    }[command]
    monkeypatch.setenv("VLLM_HOST_IP", at)
    assert main([*map(str, words), "--tls-dir", str(pki.tls_dir)]) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs a subcommand"),
        (("isue",), "did you mean issue"),
        (("init",), "--ca"),
        (("init", "--ca", "{}", "--days", "0"), "a whole number of days from 1"),
        (("issue", "--ca", "{}/none", "--role", "client", "--out", "{}"), "certs init"),
        (("issue", "--ca", "{}", "--role", "gateway", "--out", "{}"), "add --host ADDRESS"),
        (("issue", "--ca", "{}", "--role", "root", "--out", "{}"), "invalid choice"),
        (
            ("issue", "--ca", "{}", "--role", "gateway", "--host", "a:80", "--out", "{}"),
            "--host a:80 is no host",
        ),
        (
            ("issue", "--ca", "{}", "--role", "gateway", "--host", "1.2.3", "--out", "{}"),
            "--host 1.2.3 is no host",
        ),
    ],
)
def test_wrong_usage_is_said_on_one_line(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*(argument.replace("{}", str(tmp_path)) for argument in arguments)) in (1, 2)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_key_that_asks_for_a_password_does_not_ask_at_the_terminal(
    pki: Pki, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    files = pki.issue(Role.CLIENT, tmp_path)
    key = serialization.load_pem_private_key(files.private_key.read_bytes(), None)
    files.private_key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        check_certificate(tmp_path, Role.CLIENT)
