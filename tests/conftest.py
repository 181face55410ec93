"""Fixtures for all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.models.fetch import fetch_model

DEMO_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the demo model; fetched where `make test` has not done so."""

    def progress(line: str) -> None:
        print(line, file=sys.stderr)

    return fetch_model(DEMO_MODEL, progress=progress)
