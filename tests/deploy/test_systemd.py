"""The unit files: well formed, hardened, and calling commands that exist."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from services.cli.arguments import Positional, parse_arguments
from services.cli.flags import SERVE_GROUPS, STAGE_WORKER_GROUPS
from services.cli.settings import serve_config, stage_worker_config
from services.config import DEFAULT_MASTER_PORT, ServeConfig, StageWorkerConfig

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
NAMES = (
    "stagemesh-gateway.service",
    "stagemesh-stage-worker@.service",
    "stagemesh-standby@.service",
)
PROGRAM = "/opt/stagemesh/bin/stagemesh"


def read_unit(name: str) -> configparser.ConfigParser:
    # Strict: a setting that stands twice is an error.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((UNITS / name).read_text("utf-8"))
    return parser


def arguments_of(name: str) -> list[str]:
    """What the unit passes to the command, with the files of this directory."""
    program, *arguments = shlex.split(read_unit(name)["Service"]["ExecStart"])
    assert program == PROGRAM
    return [text.replace("/etc/stagemesh", str(UNITS)).replace("%i", "1") for text in arguments]


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_is_complete_and_hardened(name: str) -> None:
    unit = read_unit(name)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    assert service["User"] == "stagemesh"
    for setting in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert service[setting] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["RestartPreventExitStatus"] == "2"
    # A certificate that is not valid yet, because the clock is not set, is tried again for ever.
    assert "time-sync.target" in unit["Unit"]["After"]
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert int(service["TimeoutStopSec"]) > 0


@pytest.mark.parametrize("name", [*NAMES, "gateway.yaml", "stage-worker.yaml"])
def test_no_secrets(name: str) -> None:
    text = (UNITS / name).read_text("utf-8")
    assert not re.findall(r"(?im)^[^#\n]*(?:api[-_]key(?!-file:)|token|password|secret)", text)


def test_the_gateway_unit_and_its_settings_make_a_config() -> None:
    command, *arguments = arguments_of("stagemesh-gateway.service")
    assert command == "gateway"
    parsed = parse_arguments(command, "", SERVE_GROUPS, Positional("MODEL", ""), arguments)
    config = serve_config(command, parsed, SERVE_GROUPS, {})
    assert config == ServeConfig(
        model="/srv/models/my-model",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        host="127.0.0.1",
        master_addr="192.0.2.10",
        master_port=DEFAULT_MASTER_PORT,
        tls_dir="/etc/stagemesh/tls",
        require_tls=True,
        ssl_certfile="/etc/stagemesh/tls/gateway.pem",
        ssl_keyfile="/etc/stagemesh/tls/gateway.key",
        api_key_file="/etc/stagemesh/keys",
    )


def test_the_worker_unit_and_its_settings_make_a_config() -> None:
    command, *arguments = arguments_of("stagemesh-stage-worker@.service")
    assert command == "stage-worker"
    parsed = parse_arguments(command, "", STAGE_WORKER_GROUPS, None, arguments)
    config = stage_worker_config(parsed, STAGE_WORKER_GROUPS, {})
    assert config == StageWorkerConfig(
        master_addr="192.0.2.10",
        wait_for_head=True,
        host="192.0.2.11",
        node_rank=1,
        pp_rank=1,
        tls_dir="/etc/stagemesh/tls",
        require_tls=True,
    )


def test_the_spare_unit_takes_the_settings_of_the_nodes_stage_workers() -> None:
    """One file for both: what makes it a spare is in the unit, as a stage's number is."""
    command, *arguments = arguments_of("stagemesh-standby@.service")
    assert command == "stage-worker"
    parsed = parse_arguments(command, "", STAGE_WORKER_GROUPS, None, arguments)
    config = stage_worker_config(parsed, STAGE_WORKER_GROUPS, {})
    assert config == StageWorkerConfig(
        master_addr="192.0.2.10",
        wait_for_head=True,
        host="192.0.2.11",
        node_rank=1,
        standby=True,
        tls_dir="/etc/stagemesh/tls",
        require_tls=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    """By systemd's own check where it is installed; by its grammar everywhere."""
    text = (UNITS / name).read_text("utf-8")
    for line in text.splitlines():
        assert re.fullmatch(r"(#.*|\[\w+\]|[A-Z]\w*=.*|)", line), line
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        # It wants the program and the user to be there.
        copy = tmp_path / name
        copy.write_text(text.replace(PROGRAM, "/bin/true").replace("=stagemesh\n", "=root\n"))
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(copy)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        complaints = [line for line in done.stderr.splitlines() if name in line]
        assert complaints == []
