"""The flags of `doctor`, as data: those of `serve`, and how to look."""

from __future__ import annotations

from services.cli import values
from services.cli.flags import SERVE_GROUPS, Arity, Flag, FlagGroup

_OWN_FLAGS = (Flag(("--json",), values.switch, "print the findings as JSON", arity=Arity.SWITCH),)
DOCTOR_GROUPS = (FlagGroup("doctor", _OWN_FLAGS), *SERVE_GROUPS)
