"""`stagemesh certs init` and `stagemesh certs issue`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from services.cli.usage import UsageError, did_you_mean
from services.errors import ConfigError
from services.rpc.roles import Role

CA_DAYS = 3650
CERTIFICATE_DAYS = 365
MAX_DAYS = 36500
_SUBCOMMANDS = ("init", "issue")
_USAGE = """\
usage: stagemesh certs init --ca DIR [--days N] [--force]
       stagemesh certs issue --ca DIR --role ROLE [--host HOST ...] --out DIR [--days N] [--force]

  init   make a private CA: DIR/ca.pem, which every part trusts, and DIR/ca.key, which signs
  issue  sign a certificate for a role: what --tls-dir names on a node (docs/security.md)
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def certs(argv: Sequence[str]) -> int:
    """Runs a subcommand of `certs`."""
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if not argv:
        raise UsageError("certs needs a subcommand: stagemesh certs init or stagemesh certs issue")
    name, *rest = argv
    if name not in _SUBCOMMANDS:
        suggestion = did_you_mean(name, _SUBCOMMANDS)
        raise UsageError(f"unknown subcommand certs {name}{suggestion or '; one of: init, issue'}")
    return _init(rest) if name == "init" else _issue(rest)


def _init(argv: Sequence[str]) -> int:
    parser = _parser("init", "Makes a private CA for one mesh.", CA_DAYS)
    options = parser.parse_args(list(argv))
    authority = _authority()
    made = authority.create_authority(options.ca, days=options.days, force=options.force)
    print(f"{made.certificate} (until {made.not_after:%Y-%m-%d})")
    print(f"{made.private_key} signs certificates: keep it off the serving nodes", file=sys.stderr)
    return 0


def _issue(argv: Sequence[str]) -> int:
    parser = _parser("issue", "Signs a certificate for a role.", CERTIFICATE_DAYS)
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="name or address by which others dial the holder; may be said several times "
        "(localhost, 127.0.0.1 and ::1 are in every server's certificate)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="for --tls-dir")
    options = parser.parse_args(list(argv))
    made = _authority().issue(
        options.ca,
        Role(options.role),
        options.host,
        options.out,
        days=options.days,
        force=options.force,
    )
    print(f"{made.certificate} (until {made.not_after:%Y-%m-%d})")
    return 0


def _parser(name: str, description: str, days: int) -> _Parser:
    parser = _Parser(prog=f"stagemesh certs {name}", description=description, allow_abbrev=False)
    parser.add_argument("--ca", required=True, type=Path, metavar="DIR", help="the CA's directory")
    parser.add_argument(
        "--days", type=_days, default=days, metavar="N", help=f"how long it is valid ({days})"
    )
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    return parser


def _days(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"must be a whole number of days from 1 to {MAX_DAYS}")
    return int(text)


def _authority() -> ModuleType:
    """The module, imported now: nothing else needs the package that it uses."""
    try:
        from services.certs import authority
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "cryptography":
            raise
        raise ConfigError(
            "the package cryptography is not installed; pip install 'stagemesh-server[certs]'"
        ) from error
    return authority
