"""TP x PP over spawned processes and gloo, driven step by step from the test.

Stands in for rank processes: each child holds one rank's runner, receives
serialized steps over a pipe, and passes activations with `torch.distributed`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from stage_worker.layers.tensor_parallel import TensorParallel
from stagemesh.v1 import step_pb2
from tests.stage_chain import make_runner, stage_plan

DEADLINE_SECONDS = 60.0
"""Four interpreters import torch on two cores."""


class TensorParallelMesh:
    """A context manager whose `load` chooses what runs and whose call runs a step."""

    def __init__(self, world_size: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._children = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, self._store.port, theirs)
            child = context.Process(target=_rank_main, args=arguments, daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        self._last: Connection = self._pipes[-1]

    def __enter__(self) -> TensorParallelMesh:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(5.0)
            if child.is_alive():
                child.kill()
                child.join()
            child.close()

    def load(self, path: Path, partition: Sequence[int], tp_size: int) -> list[int]:
        """Brings all ranks to a checkpoint; returns their bytes of weights."""
        for pipe in self._pipes:
            pipe.send((str(path), tuple(partition), tp_size))
        self._last = self._pipes[-tp_size]
        return [_receive(pipe) for pipe in self._pipes]

    def __call__(self, step: step_pb2.Step) -> list[step_pb2.ResultRow]:
        for pipe in self._pipes:
            pipe.send(step.SerializeToString())
        answers = [_receive(pipe) for pipe in self._pipes]
        rows = answers[self._pipes.index(self._last)]
        silent = [
            answer
            for pipe, answer in zip(self._pipes, answers, strict=True)
            if pipe is not self._last
        ]
        if any(silent):
            raise AssertionError("a rank that must not sample has sampled")
        return [step_pb2.ResultRow.FromString(row) for row in rows]


def _receive(pipe: Connection) -> list[bytes]:
    if not pipe.poll(DEADLINE_SECONDS):
        raise TimeoutError("a rank did not answer")
    answer: list[bytes] = pipe.recv()
    return answer


def _rank_main(rank: int, world_size: int, store_port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    groups = {
        size: [
            dist.new_group(list(range(first, first + size)), timeout=timeout)
            for first in range(0, world_size, size)
        ]
        for size in (2, 4)
    }
    runner, tp_size = None, 1
    while True:
        try:
            command = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        if isinstance(command, tuple):
            path, partition, tp_size = command
            group = TensorParallel(rank % tp_size, tp_size, groups[tp_size][rank // tp_size])
            plan = stage_plan(Path(path), partition, rank // tp_size, tp_size=tp_size)
            runner = make_runner(plan, group)
            pipe.send(runner.load(lambda loaded_bytes, total_bytes: None).weight_bytes)
            continue
        if runner is None:
            raise RuntimeError("a step came before a load")
        step = step_pb2.Step.FromString(command)
        num_tokens = sum(len(row.token_ids) for row in step.rows)
        received = [
            torch.empty(num_tokens, *tensor.trailing_shape, dtype=getattr(torch, tensor.dtype))
            for tensor in runner.boundary_in.tensors
            if num_tokens
        ]
        for tensor in received:
            dist.recv(tensor, rank - tp_size)
        output = runner.run(step, received)
        for tensor in output.sent:
            dist.send(tensor, rank + tp_size)
        pipe.send([row.SerializeToString() for row in output.rows])
    dist.destroy_process_group()
