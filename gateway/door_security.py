"""What the front doors ask of clients, and show to them; both may be renewed while they serve."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.frontend.api_keys import ApiKeys
from gateway.rest.tls import RestTls
from services.config import ServeConfig
from services.file_watch import Stamps, stamps, watching


@dataclass(frozen=True, slots=True)
class DoorSecurity:
    """API keys of both doors, and the REST door's TLS."""

    keys: ApiKeys
    rest_tls: RestTls | None
    keys_as_of: Stamps | None = None
    """The state of the files before they were read: they are watched only when a deploy, which
    may take long, is over."""
    rest_tls_as_of: Stamps | None = None

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Reads files again when they change. Entered inside a running event loop."""
        with contextlib.ExitStack() as stack:
            if self.keys.path is not None:
                seen = self.keys_as_of
                stack.enter_context(watching((self.keys.path,), self.keys.reload, seen))
            if (tls := self.rest_tls) is not None:
                seen = self.rest_tls_as_of
                stack.enter_context(watching((tls.certificate, tls.private_key), tls.reload, seen))
            yield


def door_security(config: ServeConfig) -> DoorSecurity:
    """From the files that the configuration names. Raises `ConfigError` for one that cannot be
    used."""
    path = None if config.api_key_file is None else Path(config.api_key_file)
    keys_as_of = None if path is None else stamps((path,))
    tls = tls_as_of = None
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        certificate, private_key = Path(config.ssl_certfile), Path(config.ssl_keyfile)
        tls_as_of = stamps((certificate, private_key))
        tls = RestTls(certificate, private_key)
    return DoorSecurity(ApiKeys(config.api_key, path), tls, keys_as_of, tls_as_of)
