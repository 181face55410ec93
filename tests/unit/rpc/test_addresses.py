"""Which addresses a mesh takes, and what is said of the others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.types import Receive, Scope, Send

from gateway.rest.server import RestServer
from services.config import ServeConfig
from services.doctor.gather import bind_error
from services.errors import UsageError
from services.launch import deployment, headless
from services.rpc.addresses import (
    HOST_IP_ENV,
    check_door_address,
    check_master_address,
    check_mesh_addresses,
    gateway_names,
    interface_of,
    own_address_towards,
    resolve,
)

ROOT = Path(__file__).resolve().parents[3]
NO_NAMES = ("10.0..1", "a" * 64 + ".example", ".", "a\0b", "no.such.host.invalid", "10.0.0.1:80")


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Never called."""


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_stands_for_nothing_is_refused_with_flag_and_remedy(name: str) -> None:
    for refuse in (
        lambda: check_master_address(name, insecure=True, tls=False),
        lambda: own_address_towards(name),
        lambda: resolve(name, 80, flag="--master-addr", passive=True),
    ):
        with pytest.raises(UsageError) as caught:
            refuse()
        message = caught.value.message
        assert message.startswith("--master-addr ") and " is no address: " in message
        assert "give an IP address" in message and "Errno" not in message
        assert message.isprintable()
        assert caught.value.param == "--master-addr"


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_server_names_its_own_flag(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--host .* is no address"):
        RestServer(no_app).bind(name, 0)
    with pytest.raises(UsageError, match=r"^--host .* is no address"):
        interface_of(name)
    assert bind_error(name, 0) is not None


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("0.0.0.0", "the unspecified address"),
        ("::", "the unspecified address"),
        ("::ffff:0.0.0.0", "the unspecified address"),
        ("0.1.2.3", 'an address of "this network"'),
        ("255.255.255.255", "the broadcast address"),
        ("224.0.0.1", "a multicast address"),
        ("ff02::1", "a multicast address"),
    ],
)
def test_nobody_can_dial_it(address: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        check_master_address(address, insecure=True, tls=False)
    assert caught.value.message.startswith(f"--master-addr {address} is {what}")
    monkeypatch.setenv(HOST_IP_ENV, address)
    with pytest.raises(UsageError, match=f"^{HOST_IP_ENV} {address} is "):
        own_address_towards("127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_warning(address: str) -> None:
    assert check_master_address(address, insecure=False, tls=False) is None


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1", "100.127.255.254", "fd00::1"],
)
def test_a_closed_network_gets_a_warning(address: str) -> None:
    warning = check_master_address(address, insecure=False, tls=False)
    assert warning is not None and f"to {address} is not encrypted" in warning


@pytest.mark.parametrize("address", ["8.8.8.8", "100.63.255.255", "100.128.0.1", "2001:4860::1"])
def test_a_public_address_only_with_insecure(address: str) -> None:
    with pytest.raises(UsageError, match=f"^--master-addr {address} is a public address.*insecure"):
        check_master_address(address, insecure=False, tls=False)
    assert check_master_address(address, insecure=True, tls=False) is not None


def test_a_public_address_is_known_in_another_spelling() -> None:
    with pytest.raises(UsageError, match=r"::ffff:8.8.8.8 \(8.8.8.8\) is a public address"):
        check_master_address("::ffff:8.8.8.8", insecure=False, tls=False)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("stage-worker --master-addr 8.8.8.8", "--master-addr 8.8.8.8 is a public address"),
        ("stage-worker --master-addr 0.0.0.0", "--master-addr 0.0.0.0 is the unspecified address"),
        ("stage-worker --master-addr 10.0..1", "--master-addr 10.0..1 is no address"),
        ("stage-worker --host 0.0.0.0", "--host 0.0.0.0 is the unspecified address"),
        ("stage-worker --host 8.8.8.8", "--host 8.8.8.8 is a public address"),
        ("gateway m --master-addr 10.0..1", "--master-addr 10.0..1 is no address"),
        ("serve m --master-addr 224.0.0.1", "--master-addr 224.0.0.1 is a multicast address"),
        (
            "serve m --nnodes 2 --node-rank 1 --headless --master-addr 10.0..1",
            "--master-addr 10.0..1 is no address",
        ),
    ],
)
def test_every_command_says_so_in_one_line(command: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *command.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"stagemesh: error: {message}")
    assert done.stderr.count("\n") == 1


