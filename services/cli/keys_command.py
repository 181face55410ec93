"""`stagemesh keys add|list|revoke`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.api_keys import add_key, read_keys, revoke_key
from services.cli.usage import UsageError, did_you_mean

_SUBCOMMANDS = ("add", "list", "revoke")
_USAGE = """\
usage: stagemesh keys add NAME --file FILE
       stagemesh keys list --file FILE
       stagemesh keys revoke NAME --file FILE

  add     make an API key and print it, once; FILE gets its hash, for --api-key-file
  list    names of the keys, and since when they count
  revoke  take a key out of FILE; gateways that run take notice at once
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see stagemesh keys --help")


def keys(argv: Sequence[str]) -> int:
    """Runs a subcommand of `keys`."""
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if not argv:
        raise UsageError("keys needs a subcommand: stagemesh keys add, list or revoke")
    name, *rest = argv
    if name not in _SUBCOMMANDS:
        suggestion = did_you_mean(name, _SUBCOMMANDS)
        raise UsageError(
            f"unknown subcommand keys {name}{suggestion or '; one of: add, list, revoke'}"
        )
    parser = _Parser(prog=f"stagemesh keys {name}", allow_abbrev=False)
    if name != "list":
        parser.add_argument("name", metavar="NAME")
    parser.add_argument("--file", required=True, type=Path, metavar="FILE")
    options = parser.parse_args(rest)
    if name == "add":
        print(add_key(options.file, options.name))
        print(f"the key of {options.name}; it is not shown again", file=sys.stderr)
    elif name == "revoke":
        revoke_key(options.file, options.name)
    else:
        for key in read_keys(options.file):
            print(f"{key.name}  {key.since}")
    return 0
