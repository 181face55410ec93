"""The command line of a stage worker that a launcher starts."""

from __future__ import annotations

import base64
import sys

from services.topology.placement import StagePlacement
from stagemesh.v1 import topology_pb2


def worker_command(
    placement: StagePlacement | None,
    *,
    node_rank: int = 0,
    master_addr: str,
    master_port: int,
    host: str,
    device: str,
    num_devices: int,
    fingerprint: topology_pb2.Fingerprint,
    lifeline_fd: int,
    pulse_fd: int,
    tls_dir: str | None,
    wait_for_head: bool = False,
) -> list[str]:
    """`stagemesh stage-worker` for one place of the mesh, on this node; for a spare without one.

    `host` is the address that the worker and its ranks listen on; `fingerprint` is the
    plan's, from this node's copy of the model, and is compared with the head's at join;
    `lifeline_fd` is the read end of a pipe that the launcher holds open; `pulse_fd` the write
    end of one that it listens to; `tls_dir` is where this node's
    certificates are, None without TLS; with `wait_for_head` it outlives its head.
    """
    return [
        sys.executable,
        "-m",
        "services.cli",
        "stage-worker",
        f"--master-addr={master_addr}",
        f"--master-port={master_port}",
        f"--host={host}",
        "--port=0",
        *_place_flags(placement, node_rank),
        f"--device={device}",
        f"--cpu-devices={num_devices}",
        f"--fingerprint={base64.b64encode(fingerprint.SerializeToString()).decode()}",
        f"--lifeline-fd={lifeline_fd}",
        f"--pulse-fd={pulse_fd}",
        *(("--wait-for-head",) if wait_for_head else ()),
        *(() if tls_dir is None else (f"--tls-dir={tls_dir}", "--require-tls")),
    ]


def _place_flags(placement: StagePlacement | None, node_rank: int) -> tuple[str, ...]:
    if placement is None:
        return (f"--node-rank={node_rank}", "--standby")
    return (
        f"--node-rank={placement.node_rank}",
        f"--dp-rank={placement.dp_rank}",
        f"--pp-rank={placement.pp_rank}",
        f"--tp-rank-start={placement.tp_ranks[0]}",
    )
