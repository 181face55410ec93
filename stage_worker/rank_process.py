"""A stage worker's handle on one rank process: start, command, watch, stop.

Torch-free. Step results and failures go to the `on_result` and `on_failure` callbacks.
A process that has failed for good is ended here; a new one is `rank_supervisor`'s to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.errors import StageFailed
from services.launch.process import child_environment, how_it_ended, kill
from services.launch.silence import SilenceWatch, done_in_time
from stage_worker import ipc, rank_calls
from stage_worker.rank_arguments import NO_STAGE, RankArguments, RankPlace
from stage_worker.rank_calls import Call, OnProgress, RankCalls
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2

log = logging.getLogger("stagemesh.stage_worker")

START_TIMEOUT_SECONDS = 120.0
"""Importing torch from a cold disk, on a busy machine."""
LOAD_TIMEOUT_SECONDS = 1800.0
"""A stage of hundreds of GB from a network file system."""
STOP_TIMEOUT_SECONDS = 2.0
LEAVE_TIMEOUT_SECONDS = 3.0
"""For a rank to leave its groups. One that waits for a neighbour which is cut off does not take the
command, and nothing but its end breaks that wait."""
COMPUTE_GRACE_SECONDS = 20.0
"""For one that computes: it takes the command after its step, and keeps its weights."""
READ_LIMIT_BYTES = ipc.MAX_FRAME_BYTES + 4
RANK_COMMAND = (sys.executable, "-m", "stage_worker.rank_main")
RANK_ENVIRONMENT = {
    # Torch's C++ side warns about host names that nobody needs here.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # On a CPU weights are read from pages of 2 MB where the kernel gives them on request: with
    # pages of 4 kB a step of a few rows waits for their addresses (docs/decisions/019). What steps
    # allocate comes from memory that is kept, where glibc would map and clear it each time; larger
    # things go back as soon as they are freed. (Older glibc refuses a threshold above 32 MB.)
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8388608:"
    "glibc.malloc.trim_threshold=67108864",
}
"""Unless the worker's own says otherwise."""

