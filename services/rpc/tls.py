"""gRPC's credentials from the files of an identity, renewed while it runs.

All gRPC between the parts is mutual TLS: both sides show a certificate. Servers
read renewed files at the next handshake, clients for the next channel.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.errors import ConfigError
from services.rpc.certificate import check_pair
from services.rpc.tls_files import TlsFiles, check_key_mode, read_pem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pem:
    """What the files hold."""

    ca: bytes
    certificate: bytes
    private_key: bytes


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Mutual TLS for a server. Raises `ConfigError` where a file cannot be used.

    gRPC asks for the files' state at every handshake, so a renewed certificate and another CA
    count from the next connection on. Files that cannot be read then (a renewal that is half
    done) leave the last good ones in use.
    """
    source = _RenewedFiles(files)
    return grpc.dynamic_ssl_server_credentials(
        source.first, source.next, require_client_authentication=True
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Mutual TLS for one channel, with the files as they are now. Raises `ConfigError`."""
    pem = _read(files)
    return grpc.ssl_channel_credentials(pem.ca, pem.private_key, pem.certificate)


class RenewedCredentials:
    """Mutual TLS for channels that are made over a long time: each takes the files as they are
    then, and the last good ones where these cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises `ConfigError` where a file cannot be used now."""
        self._files = files
        self._last = channel_credentials(files)

    def now(self) -> grpc.ChannelCredentials:
        """For the next channel."""
        try:
            self._last = channel_credentials(self._files)
        except ConfigError as error:
            log.error("%s; the certificate from before stays in use", error.message)
        return self._last


class _RenewedFiles:
    """Gives gRPC a new configuration when a file has changed. Called from gRPC's threads."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._pem = _read(files)
        self.first = _configuration(self._pem)

    def next(self) -> grpc.ServerCertificateConfiguration | None:
        """None: nothing has changed."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return None
            try:
                pem = _read(self._files)
            except ConfigError as error:
                # Once for each change, not for each handshake after it.
                self._stamp = stamp
                log.error("%s; the certificate from before stays in use", error.message)
                return None
            self._stamp = stamp
            if pem == self._pem:
                return None
            self._pem = pem
            log.info("using the renewed certificate %s", self._files.certificate)
            return _configuration(pem)


def _stamp(files: TlsFiles) -> tuple[tuple[int, int] | None, ...]:
    return tuple(map(_stamp_of, (files.ca, files.certificate, files.private_key)))


def _stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pem.private_key, pem.certificate)], root_certificates=pem.ca
    )


def _read(files: TlsFiles) -> _Pem:
    check_key_mode(files.private_key)
    pem = _Pem(
        read_pem(files.ca, "CA certificate"),
        read_pem(files.certificate, "TLS certificate"),
        read_pem(files.private_key, "TLS private key"),
    )
    # Certificate and key of two moments would break every handshake from here on.
    check_pair(files)
    return pem