def test_a_headless_node_does_not_listen_on_a_public_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(headless, "setup_logging", lambda process: None)
    monkeypatch.setattr(headless, "allow_late_timers", lambda seconds: None)
    monkeypatch.setattr(headless, "own_address_towards", lambda master_addr: "8.8.8.8")
    config = ServeConfig(model="m", nnodes=2, node_rank=1, headless=True, master_addr="10.0.0.1")
    with pytest.raises(UsageError, match=r"^this node's address .* 8\.8\.8\.8 is a public address"):
        headless.run(config)


def test_ranks_of_ray_do_not_listen_on_a_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [SimpleNamespace(address=address) for address in ("10.0.0.1", "8.8.8.8")]
    cluster = SimpleNamespace(
        address="10.0.0.1", choose_device=lambda asked: "cpu", place=lambda shape, device: places
    )
    monkeypatch.setattr(deployment, "connect", lambda _: contextlib.nullcontext(cluster))
    monkeypatch.setattr(deployment, "resolve_model", Path)
    monkeypatch.setattr(
        deployment, "make_plan", lambda *_, **__: SimpleNamespace(shape=None, device="cpu")
    )
    config = ServeConfig(model="m", distributed_executor_backend="ray")
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(UsageError, match=r"^the Ray node's address 8\.8\.8\.8 is a public address"),
    ):
        deployment.deploy(config, stack, launch_workers=True)


def test_one_warning_names_every_address() -> None:
    named = (("--master-addr", "10.0.0.1"), ("--host", "10.0.0.2"), ("--x", "127.0.0.1"))
    said = check_mesh_addresses(named, insecure=False, tls=False)
    assert said is not None and "to 10.0.0.1 and 10.0.0.2 is not encrypted" in said
    assert check_mesh_addresses(named, insecure=False, tls=True) is None


def test_the_gateway_is_dialled_at_both_its_addresses() -> None:
    assert gateway_names("10.0.0.1", "10.0.0.2") == ("10.0.0.1", "10.0.0.2")
    for host in ("0.0.0.0", "127.0.0.1", "10.0.0.1"):
        assert gateway_names("10.0.0.1", host) == ("10.0.0.1",)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "VLLM_HOST_IP is empty; set it to an address of this node"),
        ("10.0..1", "VLLM_HOST_IP 10.0..1 is no address"),
        # From a documentation range (RFC 5737): nobody has it.
        ("192.0.2.77", "VLLM_HOST_IP 192.0.2.77 cannot be listened on here"),
    ],
)
def test_an_address_from_the_environment_is_named_as_such(
    monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    monkeypatch.setenv(HOST_IP_ENV, address)
    with pytest.raises(UsageError) as caught:
        own_address_towards("127.0.0.1")
    assert caught.value.message.startswith(words)
    monkeypatch.setenv(HOST_IP_ENV, "127.0.0.1")
    assert own_address_towards("192.0.2.1") == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_doors_on_loopback_need_no_word(host: str) -> None:
    assert (
        check_door_address(host, insecure=False, rest_tls=False, grpc_tls=False, keys=False) is None
    )


def test_what_is_open_at_the_doors_is_said_once() -> None:
    def said(host: str, **flags: bool) -> str | None:
        closed = {"insecure": False, "rest_tls": True, "grpc_tls": True, "keys": True}
        return check_door_address(host, **(closed | flags))

    for host in ("10.0.0.1", "0.0.0.0", "8.8.8.8"):
        assert said(host) is None
        assert "no API key" in str(said(host, keys=False))
    warning = str(said("0.0.0.0", rest_tls=False, grpc_tls=False, keys=False))
    for words in ("--host 0.0.0.0", "REST is not encrypted", "gRPC is not encrypted", "no API key"):
        assert words in warning
    for flags in ({"rest_tls": False}, {"grpc_tls": False}):
        with pytest.raises(UsageError, match=r"^--host 8\.8\.8\.8 is a public address.*--insecure"):
            said("8.8.8.8", **flags)
        assert "not encrypted" in str(said("8.8.8.8", insecure=True, **flags))


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860::1"])
def test_with_tls_a_public_address_is_taken_and_the_data_plane_named(address: str) -> None:
    said = check_master_address(address, insecure=False, tls=True)
    assert said is not None and "activations" in said and "not" in said
    assert check_master_address("10.0.0.1", insecure=False, tls=True) is None
