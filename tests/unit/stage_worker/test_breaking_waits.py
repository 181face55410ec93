"""A rank is freed from a wait in its groups although its neighbour does not let go."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from services.topology.facts import MeshShape
from stage_worker.data_plane import DataPlane
from stage_worker.group_sockets import shut_down_connections, tcp_connections
from stage_worker.pending_receive import PeerLost
from stagemesh.v1 import topology_pb2

TIMEOUT_SECONDS = 30.0
FREED_SECONDS = 10.0
"""Long before the time-out, also on a busy machine."""
HIDDEN_SIZE = 1 << 16
BOUNDARY = topology_pb2.BoundarySchema(
    tensors=[topology_pb2.BoundaryTensor(trailing_shape=[HIDDEN_SIZE], dtype="float32")]
)
SHAPE = MeshShape(1, 1, 2, (1, 1))
NEIGHBOUR = f"""
import sys, time, torch
from stage_worker.data_plane import DataPlane
from services.topology.facts import MeshShape
plane = DataPlane("gloo", "127.0.0.1", torch.device("cpu"), {TIMEOUT_SECONDS})
plane.form(1, sys.argv[1], MeshShape(1, 1, 2, (1, 1)), int(sys.argv[2]), 0, {TIMEOUT_SECONDS})
print("formed", flush=True)
time.sleep(120)
"""


@contextmanager
def groups(pp_rank: int) -> Iterator[DataPlane]:
    """This process as one of two stages; the other is stopped: its sockets stay open."""
    plane = DataPlane("gloo", "127.0.0.1", torch.device("cpu"), TIMEOUT_SECONDS)
    address = plane.open_store()
    command = [sys.executable, "-c", NEIGHBOUR, address, str(1 - pp_rank)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour:
        try:
            plane.form(1, address, SHAPE, pp_rank, 0, TIMEOUT_SECONDS)
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == "formed\n"
            neighbour.send_signal(signal.SIGSTOP)
            yield plane
        finally:
            plane.leave()
            neighbour.kill()


@pytest.mark.parametrize("pp_rank", [0, 1], ids=["sending", "receiving"])
def test_a_wait_for_who_does_not_answer_is_broken(pp_rank: int) -> None:
    with groups(pp_rank) as plane, concurrent.futures.ThreadPoolExecutor(1) as pool:
        if pp_rank == 0:
            waiting = pool.submit(plane.send, [torch.zeros(64, HIDDEN_SIZE)], 0)
        else:
            waiting = pool.submit(plane.post_receive(BOUNDARY, 64).wait)
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.5)
        started = time.monotonic()
        plane.break_waits()
        with pytest.raises(PeerLost):
            waiting.result(TIMEOUT_SECONDS)
        assert time.monotonic() - started < FREED_SECONDS


def test_ranks_that_wait_for_each_other_to_form_groups_are_freed() -> None:
    plane = DataPlane("gloo", "127.0.0.1", torch.device("cpu"), TIMEOUT_SECONDS)
    address = plane.open_store()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        forming = pool.submit(plane.form, 1, address, SHAPE, 0, 0, TIMEOUT_SECONDS)
        with pytest.raises(concurrent.futures.TimeoutError):
            forming.result(0.5)
        started = time.monotonic()
        plane.break_waits()
        with pytest.raises(PeerLost):
            forming.result(TIMEOUT_SECONDS)
        assert time.monotonic() - started < FREED_SECONDS
        plane.leave()


def test_groups_form_with_a_new_process_after_one_that_never_came() -> None:
    """Whoever has failed before must look for the others under the names that a new process
    has."""
    plane = DataPlane("gloo", "127.0.0.1", torch.device("cpu"), TIMEOUT_SECONDS)
    for _ in range(2):
        with pytest.raises(PeerLost):
            plane.form(1, plane.open_store(), SHAPE, 0, 0, timeout_seconds=0.3)
    with groups(pp_rank=0):
        pass


def test_connections_from_before_listeners_and_others_are_left_alone() -> None:
    one, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, one, other:
        address = server.getsockname()
        with socket.create_connection(address) as before, server.accept()[0] as accepted:
            earlier = tcp_connections()
            assert {os.fstat(s.fileno()).st_ino for s in (before, accepted)} <= earlier
            with socket.create_connection(address) as after, server.accept()[0]:
                gc.collect()  # Else what earlier tests have left may close in between.
                descriptors = len(os.listdir("/proc/self/fd"))
                shut_down_connections(but=earlier)
                assert len(os.listdir("/proc/self/fd")) == descriptors
                assert after.recv(1) == b""
                with pytest.raises(BrokenPipeError):
                    after.send(b"x")
            before.send(b"x")
            assert accepted.recv(1) == b"x"
            one.send(b"y")
            assert other.recv(1) == b"y"
            with socket.create_connection(address), server.accept()[0]:
                pass
