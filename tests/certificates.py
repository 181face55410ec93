"""Certificates for tests: a CA that nobody trusts, and what it signs.

pki = Pki(tmp_path)
tls = pki.files(Role.GATEWAY)
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.certs import authority
from services.rpc.roles import Role
from services.rpc.tls_files import TlsFiles, tls_files


class Pki:
    """One CA, and a directory for --tls-dir with a certificate of each role for 127.0.0.1."""

    def __init__(self, directory: Path) -> None:
        self.ca = directory / "ca"
        self.tls_dir = directory / "tls"
        authority.create_authority(self.ca, days=30, force=False)
        for role in Role:
            self.issue(role, self.tls_dir)

    def issue(
        self, role: Role, out: Path, *hosts: str, days: int = 30, force: bool = False
    ) -> TlsFiles:
        """A certificate in a directory; for 127.0.0.1, and the hosts."""
        named = hosts or (("127.0.0.1",) if role.listens else ())
        authority.issue(self.ca, role, named, out, days=days, force=force)
        return tls_files(out, role)

    def files(self, role: Role) -> TlsFiles:
        """Of `tls_dir`."""
        return tls_files(self.tls_dir, role)


class ShiftedClock(datetime):
    """`datetime` with a `now` that the test moves."""

    offset = timedelta(0)

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) + cls.offset


def issue_as_of(monkeypatch: pytest.MonkeyPatch, offset: timedelta) -> None:
    """Lets the CA believe that it is another day."""
    clock = type("Clock", (ShiftedClock,), {"offset": offset})
    monkeypatch.setattr(authority, "datetime", clock)
