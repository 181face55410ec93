"""Looks at certificates with the standard library's TLS: a handshake with itself, in memory.

So the rules are OpenSSL's own, as a peer applies them: chain, dates, purpose, names.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from services.errors import ConfigError
from services.rpc.roles import Role, roles_in
from services.rpc.tls_files import TlsFiles, check_key_mode, tls_files

log = logging.getLogger(__name__)

_MAX_ROUNDS = 16
"""Of bytes back and forth; a handshake takes three."""
RENEW_BEFORE = timedelta(days=14)
RETRY_SECONDS = 2.0
"""After which a supervisor may look again whether a certificate has become valid."""
_DATE = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a certificate says of its holder."""

    subject: str
    roles: frozenset[Role]
    names: tuple[str, ...]
    """Host names and IP addresses."""
    not_after: datetime

    @property
    def ends_soon(self) -> bool:
        """Whether it is time to renew it."""
        return self.not_after - datetime.now(UTC) < RENEW_BEFORE

    @property
    def end(self) -> str:
        """When it ends, for people."""
        return self.not_after.astimezone(UTC).strftime(_DATE)


def check_pair(files: TlsFiles) -> None:
    """Raises `ConfigError` where a file is no PEM, or the key is not the certificate's."""
    _own_context(ssl.PROTOCOL_TLS_SERVER, files)


def check_certificate(
    directory: str | Path, role: Role, hosts: Sequence[str] = ()
) -> CertificateFacts:
    """Looks at this node's certificate for a role as its peers will.

    `hosts` are the names or addresses by which peers dial it. Raises `ConfigError` that says
    which file is wrong and why: unreadable, another key's, expired, not valid yet, of another
    CA, of another role, without a host. Only what has to do with time says when to try again.
    """
    files = tls_files(directory, role)
    server, client = _own_context(ssl.PROTOCOL_TLS_SERVER, files), _peer_context(files.ca)
    # As a client shows it: every role does that.
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(files.ca)
    client.load_cert_chain(files.certificate, files.private_key)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    try:
        shown = _handshake(server, client, None)
    except ssl.SSLError as error:
        raise _refused(files, error) from None
    facts = _facts(shown)
    if role not in facts.roles:
        has = " and ".join(sorted(r.value for r in facts.roles)) or "none"
        raise ConfigError(
            f"the certificate {files.certificate} ({facts.subject}) has role {has}, not "
            f"{role.value}: {role.uri} is not in its alternative names; stagemesh certs issue "
            f"--role {role.value} makes one",
            param="--tls-dir",
        )
    for host in hosts:
        try:
            _handshake(_own_context(ssl.PROTOCOL_TLS_SERVER, files), _peer_context(files.ca), host)
        except ssl.SSLError as error:
            raise _refused(files, error, host, facts) from None
    return facts


def own_identity(
    tls_dir: str | Path | None, role: Role, hosts: Sequence[str] = ()
) -> TlsFiles | None:
    """The files of a role that this process is to take, looked at; None where the mesh has no
    TLS. Warns of a certificate that ends soon. Raises as `check_certificate`."""
    if tls_dir is None:
        return None
    facts = check_certificate(tls_dir, role, hosts)
    files = tls_files(tls_dir, role)
    if facts.ends_soon:
        log.warning("the certificate %s ends on %s: renew it", files.certificate, facts.end)
    return files


def _own_context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    try:
        context.load_cert_chain(files.certificate, files.private_key, password=no_password)
    except OSError as error:
        raise ConfigError(f"{_pair(files)} cannot be used: {reason(error)}") from None
    return context


def no_password() -> bytes:
    """OpenSSL would ask at the terminal."""
    return b""


