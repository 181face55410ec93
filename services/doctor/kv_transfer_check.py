"""Would a prefill and a decode instance find each other? Sizes of both sides and the ports. Pure.

Every rank of an instance listens for the other side on a port of its own, counted from
`kv_port` in order of world rank (vLLM Ascend's MooncakeConnector: kv_port + dp_rank x tp_size
x pp_size + pp_rank x tp_size + tp_rank). A handshake that times out is mostly a side that
counts from other sizes, or a port that somebody else has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from services.config import DEFAULT_MASTER_PORT, ServeConfig
from services.doctor.facts import PortFacts
from services.doctor.findings import Check, Finding, failed, ok, warning
from services.ranges import MAX_PORT
from services.topology.kv_transfer import KvTransferConfig, SideSizes

DEFAULT_KV_PORT = 14579
"""vLLM's own (vllm/config/kv_transfer.py)."""
KV_PORT_FLAG = "--kv-transfer-config kv_port"


def handshaking(config: ServeConfig) -> tuple[KvTransferConfig, ...]:
    """The connectors that shake hands: without those that are only made of others."""
    if config.kv_transfer_config is None:
        return ()
    return tuple(each for each in config.kv_transfer_config.with_parts() if not each.connectors)


def ports_of_node(config: ServeConfig, transfer: KvTransferConfig) -> range:
    """The ports of this node's ranks, which are counted node by node; empty where the ranks
    cannot be shared evenly."""
    whole = _ports(config, transfer)
    share, rest = divmod(len(whole), config.nnodes)
    first = config.node_rank * share
    return range(0) if rest else whole[first : first + share]


def check_kv_transfer(
    config: ServeConfig, transfer: KvTransferConfig, ports: Sequence[PortFacts]
) -> Iterator[Finding]:
    """`ports` are those of `ports_of_node`, each tried."""
    complaints = [
        *_own_side(config, transfer),
        *_range(config, transfer),
        *_in_use(ports),
    ]
    yield from complaints
    if complaints:
        return
    whole, here = _ports(config, transfer), ports_of_node(config, transfer)
    yield ok(
        Check.KV_TRANSFER,
        f"{transfer.kv_connector} as {transfer.kv_role}: prefill {_words(transfer.prefill)}, "
        f"decode {_words(transfer.decode)}; this side's ranks listen on ports {_span(whole)}, "
        f"those of this node on {_span(here)}: let the other side reach them",
    )


def _own_side(config: ServeConfig, transfer: KvTransferConfig) -> Iterator[Finding]:
    for name, side in (("prefill", transfer.prefill), ("decode", transfer.decode)):
        if side is None:
            yield warning(
                Check.KV_TRANSFER,
                f"kv_connector_extra_config states no sizes of the {name} side, so its ports are "
                "counted from TP 1 x PP 1 x DP 1",
                f"state {name}.tp_size, pp_size and dp_size, with the same values on both sides",
            )
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(transfer.kv_role)
    stated = {"prefill": transfer.prefill, "decode": transfer.decode}.get(role or "")
    ours = SideSizes(
        tp_size=config.tensor_parallel_size,
        pp_size=config.pipeline_parallel_size,
        dp_size=config.data_parallel_size,
    )
    if stated is not None and stated != ours:
        yield failed(
            Check.KV_TRANSFER,
            f"this is the {role} side ({transfer.kv_role}), kv_connector_extra_config says that it "
            f"has {_words(stated)}, and the flags give {_words(ours)}",
            f"make {role} in --kv-transfer-config, on both sides, and this side's flags equal",
        )


def _range(config: ServeConfig, transfer: KvTransferConfig) -> Iterator[Finding]:
    ports = _ports(config, transfer)
    if ports[-1] > MAX_PORT:
        yield failed(
            Check.KV_TRANSFER,
            f"kv_port {ports[0]} and {len(ports)} ranks need ports {_span(ports)}, and the last "
            f"port is {MAX_PORT}",
            f"use a kv_port of at most {MAX_PORT - len(ports) + 1}",
        )
    others = {"--port": config.port, "--grpc-port": config.grpc_port}
    if config.nnodes > 1 or config.master_port is not None:
        master = DEFAULT_MASTER_PORT if config.master_port is None else config.master_port
        others["--master-port"] = master
    for flag, port in others.items():
        if port in ports:
            yield failed(
                Check.KV_TRANSFER,
                f"{flag} {port} is among the ports of kv_port {ports[0]}: {_span(ports)}",
                f"choose another {flag} or kv_port",
            )


def _in_use(ports: Sequence[PortFacts]) -> Iterator[Finding]:
    taken = [port.port for port in ports if port.error is not None]
    if taken:
        yield failed(
            Check.KV_TRANSFER,
            f"of the ports of this node's ranks, {_list(taken)} cannot be had",
            "choose another kv_port: two instances of one node need ranges that do not overlap",
        )


def _ports(config: ServeConfig, transfer: KvTransferConfig) -> range:
    first = DEFAULT_KV_PORT if transfer.kv_port is None else transfer.kv_port
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)
    return range(first, first + sizes[0] * sizes[1] * sizes[2])


def _words(side: SideSizes | None) -> str:
    if side is None:
        return "of unknown size"
    return f"TP {side.tp_size} x PP {side.pp_size} x DP {side.dp_size}"


def _span(ports: range) -> str:
    if not ports:
        return "none"
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"


def _list(ports: Sequence[int]) -> str:
    """ "20001 to 20003, 20007"."""
    breaks = [index + 1 for index, (low, high) in enumerate(pairwise(ports)) if high != low + 1]
    edges = [0, *breaks, len(ports)]
    runs = [ports[start:end] for start, end in pairwise(edges)]
    return ", ".join(_span(range(run[0], run[-1] + 1)) for run in runs)
