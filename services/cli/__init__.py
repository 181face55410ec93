"""The `stagemesh` command.

Starts fast: nothing heavy is imported before a command needs it, and help and
version import neither gRPC nor torch. An error is one line,
`stagemesh: error: what happened; what to do`, with exit code 2 for wrong usage
and 1 for what failed while running.
"""

from services.cli.main import main

__all__ = ["main"]
