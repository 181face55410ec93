"""A rank process without torch: the same socket, answers made up.

    python -m tests.service.fake_rank MODE <the arguments of a rank>

MODE is words joined by commas, each a way to misbehave; see `Rank`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from services.errors import ModelError
from stage_worker import ipc
from stage_worker.rank_arguments import RankArguments
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2

HEARTBEAT_SECONDS = 0.05
EXIT_CODE = 7
SLOW_SECONDS = 0.3
FLOOD_RESULTS = 3000
FLOOD_TOKENS = 1000
MISSING_MODEL = "/models/missing"
"""Of a plan that it cannot load."""


class Rank:
    """Answers commands in their order."""

    def __init__(self, mode: set[str], sock: socket.socket) -> None:
        self._mode = mode
        self._sock = sock
        self._stream = sock.makefile("rb")
        self._lock = threading.Lock()
        self._phase = stage_worker_pb2.RANK_PHASE_CONTROL_WAIT
        if "step-compute" in mode:
            self._phase = stage_worker_pb2.RANK_PHASE_COMPUTE

    def emit(self, *events: rank_pb2.RankEvent) -> None:
        with self._lock:
            self._sock.sendall(b"".join(ipc.encode(event) for event in events))

    def beat(self) -> None:
        while True:
            self.emit(rank_pb2.RankEvent(alive=rank_pb2.RankAlive(phase=self._phase)))
            time.sleep(HEARTBEAT_SECONDS)

    def run(self) -> None:
        while (data := ipc.read_frame(self._stream)) is not None:
            command = rank_pb2.RankCommand.FromString(data)
            match command.WhichOneof("command"):
                case "form_group":
                    if "form-slow" in self._mode:
                        time.sleep(SLOW_SECONDS)
                    epoch = stage_worker_pb2.FormGroupResponse(epoch=command.form_group.epoch)
                    self.emit(rank_pb2.RankEvent(group_formed=epoch))
                case "leave_group":
                    if "leave-slow" in self._mode:
                        time.sleep(SLOW_SECONDS)
                    self.emit(rank_pb2.RankEvent(group_left=rank_pb2.GroupLeft()))
                case "take_place":
                    if "take-slow" in self._mode:
                        time.sleep(SLOW_SECONDS)
                    self.emit(rank_pb2.RankEvent(place_taken=rank_pb2.PlaceTaken()))
                case "load":
                    self.load(command.load)
                case "step":
                    self.step(command.step)
                case "stop":
                    return

    def load(self, plan: stage_worker_pb2.StagePlan) -> None:
        if "load-exit" in self._mode:
            os._exit(EXIT_CODE)
        if "load-garbage" in self._mode:
            self._sock.sendall(b"\x00\x00\x00\x01\xff")
        if plan.model_path == MISSING_MODEL:
            error = step_pb2.StageError(reason=ModelError.reason, message="it is not there")
            self.emit(rank_pb2.RankEvent(error=error))
            return
        if "load-slow" in self._mode:
            time.sleep(SLOW_SECONDS)
        progress = stage_worker_pb2.LoadProgress(loaded_bytes=plan.num_blocks)
        report = stage_worker_pb2.RankReport(num_blocks=plan.num_blocks)
        self.emit(rank_pb2.RankEvent(load_progress=progress), rank_pb2.RankEvent(loaded=report))

    def step(self, step: step_pb2.Step) -> None:
        for mode in self._mode:
            if mode.startswith("step-error="):
                reason = mode.partition("=")[2]
                error = step_pb2.StageError(reason=reason, epoch=step.epoch, step_id=step.step_id)
                self.emit(rank_pb2.RankEvent(error=error))
                return
        if "step-hang" in self._mode:
            if "step-compute" not in self._mode:
                self._phase = stage_worker_pb2.RANK_PHASE_RECEIVE
            threading.Event().wait()
        if "step-slow" in self._mode:
            time.sleep(SLOW_SECONDS)
        result = step_pb2.StepResult(epoch=step.epoch, step_id=step.step_id)
        count = 1
        if "step-flood" in self._mode and step.step_id == 1:
            result.rows.add(token_ids=[1] * FLOOD_TOKENS)
            count = FLOOD_RESULTS
        self.emit(*[rank_pb2.RankEvent(result=result)] * count)


def main() -> None:
    arguments = RankArguments.parse(sys.argv[2:])
    rank = Rank(set(sys.argv[1].split(",")), socket.socket(fileno=arguments.fd))
    rank.emit(rank_pb2.RankEvent(hello=rank_pb2.RankHello(pid=os.getpid(), device="fake:0")))
    threading.Thread(target=rank.beat, daemon=True).start()
    rank.run()
    os._exit(0)


if __name__ == "__main__":
    main()
