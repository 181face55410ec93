"""How the gateway's process ends when its mesh does: what a supervisor goes by."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import app
from gateway.mesh import Mesh
from services.cli import main
from services.errors import ConfigError, StageFailed, StagemeshError
from tests.service.front_doors import write_model
from tests.unit.topology.model_directory import ModelDirectory


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        # What ranks found when they were there: it is the same the next time.
        (ConfigError("stage 1 does not fit: 3 GiB needed, 2 GiB free"), 2),
        (StageFailed("stage 1 at 10.0.0.2:4711: loading failed"), 1),
    ],
)
def test_a_refusal_by_the_mesh_is_not_tried_again(
    failure: StagemeshError,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def fails(mesh: Mesh) -> None:
        raise ExceptionGroup("while the mesh came up", [failure])

    monkeypatch.setattr(Mesh, "run", fails)
    # Of the process, which here is that of all tests.
    monkeypatch.setattr(app, "setup_logging", lambda process: None)
    monkeypatch.setattr(app, "allow_late_timers", lambda seconds: None)
    model = ModelDirectory(tmp_path / "tiny")
    write_model(model.path)
    model.write_config(vocab_size=600)
    model.write_single()
    ports = ("--port", "0", "--grpc-port", "0", "--master-port", "0")
    assert main(["gateway", str(model.path), *ports]) == code
    assert f"stagemesh: error: {failure.message}\n" in capfd.readouterr().err
