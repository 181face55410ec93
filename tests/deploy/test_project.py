"""The project's own files: no test is forgotten, no command of the docs is made up."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_directory_of_tests_is_run() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = set(config["tool"]["pytest"]["ini_options"]["testpaths"])
    present = {
        "/".join(path.relative_to(ROOT).parts[:2]) for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert present <= listed


@pytest.mark.parametrize("document", ["README.md", ".ci/run"])
def test_every_make_target_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", text))
    assert targets
    for target in targets:
        done = subprocess.run(
            ["make", "--dry-run", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_license_of_the_sdk_is_the_projects() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert (ROOT / "stagemesh" / "LICENSE").read_text("utf-8") == text


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
