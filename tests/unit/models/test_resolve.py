"""What MODEL can be, and what a user reads when it is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.errors import ModelError
from services.models.cache import models_directory, write_marker
from services.models.resolve import resolve_model, resolve_tokenizer

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def refusal(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    return caught.value.message


def test_a_directory(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "here")
    assert resolve_model(str(directory)) == directory
    assert resolve_model("here") == directory
    assert resolve_model("./here") == directory


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refusal("empty")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    assert "is a file" in refusal("model.gguf")


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "a/b/c", ""])
def test_a_path_to_nothing(model: str, tmp_path: Path) -> None:
    if model == "":
        # The empty path is the current directory.
        assert "holds no config.json" in refusal(model)
    else:
        assert f"there is no directory {model}" in refusal(model)


def test_the_demo_model_before_and_after_it_is_fetched() -> None:
    assert f"run: stagemesh model fetch {NAME}" in refusal(NAME)
    directory = make_model(models_directory() / NAME)
    assert f"run: stagemesh model fetch {NAME}" in refusal(NAME)
    write_marker(directory, "a test")
    assert resolve_model(NAME) == directory


def test_a_tokenizer_is_a_directory_without_config_or_any_model(tmp_path: Path) -> None:
    plain = tmp_path / "tokenizer"
    plain.mkdir()
    assert resolve_tokenizer(str(plain)) == plain
    with pytest.raises(ModelError, match="model fetch"):
        resolve_tokenizer(NAME)
