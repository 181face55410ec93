"""`stagemesh version`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from services.cli.usage import UsageError
from stagemesh.version import __version__

SHOWN_PACKAGES = ("torch", "torch-npu", "grpcio", "protobuf", "tokenizers")


def version(argv: Sequence[str]) -> int:
    """Prints the versions that a bug report needs; imports none of the packages."""
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write("usage: stagemesh version\n\nPrints versions, for bug reports.\n")
        return 0
    if argv:
        raise UsageError(f"version takes no arguments, got {argv[0]}")
    lines = [f"stagemesh {__version__}", f"python {platform.python_version()}"]
    for name in SHOWN_PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
