"""The command as a process: exit codes, one line of error, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import commands, main
from services.config import ServeConfig, StageWorkerConfig
from stagemesh.version import __version__

ROOT = Path(__file__).resolve().parents[3]


def run(*argv: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "argv", [(), ("serve",), ("sreve",), ("serve", "m", "--enable-lora"), ("model", "fetch", "x")]
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("stagemesh: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "gateway", "plan", "headless"])
def test_every_command_refuses_two_partitions(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,1")
    headless = ("--nnodes", "2", "--node-rank", "1", "--headless")
    words = ("serve", "m", *headless) if command == "headless" else (command, "m")
    assert main([*words, "-pp", "2", "--pp-layer-partition", "1,2"]) == 2
    err = capfd.readouterr().err
    assert "--pp-layer-partition says '1,2' and VLLM_PP_LAYER_PARTITION says '2,1'" in err


def test_nothing_that_was_written_reaches_the_terminal_as_a_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "m", "--dtype", "\x1b[31mred\x07"]) == 2
    assert main(["\x1b[31mred"]) == 2
    err = capfd.readouterr().err
    assert "\\x1b[31mred" in err and err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("environment", "argv", "code", "message"),
    [
        ({"VLLM_PP_LAYER_PARTITION": "a,b"}, (), 2, 'VLLM_PP_LAYER_PARTITION="a,b": entry'),
        ({}, ("--host", "192.0.2.77"), 1, "cannot listen on 192.0.2.77:0"),
    ],
)
def test_a_stage_worker_that_cannot_start_says_one_line(
    environment: dict[str, str], argv: tuple[str, ...], code: int, message: str
) -> None:
    done = run("stage-worker", *argv, environment=environment)
    assert done.returncode == code
    # A warning may be said first: of what would be open at the address.
    (line,) = (line for line in done.stderr.splitlines() if " WARNING " not in line)
    assert message in line and "--pp-layer-partition" not in line


def test_a_failure_while_running_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("STAGEMESH_HOME", str(blocked))
    assert main(["model", "fetch", "smollm2-135m-instruct"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("stagemesh: error: smollm2-135m-instruct cannot be put into")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "of_the_service"), [(("serve", "m"), ("secret",)), (("stage-worker",), None)]
)
def test_what_a_command_starts_does_not_inherit_the_key(
    command: tuple[str, ...],
    of_the_service: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    def service(config: ServeConfig | StageWorkerConfig) -> int:
        child = [sys.executable, "-c", "import os; print(os.environ.get('STAGEMESH_API_KEY'))"]
        seen.append(subprocess.check_output(child, text=True).strip())
        seen.append(getattr(config, "api_key", None))
        return 0

    monkeypatch.setenv("STAGEMESH_API_KEY", "secret")
    monkeypatch.setattr(commands, "load_service", lambda *_: service)
    assert main(command) == 0
    assert seen == ["None", of_the_service]


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("serve", "--help"),
        ("gateway", "--help"),
        ("stage-worker", "--help"),
        ("doctor", "--help"),
        ("bench", "--help"),
        ("bench", "serve", "--help"),
        ("model", "--help"),
        ("model", "fetch", "--help"),
        ("version", "--help"),
    ],
)
def test_every_command_has_help(argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert out.startswith("usage: stagemesh")
    assert err == ""
    assert "lifeline" not in out


def test_version_names_the_one_version() -> None:
    done = run("version")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"stagemesh {__version__}"


@pytest.mark.parametrize("argv", [["version"], ["serve", "--help"], ["--help"]])
def test_help_and_version_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from services.cli import main\n"
        f"code = main({argv!r})\n"
        "heavy = {'torch', 'grpc', 'transformers', 'tokenizers', 'fastapi', 'yaml'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"
