"""`--step-trace`: when each stage computed each step, for https://ui.perfetto.dev.

One line for each step of each stage, in Chrome's trace event format: a "complete"
event from the start to the end of computing, with the four phases of the stage's
clock beside it. `pid` is the replica, `tid` the stage; `sampled_rows` are the rows
that gave a token, known on the last stage and 0 on others. Times are those of the
monotonic clock of the stage's node: lines of one node can be compared.

Format: "Trace Event Format", JSON array (its closing bracket may be left out).
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from services.errors import ConfigError
from stagemesh.v1 import step_pb2

STEP_TRACE_FLAG = "--step-trace"
MICROSECONDS = 1e-3


class StepTrace:
    """An open trace file. Lines are written in blocks; `close` writes the rest."""

    def __init__(self, path: Path) -> None:
        """Empties the file. Raises `ConfigError` where it cannot be written."""
        try:
            self._file: TextIO = path.open("w", encoding="ascii")
        except OSError as error:
            raise ConfigError(
                f"{STEP_TRACE_FLAG} {path} cannot be written: {error.strerror}",
                param=STEP_TRACE_FLAG,
            ) from None
        self._file.write("[\n")

    def write(self, replica: int, stage: int, result: step_pb2.StepResult) -> None:
        """Adds a step of a stage."""
        self._file.write(f"{trace_event(replica, stage, result)},\n")

    def close(self) -> None:
        """No line may follow."""
        self._file.close()


def trace_event(replica: int, stage: int, result: step_pb2.StepResult) -> str:
    """One event as JSON."""
    clock = result.clock
    duration_ns = clock.compute_end_ns - clock.compute_start_ns
    return (
        f'{{"name": "step {result.step_id}", "ph": "X", "pid": {replica}, "tid": {stage}, '
        f'"ts": {clock.compute_start_ns * MICROSECONDS:.3f}, '
        f'"dur": {duration_ns * MICROSECONDS:.3f}, "args": {{"epoch": {result.epoch}, '
        f'"step_id": {result.step_id}, "sampled_rows": {len(result.rows)}, '
        f'"control_wait_us": {clock.control_wait_ns * MICROSECONDS:.3f}, '
        f'"receive_us": {clock.receive_ns * MICROSECONDS:.3f}, '
        f'"compute_us": {clock.compute_ns * MICROSECONDS:.3f}, '
        f'"send_us": {clock.send_ns * MICROSECONDS:.3f}, '
        f'"end_us": {clock.end_ns * MICROSECONDS:.3f}}}}}'
    )
