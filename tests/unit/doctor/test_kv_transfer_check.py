"""Prefill and decode: sizes of both sides, and the range of ports that starts at kv_port."""

from __future__ import annotations

import errno
import json
import socket

import pytest

from services.cli import main
from services.config import ServeConfig
from services.doctor.facts import PortFacts
from services.doctor.findings import Finding, Outcome
from services.doctor.gather import gather_kv_ports
from services.doctor.kv_transfer_check import check_kv_transfer, handshaking, ports_of_node
from services.topology.kv_transfer import KvTransferConfig, SideSizes

PREFILL = SideSizes(tp_size=2, pp_size=2, dp_size=1)
DECODE = SideSizes(tp_size=4)


def transfer(**changes: object) -> KvTransferConfig:
    fields: dict[str, object] = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "kv_port": 20001,
        "prefill": PREFILL,
        "decode": DECODE,
    }
    return KvTransferConfig(**{**fields, **changes})  # type: ignore[arg-type]


def config(asked: KvTransferConfig, **changes: object) -> ServeConfig:
    fields = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **changes}
    return ServeConfig(model="m", kv_transfer_config=asked, **fields)  # type: ignore[arg-type]


def check(asked: KvTransferConfig, *ports: PortFacts, **changes: object) -> list[Finding]:
    return list(check_kv_transfer(config(asked, **changes), asked, ports))


def test_both_sides_and_the_ports_are_told() -> None:
    (finding,) = check(transfer(), nnodes=2, node_rank=1)
    assert finding.outcome is Outcome.OK
    assert finding.what == (
        "MooncakeConnectorV1 as kv_producer: prefill TP 2 x PP 2 x DP 1, decode TP 4 x PP 1 x "
        "DP 1; this side's ranks listen on ports 20001 to 20004, those of this node on 20003 to "
        "20004: let the other side reach them"
    )


@pytest.mark.parametrize(
    ("role", "side", "stated"),
    [
        ("kv_producer", "prefill", "TP 2 x PP 2 x DP 1"),
        ("kv_consumer", "decode", "TP 4 x PP 1 x DP 1"),
    ],
)
def test_a_side_whose_flags_are_other_than_what_both_are_told(
    role: str, side: str, stated: str
) -> None:
    (finding,) = check(transfer(kv_role=role), tensor_parallel_size=8, pipeline_parallel_size=1)
    assert finding.outcome is Outcome.FAILED
    assert f"this is the {side} side ({role})" in finding.what
    assert f"says that it has {stated}, and the flags give TP 8 x PP 1 x DP 1" in finding.what


def test_sizes_that_nobody_states() -> None:
    found = check(transfer(decode=None))
    assert [finding.outcome for finding in found] == [Outcome.WARNING]
    assert "no sizes of the decode side" in found[0].what


def test_a_range_that_ends_behind_the_last_port() -> None:
    (finding,) = check(transfer(kv_port=65534))
    assert finding.outcome is Outcome.FAILED
    assert finding.what == (
        "kv_port 65534 and 4 ranks need ports 65534 to 65537, and the last port is 65535"
    )
    assert finding.remedy == "use a kv_port of at most 65532"
    assert not [f for f in check(transfer(kv_port=65532)) if f.outcome is Outcome.FAILED]


def test_a_range_that_holds_a_port_of_this_service() -> None:
    (finding,) = check(transfer(kv_port=7999), grpc_port=0)
    assert finding.what == "--port 8000 is among the ports of kv_port 7999: 7999 to 8002"
    (finding,) = check(transfer(kv_port=29549), nnodes=2)
    assert finding.what.startswith("--master-port 29550 is among")


def test_ports_that_somebody_else_has_are_listed() -> None:
    def port(number: int, error: int | None) -> PortFacts:
        return PortFacts("kv_port", "127.0.0.1", number, error)

    taken = [port(number, errno.EADDRINUSE) for number in (20001, 20002, 20004)]
    (finding,) = check(transfer(), *taken, port(20003, None))
    assert finding.outcome is Outcome.FAILED
    assert "20001 to 20002, 20004 cannot be had" in finding.what


def test_ports_are_counted_in_order_of_world_rank() -> None:
    asked = transfer(kv_port=None)
    whole = [
        port
        for node_rank in range(4)
        for port in ports_of_node(
            config(asked, data_parallel_size=2, nnodes=4, node_rank=node_rank), asked
        )
    ]
    assert whole == list(range(14579, 14579 + 8))
    assert not ports_of_node(config(asked, nnodes=3), asked)


def test_a_connector_of_several_shakes_hands_for_each_part() -> None:
    parts = (transfer(), transfer(kv_connector="Other", kv_port=30000))
    whole = KvTransferConfig("MultiConnector", "kv_producer", connectors=parts)
    assert handshaking(config(whole)) == parts
    assert handshaking(ServeConfig(model="m")) == ()


def test_the_command_tries_the_ports(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asked = transfer(kv_port=port)
        facts = gather_kv_ports(config(asked, pipeline_parallel_size=1), asked)
        assert facts[0].error == errno.EADDRINUSE and len(facts) == 2
        options = {"kv_connector": "Connector", "kv_role": "kv_both", "kv_port": str(port)}
        flags = ("--port", "0", "--grpc-port", "0", "--json")
        code = main(["doctor", "--kv-transfer-config", json.dumps(options), *flags])
    assert code == 1
    findings = json.loads(capfd.readouterr().out)["findings"]
    found = [f["what"] for f in findings if f["check"] == "kv transfer"]
    assert f"{port} cannot be had" in found[-1]
