"""Sampling defaults and end-of-sequence ids of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.frontend.generation_defaults import GenerationDefaults, load_generation_defaults
from services.errors import ConfigError, ModelError


def write(directory: Path, name: str, value: object) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(value))


def test_no_files_no_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_only_the_numbers_that_are_given(tmp_path: Path) -> None:
    write(
        tmp_path,
        "generation_config.json",
        {"temperature": 0.6, "top_k": 40, "do_sample": False, "eos_token_id": [2, 3]},
    )
    write(tmp_path, "config.json", {"eos_token_id": 7})
    defaults = load_generation_defaults(tmp_path)
    assert defaults == GenerationDefaults(
        temperature=0.6, top_k=40, eos_token_ids=frozenset((2, 3, 7))
    )


def test_none_ignores_the_numbers_and_keeps_the_ends(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"temperature": 0.6, "eos_token_id": 2})
    defaults = load_generation_defaults(tmp_path, "none")
    assert defaults == GenerationDefaults(eos_token_ids=frozenset((2,)))


def test_a_directory_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "model", "generation_config.json", {"temperature": 0.6, "eos_token_id": 2})
    write(tmp_path / "other", "generation_config.json", {"top_p": 0.9, "eos_token_id": 5})
    defaults = load_generation_defaults(tmp_path / "model", str(tmp_path / "other"))
    assert defaults == GenerationDefaults(top_p=0.9, eos_token_ids=frozenset((2, 5)))
    with pytest.raises(ConfigError, match="--generation-config"):
        load_generation_defaults(tmp_path / "model", str(tmp_path))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 101},
        {"temperature": 2.5},
        {"temperature": 10**400},
        {"top_p": 1e-320},
        {"eos_token_id": "x"},
        {"eos_token_id": [1, -1]},
    ],
)
def test_values_out_of_range_name_the_file(tmp_path: Path, values: dict[str, object]) -> None:
    write(tmp_path, "generation_config.json", values)
    with pytest.raises(ModelError, match=r"generation_config\.json.*" + next(iter(values))):
        load_generation_defaults(tmp_path)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_generation_defaults(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="list"):
        load_generation_defaults(tmp_path)
