"""One line per request at INFO, with its id and counts; never the prompt or the answer."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from front_doors import MODEL, REPLY, FakeGateway, Rest

from gateway.grpc_server.server import create_inference_server
from services.telemetry.logging import KeyValueFormatter
from stagemesh import AsyncClient

ROUTE = "/v1/chat/completions"
SECRET = "xyzzy plugh"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """Everything that goes to the log, at DEBUG."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValueFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def own_lines(logs: io.StringIO) -> list[str]:
    return [line for line in logs.getvalue().splitlines() if "INFO gateway." in line]


async def test_rest(rest: Rest, logs: io.StringIO) -> None:
    headers = {"x-request-id": "mine"}
    for stream in (False, True):
        await rest.http.post(ROUTE, json=BODY | {"stream": stream}, headers=headers)
    rest.gateway.engine.fail_with = ZeroDivisionError("on purpose")
    await rest.http.post(ROUTE, json=BODY, headers=headers)
    await rest.http.get("/health")
    lines = own_lines(logs)
    assert len(lines) == 3
    assert all("request_id=mine" in line and f"path={ROUTE}" in line for line in lines)
    assert all("prompt_tokens=" in line and "seconds=" in line for line in lines)
    assert "status=200" in lines[0] and "completion_tokens=14" in lines[0]
    assert "completion_tokens=14" in lines[1]
    assert "status=500" in lines[2]
    assert SECRET not in logs.getvalue() and REPLY not in logs.getvalue()


async def test_grpc(gateway: FakeGateway, logs: io.StringIO) -> None:
    server = create_inference_server(gateway.frontend)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    async with AsyncClient(address, timeout=5) as client:
        await client.generate(SECRET, max_tokens=50, request_id="mine")
    await server.stop(grace_seconds=0)
    (line,) = own_lines(logs)
    assert "request_id=mine" in line and "path=grpc/Generate" in line and "status=200" in line
    assert "completion_tokens=14" in line
    assert SECRET not in logs.getvalue()
