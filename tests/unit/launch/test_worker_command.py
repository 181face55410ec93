"""What a worker that a launcher starts is told."""

from __future__ import annotations

from services.launch.worker_command import worker_command
from services.topology.placement import StagePlacement
from stagemesh.v1 import topology_pb2


def test_a_worker_is_told_where_certificates_are_and_nothing_of_what_is_in_them() -> None:
    def command(tls_dir: str | None) -> list[str]:
        return worker_command(
            StagePlacement(0, 0, 0, (0,), (0,), 0, 2),
            master_addr="127.0.0.1",
            master_port=1,
            host="127.0.0.1",
            device="cpu",
            num_devices=1,
            fingerprint=topology_pb2.Fingerprint(),
            lifeline_fd=3,
            pulse_fd=4,
            tls_dir=tls_dir,
        )

    with_tls, without = command("/etc/stagemesh/tls"), command(None)
    # Who was given TLS by a launcher must not go on without it.
    assert with_tls == [*without, "--tls-dir=/etc/stagemesh/tls", "--require-tls"]


def test_a_spare_wants_no_place() -> None:
    command = worker_command(
        None,
        node_rank=3,
        master_addr="127.0.0.1",
        master_port=1,
        host="127.0.0.1",
        device="cpu",
        num_devices=1,
        fingerprint=topology_pb2.Fingerprint(),
        lifeline_fd=3,
        pulse_fd=4,
        tls_dir=None,
    )
    assert {"--standby", "--node-rank=3"} <= {*command}
    assert not any("--pp-rank" in argument for argument in command)
