"""F14: many processes started at once never fight for a port: bind first, announce after."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.mesh_process import MeshProcess
from tests.tiny_models import TinyShape, make_tiny_llama

NUM_STAGES = 8


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ports") / "tiny"
    return make_tiny_llama(path, shape=TinyShape(num_layers=NUM_STAGES))


def start_and_ask(model: Path) -> None:
    """A mesh of 8 workers and 8 ranks, with one answer through all of them."""
    with MeshProcess(model, "-pp", str(NUM_STAGES), "--max-model-len", "128") as mesh:
        assert len(mesh.workers()) == len(mesh.ranks()) == NUM_STAGES
        body = {"model": mesh.model_name, "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        assert "in use" not in mesh.log()


def test_eight_workers_at_once(eight_layers: Path) -> None:
    start_and_ask(eight_layers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_workers_at_once_twenty_times(eight_layers: Path) -> None:
    for _ in range(20):
        start_and_ask(eight_layers)


def test_a_port_in_use_is_named_before_anything_starts(eight_layers: Path) -> None:
    with (
        MeshProcess(eight_layers, "--max-model-len", "128") as first,
        pytest.raises(AssertionError, match="cannot listen on") as failure,
        MeshProcess(eight_layers, "--port", first.url.rpartition(":")[2]),
    ):
        pass
    assert "choose another with --port" in str(failure.value)
