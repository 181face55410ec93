"""The REST door's own certificate, which web clients trust: not that of the mesh."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from services.errors import ConfigError
from services.rpc.certificate import reason
from services.rpc.tls import check_key_mode

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RestTls:
    """Raises `ConfigError` when made of files that cannot be used."""

    certificate: Path
    """The server's own first, then its chain."""
    private_key: Path
    context: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = _loaded(self.certificate, self.private_key)

    def reload(self) -> None:
        """Takes renewed files for new connections; those from before stay in use where these
        cannot be used."""
        try:
            # Tried apart: a pair that does not match would spoil the one that serves.
            _loaded(self.certificate, self.private_key)
            self.context.load_cert_chain(self.certificate, self.private_key, _no_password)
        except (ConfigError, OSError) as error:
            log.error("%s; the certificate from before stays in use", error)
        else:
            log.info("using the renewed certificate %s", self.certificate)


def _loaded(certificate: Path, private_key: Path) -> ssl.SSLContext:
    check_key_mode(private_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, _no_password)
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} with --ssl-keyfile {private_key} cannot be used: "
            f"{reason(error)}",
            param="--ssl-certfile",
        ) from None
    return context


def _no_password() -> bytes:
    """OpenSSL would ask at the terminal."""
    return b""