_ENDS_AN_EPOCH = ("leave_group", "form_group")
_STARTS_ANEW = frozenset(("STEP_FAILED", "RANK_FAILED"))
"""Failures that nobody foresaw: what they have left behind in a process or on its device is not
known, so another takes its place. After the others a rank keeps its weights."""


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
        self._calls = RankCalls()
        self._alive = rank_pb2.RankAlive()
        self._silence = SilenceWatch(self._frozen)
        self._stopping = False
        self._ending = False
        self._has_loaded = False
        self._is_in_group = False
        self.over = asyncio.Event()
        """Set when the process is gone and its last events are read."""
        self.state = stage_worker_pb2.COMPONENT_STATE_STARTING
        self.epoch = 0
        self._times_left = 0
        self.last_step_id = 0

    @property
    def tp_rank(self) -> int:
        """The rank's place in its TP group."""
        return self._arguments.tp_rank

    @property
    def has_loaded(self) -> bool:
        """Whether it has come to a plan, and is there still."""
        return self._has_loaded and not self.is_ending

    @property
    def is_in_group(self) -> bool:
        """Whether it was told to join groups, and has not said since that it has left them. Until
        then it may hold a step, whatever epoch this side counts it to."""
        return self._is_in_group and not self.is_ending

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
            started=hello is not None and not self.is_ending,
        )

    @property
    def is_ending(self) -> bool:
        """Whether the process has failed for good, is being stopped, or is gone."""
        return self._ending or self._stopping or self.over.is_set()

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
            self._silence.stop()
            if self._writer is None:  # else the socket is the writer's to close
                ours.close()
            await self._kill()
            self._give_up(self._error("RANK_FAILED", "has left"))
            self.over.set()

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
                env={**RANK_ENVIRONMENT, **child_environment()},
            )
            if self.is_ending:  # Given up while it was being started: `run` kills it.
                return None
            self._silence.start(self._process.pid)
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=READ_LIMIT_BYTES)
        except OSError as error:
            self._fail(self._error("RANK_FAILED", f"could not be started ({error})"))
            return None
        return reader

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (event := await self._next_event(reader)) is not None:
            self._silence.heard()
            kind = event.WhichOneof("event")
            if kind == "result":
                self.last_step_id = event.result.step_id
                self._on_result(self.tp_rank, event.result)
            elif kind == "alive":
                self._alive = event.alive
                self.last_step_id = max(self.last_step_id, event.alive.last_step_id)
            elif kind == "load_progress":
                self._calls.progress(event.load_progress)
            elif kind == "hello" and not self._hello.done():
                self._hello.set_result(event.hello)
            elif kind == "error":
                self._failed(event.error)
            elif (call := self._calls.answered(event)) is not None:
                self._has_answered(call)

    def _has_answered(self, call: Call) -> None:
        if call.kind == "leave_group":
            self._is_in_group = self._calls.has("form_group")
        if call.kind == "load":
            self._has_loaded = True
            loading = self.state == stage_worker_pb2.COMPONENT_STATE_LOADING
            if loading and not self._calls.has("load"):
                self.state = stage_worker_pb2.COMPONENT_STATE_READY
        elif call.kind in _ENDS_AN_EPOCH and not self.is_ending:
            # Whatever had failed in the epoch before.
            ready, new = (
                stage_worker_pb2.COMPONENT_STATE_READY,
                stage_worker_pb2.COMPONENT_STATE_STARTING,
            )
            self.state = ready if self._has_loaded else new

    async def _next_event(self, reader: asyncio.StreamReader) -> rank_pb2.RankEvent | None:
        try:
            return await ipc.read_event(reader)
        except ipc.FrameError as error:
            self._fail(self._error("RANK_FAILED", f"sent what is no event ({error})"))
            return None

    def _frozen(self, seconds: float) -> None:
        self._fail(self._error("RANK_FROZEN", f"has been silent for {seconds:.0f} s"))

    async def _ended(self) -> None:
        """The socket is closed: the process is gone or about to be."""
        if self._process is None or self.is_ending:
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
        place = self._arguments.place
        where = "of a spare" if place.pp_rank == NO_STAGE else f"stage {place.pp_rank}"
        rank = f"rank process {pid} ({where}, TP rank {self.tp_rank})"
        return step_pb2.StageError(
            reason=reason,
            message=f"{rank} {how}; its log lines say more",
            pp_rank=place.stage,
            tp_rank=self.tp_rank,
            epoch=self.epoch,
        )

    def _failed(self, error: step_pb2.StageError) -> None:
        """The rank says that something has failed."""
        if error.reason in _STARTS_ANEW:
            self._fail(error)
            return
        if error.HasField("step_id"):
            if self._calls.has(*_ENDS_AN_EPOCH):
                return  # Of the epoch that it is about to leave.
        else:
            self._calls.refused(error)
        self.state = stage_worker_pb2.COMPONENT_STATE_FAILED
        self._on_failure(error)

    def _fail(self, error: step_pb2.StageError) -> None:
        """Ends the process, for a first cause."""
        if self._ending:
            return
        self._ending = True
        self.state = stage_worker_pb2.COMPONENT_STATE_FAILED
        self._silence.stop()
        self._give_up(error)
        self._on_failure(error)
        kill(self._process)  # Its socket closes, which ends the reading.

    def replace(self, why: str) -> None:
        """Ends the process so that another takes its place; `why` is what it does, in words."""
        self._fail(self._error("RANK_FROZEN", why))

    def _give_up(self, error: step_pb2.StageError) -> None:
        """Nobody waits for this rank any longer."""
        rank_calls.fail(self._hello, error)
        self._calls.give_up(error)

    async def started(self) -> rank_pb2.RankHello:
        """Waits until the process has its device. Raises `StageFailed`."""
        if not await done_in_time(self._hello, START_TIMEOUT_SECONDS):
            self._fail(
                self._error("RANK_FAILED", f"did not start in {START_TIMEOUT_SECONDS:.0f} s")
            )
        return self._hello.result()

    async def open_store(self, request: stage_worker_pb2.OpenStoreRequest) -> str:
        """Opens the epoch's store in the rank and returns its address. Raises `StageFailed`."""
        command = rank_pb2.RankCommand(open_store=request)
        return (await self._call(command, START_TIMEOUT_SECONDS)).store_opened.address

    def starts_at(self, place: RankPlace) -> None:
        """Before it is run: it stands elsewhere than its arguments say."""
        self._arguments = self._arguments.at(place)

    async def take_place(self, place: RankPlace) -> None:
        """Tells the rank where it stands from now on. Raises `StageFailed`."""
        if place == self._arguments.place:
            return
        there = rank_pb2.TakePlace(pp_rank=place.pp_rank, tp_rank=place.tp_rank)
        await self._call(rank_pb2.RankCommand(take_place=there), LEAVE_TIMEOUT_SECONDS)
        self._has_loaded = self._has_loaded and place.tp_rank == self.tp_rank
        self._arguments = self._arguments.at(place)

    async def form_group(self, request: stage_worker_pb2.FormGroupRequest) -> None:
        """Lets the rank join the epoch's groups. Raises `StageFailed`."""
        command = rank_pb2.RankCommand(form_group=request)
        times_left = self._times_left
        # The rank has its own deadline and its error says more than ours.
        await self._call(command, request.timeout_seconds + STOP_TIMEOUT_SECONDS)
        if self._times_left != times_left:
            raise StageFailed(
                f"TP rank {self.tp_rank} has left the epoch before its groups, of {request.epoch}, "
                "were formed"
            )
        self.epoch, self.last_step_id = request.epoch, 0

    def leave_epoch(self) -> None:
        """From now on it is in none, also where its groups are just being formed; the rank itself
        has to be told with `leave_group`."""
        self.epoch = 0
        self._times_left += 1

    async def load(
        self,
        plan: stage_worker_pb2.StagePlan,
        on_progress: OnProgress,
    ) -> stage_worker_pb2.RankReport:
        """Brings the rank to a plan. Raises `StageFailed`."""
        command = rank_pb2.RankCommand(load=plan)
        return (await self._call(command, LOAD_TIMEOUT_SECONDS, on_progress)).loaded

    async def leave_group(self) -> bool:
        """Lets the rank leave its groups, after what it was told before. Returns False where it
        does not take the command. Raises `StageFailed` where it ends."""
        await self.started()
        self._refuse_where_over()
        told_at = time.monotonic()
        command = rank_pb2.RankCommand(leave_group=rank_pb2.LeaveGroup())
        earlier_due = self._calls.last_due
        call = self._tell(command, LEAVE_TIMEOUT_SECONDS)
        while True:
            if await done_in_time(call.reply, LEAVE_TIMEOUT_SECONDS):
                call.reply.result()
                return True
            now = time.monotonic()
            computes = self._alive.phase == stage_worker_pb2.RANK_PHASE_COMPUTE
            may_compute = computes and now - told_at < COMPUTE_GRACE_SECONDS
            if now > earlier_due and not may_compute:
                return False

    async def _call(
        self,
        command: rank_pb2.RankCommand,
        timeout_seconds: float,
        on_progress: OnProgress | None = None,
    ) -> rank_pb2.RankEvent:
        """One command and its reply; commands of several callers follow each other."""
        async with self._one_by_one:
            await self.started()
            self._refuse_where_over()
            call = self._tell(command, timeout_seconds, on_progress)
            if not await done_in_time(call.reply, timeout_seconds):
                how = f"did not answer {call.kind} in {timeout_seconds:.0f} s"
                self._fail(self._error("RANK_FAILED", how))
            return call.reply.result()

    def _refuse_where_over(self) -> None:
        if self.is_ending:
            raise StageFailed(self._error("RANK_FAILED", "has failed or left already").message)

    def _tell(
        self,
        command: rank_pb2.RankCommand,
        timeout_seconds: float,
        on_progress: OnProgress | None = None,
    ) -> Call:
        if self._calls.is_full:
            how = f"has {len(self._calls)} commands to answer before another"
            raise StageFailed(self._error("RANK_FAILED", how).message)
        kind = command.WhichOneof("command") or ""
        if kind == "load":
            self.state = stage_worker_pb2.COMPONENT_STATE_LOADING
        self._is_in_group |= kind == "form_group"
        call = self._calls.add(kind, timeout_seconds, on_progress)
        self.send(ipc.encode(command))
        return call

    def send(self, frames: bytes) -> None:
        """Queues frames for the rank; what waits there is bounded by the steps in flight."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frames)

    async def send_steps(self, frames: bytes) -> None:
        """Queues steps, and waits while the rank does not take what was queued before them, so
        that a gateway that sends more than it reads is held back and not stored."""
        self.send(frames)
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):  # Its end is told by its reader.
                await self._writer.drain()

    async def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """Lets the rank finish what is queued, up to a deadline, and makes sure that it is gone."""
        self._stopping = True
        if self.state != stage_worker_pb2.COMPONENT_STATE_FAILED:
            self.state = stage_worker_pb2.COMPONENT_STATE_DRAINING
        if self._is_up():  # before that nothing is queued
            self.send(ipc.encode(rank_pb2.RankCommand(stop=rank_pb2.RankStop())))
            with contextlib.suppress(TimeoutError):
                # Until its last events are read, which is later than its exit.
                await asyncio.wait_for(self.over.wait(), timeout_seconds)
        await self._kill()

    async def _kill(self) -> None:
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        kill(self._process)
        if self._process is not None:
            await self._process.wait()
