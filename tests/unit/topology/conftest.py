"""Fixtures for the tests of pure topology functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.topology.model_directory import ModelDirectory


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(tmp_path / "model")