def _peer_context(ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(f"the CA certificate {ca} cannot be used: {reason(error)}") from None
    return context


def rest_context(certificate: Path, private_key: Path) -> ssl.SSLContext:
    """For the REST door, whose clients show no certificate. Raises `ConfigError` naming the flags
    where the files cannot be used."""
    check_key_mode(private_key, flag="--ssl-keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, no_password)
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} with --ssl-keyfile {private_key} cannot be used: "
            f"{reason(error)}",
            param="--ssl-certfile",
        ) from None
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a connection to a peer, outside of gRPC, that shows our certificate."""
    context = _peer_context(files.ca)
    context.load_cert_chain(files.certificate, files.private_key, password=no_password)
    context.set_alpn_protocols(["h2"])
    return context


def _handshake(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext, host: str | None
) -> dict[str, Any]:
    """Both sides in this process; the server's view of the client. Raises `ssl.SSLError`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(_MAX_ROUNDS):
        for side in tuple(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
        if not waiting:
            return server.getpeercert() or {}
    raise ssl.SSLError("the handshake did not end")


def _facts(shown: dict[str, Any]) -> CertificateFacts:
    subject = ", ".join(f"{key}={value}" for part in shown["subject"] for key, value in part)
    alternatives = shown.get("subjectAltName", ())
    return CertificateFacts(
        subject=subject or "no subject",
        roles=roles_in(value for kind, value in alternatives if kind == "URI"),
        names=tuple(value for kind, value in alternatives if kind in ("DNS", "IP Address")),
        not_after=datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC),
    )


def _refused(
    files: TlsFiles,
    error: ssl.SSLError,
    host: str | None = None,
    facts: CertificateFacts | None = None,
) -> ConfigError:
    what = f"the certificate {files.certificate}"
    if facts is not None and host is not None and "match" in reason(error):
        return wrong_host(files, facts, host)
    return ConfigError(
        f"{what} is refused against {files.ca}: {reason(error)}; stagemesh certs issue makes a "
        "new one",
        param="--tls-dir",
        # A clock is set, or a certificate renewed, while a supervisor tries again.
        retry_after_seconds=RETRY_SECONDS if _has_to_do_with_time(error) else None,
    )


def _has_to_do_with_time(error: ssl.SSLError) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in (
        _NOT_YET_VALID,
        _EXPIRED,
    )


def wrong_host(files: TlsFiles, facts: CertificateFacts, host: str) -> ConfigError:
    """A certificate that peers will refuse, because they dial another name."""
    names = ", ".join(facts.names) or "no host"
    return ConfigError(
        f"the certificate {files.certificate} is for {names}, and peers dial {host}; stagemesh "
        f"certs issue --host {host} makes one",
        param="--tls-dir",
    )


def _pair(files: TlsFiles) -> str:
    return f"the certificate {files.certificate} with its key {files.private_key}"


def reason(error: OSError) -> str:
    """What TLS says, in words that stand in a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFICATION.get(error.verify_code, error.verify_message)
    if isinstance(error, ssl.SSLError):
        library = (error.reason or "").upper().replace(" ", "_")
        return next((words for name, words in _ALERTS.items() if name in library), None) or (
            library.lower().replace("_", " ") or "it is no PEM file"
        )
    return error.strerror or str(error)


# OpenSSL's X509_V_ERR_...
_NOT_YET_VALID = 9
_EXPIRED = 10
_VERIFICATION = {
    _NOT_YET_VALID: "it is not valid yet (compare this node's clock with that of the CA's)",
    _EXPIRED: "it has expired",
    18: "it is self-signed, and not by that CA",
    19: "its chain ends in a CA that is not trusted here",
    20: "it was signed by another CA",
    21: "it was signed by another CA",
    26: "it is not made for this purpose (extended key usage)",
    62: "its names do not match the host",
    64: "its names do not match the address",
}
_ALERTS = {
    "CERTIFICATE_EXPIRED": "the other side says that our certificate has expired",
    "UNKNOWN_CA": "the other side does not trust the CA of our certificate",
    "CERTIFICATE_REQUIRED": "the other side asks for a certificate",
    "BAD_CERTIFICATE": "the other side refuses our certificate",
    "CERTIFICATE_UNKNOWN": "the other side refuses our certificate",
    "UNSUPPORTED_CERTIFICATE": "the other side refuses our certificate for this purpose",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
    "NO_START_LINE": "it is no PEM file",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it is no PEM file",
}
