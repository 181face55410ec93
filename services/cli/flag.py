"""What an option of a command is, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.cli.values import Parser


class Arity(Enum):
    """How many values follow a flag."""

    SWITCH = "switch"
    """None; `--no-flag` turns it off."""
    ONE = "one"
    MANY = "many"
    """One or more, up to the next flag."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of a command."""

    names: tuple[str, ...]
    """Spellings, the long one first."""
    parse: Parser
    help: str
    metavar: str = "N"
    arity: Arity = Arity.ONE
    environment: str | None = None
    """Variable that is read where neither command line nor file says anything."""
    environment_agrees: bool = False
    """Where the variable is set too, it must say the same."""
    source_field: str | None = None
    """The config's field that holds where the value stands, for what is checked later."""
    hidden: bool = False
    """Between Stagemesh's own processes; not in the help."""
    is_object: bool = False
    """A JSON object; in a YAML file also a mapping."""

    @property
    def field(self) -> str:
        """The config's field, and the key in a YAML file."""
        return self.names[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that stand together in the help."""

    title: str
    flags: tuple[Flag, ...]
