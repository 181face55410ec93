"""Every method of every service over real TLS: its roles get in, and nobody else does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from services.certs import authority
from services.errors import NotAuthenticated, NotPermitted
from services.rpc import RpcServer, create_channel, error_from_rpc
from services.rpc.roles import ROLES_OF_METHOD, Role
from services.rpc.tls_files import TlsFiles
from tests.certificates import Pki
from tests.service_methods import own_methods

TIMEOUT_SECONDS = 5.0
REFUSED = grpc.StatusCode.PERMISSION_DENIED


def stub(method: MethodDescriptor) -> grpc.RpcMethodHandler:
    """Answers with one empty message."""
    response = method.output_type._concrete_class()

    async def unary(_: Any, context: grpc.aio.ServicerContext) -> Any:
        return response

    async def stream(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        yield response

    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, stream),
    }
    make, handler = kinds[method.client_streaming, method.server_streaming]
    return make(
        handler, method.input_type._concrete_class.FromString, type(response).SerializeToString
    )


@contextlib.asynccontextmanager
async def served(tls: TlsFiles) -> AsyncIterator[str]:
    """A server of ours with a stub for every method of our services."""
    server = RpcServer([])
    by_service: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for method in own_methods():
        handlers = by_service.setdefault(method.containing_service.full_name, {})
        handlers[method.name] = stub(method)
    for service, handlers in by_service.items():
        generic = grpc.method_handlers_generic_handler(service, handlers)
        server.grpc_server.add_generic_rpc_handlers((generic,))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0, tls=tls)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace_seconds=0)


async def call(
    channel: grpc.aio.Channel, method: str, *, silent: bool = False
) -> grpc.aio.AioRpcError | None:
    """One empty request of whatever kind, or none at all; None where an answer came."""
    # What is sent looks alike for all kinds of methods.
    requests = None if silent else iter([b""])
    running = channel.stream_stream(method)(requests, timeout=TIMEOUT_SECONDS)
    try:
        answer = await running.read()
    except grpc.aio.AioRpcError as error:
        return error
    assert answer is not grpc.aio.EOF, method
    running.cancel()
    return None


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize("role", Role)
async def test_a_role_may_call_its_methods_and_no_others(pki: Pki, role: Role) -> None:
    async with (
        served(pki.files(Role.GATEWAY)) as address,
        create_channel(address, tls=pki.files(role)) as channel,
    ):
        for method, allowed in ROLES_OF_METHOD.items():
            # Who may not call is told so before anything is waited for.
            error = await call(channel, method, silent=role not in allowed)
            if role in allowed:
                code = grpc.StatusCode.OK if error is None else error.code()
                library_lacks_it = method == "/grpc.health.v1.Health/List"
                wanted = "UNIMPLEMENTED" if library_lacks_it else "OK"
                assert code.name == wanted, (method, error)
                continue
            assert error is not None and error.code() is REFUSED, method
            failure = error_from_rpc(error)
            assert isinstance(failure, NotPermitted)
            for word in (method, f"has role {role.value}", *(each.value for each in allowed)):
                assert word in failure.message


async def test_a_certificate_without_a_role_is_refused_everywhere(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Role, "uri", property(lambda role: f"spiffe://elsewhere/{role.value}"))
    files = pki.issue(Role.CLIENT, tmp_path)
    monkeypatch.undo()
    async with (
        served(pki.files(Role.GATEWAY)) as address,
        create_channel(address, tls=files) as channel,
    ):
        for method in ROLES_OF_METHOD:
            error = await call(channel, method)
            assert error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED, method
            failure = error_from_rpc(error)
            assert isinstance(failure, NotAuthenticated)
            assert method in failure.message and "names no role" in failure.message


async def test_without_a_certificate_of_the_ca_nothing_is_answered(
    pki: Pki, tmp_path: Path
) -> None:
    """None at all, one of another CA, and no TLS: the handshake ends it, before any method."""
    other = Pki(tmp_path)
    ca = pki.files(Role.CLIENT).ca.read_bytes()
    stranger = other.files(Role.GATEWAY)
    identities = {
        "none": grpc.ssl_channel_credentials(ca),
        "another CA's": grpc.ssl_channel_credentials(
            ca, stranger.private_key.read_bytes(), stranger.certificate.read_bytes()
        ),
    }
    async with served(pki.files(Role.GATEWAY)) as address:
        channels = {
            name: grpc.aio.secure_channel(address, credentials)
            for name, credentials in identities.items()
        }
        channels["no TLS"] = grpc.aio.insecure_channel(address)
        for name, channel in channels.items():
            async with channel:
                for method in ROLES_OF_METHOD:
                    error = await call(channel, method)
                    assert error is not None, (name, method)
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, (name, method)


async def test_an_operator_cannot_pose_as_a_server(pki: Pki, tmp_path: Path) -> None:
    """Its certificate is for clients, whatever hosts somebody has put into it."""
    out = tmp_path / "tls"
    authority.issue(pki.ca, Role.OPERATOR, ("127.0.0.1",), out, days=1, force=False)
    operator = TlsFiles(out / "ca.pem", out / "operator.pem", out / "operator.key")
    async with (
        served(operator) as address,
        create_channel(address, tls=pki.files(Role.STAGE_WORKER)) as channel,
    ):
        error = await call(channel, "/grpc.health.v1.Health/Check")
        assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
