"""A stage worker's handle on one rank process: start, command, watch, stop.

Torch-free. Commands other than steps are answered one at a time; step results
and the first failure go to the `on_result` and `on_failure` callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.errors import StageFailed
from stage_worker import ipc
from stage_worker.rank_arguments import RankArguments
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2

log = logging.getLogger("stagemesh.stage_worker")

START_TIMEOUT_SECONDS = 120.0
"""Importing torch from a cold disk, on a busy machine."""
LOAD_TIMEOUT_SECONDS = 1800.0
"""A stage of hundreds of GB from a network file system."""
STOP_TIMEOUT_SECONDS = 2.0
FROZEN_AFTER_SECONDS = 3.0
"""A rank whose heartbeat thread is silent for this long is stopped or hung."""
READ_LIMIT_BYTES = ipc.MAX_FRAME_BYTES + 4

OWN_STALL_SECONDS = 0.5
"""A timer that is later than this says that this process did not run."""
RANK_COMMAND = (sys.executable, "-m", "stage_worker.rank_main")

_REPLIES = {"open_store": "store_opened", "form_group": "group_formed", "load": "loaded"}
"""The event that answers each command."""


class RankProcess:
    """One rank, from exec to exit."""

    def __init__(
        self,
        arguments: RankArguments,
        on_result: Callable[[int, step_pb2.StepResult], None],
        on_failure: Callable[[step_pb2.StageError], None],
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        """`command` starts the rank; its arguments are appended."""
        self._command = tuple(command)
        self._arguments = arguments
        self._on_result = on_result
        self._on_failure = on_failure
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._hello: asyncio.Future[rank_pb2.RankHello] = asyncio.Future()
        self._calls = asyncio.Lock()
        self._expected: str | None = None
        self._reply: asyncio.Future[rank_pb2.RankEvent] | None = None
        self._heard_at = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._on_progress: Callable[[stage_worker_pb2.LoadProgress], None] | None = None
        self._stopping = False
        self.state = stage_worker_pb2.COMPONENT_STATE_STARTING
        self.epoch = 0
        self.last_step_id = 0

    @property
    def tp_rank(self) -> int:
        """The rank's place in its TP group."""
        return self._arguments.tp_rank

    def status(self) -> stage_worker_pb2.RankStatus:
        """What the rank does, as far as this side knows; never waits."""
        hello = self._hello.result() if self._is_up() else None
        return stage_worker_pb2.RankStatus(
            tp_rank=self.tp_rank,
            device=hello.device if hello else self._arguments.device,
            pid=self._process.pid if self._process else 0,
            state=self.state,
        )

    def _is_up(self) -> bool:
        return self._hello.done() and not self._hello.cancelled() and not self._hello.exception()

    async def run(self) -> None:
        """Starts the process and reads its events until it ends. One task per rank."""
        ours, theirs = socket.socketpair()
        arguments = replace(self._arguments, fd=theirs.fileno(), parent_pid=os.getpid())
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *arguments.to_argv(),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    # Torch's C++ side warns about host names that nobody needs here.
                    env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
                )
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=READ_LIMIT_BYTES)
            await self._read(reader)
            await self._ended()
        finally:
            if self._silence is not None:
                self._silence.cancel()
            ours.close()
            await self._kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (event := await self._next_event(reader)) is not None:
            self._heard_at = time.monotonic()
            kind = event.WhichOneof("event")
            if kind == "result":
                self.last_step_id = event.result.step_id
                self._on_result(self.tp_rank, event.result)
            elif kind == "load_progress":
                if self._on_progress is not None:
                    self._on_progress(event.load_progress)
            elif kind == "hello" and not self._hello.done():
                self._hello.set_result(event.hello)
                # From the first event on there is a heartbeat.
                self._look_again(FROZEN_AFTER_SECONDS)
            elif kind == "error":
                self._fail(event.error)
            elif kind == self._expected and self._reply is not None and not self._reply.done():
                # A reply that nobody waits for any more is let go.
                self._reply.set_result(event)

    async def _next_event(self, reader: asyncio.StreamReader) -> rank_pb2.RankEvent | None:
        try:
            return await ipc.read_event(reader)
        except ipc.FrameError as error:
            self._fail(self._error("RANK_FAILED", f"sent what is no event ({error})"))
            return None

    def _look_again(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._silence = asyncio.get_running_loop().call_later(seconds, self._look, due)

    def _look(self, due: float) -> None:
        """Notices a rank that is there and does not run: stopped, or its interpreter lock held.

        When this look itself is late, it was this process that did not run, and the
        rank's heartbeats are yet to be read.
        """
        now = time.monotonic()
        if now - due > OWN_STALL_SECONDS:
            self._look_again(FROZEN_AFTER_SECONDS)
        elif now - self._heard_at < FROZEN_AFTER_SECONDS:
            self._look_again(self._heard_at + FROZEN_AFTER_SECONDS - now)
        else:
            how = f"has been silent for {now - self._heard_at:.0f} s"
            self._fail(self._error("RANK_FROZEN", how))
            self._stopping = True
            if self._process is not None and self._process.returncode is None:
                self._process.kill()  # Its socket closes, which ends the reading.

    async def _ended(self) -> None:
        """The socket is closed: the process is gone or about to be."""
        if self._process is None or self._stopping:
            return
        try:
            code = await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_SECONDS)
        except TimeoutError:
            how = "closed its socket and does not end"
        else:
            how = (
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
        self._fail(self._error("RANK_DIED", how))

    def _error(self, reason: str, how: str) -> step_pb2.StageError:
        pid = self._process.pid if self._process else 0
        rank = f"rank process {pid} (stage {self._arguments.pp_rank}, TP rank {self.tp_rank})"
        return step_pb2.StageError(
            reason=reason,
            message=f"{rank} {how}; its log lines say more",
            pp_rank=self._arguments.pp_rank,
            tp_rank=self.tp_rank,
            epoch=self.epoch,
        )

    def _fail(self, error: step_pb2.StageError) -> None:
        self.state = stage_worker_pb2.COMPONENT_STATE_FAILED
        failure = StageFailed(error.message)
        for waiting in (self._hello, self._reply):
            if waiting is not None and not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # read here too: nobody may be waiting for it
        self._on_failure(error)

    async def started(self) -> rank_pb2.RankHello:
        """Waits until the process has its device. Raises `StageFailed`."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._hello), START_TIMEOUT_SECONDS)
        except TimeoutError:
            raise StageFailed(
                self._error(
                    "RANK_FAILED", f"did not start in {START_TIMEOUT_SECONDS:.0f} s"
                ).message
            ) from None

    async def open_store(self, request: stage_worker_pb2.OpenStoreRequest) -> str:
        """Opens the epoch's store in the rank and returns its address. Raises `StageFailed`."""
        command = rank_pb2.RankCommand(open_store=request)
        return (await self._call(command, START_TIMEOUT_SECONDS)).store_opened.address

    async def form_group(self, request: stage_worker_pb2.FormGroupRequest) -> None:
        """Lets the rank join the epoch's groups. Raises `StageFailed`."""
        command = rank_pb2.RankCommand(form_group=request)
        # The rank has its own deadline and its error says more than ours.
        await self._call(command, request.timeout_seconds + STOP_TIMEOUT_SECONDS)
        self.epoch, self.last_step_id = request.epoch, 0

    async def load(
        self,
        plan: stage_worker_pb2.StagePlan,
        on_progress: Callable[[stage_worker_pb2.LoadProgress], None],
    ) -> stage_worker_pb2.RankReport:
        """Brings the rank to a plan. Raises `StageFailed`."""
        self._on_progress = on_progress
        try:
            event = await self._call(rank_pb2.RankCommand(load=plan), LOAD_TIMEOUT_SECONDS)
        finally:
            self._on_progress = None
        self.state = stage_worker_pb2.COMPONENT_STATE_READY
        return event.loaded

    async def _call(
        self, command: rank_pb2.RankCommand, timeout_seconds: float
    ) -> rank_pb2.RankEvent:
        """One command and its reply; commands of several callers follow each other."""
        kind = command.WhichOneof("command") or ""
        async with self._calls:
            await self.started()
            if self.state == stage_worker_pb2.COMPONENT_STATE_FAILED or self._stopping:
                raise StageFailed(self._error("RANK_FAILED", "has failed or left already").message)
            if kind == "load":
                self.state = stage_worker_pb2.COMPONENT_STATE_LOADING
            self._expected, self._reply = _REPLIES[kind], asyncio.Future()
            self.send(ipc.encode(command))
            try:
                return await asyncio.wait_for(self._reply, timeout_seconds)
            except TimeoutError:
                how = f"did not answer {kind} in {timeout_seconds:.0f} s"
                error = self._error("RANK_FAILED", how)
                self._fail(error)
                raise StageFailed(error.message) from None
            finally:
                self._expected = None

    def send(self, frame: bytes) -> None:
        """Queues one frame for the rank; what waits there is bounded by the steps in flight."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    async def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """Lets the rank finish what is queued, up to a deadline, and makes sure that it is gone."""
        self._stopping = True
        if self.state != stage_worker_pb2.COMPONENT_STATE_FAILED:
            self.state = stage_worker_pb2.COMPONENT_STATE_DRAINING
        self.send(ipc.encode(rank_pb2.RankCommand(stop=rank_pb2.RankStop())))
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_seconds)
        await self._kill()

    async def _kill(self) -> None:
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
