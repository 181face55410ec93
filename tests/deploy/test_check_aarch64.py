"""`make check-aarch64` fails when it should. Small wheels made here stand in for packages, so
that no index is asked."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.check_aarch64 import Resolved, pinned, problems, resolve

PYTHON = "3.11"


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def make_wheel(directory: Path, tag: str, *requires: str) -> None:
    lines = ["Metadata-Version: 2.1", "Name: demo", "Version: 1.0"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    with zipfile.ZipFile(directory / f"demo-1.0-{tag}.whl", "w") as archive:
        archive.writestr("demo-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(
            "demo-1.0.dist-info/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n",
        )
        archive.writestr("demo-1.0.dist-info/RECORD", "")


def resolve_demo(directory: Path, pins: str = "demo==1.0\n") -> tuple[list[Resolved], str]:
    constraints = directory / "constraints.txt"
    constraints.write_text(pins)
    return resolve("demo", python_version=PYTHON, constraints=constraints, links=directory)


def test_an_older_aarch64_wheel_resolves(tmp_path: Path) -> None:
    make_wheel(tmp_path, "cp311-cp311-manylinux_2_27_aarch64")
    (package,), complaint = resolve_demo(tmp_path)
    assert complaint == ""
    assert (package.name, package.version) == ("demo", "1.0")


@pytest.mark.parametrize(
    "tag", ["cp311-cp311-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_34_aarch64"]
)
def test_a_wheel_for_another_machine_does_not(tmp_path: Path, tag: str) -> None:
    make_wheel(tmp_path, tag)
    packages, complaint = resolve_demo(tmp_path)
    assert packages == []
    assert "demo==1.0" in complaint


def test_a_pin_without_a_wheel_fails(tmp_path: Path) -> None:
    make_wheel(tmp_path, "cp311-cp311-manylinux_2_28_aarch64")
    _, complaint = resolve_demo(tmp_path, "demo==2.0\n")
    assert complaint


def test_what_has_no_pin_is_a_problem() -> None:
    packages = [Resolved("demo", "1.0", (), "demo.whl")]
    assert problems(packages, {"demo": "1.0"}, PYTHON) == []
    assert problems(packages, {}, PYTHON) == ["demo 1.0 has no pin in constraints.txt"]


def test_what_only_aarch64_needs_must_have_been_looked_at() -> None:
    text = 'only-arm>=1; platform_machine == "aarch64"'
    demo = Resolved("demo", "1.0", (text, 'old; python_version < "3.8"'), "demo.whl")
    pins = {"demo": "1.0", "only-arm": "1.0"}
    (problem,) = problems([demo], pins, PYTHON)
    assert "demo needs only-arm" in problem
    assert problems([demo, Resolved("only-arm", "1.0", (), "w.whl")], pins, PYTHON) == []


def test_pins_are_read_without_comments(tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text("# head\nPyYAML==6.0\nragged.name==1  # why\n\n")
    assert pinned(path) == {"pyyaml": "6.0", "ragged-name": "1"}
