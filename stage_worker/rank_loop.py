"""What a rank does with each command, and the clock of each step.

Knows nothing of gRPC or of other ranks' processes. Commands are applied in the
order in which they come; after an error the rank takes no further step until a
new epoch is formed.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError

from services.errors import ECHO_REASON, StageFailed, StagemeshError
from services.telemetry.logging import setup_logging
from services.topology.checkpoint import inspect_checkpoint, without_weights
from services.topology.fingerprint import (
    build_fingerprint,
    environment_fingerprint,
    require_equal,
)
from services.topology.wire import shape_from_proto
from stage_worker import ipc
from stage_worker.clock import Phase, StageTimer
from stage_worker.data_plane import DataPlane
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.pending_receive import NOTHING, PeerLost, PendingReceive
from stage_worker.plan_sizes import check_sizes
from stage_worker.platforms import select_platform
from stage_worker.rank_arguments import RankArguments, RankPlace, process_name
from stage_worker.references import ReturnedTokens
from stage_worker.runner import PreparedStep, StageRunner
from stage_worker.step_results import DoneStep, StepResults
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2

log = logging.getLogger("stagemesh.rank")
_T = TypeVar("_T")

MAX_QUEUED_COMMANDS = 256
"""The scheduler keeps far fewer steps in flight; a full queue makes the reader wait."""
MAX_PENDING_SENDS = 4
"""Tensors on their way to the next stage before a send waits for the oldest."""


_PHASES = {
    Phase.CONTROL_WAIT: stage_worker_pb2.RANK_PHASE_CONTROL_WAIT,
    Phase.RECEIVE: stage_worker_pb2.RANK_PHASE_RECEIVE,
    Phase.COMPUTE: stage_worker_pb2.RANK_PHASE_COMPUTE,
    Phase.SEND: stage_worker_pb2.RANK_PHASE_SEND,
}


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step whose receives are posted."""

    step: step_pb2.Step
    receive: PendingReceive
    tokens: PendingReceive
    """What the step samples, where this rank may need it and another samples it."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that is next."""

    queued: QueuedStep
    prepared: PreparedStep | None
    """None where that is left to its turn."""


