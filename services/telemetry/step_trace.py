"""`--step-trace`: when each stage computed each step, for https://ui.perfetto.dev.

One line for each step of each stage, in Chrome's trace event format: a "complete"
event from the start to the end of computing, with the four phases of the stage's
clock beside it. `pid` is the replica, `tid` the stage; `sampled_rows` are the rows
that gave a token, known on the last stage and 0 on others. Times are those of the
monotonic clock of the stage's node: lines of one node can be compared.

Format: "Trace Event Format", JSON array (its closing bracket may be left out).
"""

from __future__ import annotations

import contextlib
import logging
import os
from io import FileIO
from pathlib import Path

from services.errors import ConfigError
from stagemesh.v1 import step_pb2

log = logging.getLogger("stagemesh.trace")

STEP_TRACE_FLAG = "--step-trace"
MICROSECONDS = 1e-3
MAX_TRACE_BYTES = 256 << 20
"""About 800,000 lines: half an hour of eight stages at 50 steps a second, and more than a viewer
shows at ease. A service that runs on must not fill its disk."""
BLOCK_BYTES = 64 << 10
"""Lines are kept until there are so many bytes. Writing them is a copy into the page cache, tens of
microseconds every 200 lines, so the event loop does it by itself: a thread would cost more."""


class StepTrace:
    """An open trace file. Lines are written in blocks; `close` writes the rest.

    A file that can no longer be written, or that has its full length, ends the trace and
    nothing else: a warning says so once, and what is in the file can be read.
    """

    def __init__(self, path: Path) -> None:
        """Empties the file. Raises `ConfigError` where it cannot be written."""
        try:
            self._file = FileIO(path, "w")
        except OSError as error:
            raise ConfigError(
                f"{STEP_TRACE_FLAG} {path} cannot be written: {error.strerror}",
                param=STEP_TRACE_FLAG,
            ) from None
        self._path = path
        self._block = bytearray(b"[\n")
        self._written_bytes = 0
        """Of whole lines."""

    def write(self, replica: int, stage: int, result: step_pb2.StepResult) -> None:
        """Adds a step of a stage, as long as there is a trace. Never raises."""
        if self._file.closed:
            return
        line = f"{trace_event(replica, stage, result)},\n".encode("ascii")
        if self._written_bytes + len(self._block) + len(line) > MAX_TRACE_BYTES:
            self._flush()
            self._stop(f"has its full length of {MAX_TRACE_BYTES} bytes")
            return
        self._block += line
        if len(self._block) >= BLOCK_BYTES:
            self._flush()

    def close(self) -> None:
        """Later lines are left out. Never raises."""
        if not self._file.closed:
            self._flush()
        self._close_file()

    def _close_file(self) -> None:
        # A network's file system may say only now that its disk is full.
        with contextlib.suppress(OSError):
            self._file.close()

    def _flush(self) -> None:
        try:
            done = 0
            while done < len(self._block):
                done += self._file.write(self._block[done:])
        except OSError as error:
            self._block.clear()
            # Half a line would make the file unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._written_bytes)
            self._stop(f"cannot be written: {error.strerror}")
            return
        self._written_bytes += len(self._block)
        self._block.clear()

    def _stop(self, why: str) -> None:
        if self._file.closed:
            return
        self._close_file()
        log.warning(
            "%s %s %s; no more steps are traced, serving goes on", STEP_TRACE_FLAG, self._path, why
        )


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
