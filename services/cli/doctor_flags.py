"""The flags of `doctor`, as data: those of `serve`, and how to look."""

from __future__ import annotations

from services.cli import values
from services.cli.flag import Arity, Flag, FlagGroup
from services.cli.flags import SERVE_GROUPS
from services.doctor.request import DEFAULT_TIMEOUT_SECONDS

OWN_FLAGS = (
    Flag(
        ("--listen",),
        values.switch,
        "afterwards answer the doctors of other nodes at --master-addr, in the place of a head",
        arity=Arity.SWITCH,
    ),
    Flag(
        ("--deep",),
        values.switch,
        "read and hash all weights, and compare them with the head's: minutes for a large model",
        arity=Arity.SWITCH,
    ),
    Flag(
        ("--timeout-seconds",),
        values.positive_seconds,
        f"for each question over the network (default: {DEFAULT_TIMEOUT_SECONDS:g})",
        metavar="SECONDS",
    ),
    Flag(("--json",), values.switch, "print the findings as JSON", arity=Arity.SWITCH),
)
DOCTOR_GROUPS = (FlagGroup("doctor", OWN_FLAGS), *SERVE_GROUPS)
