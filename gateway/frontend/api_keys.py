"""Which API keys let a client in, at both doors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from services.api_keys import digest_of, read_keys
from services.errors import ConfigError, NotAuthenticated

log = logging.getLogger(__name__)


class ApiKeys:
    """The keys of the command line and the environment, and those of a file. Holds hashes only."""

    def __init__(self, keys: Sequence[str] = (), path: Path | None = None) -> None:
        """Without keys and without a file everyone is let in; a file without keys lets nobody
        in. Raises `ConfigError` where the file cannot be read."""
        self._own = tuple(digest_of(key.encode()) for key in keys)
        self.path = path
        self._digests = self._own + self._from_file()

    @property
    def required(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._own) or self.path is not None

    def reload(self) -> None:
        """Reads the file again; what was read before counts on where it cannot be used."""
        try:
            self._digests = self._own + self._from_file()
        except ConfigError as error:
            log.error("%s; the API keys from before count on", error.message)
        else:
            log.info("%d API keys count now", len(self._digests))

    def _from_file(self) -> tuple[bytes, ...]:
        return () if self.path is None else tuple(key.digest for key in read_keys(self.path))

    def check(self, authorization: bytes, how: str) -> None:
        """Raises `NotAuthenticated` unless "Bearer KEY" names one of the keys; `how` tells the
        client where it goes."""
        if not self.required:
            return
        scheme, _, key = authorization.partition(b" ")
        given = digest_of(key.strip())
        # Every hash is compared in full, so that time tells nothing about any of them.
        matches = [hmac.compare_digest(given, one) for one in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise NotAuthenticated(f"the API key is missing or wrong; send {how}")
