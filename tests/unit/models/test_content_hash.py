"""Every byte of a model's weights is hashed once, beside other work, and it can be ended."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from services.models import content_hash
from services.models.content_hash import ContentHash, FileHash
from services.topology.checkpoint import CheckpointFacts, inspect_checkpoint
from tests.unit.topology.model_directory import ModelDirectory


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(tmp_path / "tiny")


def test_every_file_is_hashed(model: ModelDirectory) -> None:
    files = model.write_sharded(2)
    weights = ContentHash(model.path)
    assert not weights.progress.is_over
    found = weights.finish()
    assert found.files == tuple(
        FileHash(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files
    )
    assert found.hashed_bytes == found.total_bytes == sum(file.stat().st_size for file in files)
    assert (found.is_over, found.error) == (True, "")


def test_it_is_done_once(model: ModelDirectory) -> None:
    file = model.write_single()
    weights = ContentHash(model.path)
    first = weights.finish()
    file.write_bytes(b"")
    weights.start()
    assert weights.finish() == first


def test_weights_that_cannot_be_read(model: ModelDirectory) -> None:
    found = ContentHash(model.path).finish()
    assert found.is_over and found.files == ()
    assert "cannot be read" in found.error and "has neither model.safetensors" in found.error


def test_it_ends_within_a_chunk(model: ModelDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    model.write_single()
    weights = ContentHash(model.path)

    def closed_meanwhile(path: Path) -> CheckpointFacts:
        weights._stop.wait(10)
        return inspect_checkpoint(path)

    monkeypatch.setattr(content_hash, "inspect_checkpoint", closed_meanwhile)
    weights.start()
    weights.close()
    assert weights.progress.files == ()
    assert weights.progress.hashed_bytes == 0
    assert not [t for t in threading.enumerate() if t.name == "content-hash"]
    ContentHash(model.path).close()  # one that was never started


def test_a_disk_that_gives_nothing_is_not_waited_for(
    model: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def stuck(path: Path) -> None:
        go_on.wait(10)
        raise OSError("gone")

    monkeypatch.setattr(content_hash, "inspect_checkpoint", stuck)
    weights = ContentHash(model.path)
    found = weights.finish(stall_seconds=0.05)
    assert found.error == "nothing was read for 0 s"
    # Nor does anyone who leaves wait for it: this is called on an event loop.
    started = time.monotonic()
    weights.close()
    assert time.monotonic() - started < 5
    assert not go_on.is_set()
    (thread,) = [t for t in threading.enumerate() if t.name == "content-hash"]
    assert thread.daemon
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()
