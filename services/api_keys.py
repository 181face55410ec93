"""API keys as they lie in a file, hashed, and what `stagemesh keys` does to it.

    # name   hash                     since
    alice    sha256:5e88...           2026-11-30T09:00:00Z

Keys are made here, never chosen: 256 random bits, so that one round of SHA-256 is
as good as a slow hash. The file tells nobody a key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from services.errors import ConfigError, UsageError
from services.text import shown

KEY_PREFIX = "sm-"
"""So that a key that was published by mistake can be searched for."""
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LINE = re.compile(r"(\S+)\s+sha256:([0-9a-f]{64})(?:\s+(\S+))?")
_HEADER = "# name, hash of the key, since; stagemesh keys writes this file\n"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One line of the file."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    since: str = "-"


def digest_of(key: bytes) -> bytes:
    """What is stored and compared in the place of a key."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """Every key of a file. Raises `ConfigError` naming the line that is none."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the API keys in {path}: {error.strerror or error}; stagemesh keys add "
            f"NAME --file {path} makes the file",
            param="--api-key-file",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text file", param="--api-key-file") from None
    found: list[StoredKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            # Not shown: somebody may have written a key itself there.
            raise ConfigError(
                f"line {number} of {path} is not 'NAME sha256:HASH SINCE'; stagemesh keys add "
                "writes such lines",
                param="--api-key-file",
            )
        found.append(StoredKey(match[1], bytes.fromhex(match[2]), match[3] or "-"))
    return tuple(found)


def add_key(path: Path, name: str) -> str:
    """Makes a key, stores its hash under the name, and returns the key: it is not to be had
    again. Raises `UsageError` for a name that is taken or none, `ConfigError` for the file."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{shown(name)} is no name for a key: 1 to 64 letters, digits and . _ @ -", param="NAME"
        )
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with _alone(path):
        keys = read_keys(path) if path.exists() else ()
        if any(key.name == name for key in keys):
            raise UsageError(
                f"{path} has a key named {name}; revoke it first, or choose another name",
                param="NAME",
            )
        _write(path, (*keys, StoredKey(name, digest_of(key.encode()), since)))
    return key


def revoke_key(path: Path, name: str) -> None:
    """Takes a key out of the file. Raises `UsageError` where there is none of that name."""
    read_keys(path)  # Nothing is made beside a file that is none.
    with _alone(path):
        keys = read_keys(path)
        left = tuple(key for key in keys if key.name != name)
        if len(left) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise UsageError(
                f"{path} has no key named {shown(name)}; there is: {names}", param="NAME"
            )
        _write(path, left)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """From reading to writing, so that of two commands at a time neither undoes the other.

    A file beside it is locked: the file itself is replaced. It stays; one that is removed could
    be locked by two. Others hold it for milliseconds. Raises `ConfigError`.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _cannot_write(lock, error) from error
    with open(descriptor, "wb") as file:
        try:
            _keep_owner(path, lock)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise _cannot_write(lock, error) from error
        yield


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path}: {error.strerror or error}")


def _write(path: Path, keys: Sequence[StoredKey]) -> None:
    """At once: a gateway that reloads never sees half a file."""
    lines = [f"{key.name} sha256:{key.digest.hex()} {key.since}\n" for key in keys]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(_HEADER + "".join(lines))
            file.flush()
            os.fsync(descriptor)
        _keep_owner(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _keep_owner(path: Path, temporary: Path) -> None:
    """Root may add a key to the file of the service's user, who must still read it."""
    if path.exists() and os.geteuid() == 0:
        state = path.stat()
        os.chown(temporary, state.st_uid, state.st_gid)
        temporary.chmod(state.st_mode & 0o777)
