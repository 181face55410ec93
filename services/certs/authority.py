"""A mesh's own CA: makes it, and signs certificates with it.

    CA/ca.pem   what every part trusts        CA/ca.key   signs; belongs on no serving node
    OUT/ca.pem, OUT/ROLE.pem, OUT/ROLE.key    what --tls-dir names on a node

The one place that uses the package `cryptography`; serving does without it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.errors import ConfigError, UsageError
from services.rpc.roles import Role
from services.rpc.tls_files import CA_FILE, tls_files
from services.text import shown

CA_KEY_FILE = "ca.key"
CLOCK_TOLERANCE = timedelta(minutes=10)
"""A certificate counts from so long ago, for nodes whose clocks are behind."""
ALWAYS_NAMED = ("localhost", "127.0.0.1", "::1")
"""In every server's certificate: whoever can listen there is on the same machine."""
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")
_ORGANIZATION = "Stagemesh"


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was written."""

    certificate: Path
    private_key: Path
    not_after: datetime


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def create_authority(directory: Path, *, days: int, force: bool) -> Issued:
    """Makes a CA. Raises `UsageError` where one is there already, unless `force`, and
    `ConfigError` where it cannot be written."""
    certificate_path, key_path = directory / CA_FILE, directory / CA_KEY_FILE
    _check_free((certificate_path, key_path), force, "every certificate of this CA with it")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Stagemesh CA {secrets.token_hex(4)}")
    builder = _builder(name, name, key, days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write_secret(key_path, _pem_of_key(key))
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))
    return Issued(certificate_path, key_path, certificate.not_valid_after_utc)


def issue(
    authority_directory: Path,
    role: Role,
    hosts: Sequence[str],
    out: Path,
    *,
    days: int,
    force: bool,
) -> Issued:
    """Signs a certificate for a role and writes it, its key and the CA's certificate.

    `hosts` are the names and addresses by which others dial the holder; roles that listen
    need one. Raises `UsageError` for files that are there already, unless `force`, and for
    what is no host; `ConfigError` where the CA cannot be read or a file not be written.
    """
    names = [_host(host) for host in hosts]
    if role.listens and not names:
        raise UsageError(
            f"role {role.value} listens, so its certificate names the node: add --host ADDRESS, "
            "as --master-addr or the worker's --host has it",
            param="--host",
        )
    files = tls_files(out, role)
    _check_free((files.certificate, files.private_key), force, "the certificate in use with it")
    authority = _read_authority(authority_directory)
    _write_trust(files.ca, authority.certificate, force)
    key = ec.generate_private_key(ec.SECP256R1())
    wanted = _builder(
        _name(f"{role.value} {hosts[0]}" if hosts else role.value),
        authority.certificate.subject,
        key,
        days,
        latest=authority.certificate.not_valid_after_utc,
    )
    if role.listens:
        names += [_host(host) for host in ALWAYS_NAMED if host not in hosts]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role.listens:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    alternatives = [x509.UniformResourceIdentifier(role.uri), *names]
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName(alternatives), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(_public(authority)), False),
    ]
    for extension, critical in extensions:
        wanted = wanted.add_extension(extension, critical=critical)
    certificate = wanted.sign(authority.key, hashes.SHA256())
    _write_secret(files.private_key, _pem_of_key(key))
    _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    return Issued(files.certificate, files.private_key, certificate.not_valid_after_utc)


def _public(authority: _Authority) -> CertificateIssuerPublicKeyTypes:
    return authority.key.public_key()


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANIZATION),
            # A common name has at most 64 characters (RFC 5280); who is meant stands beside it.
            x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64]),
        ]
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    if latest is not None and latest <= now:
        raise ConfigError(
            f"the CA has expired on {latest:%Y-%m-%d}; make another one with stagemesh certs init"
        )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(end if latest is None else min(end, latest))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if _NAME.fullmatch(text) and len(text) <= 253 and not re.fullmatch(r"[\d.]+", text):
        return x509.DNSName(text)
    raise UsageError(
        f"--host {shown(text)} is no host: give an IP address or a name, without a port",
        param="--host",
    )


def _read_authority(directory: Path) -> _Authority:
    certificate_path, key_path = directory / CA_FILE, directory / CA_KEY_FILE
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(
            f"no CA in {directory}: {error.filename}: {error.strerror}; stagemesh certs init "
            f"--ca {directory} makes one",
            param="--ca",
        ) from None
    except (ValueError, TypeError):
        raise ConfigError(
            f"{certificate_path} or {key_path} is no PEM file of a CA", param="--ca"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or (
        key.public_key() != certificate.public_key()
    ):
        raise ConfigError(
            f"{key_path} is not the key of {certificate_path} (an elliptic curve key)", param="--ca"
        )
    return _Authority(certificate, key)


def _write_trust(path: Path, certificate: x509.Certificate, force: bool) -> None:
    """Leaves a bundle that holds the CA already as it is, also where `force` replaces the
    certificate: it may hold another one for a change of CAs."""
    if path.exists():
        try:
            known = x509.load_pem_x509_certificates(path.read_bytes())
        except ValueError:
            known = []
        if certificate in known:
            return
    if path.exists() and not force:
        raise UsageError(
            f"{path} holds another CA; --out another directory, --force to replace it, or append "
            "this CA's ca.pem to it while certificates of both are in use",
            param="--out",
        )
    _write(path, certificate.public_bytes(serialization.Encoding.PEM))


def _check_free(paths: Sequence[Path], force: bool, loses: str) -> None:
    there = next((path for path in paths if path.exists()), None)
    if there is not None and not force:
        raise UsageError(
            f"{there} is there already; --force replaces it, and {loses}", param="--force"
        )


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_secret(path: Path, content: bytes) -> None:
    _write(path, content, mode=0o600)


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """At once or not at all: a service that reloads never sees half a file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
