"""Repository ids: the Hub's cache, and clear words when the Hub cannot help. Each case is a
process of its own, because huggingface_hub reads its settings when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = """
import sys
from services.errors import ModelError
from services.models import resolve
try:
    print(getattr(resolve, sys.argv[2])(sys.argv[1]))
except ModelError as error:
    print("REFUSED", error.message)
"""


# Stands for the Hub's client: says what would be downloaded.
RECORDER = """
import huggingface_hub
import huggingface_hub.errors
import huggingface_hub.utils
def snapshot_download(repository, allow_patterns, ignore_patterns, local_files_only=False):
    if local_files_only:
        raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
    names = ["model-00001.safetensors", "consolidated.00.safetensors", "config.json",
             "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "logo.png"]
    return " ".join(huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
huggingface_hub.snapshot_download = snapshot_download
"""


def resolve(
    repository: str,
    hub_home: Path,
    function: str = "resolve_model",
    *,
    before: str = "",
    **environment: str,
) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + CODE, repository, function],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(hub_home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_cached(hub_home: Path, owner: str, name: str, *files: str) -> Path:
    repository = hub_home / "hub" / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_a_cached_repository_needs_no_network(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path, "owner", "name", "config.json", "model.safetensors")
    assert resolve("owner/name", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


@pytest.mark.parametrize("files", [(), ("config.json",)])
def test_offline_and_not_or_half_cached(tmp_path: Path, files: tuple[str, ...]) -> None:
    if files:
        make_cached(tmp_path, "owner", "name", *files)
    answer = resolve("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("REFUSED owner/name is neither a local directory nor in the Hub's")
    assert "HF_HUB_OFFLINE" in answer


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    # Port 9 of this machine: nothing listens there.
    answer = resolve("owner/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert answer.startswith("REFUSED owner/name is neither")
    assert "the Hub cannot be reached" in answer


def test_a_second_copy_of_the_weights_is_no_model(tmp_path: Path) -> None:
    make_cached(tmp_path, "owner", "name", "config.json", "consolidated.00.safetensors")
    answer = resolve("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("REFUSED owner/name is neither")


def test_a_cached_tokenizer_needs_no_model_beside_it(tmp_path: Path) -> None:
    snapshot = make_cached(tmp_path, "owner", "name", "tokenizer.json")
    answer = resolve("owner/name", tmp_path, "resolve_tokenizer", HF_HUB_OFFLINE="1")
    assert answer == str(snapshot)
    make_cached(tmp_path, "owner", "other", "config.json", "model.safetensors")
    answer = resolve("owner/other", tmp_path, "resolve_tokenizer", HF_HUB_OFFLINE="1")
    assert answer.startswith("REFUSED owner/other is neither")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("resolve_tokenizer", "tokenizer.json tokenizer_config.json chat_template.jinja"),
        (
            "resolve_model",
            "model-00001.safetensors config.json tokenizer.json tokenizer_config.json "
            "chat_template.jinja",
        ),
    ],
)
def test_only_what_is_read_is_downloaded(tmp_path: Path, function: str, expected: str) -> None:
    answer = resolve("owner/name", tmp_path, function, before=RECORDER, HF_HUB_OFFLINE="0")
    assert answer == expected
