"""The flags of what a mesh does when a part of it is lost, as data (docs/recovery.md)."""

from __future__ import annotations

from services.cli import values
from services.cli.flag import Arity, Flag

WAIT_FOR_HEAD_FLAG = Flag(
    ("--wait-for-head",),
    values.switch,
    "for nodes without the gateway: their stage workers wait for the head without limit, and keep "
    "their weights when it goes, for the next one to take over (docs/recovery.md)",
    arity=Arity.SWITCH,
)
WORKER_STANDBY_FLAG = Flag(
    ("--standby",),
    values.switch,
    "this worker is a spare: it takes over a stage that is lost (docs/recovery.md)",
    arity=Arity.SWITCH,
)
RECOVERY_FLAGS = (
    Flag(
        ("--max-recovery-attempts",),
        values.natural_integer,
        "failures of the stages in a row that a request survives without a new token "
        "(default: 3); 0 ends the mesh with the first failure (docs/recovery.md)",
    ),
    Flag(
        ("--recovery-timeout-seconds",),
        values.positive_seconds,
        "how long stages may take to come back after a failure (default: 120)",
        metavar="SECONDS",
    ),
    Flag(
        ("--standby",),
        values.natural_integer,
        "spare stage workers of this node, on devices of their own, that take over a stage "
        "which is lost (docs/recovery.md)",
    ),
    Flag(
        ("--standby-stages",),
        values.stages,
        "stages whose weights spares hold in advance, like 0,1; one spare for each",
        metavar="N,N,...",
    ),
)
