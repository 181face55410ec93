"""A rank process that tells its worker thousands of things that make no sense.

    python -m tests.service.odd_rank SEED COUNT NOISE <the arguments of a rank>

Every event is one, but its fields are anything. At the end NOISE says whether it sends bytes
that are no event; then it only beats.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import time

from stage_worker import ipc
from stage_worker.rank_arguments import RankArguments
from stagemesh.v1 import rank_pb2, stage_worker_pb2, step_pb2
from tests.mutation import mutated_message

HEARTBEAT_SECONDS = 0.5
STORM_IS_OVER = 12345
"""Peak memory in its last beats: what was sent before has been read."""
HELLO = rank_pb2.RankHello(
    pid=1, device="odd:0", memory=stage_worker_pb2.DeviceMemory(free_bytes=1, total_bytes=2)
)
RESULT = step_pb2.StepResult(
    epoch=1,
    step_id=1,
    rows=[step_pb2.ResultRow(token_ids=[1], logprobs=[step_pb2.TokenLogprobs(logprob=-1)])],
    clock=step_pb2.StageClock(compute_ns=1),
    earlier_clocks=[step_pb2.StageClock(compute_ns=1)],
)
EVENTS = (
    rank_pb2.RankEvent(hello=HELLO),
    rank_pb2.RankEvent(store_opened=stage_worker_pb2.OpenStoreResponse(address="127.0.0.1:1")),
    rank_pb2.RankEvent(group_formed=stage_worker_pb2.FormGroupResponse(epoch=1)),
    rank_pb2.RankEvent(load_progress=stage_worker_pb2.LoadProgress(loaded_bytes=1)),
    rank_pb2.RankEvent(loaded=stage_worker_pb2.RankReport(num_blocks=1)),
    rank_pb2.RankEvent(result=RESULT),
    rank_pb2.RankEvent(alive=rank_pb2.RankAlive(last_step_id=1, phase_seconds=1.0)),
)


def main() -> None:
    seed, count, noise = sys.argv[1:4]
    arguments = RankArguments.parse(sys.argv[4:])
    sock = socket.socket(fileno=arguments.fd)
    generator = random.Random(int(seed))
    sock.sendall(ipc.encode(rank_pb2.RankEvent(hello=HELLO)))
    for _ in range(int(count)):
        event = mutated_message(generator, generator.choice(EVENTS))
        if not event.HasField("error"):  # which is the rank's own word that it has failed
            sock.sendall(ipc.encode(event))
    if noise == "noise":
        sock.sendall(b"\0\0\0\x03\xff\xff\xff")
    last = rank_pb2.RankEvent(alive=rank_pb2.RankAlive(memory_peak_bytes=STORM_IS_OVER))
    with contextlib.suppress(ConnectionError):
        while True:
            sock.sendall(ipc.encode(last))
            time.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    main()
