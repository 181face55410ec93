"""What cannot be said together, though each flag alone is right."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.usage import UsageError
from services.config import DEFAULT_MASTER_PORT, ServeConfig


def contradictions(command: str, config: ServeConfig) -> Iterator[UsageError]:
    """Everything that single flags do not say: which node does what, and ports that differ."""
    if config.distributed_executor_backend == "ray":
        yield from _ray_contradictions(command, config)
    else:
        yield from _node_contradictions(command, config)
    yield from _equal_ports(command, config)
    yield from _tls_contradictions(config)
    yield from _standby_contradictions(command, config)


def _standby_contradictions(command: str, config: ServeConfig) -> Iterator[UsageError]:
    """Who starts spares, and who says what they hold."""
    if config.standby and command == "gateway":
        yield UsageError(
            "--standby starts spare workers, and stagemesh gateway starts none; start them with "
            "stagemesh stage-worker --standby",
            param="--standby",
        )
    if (config.standby or config.standby_stages) and config.max_recovery_attempts == 0:
        yield UsageError(
            "--max-recovery-attempts 0 ends the mesh with the first failure, so that no spare ever "
            "takes over; leave it or --standby out",
            param="--standby",
        )
    if config.standby_stages and config.headless:
        yield UsageError(
            "--standby-stages is for the head, which tells spares of all nodes what to hold; leave "
            "it out with --headless",
            param="--standby-stages",
        )
    if config.standby_stages and max(config.standby_stages) >= config.pipeline_parallel_size:
        yield UsageError(
            f"--standby-stages names stage {max(config.standby_stages)}, and there are stages 0 to "
            f"{config.pipeline_parallel_size - 1}",
            param="--standby-stages",
        )
    starts_all = command == "serve" and config.nnodes == 1 and not config.headless
    if starts_all and len(config.standby_stages) > config.standby:
        yield UsageError(
            f"--standby-stages names {len(config.standby_stages)} stages, and --standby starts "
            f"{config.standby} spares, of which each holds one; give both the same number",
            param="--standby-stages",
        )


def _tls_contradictions(config: ServeConfig) -> Iterator[UsageError]:
    if config.require_tls and config.tls_dir is None:
        yield no_tls()
    if config.require_tls and config.ssl_certfile is None and not config.headless:
        yield UsageError(
            "--require-tls needs --ssl-certfile and --ssl-keyfile for the REST API; the gateway's "
            "of --tls-dir will do where its clients trust the mesh's CA",
            param="--require-tls",
        )
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        has, lacks = "--ssl-certfile", "--ssl-keyfile"
        if config.ssl_certfile is None:
            has, lacks = lacks, has
        yield UsageError(f"{has} needs {lacks} with it", param=lacks)


def no_tls() -> UsageError:
    """TLS is required, and nothing says with which certificates."""
    return UsageError(
        "--require-tls needs --tls-dir, the directory of this node's certificates (stagemesh "
        "certs issue writes one)",
        param="--require-tls",
    )


def _node_contradictions(command: str, config: ServeConfig) -> Iterator[UsageError]:
    if config.node_rank >= config.nnodes:
        yield UsageError(
            f"--node-rank {config.node_rank} does not exist with --nnodes {config.nnodes}; "
            f"nodes are numbered 0 to {config.nnodes - 1}",
            param="--node-rank",
        )
    if config.node_rank > 0 and not config.headless:
        yield UsageError(
            f"--node-rank {config.node_rank} needs --headless: only node rank 0 runs the gateway",
            param="--headless",
        )
    if config.headless and config.node_rank == 0:
        yield UsageError(
            "--headless is for the other nodes: node rank 0 runs the gateway; give this node its "
            "own --node-rank",
            param="--headless",
        )
    if config.wait_for_head and not config.headless:
        yield UsageError(
            "--wait-for-head is for --headless and stagemesh stage-worker: workers that a gateway "
            "has started itself end with it",
            param="--wait-for-head",
        )
    if config.headless and config.master_port == 0:
        yield no_port_to_ask()
    if config.headless and command == "gateway":
        yield UsageError("--headless runs no gateway; use stagemesh serve", param="--headless")


def no_port_to_ask() -> UsageError:
    """Somebody is to ask at a port that the head has chosen."""
    return UsageError(
        "--master-port 0 lets the head choose; name the port from its line 'workers join at'",
        param="--master-port",
    )


def _ray_contradictions(command: str, config: ServeConfig) -> Iterator[UsageError]:
    """Where ranks run is Ray's to decide."""
    if command == "gateway":
        yield UsageError(
            "--distributed-executor-backend ray starts the ranks, and stagemesh gateway starts "
            "none; use stagemesh serve",
            param="--distributed-executor-backend",
        )
    said = {
        f"--nnodes {config.nnodes}": config.nnodes > 1,
        f"--node-rank {config.node_rank}": config.node_rank > 0,
        "--headless": config.headless,
        "--wait-for-head": config.wait_for_head,
    }
    for words, given in said.items():
        if given:
            yield UsageError(
                f"{words} is for --distributed-executor-backend mp: with ray there is one "
                "command, on one node, and Ray places the ranks; leave it out",
                param=words.split()[0],
            )


def _equal_ports(command: str, config: ServeConfig) -> Iterator[UsageError]:
    """Servers of one process cannot share a port (0 means any free one)."""
    ports = {"--port": config.port, "--grpc-port": config.grpc_port}
    if command == "gateway" or config.nnodes > 1 or config.master_port is not None:
        # On one node `serve` takes a free port for the workers that it starts itself.
        ports["--master-port"] = (
            DEFAULT_MASTER_PORT if config.master_port is None else config.master_port
        )
    seen: dict[int, str] = {}
    for name, port in ports.items():
        if port != 0 and port in seen:
            yield UsageError(
                f"{seen[port]} and {name} are both {port}; give them different ports", param=name
            )
        seen[port] = name
