"""Says the two things that pyproject.toml cannot: the version from version.py,
and that `stagemesh[extra]` is `stagemesh-server[extra]` at the same version."""

import runpy
from pathlib import Path

from setuptools import setup

VERSION = runpy.run_path(str(Path(__file__).resolve().parent / "version.py"))["__version__"]
EXTRAS = ("gateway", "worker", "convert", "ray", "npu")

setup(
    version=VERSION,
    extras_require={name: [f"stagemesh-server[{name}]=={VERSION}"] for name in EXTRAS},
)
