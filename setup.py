"""Says the one thing that pyproject.toml cannot: server and SDK have the same
version, which stands in stagemesh/version.py."""

import runpy
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
VERSION = runpy.run_path(str(HERE / "stagemesh" / "version.py"))["__version__"]

setup(
    version=VERSION,
    install_requires=[
        f"stagemesh=={VERSION}",
        "grpcio>=1.85",
        "grpcio-health-checking>=1.85",
        "grpcio-reflection>=1.85",
        "protobuf>=7.35",
        "prometheus-client>=0.22",
        "pyyaml>=6.0",
        "uvloop>=0.21",
    ],
)
