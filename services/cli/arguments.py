"""Splits a command's arguments into raw values per flag, and prints its help.

Unknown flags are found before argparse sees them, so that a flag of vLLM is
refused by name, a typo gets a suggestion, and a value such as `-1,62` reaches
the parser that can say what is wrong with it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from services.bench.settings import BenchSettings
from services.cli.flag import Arity, Flag, FlagGroup
from services.cli.flags import CONFIG_FLAG, all_flags
from services.cli.usage import UsageError, did_you_mean
from services.cli.values import Raw
from services.cli.vllm import is_vllm_flag
from services.config import ServeConfig, StageWorkerConfig

_DEFAULTS: dict[str, object] = {
    field.name: field.default
    for config in (BenchSettings, StageWorkerConfig, ServeConfig)
    for field in fields(config)
}
"""By field name; where several commands have a field, their defaults are the same or said
in the flag's own help."""
_HELP_NAMES = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Positional:
    """The one argument without a flag, where a command has it."""

    name: str
    help: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was written on the command line, not yet checked."""

    positional: str | None
    config_file: str | None
    values: dict[str, Raw]
    """Field name to raw value."""


class _Parser(argparse.ArgumentParser):
    """argparse, with errors raised instead of printed over several lines."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse_arguments(
    command: str,
    description: str,
    groups: Sequence[FlagGroup],
    positional: Positional | None,
    argv: Sequence[str],
) -> Arguments:
    """Reads the arguments after the command's name.

    Prints the help and raises `SystemExit(0)` for `--help`; raises
    `UsageError` for an unknown flag or a missing value.
    """
    flags = all_flags(groups)
    parser = _build_parser(command, description, groups, positional)
    known = parser.parse_args(_normalize(command, flags, argv))
    raw = {
        flag.field: getattr(known, flag.field)
        for flag in flags
        if hasattr(known, flag.field) and flag is not CONFIG_FLAG
    }
    return Arguments(
        positional=getattr(known, "positional", None),
        config_file=getattr(known, CONFIG_FLAG.field, None),
        values=raw,
    )


def _build_parser(
    command: str,
    description: str,
    groups: Sequence[FlagGroup],
    positional: Positional | None,
) -> _Parser:
    parser = _Parser(
        prog=f"stagemesh {command}",
        description=description,
        usage=f"stagemesh {command}{f' {positional.name}' if positional else ''} [flags]",
        allow_abbrev=False,
    )
    if positional is not None:
        parser.add_argument("positional", metavar=positional.name, nargs="?", help=positional.help)
    parser.add_argument(
        *CONFIG_FLAG.names,
        default=argparse.SUPPRESS,
        metavar=CONFIG_FLAG.metavar,
        help=CONFIG_FLAG.help,
    )
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag in group.flags:
            if flag.arity is Arity.SWITCH:
                section.add_argument(
                    *flag.names,
                    dest=flag.field,
                    action=argparse.BooleanOptionalAction,
                    default=argparse.SUPPRESS,
                    help=flag.help,
                )
            elif flag.arity is Arity.MANY:
                section.add_argument(
                    *flag.names,
                    dest=flag.field,
                    nargs="+",
                    action="extend",
                    default=argparse.SUPPRESS,
                    metavar=flag.metavar,
                    help=_help(flag),
                )
            else:
                section.add_argument(
                    *flag.names,
                    dest=flag.field,
                    default=argparse.SUPPRESS,
                    metavar=flag.metavar,
                    help=_help(flag),
                )
    return parser


def _help(flag: Flag) -> str:
    if flag.hidden:
        return argparse.SUPPRESS
    default = _DEFAULTS.get(flag.field)
    if default in (None, False, ()) or "default" in flag.help:
        return flag.help.replace("%", "%%")
    return f"{flag.help} (default: {default})".replace("%", "%%")


def _normalize(command: str, flags: Sequence[Flag], argv: Sequence[str]) -> list[str]:
    """The same arguments with dashes in flag names and `--flag=value` for single values."""
    by_name = {name: flag for flag in flags for name in flag.names}
    by_name |= {f"--no-{flag.names[0][2:]}": flag for flag in flags if flag.arity is Arity.SWITCH}
    result: list[str] = []
    index = 0
    while index < len(argv):
        argument = argv[index]
        index += 1
        if argument == "--":
            return [*result, *argv[index - 1 :]]
        if not _looks_like_flag(argument):
            result.append(argument)
            continue
        written, equals, value = argument.partition("=")
        name = written.replace("_", "-") if written.startswith("--") else written
        if name in _HELP_NAMES:
            result.append(name)
            continue
        flag = by_name.get(name)
        if flag is None:
            raise UsageError(unknown_flag_message(command, written, by_name))
        if equals:
            result.append(f"{name}={value}")
        elif flag.arity is Arity.ONE:
            if index == len(argv) or _looks_like_flag(argv[index]):
                raise UsageError(f"{written} needs a value; see stagemesh {command} --help")
            result.append(f"{name}={argv[index]}")
            index += 1
        else:
            result.append(name)
    return result


def _looks_like_flag(argument: str) -> bool:
    """A dash and then anything but a number: `-1`, `-0.5` and `-1,62` are values."""
    return bool(re.match(r"-[^\d.]", argument))


def unknown_flag_message(command: str, written: str, known: Sequence[str] | dict[str, Flag]) -> str:
    """Why a flag is refused: vLLM's, or nobody's."""
    dashed = written.replace("_", "-") if written.startswith("--") else written
    if is_vllm_flag(dashed):
        return (
            f"vLLM has {written}, stagemesh {command} does not (yet); leave it out, "
            f"or see stagemesh {command} --help"
        )
    suggestion = did_you_mean(dashed, known)
    return f"unknown flag {written}{suggestion or f'; see stagemesh {command} --help'}"
