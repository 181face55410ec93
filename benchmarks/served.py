"""A served mesh for a benchmark, as a context manager."""

from __future__ import annotations

from tests.mesh_process import MeshProcess as served

DEMO_MODEL = "smollm2-135m-instruct"

__all__ = ["DEMO_MODEL", "served"]