class RankLoop:
    """One rank's state and main loop."""

    def __init__(self, arguments: RankArguments, sock: socket.socket) -> None:
        self._arguments = arguments
        self._sock = sock
        self._write_lock = threading.Lock()
        self._queue: queue.Queue[rank_pb2.RankCommand | QueuedStep] = queue.Queue(
            MAX_QUEUED_COMMANDS
        )
        self._platform = select_platform(arguments.device)
        self._platform.set_up(arguments.device_index, arguments.num_threads)
        self._device = self._platform.device(arguments.device_index)
        self._plane = DataPlane(
            self._platform.collective_backend,
            arguments.host,
            self._device,
            arguments.step_timeout_seconds,
            self._platform.finish,
        )
        self._tensor_parallel = TensorParallel(
            rank=arguments.tp_rank, timeout_seconds=arguments.step_timeout_seconds
        )
        self._runner: StageRunner | None = None
        self._returned = ReturnedTokens()
        self._epoch = 0
        self._last_step_id = 0
        self._failed = False
        self._agreed: tuple[str, str] | None = None
        """Path and digest of the plan that was compared with what is here."""
        self._timer = StageTimer()
        self._next: _Ahead | rank_pb2.RankCommand | None = None
        self._results = StepResults(self._emit)

    # On the reader thread.

    def read_commands(self) -> None:
        """Takes commands off the socket until the worker closes it.

        Never raises: without a reader a rank would be deaf and still beat, so what
        ends this is told to the worker, and the caller ends the process.
        """
        try:
            with self._sock.makefile("rb") as stream:
                while (data := ipc.read_frame(stream)) is not None:
                    self._take(data)
        except ConnectionError:
            log.warning("the stage worker is gone")
        except Exception as error:
            # The edge of this thread, as `_guard` is that of the main one.
            log.exception("commands cannot be read any more")
            self._fail(error, "RANK_FAILED", None)

    def _take(self, data: bytes) -> None:
        try:
            command = rank_pb2.RankCommand.FromString(data)
        except DecodeError:
            # The next frame may be right, but a step is missing from now on.
            error = StageFailed(f"a command of {len(data)} bytes cannot be read")
            self._fail(error, error.reason, None)
            return
        kind = command.WhichOneof("command")
        if kind == "step":
            self._queue.put(self._post(command.step))
            return
        if kind == "leave_group":
            # Nobody needs the steps any more that are queued before it, or what one waits for.
            self._failed = True
            self._plane.break_waits()
        self._queue.put(command)

    def _post(self, step: step_pb2.Step) -> QueuedStep:
        """Posts the step's receives before its turn comes, so that the sender never waits."""
        receive = tokens = NOTHING
        runner = self._runner
        if runner is not None and step.epoch == self._epoch and not self._failed:
            num_tokens = sum(len(row.token_ids) for row in step.rows)
            try:
                num_sampled = sum(row.num_sampled for row in step.rows)
                # Larger steps are refused in their turn; nothing is allocated for them.
                if num_sampled <= num_tokens <= runner.max_num_batched_tokens:
                    receive = self._plane.post_receive(runner.boundary_in, num_tokens)
                    if step.returns_tokens:
                        tokens = self._plane.post_token_receive(num_sampled)
            except PeerLost as error:
                self._fail(error, ECHO_REASON, step.step_id)
            except StagemeshError as error:
                self._fail(error, error.reason, step.step_id)
        return QueuedStep(step, receive, tokens)

    # On the heartbeat thread.

    def send_alive(self) -> None:
        """Says that the process is not frozen, whatever its main loop does."""
        self._results.send()
        phase, phase_seconds = self._timer.present()
        alive = rank_pb2.RankAlive(
            last_step_id=self._last_step_id,
            memory_peak_bytes=self._platform.memory_peak_bytes(),
            phase=_PHASES[phase],
            phase_seconds=phase_seconds,
        )
        self._emit(rank_pb2.RankEvent(alive=alive))

    # On the main thread.

    def send_hello(self) -> None:
        """The first event: the process runs and has its device."""
        free_bytes, total_bytes = self._platform.memory()
        hello = rank_pb2.RankHello(
            pid=os.getpid(),
            device=f"{self._platform.name}:{self._arguments.device_index}",
            fingerprint=environment_fingerprint(),
            memory=stage_worker_pb2.DeviceMemory(free_bytes=free_bytes, total_bytes=total_bytes),
        )
        self._emit(rank_pb2.RankEvent(hello=hello))

    @torch.inference_mode()
    def run(self) -> None:
        """Applies commands until told to stop."""
        while True:
            item = self._take_next()
            if isinstance(item, _Ahead):
                self._guard(self._run_step, item, step_id=item.queued.step.step_id)
                continue
            self._results.send()
            match item.WhichOneof("command"):
                case "open_store":
                    self._guard(self._open_store, item.open_store)
                case "form_group":
                    self._guard(self._form_group, item.form_group)
                case "load":
                    self._guard(self._load, item.load)
                case "leave_group":
                    self._guard(self._leave_group, item.leave_group)
                case "take_place":
                    self._guard(self._take_place, item.take_place)
                case "stop":
                    return
            # What is no step belongs to none of a step's phases.
            self._timer.restart()

    def _take_next(self) -> _Ahead | rank_pb2.RankCommand:
        """The next step or command; waits for it."""
        if self._next is not None:
            taken, self._next = self._next, None
            return taken
        self._timer.enter(Phase.CONTROL_WAIT)
        item = self._queue.get()
        self._timer.enter(Phase.COMPUTE)
        return _Ahead(item, None) if isinstance(item, QueuedStep) else item

    def _guard(self, action: Callable[[_T], None], item: _T, step_id: int | None = None) -> None:
        """The edge of this process: any failure becomes an event with its cause."""
        try:
            action(item)
        except PeerLost as error:
            self._fail(error, ECHO_REASON, step_id)
        except StagemeshError as error:
            self._fail(error, error.reason, step_id)
        except Exception as error:
            log.exception("unexpected failure")
            self._fail(error, "STEP_FAILED" if step_id is not None else "RANK_FAILED", step_id)

    def _fail(self, error: Exception, reason: str, step_id: int | None) -> None:
        self._failed = True
        self._results.send()
        known = isinstance(error, StagemeshError | PeerLost)
        self._emit(
            rank_pb2.RankEvent(
                error=step_pb2.StageError(
                    reason=reason,
                    message=str(error) if known else f"{type(error).__name__}: {error}",
                    pp_rank=self._arguments.place.stage,
                    tp_rank=self._arguments.tp_rank,
                    epoch=self._epoch,
                    step_id=step_id,
                )
            )
        )

    def _open_store(self, request: stage_worker_pb2.OpenStoreRequest) -> None:
        address = self._plane.open_store()
        self._emit(
            rank_pb2.RankEvent(store_opened=stage_worker_pb2.OpenStoreResponse(address=address))
        )

    def _leave_group(self, _: rank_pb2.LeaveGroup) -> None:
        """Neighbours that wait for this rank are free when its connections close, so nothing may
        hold on to what was posted."""
        self._failed = True
        self._returned.clear()
        self._plane.leave()
        self._emit(rank_pb2.RankEvent(group_left=rank_pb2.GroupLeft()))

    def _take_place(self, there: rank_pb2.TakePlace) -> None:
        place = RankPlace(there.pp_rank, there.tp_rank)
        if place.tp_rank != self._arguments.tp_rank:
            # Other slices of every matrix: nothing of it is of use.
            self._runner = None
            self._tensor_parallel = TensorParallel(
                place.tp_rank,
                self._tensor_parallel.size,
                timeout_seconds=self._arguments.step_timeout_seconds,
            )
        self._arguments = self._arguments.at(place)
        setup_logging(process=process_name(place))
        self._emit(rank_pb2.RankEvent(place_taken=rank_pb2.PlaceTaken()))

    def _form_group(self, request: stage_worker_pb2.FormGroupRequest) -> None:
        shape = shape_from_proto(request.topology)
        self._plane.form(
            request.epoch,
            request.store_address,
            shape,
            self._arguments.pp_rank,
            self._arguments.tp_rank,
            request.timeout_seconds,
        )
        self._tensor_parallel.size = shape.tp_size
        self._tensor_parallel.group = self._plane.tensor_parallel_group
        if self._runner is not None:
            self._runner.reset()
        self._returned.clear()
        self._epoch = request.epoch
        self._last_step_id = 0
        self._failed = False
        self._emit(
            rank_pb2.RankEvent(group_formed=stage_worker_pb2.FormGroupResponse(epoch=request.epoch))
        )

    def _load(self, plan: stage_worker_pb2.StagePlan) -> None:
        check_sizes(plan)
        self._compare(plan)
        if self._runner is None:
            if not self._epoch:
                # A spare, before its first groups.
                self._tensor_parallel.size = plan.topology.tp_size
            self._runner = StageRunner(
                plan,
                self._arguments.tp_rank,
                self._arguments.device_index,
                self._platform,
                self._tensor_parallel,
            )
            report = self._runner.load(self._report_progress)
        else:
            report = self._runner.apply_plan(plan, self._report_progress)
        # Both sides have fields that the other cannot know (see `fingerprint`), so a rank
        # acknowledges a plan with the plan's digest, and only after `require_equal`.
        report.fingerprint_digest = plan.fingerprint.digest
        self._emit(rank_pb2.RankEvent(loaded=report))

    def _compare(self, plan: stage_worker_pb2.StagePlan) -> None:
        """Compares the plan with what is here. Raises `FingerprintMismatch`.

        Once: after a recovery the same plan comes again, and no file is read for it.
        """
        agreed = (plan.model_path, plan.fingerprint.digest)
        if agreed == self._agreed:
            return
        path = Path(plan.model_path)
        needs_weights = self._platform.needs_weights
        own = build_fingerprint(
            inspect_checkpoint(path) if needs_weights else without_weights(path),
            shape_from_proto(plan.topology),
            dtype=plan.dtype,
            block_size=plan.block_size,
        )
        rank = f"stage {self._arguments.pp_rank} TP rank {self._arguments.tp_rank}"
        require_equal(plan.fingerprint, own, worker_name=rank)
        self._agreed = agreed

    def _report_progress(self, loaded_bytes: int, total_bytes: int) -> None:
        progress = stage_worker_pb2.LoadProgress(
            tp_rank=self._arguments.tp_rank, loaded_bytes=loaded_bytes, total_bytes=total_bytes
        )
        self._emit(rank_pb2.RankEvent(load_progress=progress))

    def _run_step(self, ahead: _Ahead) -> None:
        """Runs one step."""
        step = ahead.queued.step
        if self._failed or step.epoch < self._epoch:
            return  # Whoever sent it knows by now that it is of no use.
        runner = self._runner_for(step, self._last_step_id)
        prepared = ahead.prepared or runner.prepare(step)
        self._timer.enter(Phase.RECEIVE)
        self._returned.expect(step.step_id, ahead.queued.tokens)
        received = ahead.queued.receive.wait()
        returned = self._returned.wait(prepared.referred)
        compute_start_ns = self._timer.enter(Phase.COMPUTE)
        output = runner.compute(prepared, received, returned)
        if self._platform.runs_ahead:
            self._next = self._prepare_ahead(step.step_id)
        self._platform.synchronize()
        compute_end_ns = self._timer.enter(Phase.SEND)
        if output.returned is not None:
            self._returned.put(step.step_id, output.returned)
            self._plane.return_tokens(output.returned, MAX_PENDING_SENDS)
        self._plane.send(output.sent, MAX_PENDING_SENDS)
        self._last_step_id = step.step_id
        clock = self._timer.finish_step(compute_start_ns, compute_end_ns)
        # Of a stage that sends activations on, nobody waits for more than clocks.
        done = DoneStep(step.epoch, step.step_id, output.rows, clock)
        self._answer(done, may_wait=bool(output.sent))

    def _answer(self, done: DoneStep, *, may_wait: bool) -> None:
        """Sends a result, with those that waited for it; or lets it wait itself while there is a
        step to go on with."""
        busy = self._next is not None or not self._queue.empty()
        self._results.add(done, may_wait=may_wait and busy)

    def _runner_for(self, step: step_pb2.Step, last_step_id: int) -> StageRunner:
        """Raises `StagemeshError` for a step whose turn after `last_step_id` it is not."""
        if self._runner is None or step.epoch != self._epoch:
            raise StagemeshError(
                f"step {step.step_id} is of epoch {step.epoch}; this rank is in epoch {self._epoch}"
            )
        if step.step_id != last_step_id + 1:
            raise StagemeshError(
                f"step {step.step_id} does not follow step {last_step_id}; it was not applied"
            )
        return self._runner

    def _prepare_ahead(self, last_step_id: int) -> _Ahead | rank_pb2.RankCommand | None:
        """Takes the next command, if one is there or comes while the device is known to be busy,
        and prepares it where it is a step.

        The device computes meanwhile. What is wrong with the step is said in its turn:
        preparing it again, which a refused step allows, finds the same.
        """
        try:
            item = self._queue.get(timeout=self._platform.busy_seconds())
        except queue.Empty:
            return None
        if not isinstance(item, QueuedStep):
            return item
        try:
            return _Ahead(item, self._runner_for(item.step, last_step_id).prepare(item.step))
        except StagemeshError:
            return _Ahead(item, None)

    def _emit(self, event: rank_pb2.RankEvent) -> None:
        frame = ipc.encode(event)
        with self._write_lock:
            try:
                self._sock.sendall(frame)
            except (BrokenPipeError, ConnectionResetError):
                # The worker is gone; the reader sees the same and ends the process.
                log.warning("the stage worker is gone")
