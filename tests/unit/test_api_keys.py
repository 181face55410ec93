"""API keys: made once, stored hashed, taken back, and never shown again."""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.door_security import door_security
from gateway.frontend.api_keys import ApiKeys
from gateway.rest.tls import RestTls
from services.api_keys import add_key, read_keys, revoke_key
from services.cli import main
from services.config import ServeConfig
from services.errors import ConfigError, NotAuthenticated
from services.file_watch import SETTLE_SECONDS, watching
from services.rpc.roles import Role
from tests.certificates import Pki

HOW = "it"


def add(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["keys", "add", name, "--file", str(path)]) == 0
    return capsys.readouterr().out.strip()


def lets_in(keys: ApiKeys, key: str, scheme: str = "Bearer") -> bool:
    try:
        keys.check(f"{scheme} {key}".encode(), HOW)
    except NotAuthenticated as error:
        assert not key or key not in error.message
        return False
    return True


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    alice, bob = add(path, "alice", capsys), add(path, "bob", capsys)
    assert alice != bob and len(alice) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert alice not in path.read_text() and bob not in path.read_text()
    keys = ApiKeys(path=path)
    assert keys.required and lets_in(keys, alice) and lets_in(keys, bob, "bearer")
    assert not lets_in(keys, alice, "Basic") and not lets_in(keys, alice[:-1])
    assert main(["keys", "list", "--file", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed and "bob" in listed and alice not in listed
    assert main(["keys", "add", "alice", "--file", str(path)]) == 2
    assert "has a key named alice" in capsys.readouterr().err
    assert main(["keys", "revoke", "alice", "--file", str(path)]) == 0
    assert main(["keys", "revoke", "alice", "--file", str(path)]) == 2
    assert "there is: bob" in capsys.readouterr().err
    keys.reload()
    assert not lets_in(keys, alice) and lets_in(keys, bob)
    assert main(["keys", "revoke", "bob", "--file", str(path)]) == 0
    keys.reload()
    assert keys.required and not lets_in(keys, bob)


@pytest.mark.parametrize(
    "arguments", [(), ("ad",), ("add",), ("list",), ("add", "a b"), ("list", "--file", "/none")]
)
def test_wrong_usage_is_said_on_one_line(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments == ("add", "a b"):
        arguments = (*arguments, "--file", str(tmp_path / "keys"))
    assert main(["keys", *arguments]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1


def test_keys_of_the_command_line_and_of_a_file_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    stored = add(path, "a", capsys)
    keys = ApiKeys(("own", "schlüssel"), path)
    assert all(lets_in(keys, key) for key in ("own", "schlüssel", stored))
    assert not lets_in(keys, "")
    open_to_all = ApiKeys()
    assert not open_to_all.required and lets_in(open_to_all, "anything")


def test_a_line_that_is_none_is_named_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    key = add(path, "a", capsys)
    keys = ApiKeys(path=path)
    path.write_text(f"# mine\n\n{key}\n")
    with pytest.raises(ConfigError, match="line 3 of") as error:
        read_keys(path)
    assert key not in error.value.message
    keys.reload()
    assert lets_in(keys, key) and "count on" in caplog.text and key not in caplog.text
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no text file"):
        read_keys(path)


async def test_a_changed_file_is_heard_of(tmp_path: Path) -> None:
    """Written in place, replaced, and behind a symbolic link, as a container's secrets are."""
    first, link = tmp_path / "first", tmp_path / "keys"
    first.write_text("1")
    link.symlink_to(first)
    changes: asyncio.Queue[None] = asyncio.Queue()
    with watching((link,), lambda: changes.put_nowait(None)):
        (tmp_path / "unrelated").write_text("x")
        await asyncio.sleep(2 * SETTLE_SECONDS)
        assert changes.empty()
        first.write_text("22")
        await asyncio.wait_for(changes.get(), 5)
        (tmp_path / "new").write_text("3")
        os.replace(tmp_path / "new", first)
        await asyncio.wait_for(changes.get(), 5)
        (tmp_path / "second").write_text("4")
        (tmp_path / "other").symlink_to(tmp_path / "second")
        os.replace(tmp_path / "other", link)
        await asyncio.wait_for(changes.get(), 5)
    first.write_text("5")
    await asyncio.sleep(0)
    assert changes.empty()


async def test_a_directory_that_is_replaced_is_watched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "here" / "keys"
    keys.parent.mkdir()
    keys.write_text("1")
    changes: asyncio.Queue[None] = asyncio.Queue()
    with watching((keys,), lambda: changes.put_nowait(None)):
        os.rename(keys.parent, tmp_path / "gone")
        await asyncio.wait_for(changes.get(), 5)
        assert "is not watched for changes now" in caplog.text
        keys.parent.mkdir()
        keys.write_text("22")
        await asyncio.wait_for(changes.get(), 5)
        keys.write_text("333")
        await asyncio.wait_for(changes.get(), 5)
        shutil.rmtree(keys.parent)
        await asyncio.wait_for(changes.get(), 5)
        keys.parent.mkdir()
        keys.write_text("4444")
        await asyncio.wait_for(changes.get(), 5)


async def test_a_change_between_reading_and_watching_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deploy may take long: a key that is revoked meanwhile must not count."""
    path, tls = tmp_path / "keys", Pki(tmp_path).files(Role.GATEWAY)
    kept, revoked = add_key(path, "kept"), add_key(path, "revoked")
    config = ServeConfig(
        model="m",
        api_key_file=str(path),
        ssl_certfile=str(tls.certificate),
        ssl_keyfile=str(tls.private_key),
    )
    doors = door_security(config)
    loaded: list[None] = []
    monkeypatch.setattr(RestTls, "reload", lambda _: loaded.append(None))
    with doors.renewed():
        assert not loaded
    revoke_key(path, "revoked")
    os.utime(tls.certificate)
    with doors.renewed():
        assert lets_in(doors.keys, kept) and not lets_in(doors.keys, revoked)
        assert loaded


def test_two_who_add_keys_at_a_time_undo_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    names = [f"name-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_key(path, name), names))
        assert {key.name for key in read_keys(path)} == set(names)
        list(pool.map(lambda name: revoke_key(path, name), names[1:]))
    assert [key.name for key in read_keys(path)] == names[:1]


async def test_what_cannot_be_watched_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with watching((tmp_path / "none" / "keys",), lambda: None):
        assert "need a restart: No such file" in caplog.text
