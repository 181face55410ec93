"""`stagemesh bench serve`: measures an OpenAI endpoint. Starts no server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from services.cli.arguments import parse_arguments
from services.cli.bench_flags import BENCH_GROUPS
from services.cli.main import load_service
from services.cli.settings import bench_settings
from services.cli.usage import UsageError, did_you_mean

_DESCRIPTION = (
    "Sends requests to an OpenAI endpoint, of any server, and prints throughput and latencies "
    "as a client sees them. Exit code 1 if every request failed."
)


def bench(argv: Sequence[str]) -> int:
    """Runs a subcommand of `bench`; there is one."""
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: stagemesh bench serve [flags]\n\n"
            "  serve  measure an OpenAI endpoint (stagemesh bench serve --help)\n"
        )
        return 0
    if not argv:
        raise UsageError("bench needs a subcommand: stagemesh bench serve")
    if argv[0] != "serve":
        suggestion = did_you_mean(argv[0], ["serve"])
        raise UsageError(f"unknown subcommand bench {argv[0]}{suggestion or '; there is: serve'}")
    arguments = parse_arguments("bench serve", _DESCRIPTION, BENCH_GROUPS, None, argv[1:])
    settings = bench_settings(arguments, BENCH_GROUPS, os.environ)
    return load_service("services.bench.serve", "run", "bench")(settings)
