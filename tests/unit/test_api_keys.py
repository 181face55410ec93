"""API keys: made once, stored hashed, taken back, and never shown again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.frontend.api_keys import ApiKeys
from services.api_keys import read_keys
from services.cli import main
from services.errors import ConfigError, NotAuthenticated
from services.file_watch import SETTLE_SECONDS, watching

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


async def test_what_cannot_be_watched_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with watching((tmp_path / "none" / "keys",), lambda: None):
        assert "need a restart: No such file" in caplog.text
