"""Front doors of a scripted engine, on real ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from front_doors import MESH, FakeGateway, Rest, make_gateway, write_model

from gateway.frontend.api_keys import ApiKeys
from gateway.rest.app import RestConfig, create_rest_app
from gateway.rest.server import RestServer


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def gateway(model_directory: Path) -> Iterator[FakeGateway]:
    gateway = make_gateway(model_directory)
    yield gateway
    gateway.frontend.close()
    assert not gateway.engine.open_requests, "a request was left open"


@pytest.fixture
def api_keys() -> tuple[str, ...]:
    return ()


@pytest.fixture
async def rest(gateway: FakeGateway, api_keys: tuple[str, ...]) -> AsyncIterator[Rest]:
    app = create_rest_app(
        gateway.frontend,
        gateway.engine,
        lambda: MESH,
        gateway.metrics,
        RestConfig(ApiKeys(api_keys), version="1.2.3"),
    )
    server = RestServer(app)
    url = f"http://127.0.0.1:{server.bind('127.0.0.1', 0)}"
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(stop, grace_seconds=1))
        # Plain HTTP: loading the system's CAs twice would be most of a test's time.
        async with (
            httpx.AsyncClient(base_url=url, timeout=10, verify=False) as http,
            httpx.AsyncClient(timeout=10, verify=False) as openai_http,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                max_retries=0,
                timeout=10,
                http_client=openai_http,
            ) as client,
        ):
            yield Rest(gateway, url, http, client)
        stop.set()
