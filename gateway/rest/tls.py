"""The REST door's own certificate, which web clients trust: not that of the mesh."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from services.errors import ConfigError
from services.rpc.certificate import no_password, rest_context

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RestTls:
    """Raises `ConfigError` when made of files that cannot be used."""

    certificate: Path
    """The server's own first, then its chain."""
    private_key: Path
    context: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = rest_context(self.certificate, self.private_key)

    def reload(self) -> None:
        """Takes renewed files for new connections; those from before stay in use where these
        cannot be used."""
        try:
            # Tried apart: a pair that does not match would spoil the one that serves.
            rest_context(self.certificate, self.private_key)
            self.context.load_cert_chain(self.certificate, self.private_key, no_password)
        except (ConfigError, OSError) as error:
            log.error("%s; the certificate from before stays in use", error)
        else:
            log.info("using the renewed certificate %s", self.certificate)
