"""Where a rank's main loop spends its time: every moment belongs to one of four phases.

Entering a phase ends the one before with the same clock reading, so each phase has
a start and a stop of its own and nothing lies between two of them. That the phases
of a step add up to its wall time follows; none is computed from the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from stagemesh.v1 import step_pb2


class Phase(IntEnum):
    """What a rank does. Numbers, because a step enters four of them: a plain enumeration's members
    are hashed in Python."""

    # In the order of `StepClock`.
    CONTROL_WAIT = 0
    """Waits for a command."""
    RECEIVE = 1
    """Waits for the activations of the stage before."""
    COMPUTE = 2
    """Everything else: indices, layers, head, sampling, writing the result of a step."""
    SEND = 3
    """Hands activations on, and waits for older sends."""


class StepClock(NamedTuple):
    """The clock of one step, as `StageClock` has it; nanoseconds. Not the message itself: that is
    made when it is sent, not while the next stage waits for a core."""

    control_wait_ns: int
    receive_ns: int
    compute_ns: int
    send_ns: int
    compute_start_ns: int
    compute_end_ns: int
    end_ns: int

    def to_proto(self) -> step_pb2.StageClock:
        """The message."""
        return step_pb2.StageClock(
            control_wait_ns=self.control_wait_ns,
            receive_ns=self.receive_ns,
            compute_ns=self.compute_ns,
            send_ns=self.send_ns,
            compute_start_ns=self.compute_start_ns,
            compute_end_ns=self.compute_end_ns,
            end_ns=self.end_ns,
        )


class StageTimer:
    """Times the phases of one step after the other."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._total_ns = [0] * len(Phase)
        # One value, so that another thread never sees the one without the other.
        self._present = (Phase.CONTROL_WAIT, now_ns())

    def present(self) -> tuple[Phase, float]:
        """What the loop does and for how many seconds. For any thread."""
        phase, entered_ns = self._present
        return phase, max(0, self._now_ns() - entered_ns) / 1e9

    def enter(self, phase: Phase) -> int:
        """Ends the present phase and begins another; returns the clock reading between them."""
        now_ns = self._now_ns()
        ended, entered_ns = self._present
        self._total_ns[ended] += now_ns - entered_ns
        self._present = (phase, now_ns)
        return now_ns

    def restart(self) -> None:
        """Forgets what was timed: it belonged to no step."""
        self._total_ns = [0] * len(Phase)
        self._present = (self._present[0], self._now_ns())

    def finish_step(self, compute_start_ns: int, compute_end_ns: int) -> StepClock:
        """The clock of a step that is done. What follows counts as the next step's computing,
        until another phase is entered."""
        end_ns = self.enter(Phase.COMPUTE)
        control_wait_ns, receive_ns, compute_ns, send_ns = self._total_ns
        clock = StepClock(
            control_wait_ns,
            receive_ns,
            compute_ns,
            send_ns,
            compute_start_ns,
            compute_end_ns,
            end_ns,
        )
        self._total_ns = [0] * len(Phase)
        return clock
