"""A stage worker's handle on one rank process: start, command, watch, stop.

Torch-free. A rank answers commands other than steps in their order, each once: so
a reply belongs to the oldest command that has none, also where its caller has
left. Step results and failures go to the `on_result` and `on_failure` callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.errors import StageFailed
from services.launch.process import how_it_ended
from stage_worker import ipc
from stage_worker.rank_arguments import RankArguments
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2

log = logging.getLogger("stagemesh.stage_worker")

START_TIMEOUT_SECONDS = 120.0
"""Importing torch from a cold disk, on a busy machine."""
LOAD_TIMEOUT_SECONDS = 1800.0
"""A stage of hundreds of GB from a network file system."""
STOP_TIMEOUT_SECONDS = 2.0
FROZEN_AFTER_SECONDS = 2.4
"""A rank whose heartbeat thread (one a second) is silent for this long is stopped or hung.
With the second look it is known within 3 s."""
READ_LIMIT_BYTES = ipc.MAX_FRAME_BYTES + 4

CONFIRM_SECONDS = 0.5
"""After a silence there is a second look: what came while this process did not run
itself is read until then."""
OWN_STALL_SECONDS = 0.25
"""A look that is later than this says that this process did not run."""
MAX_UNANSWERED_COMMANDS = 16
"""Callers come one by one; what is above that are commands whose callers have left."""
RANK_COMMAND = (sys.executable, "-m", "stage_worker.rank_main")

_REPLIES = {"open_store": "store_opened", "form_group": "group_formed", "load": "loaded"}
"""The event that answers each command."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A command without a reply yet."""

    answered_by: str
    reply: asyncio.Future[rank_pb2.RankEvent]
    """Cancelled where the caller has left."""
    on_progress: Callable[[stage_worker_pb2.LoadProgress], None] | None


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
        self._one_by_one = asyncio.Lock()
        self._calls: deque[_Call] = deque()
        self._heard_at = 0.0
        self._alive = rank_pb2.RankAlive()
        self._suspected = False
        self._silence: asyncio.TimerHandle | None = None
        self._stopping = False
        self._over = asyncio.Event()
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
            memory_at_start=hello.memory if hello and hello.HasField("memory") else None,
            memory_peak_bytes=self._alive.memory_peak_bytes,
            phase=self._alive.phase,
            phase_seconds=self._alive.phase_seconds,
        )

    def _is_up(self) -> bool:
        return self._hello.done() and not self._hello.cancelled() and not self._hello.exception()

    async def run(self) -> None:
        """Starts the process and reads its events until it ends. One task per rank."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                reader = await self._start(ours, theirs)
            if reader is not None and not self._stopping:
                await self._read(reader)
                await self._ended()
        finally:
            if self._silence is not None:
                self._silence.cancel()
            if self._writer is None:  # else the socket is the writer's to close
                ours.close()
            await self._kill()
            self._give_up(self._error("RANK_FAILED", "has left").message)
            self._over.set()

    async def _start(
        self, ours: socket.socket, theirs: socket.socket
    ) -> asyncio.StreamReader | None:
        """Starts the process and returns its events; None where it could not be started."""
        arguments = replace(self._arguments, fd=theirs.fileno(), parent_pid=os.getpid())
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments.to_argv(),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                # Torch's C++ side warns about host names that nobody needs here.
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
            )
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=READ_LIMIT_BYTES)
        except OSError as error:
            self._fail(self._error("RANK_FAILED", f"could not be started ({error})"))
            return None
        return reader

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (event := await self._next_event(reader)) is not None:
            self._heard_at = time.monotonic()
            kind = event.WhichOneof("event")
            if kind == "result":
                self.last_step_id = event.result.step_id
                self._on_result(self.tp_rank, event.result)
            elif kind == "alive":
                self._alive = event.alive
                self.last_step_id = max(self.last_step_id, event.alive.last_step_id)
            elif kind == "load_progress":
                if self._calls and (report := self._calls[0].on_progress) is not None:
                    report(event.load_progress)
            elif kind == "hello" and not self._hello.done():
                self._hello.set_result(event.hello)
                # From the first event on there is a heartbeat.
                self._look_again(FROZEN_AFTER_SECONDS)
            elif kind == "error":
                self._fail(event.error)
            elif self._calls and kind == self._calls[0].answered_by:
                self._answered(event)

    def _answered(self, event: rank_pb2.RankEvent) -> None:
        call = self._calls.popleft()
        loads_on = any(other.answered_by == "loaded" for other in self._calls)
        loading = self.state == stage_worker_pb2.COMPONENT_STATE_LOADING
        if call.answered_by == "loaded" and loading and not loads_on:
            self.state = stage_worker_pb2.COMPONENT_STATE_READY
        if not call.reply.done():  # else nobody waits for it any more
            call.reply.set_result(event)

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

        It may also be this process that did not run, and the rank's heartbeats are yet
        to be read: so it takes a second look, and one that is not late itself.
        """
        now = time.monotonic()
        if now - self._heard_at < FROZEN_AFTER_SECONDS:
            self._suspected = False
            self._look_again(self._heard_at + FROZEN_AFTER_SECONDS - now)
        elif not self._suspected or now - due > OWN_STALL_SECONDS:
            self._suspected = True
            self._look_again(CONFIRM_SECONDS)
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
            how = how_it_ended(code)
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
        self._give_up(error.message)
        self._on_failure(error)

    def _give_up(self, message: str) -> None:
        """Nobody waits for this rank any longer."""
        waited_for: list[asyncio.Future[Any]] = [self._hello, *(c.reply for c in self._calls)]
        self._calls.clear()
        for waiting in waited_for:
            if not waiting.done():
                waiting.set_exception(StageFailed(message))
                waiting.exception()  # read here too: nobody may be waiting for it

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
        command = rank_pb2.RankCommand(load=plan)
        return (await self._call(command, LOAD_TIMEOUT_SECONDS, on_progress)).loaded

    async def _call(
        self,
        command: rank_pb2.RankCommand,
        timeout_seconds: float,
        on_progress: Callable[[stage_worker_pb2.LoadProgress], None] | None = None,
    ) -> rank_pb2.RankEvent:
        """One command and its reply; commands of several callers follow each other."""
        kind = command.WhichOneof("command") or ""
        async with self._one_by_one:
            await self.started()
            if self.state == stage_worker_pb2.COMPONENT_STATE_FAILED or self._stopping:
                raise StageFailed(self._error("RANK_FAILED", "has failed or left already").message)
            if len(self._calls) >= MAX_UNANSWERED_COMMANDS:
                how = f"has {len(self._calls)} commands to answer before another"
                raise StageFailed(self._error("RANK_FAILED", how).message)
            if kind == "load":
                self.state = stage_worker_pb2.COMPONENT_STATE_LOADING
            call = _Call(_REPLIES[kind], asyncio.Future(), on_progress)
            self._calls.append(call)
            self.send(ipc.encode(command))
            try:
                return await asyncio.wait_for(call.reply, timeout_seconds)
            except TimeoutError:
                how = f"did not answer {kind} in {timeout_seconds:.0f} s"
                error = self._error("RANK_FAILED", how)
                self._fail(error)
                raise StageFailed(error.message) from None

    def send(self, frame: bytes) -> None:
        """Queues one frame for the rank; what waits there is bounded by the steps in flight."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    async def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """Lets the rank finish what is queued, up to a deadline, and makes sure that it is gone."""
        self._stopping = True
        if self.state != stage_worker_pb2.COMPONENT_STATE_FAILED:
            self.state = stage_worker_pb2.COMPONENT_STATE_DRAINING
        if self._is_up():  # before that nothing is queued
            self.send(ipc.encode(rank_pb2.RankCommand(stop=rank_pb2.RankStop())))
            with contextlib.suppress(TimeoutError):
                # Until its last events are read, which is later than its exit.
                await asyncio.wait_for(self._over.wait(), timeout_seconds)
        await self._kill()

    async def _kill(self) -> None:
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
