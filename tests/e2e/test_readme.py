"""What the README says, done as it says it: `make serve`, then each of its snippets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh_process import MeshProcess

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"


def snippets(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def served() -> Iterator[MeshProcess]:
    """The first of the two commands, on free ports and in the environment of this test."""
    make = ["make", "-C", str(ROOT), "serve", f"VENV={sys.prefix}"]
    with MeshProcess(MODEL, command=[*make, "SERVE_ARGS=-pp 2 --port 0 --grpc-port 0"]) as mesh:
        yield mesh


def here(text: str, mesh: MeshProcess) -> str:
    """A snippet with this mesh's addresses in place of the default ones."""
    return text.replace("http://127.0.0.1:8000", mesh.url).replace(
        "127.0.0.1:8001", mesh.grpc_address
    )


def test_the_curl_line(served: MeshProcess) -> None:
    (command,) = [text for text in snippets("bash") if text.startswith("curl")]
    done = subprocess.run(
        ["bash", "-c", here(command, served)], capture_output=True, text=True, timeout=60
    )
    assert "Paris" in done.stdout


def test_the_python_snippets(served: MeshProcess) -> None:
    programs = snippets("python")
    assert len(programs) == 2
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", here(program, served)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Paris" in done.stdout, done.stderr


def test_the_other_commands_are_the_makefile_s_and_the_command_line_s() -> None:
    """`make test` runs this; `stagemesh serve PATH` is what every other test starts."""
    commands = [line for text in snippets("bash") for line in text.splitlines()]
    known = ("make serve ", "make test ", "curl ", "stagemesh serve /path/to/model -pp 4 -tp 2")
    top_level = [line for line in commands if re.match(r"[a-z]", line)]
    assert [line for line in top_level if not line.startswith(known)] == []
