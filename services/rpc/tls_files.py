"""A process's place in the mesh's private PKI: the CA, its own certificate and its key.

DIRECTORY/ca.pem              one or several CAs that peers' certificates are signed by
DIRECTORY/ROLE.pem, ROLE.key  this node's certificate for a role, with its chain, and its key
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from services.errors import ConfigError
from services.rpc.roles import Role

CA_FILE = "ca.pem"
_READABLE_BY_OTHERS = stat.S_IROTH | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one identity."""

    ca: Path
    certificate: Path
    """The holder's own first, then the chain up to the CA."""
    private_key: Path


def tls_files(directory: str | Path, role: Role) -> TlsFiles:
    """The files of a role in a directory of --tls-dir; they need not be there."""
    path = Path(directory)
    return TlsFiles(path / CA_FILE, path / f"{role.value}.pem", path / f"{role.value}.key")


def read_pem(path: Path, what: str) -> bytes:
    """Reads one PEM file; raises `ConfigError` naming it where that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the {what} {path}: {error.strerror or error}; stagemesh certs issue "
            "writes it, and --tls-dir names its directory",
            param="--tls-dir",
        ) from error


def check_key_mode(path: Path, *, flag: str = "--tls-dir") -> None:
    """Raises `ConfigError` for a private key that every user of the node can read."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # Whoever reads it says so.
    if mode & _READABLE_BY_OTHERS:
        raise ConfigError(
            f"the TLS private key {path} can be read by every user of this node (mode "
            f"{stat.S_IMODE(mode):04o}); chmod 600 {path}",
            param=flag,
        )
