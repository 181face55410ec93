"""docs/security.md: its commands work in its order, and its table of roles is the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from services.cli import main
from services.cli.arguments import Positional, parse_arguments
from services.cli.doctor_flags import DOCTOR_GROUPS
from services.cli.flags import SERVE_GROUPS
from services.cli.settings import doctor_request, serve_config
from services.rpc.certificate import check_certificate
from services.rpc.roles import Role

DOCUMENT = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")
MODEL = Positional("MODEL", "")


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert all(line.startswith("stagemesh ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


def test_the_set_up_is_five_commands() -> None:
    first = re.search(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL)
    assert first is not None and len(first[1].splitlines()) == 5


def test_its_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = set()
    for command, *arguments in commands():
        seen.add(command)
        if command in ("certs", "keys"):
            assert main([command, *arguments]) == 0, capsys.readouterr().err
        elif command == "serve":
            parsed = parse_arguments(command, "", SERVE_GROUPS, MODEL, arguments)
            assert serve_config(command, parsed, SERVE_GROUPS, {}).tls_dir == "/etc/stagemesh/tls"
        else:
            assert command == "doctor"
            parsed = parse_arguments(command, "", DOCTOR_GROUPS, MODEL, arguments)
            request = doctor_request(parsed, DOCTOR_GROUPS, {})
            assert request.asks_head and not request.problems
    assert seen == {"certs", "keys", "serve", "doctor"}
    for directory, role, hosts in (
        ("node-1", Role.GATEWAY, ("10.0.0.1",)),
        ("node-1", Role.STAGE_WORKER, ("10.0.0.1",)),
        ("node-2", Role.STAGE_WORKER, ("10.0.0.2",)),
        ("operator", Role.OPERATOR, ()),
    ):
        check_certificate(directory, role, hosts)


def test_every_role_has_its_row() -> None:
    section = DOCUMENT.partition("## Who may do what")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == {r.value for r in Role}
