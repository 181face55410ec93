"""Says what pyproject.toml cannot: the version from version.py, that
`stagemesh[extra]` is `stagemesh-server[extra]` at the same version, and that
this file, which lies in the package's directory, is no part of the package."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

VERSION = runpy.run_path(str(Path(__file__).resolve().parent / "version.py"))["__version__"]
EXTRAS = ("gateway", "bench", "worker", "convert", "ray", "npu", "certs")


class BuildWithoutSetup(build_py):
    """Leaves setup.py out of the wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[1] != "setup"]


setup(
    version=VERSION,
    extras_require={name: [f"stagemesh-server[{name}]=={VERSION}"] for name in EXTRAS},
    cmdclass={"build_py": BuildWithoutSetup},
)
