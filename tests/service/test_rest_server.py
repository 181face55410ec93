"""The REST door as a server: state routes, keys, body limit, disconnects, ports, shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from front_doors import MESH, MODEL, REPLY, FakeGateway, Rest, until
from prometheus_client.parser import text_string_to_metric_families

from gateway.frontend import limits
from gateway.rest.app import create_rest_app
from gateway.rest.server import RestServer
from services.errors import ConfigError

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


async def test_health_is_liveness_and_ready_is_readiness(rest: Rest) -> None:
    assert (await rest.http.get("/health")).status_code == 200
    assert (await rest.http.get("/ready")).json() == {"ready": True, "reason": None}
    rest.gateway.engine.ready = False
    assert (await rest.http.get("/health")).status_code == 200
    response = await rest.http.get("/ready")
    assert response.status_code == 503 and response.json()["reason"]
    assert response.headers["retry-after"] == "1"


async def test_version_mesh_and_openapi(rest: Rest) -> None:
    assert (await rest.http.get("/version")).json() == {"version": "1.2.3"}
    assert (await rest.http.get("/v1/mesh")).json() == MESH
    schema = (await rest.http.get("/openapi.json")).json()
    expected = {
        CHAT: "post", "/v1/completions": "post", "/v1/models": "get", "/v1/models/{name}": "get",
        "/tokenize": "post", "/detokenize": "post", "/health": "get", "/ready": "get",
        "/metrics": "get", "/version": "get", "/v1/mesh": "get",
    }  # fmt: skip
    for path, method in expected.items():
        assert schema["paths"][path][method]["description"]
    chat = schema["components"]["schemas"]["ChatCompletionRequest"]
    assert {"messages", "temperature", "top_k", "stream", "logit_bias"} <= set(chat["properties"])
    assert "422" not in json.dumps(schema["paths"])


async def test_answers_have_the_described_shape(rest: Rest) -> None:
    paths = (await rest.http.get("/openapi.json")).json()["paths"]

    def check(value: object, schema: dict[str, Any], where: str) -> None:
        for name, inner in schema.get("properties", {}).items():
            assert isinstance(value, dict) and name in value, f"{where}.{name} is missing"
            check(value[name], inner, f"{where}.{name}")
        for one in value if "items" in schema and isinstance(value, list) else ():
            check(one, schema["items"], f"{where}[]")

    requests = {
        CHAT: BODY, "/v1/completions": {"prompt": "stop"}, "/tokenize": {"prompt": "stop"},
        "/detokenize": {"tokens": [5]},
    }  # fmt: skip
    for path, operations in paths.items():
        content = next(iter(operations.values()))["responses"]["200"]["content"]
        if "application/json" not in content:
            continue
        real = path.replace("{name}", MODEL)
        response = await (
            rest.http.post(real, json=requests[path]) if path in requests else rest.http.get(real)
        )
        check(response.json(), content["application/json"]["schema"], path)
    bad = await rest.http.post(CHAT, json={})
    error = paths[CHAT]["post"]["responses"]["default"]
    check(bad.json(), error["content"]["application/json"]["schema"], "error")


async def test_tokenize_and_detokenize(rest: Rest) -> None:
    ids = rest.gateway.tokenizer.encode("stop here").ids
    answer = (
        await rest.http.post("/tokenize", json={"prompt": "stop here", "return_token_strs": True})
    ).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == 128
    assert "".join(answer["token_strs"]) == "stop here"
    answer = (await rest.http.post("/detokenize", json={"tokens": ids})).json()
    assert answer == {"prompt": "stop here"}
    answer = (await rest.http.post("/tokenize", json={"messages": BODY["messages"]})).json()
    assert answer["token_strs"] is None
    text = (await rest.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


async def test_long_texts_are_tokenized_off_the_loop(rest: Rest) -> None:
    prompt = "capital of France " * 2000
    answer = (await rest.http.post("/tokenize", json={"prompt": prompt})).json()
    assert answer["tokens"] == rest.gateway.tokenizer.encode(prompt).ids


async def test_metrics_count_requests_and_tokens(rest: Rest) -> None:
    await rest.http.post(CHAT, json=BODY)
    await rest.http.post(CHAT, json=BODY | {"n": 0})
    await rest.http.get("/secret-path")
    response = await rest.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert found["stagemesh_requests_total", CHAT, "200"] == 1
    assert found["stagemesh_requests_total", CHAT, "400"] == 1
    assert found["stagemesh_requests_total", "404", "other"] == 1
    tokens = len(rest.gateway.tokenizer.encode(REPLY).ids)
    assert found["stagemesh_generation_tokens_total",] == tokens + 1
    assert found["stagemesh_time_to_first_token_seconds_count",] == 1
    assert found["stagemesh_inter_token_seconds_count",] == tokens - 1
    assert found["stagemesh_kv_free_blocks",] == 100


async def test_request_id_is_taken_and_given(rest: Rest) -> None:
    response = await rest.http.post(CHAT, json=BODY, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"].startswith("chatcmpl-mine-1-")
    response = await rest.http.post(CHAT, json=BODY | {"n": 0})
    assert response.headers["x-request-id"].startswith("req-")
    response = await rest.http.get("/health", headers={"x-request-id": "x" * 500})
    assert response.headers["x-request-id"].startswith("req-")


class TestWithKeys:
    @pytest.fixture
    def api_keys(self) -> tuple[str, ...]:
        return ("one", "two")

    async def test_keys(self, rest: Rest) -> None:
        for header in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            response = await rest.http.post(CHAT, json=BODY, headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
            assert (await rest.http.get("/v1/nothing", headers=header)).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert (await rest.http.get(path)).status_code == 200
        for key in ("one", "two"):
            good = {"authorization": f"Bearer {key}"}
            assert (await rest.http.post(CHAT, json=BODY, headers=good)).status_code == 200


async def test_oversized_bodies_are_refused_while_they_arrive(rest: Rest) -> None:
    huge = b"x" * (limits.MAX_BODY_BYTES + 1)
    announced = await rest.http.post(CHAT, content=huge)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * (limits.MAX_BODY_BYTES // 10)

    chunked = await rest.http.post(CHAT, content=pieces())
    for response in (announced, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert str(limits.MAX_BODY_BYTES) in response.json()["error"]["message"]
    assert (await rest.http.post(CHAT, json=BODY)).status_code == 200


async def test_a_body_that_never_comes_is_given_up(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rest.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
    assert b"400" in answer and b"did not arrive" in answer
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(rest: Rest, stream: bool) -> None:
    engine = rest.gateway.engine
    engine.delay_seconds = 0.1
    with pytest.raises(httpx.ReadTimeout):
        async with rest.http.stream("POST", CHAT, json=BODY | {"stream": stream}, timeout=0.25) as (
            response
        ):
            async for _ in response.aiter_bytes():
                await asyncio.sleep(0.3)
                raise httpx.ReadTimeout("enough")
    await until(lambda: engine.aborted)
    assert not engine.open_requests
    await until(lambda: b'status="499"' in rest.gateway.metrics.render())


async def test_leaving_aborts_all_prompts_of_a_call(rest: Rest) -> None:
    engine = rest.gateway.engine
    engine.delay_seconds = 0.1
    with pytest.raises(httpx.ReadTimeout):
        await rest.http.post(
            "/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 50}, timeout=0.2
        )
    await until(lambda: len(engine.aborted) == 3)


async def test_a_failing_prompt_ends_the_others(rest: Rest) -> None:
    engine = rest.gateway.engine
    engine.fail_with, engine.fail_after_tokens = ZeroDivisionError("secret"), 2
    body = {"prompt": ["a", "b", "c"], "max_tokens": 50}
    response = await rest.http.post("/v1/completions", json=body)
    assert response.status_code == 500 and "secret" not in response.text
    response = await rest.http.post("/v1/completions", json=body | {"stream": True})
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert "error" in json.loads(events[-1].removeprefix("data: "))
    assert "[DONE]" not in response.text and "secret" not in response.text
    assert len(engine.aborted) == 6


async def test_a_stream_is_server_sent_events(rest: Rest) -> None:
    response = await rest.http.post(CHAT, json=BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


async def test_the_last_chunk_names_the_stop(rest: Rest) -> None:
    eos = rest.gateway.tokenizer.token_to_id("<|im_end|>")
    for path, body in ((CHAT, BODY), ("/v1/completions", {"prompt": "x", "max_tokens": 50})):
        for stop, expected in ((["Paris"], "Paris"), (None, eos)):
            response = await rest.http.post(path, json=body | {"stream": True, "stop": stop})
            events = [
                json.loads(event.removeprefix("data: "))["choices"][0]
                for event in response.text.split("\n\n")[:-2]
            ]
            assert events[-1]["finish_reason"] == "stop"
            assert events[-1]["stop_reason"] == expected
            assert all("stop_reason" not in event for event in events[:-1])


async def test_too_many_requests_are_429(rest: Rest) -> None:
    rest.gateway.frontend.max_requests = 2
    rest.gateway.engine.delay_seconds = 0.05
    responses = await asyncio.gather(*(rest.http.post(CHAT, json=BODY) for _ in range(4)))
    assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert (await rest.http.post(CHAT, json=BODY)).status_code == 200


def make_server(gateway: FakeGateway) -> RestServer:
    app = create_rest_app(gateway.frontend, gateway.engine, lambda: MESH, gateway.metrics)
    return RestServer(app)


def test_a_port_in_use_names_address_and_remedy(gateway: FakeGateway) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            make_server(gateway).bind("127.0.0.1", port)


def test_two_servers_cannot_have_one_port(gateway: FakeGateway) -> None:
    first, second = make_server(gateway), make_server(gateway)
    port = first.bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="in use"):
        second.bind("127.0.0.1", port)
    first.close()
    second.bind("127.0.0.1", port)
    second.close()


@pytest.mark.parametrize(("host", "port"), [("", 0), ("no such host", 0), ("127.0.0.1", 70000)])
def test_unusable_addresses_are_config_errors(gateway: FakeGateway, host: str, port: int) -> None:
    with pytest.raises(ConfigError):
        make_server(gateway).bind(host, port)


async def test_shutdown_drains_to_its_deadline_and_cancels_the_rest(gateway: FakeGateway) -> None:
    gateway.engine.delay_seconds = 0.5
    server = make_server(gateway)
    url = f"http://127.0.0.1:{server.bind('127.0.0.1', 0)}"
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(stop, grace_seconds=1))
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=False) as http:
            slow = group.create_task(http.post(CHAT, json=BODY))
            await until(lambda: gateway.engine.open_requests)
            started = loop.time()
            stop.set()
            with pytest.raises(httpx.HTTPError):
                (await slow).raise_for_status()
    assert loop.time() - started < 4
    assert gateway.engine.aborted and not gateway.engine.open_requests


async def test_cancelling_the_server_frees_port_and_requests(gateway: FakeGateway) -> None:
    gateway.engine.delay_seconds = 0.5
    server = make_server(gateway)
    port = server.bind("127.0.0.1", 0)
    running = asyncio.ensure_future(server.run(asyncio.Event()))
    async with httpx.AsyncClient(timeout=30, verify=False) as http:
        slow = asyncio.ensure_future(http.post(f"http://127.0.0.1:{port}{CHAT}", json=BODY))
        await until(lambda: gateway.engine.open_requests)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not gateway.engine.open_requests
        await asyncio.wait([slow], timeout=5)
        assert slow.done() and (slow.exception() or slow.result().is_error)
    other = make_server(gateway)
    other.bind("127.0.0.1", port)
    other.close()
