"""A doctor that answers in the place of a head: what it says of who asks."""

from __future__ import annotations

from services.control.server import control_server
from services.doctor import listen
from services.doctor.listen import ListeningDoctor
from services.rpc.channel import create_channel
from stagemesh.v1 import control_pb2, control_pb2_grpc


async def named(*asking: control_pb2.DiagnoseRequest) -> list[str]:
    said: list[str] = []
    answer = control_pb2.DiagnoseResponse(node="here", is_doctor=True)
    server = control_server(ListeningDoctor(answer, None, said.append))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    channel = create_channel(f"127.0.0.1:{port}")
    try:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        for request in asking:
            assert await stub.Diagnose(request, timeout=5) == answer
    finally:
        await channel.close()
        await server.stop(grace_seconds=0.0)
    return said


async def test_what_a_node_calls_itself_does_nothing_to_the_terminal() -> None:
    clears = control_pb2.DiagnoseRequest(node="\x1b[2J\nnode 2 (b) asks", node_rank=1)
    endless = control_pb2.DiagnoseRequest(node="\u202e" + "x" * 100_000, node_rank=2)
    lines = await named(clears, clears, endless)
    assert lines == [
        "node 1 ('\\x1b[2J\\nnode 2 (b) asks') asks",
        f"node 2 ('\\u202e{'x' * 63}') asks",
    ]


async def test_who_asks_is_not_remembered_without_end() -> None:
    nodes = [
        control_pb2.DiagnoseRequest(node=f"n{number}")
        for number in range(listen.MAX_NAMED_NODES + 20)
    ]
    lines = await named(*nodes)
    assert len(lines) == listen.MAX_NAMED_NODES + 1
    assert lines[-1] == "256 nodes have asked; further ones are not named"
