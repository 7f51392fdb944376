"""The HTTP routes as plain ASGI, in front of a fleet: uvicorn's own protocol stands for a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn

from megatron_async.ray.own_port import OwnPort
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.asgi_app import AsgiApp, make_app
from megatron_async.server.stream_hub import StreamHub
from tests.functional_tests.ray.test_fleet_streams import InProcess, fleet_of, until
from tests.support.patience import PATIENCE_S

BODY = {"prompt": [5, 7, 11], "max_tokens": 30, "temperature": 0, "return_token_ids": True}


@contextlib.asynccontextmanager
async def served(
    count: int, own_port: int | None = None
) -> AsyncIterator[tuple[InProcess, httpx.AsyncClient]]:
    async with fleet_of(count) as (fleet, client):
        hub = StreamHub()
        client.after_message = hub.flush
        api = ApiConfig(coordinator="", served_names=("tiny",), shutdown_timeout_s=20.0)
        routes = make_app(client, api, hub)
        own = None if own_port is None else OwnPort(routes, api, "127.0.0.1", own_port)
        app = AsgiApp(routes, own)
        config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S
        ) as http:
            yield fleet, http
        server.should_exit = True
        await serving


async def streamed(http: httpx.AsyncClient, **changes: Any) -> list[int]:
    tokens: list[int] = []
    body = {**BODY, "stream": True, **changes}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            tokens += choice["token_ids"]
    return tokens


def test_streams_and_whole_answers_have_the_same_tokens() -> None:
    async def run() -> None:
        async with served(2) as (_, http):
            answer = (await http.post("/v1/completions", json=BODY)).json()
            whole = answer["choices"][0]["token_ids"]
            assert len(whole) == 30
            streams = await asyncio.gather(*(streamed(http) for _ in range(6)))
            assert all(tokens == whole for tokens in streams)
            assert (await http.get("/ready")).json() == {"state": "running", "replicas": 2}
            metrics = (await http.get("/metrics")).text
            assert 'megatron_async_service_requests_total{outcome="completed"} 7.0' in metrics
            assert 'megatron_async_replica_up{replica="r1"} 1.0' in metrics
            refused = await http.post("/v1/completions", json={**BODY, "model": "other"})
            assert refused.status_code == 404

    asyncio.run(run())


def test_a_client_that_goes_ends_its_request() -> None:
    async def run() -> None:
        async with served(1) as (fleet, http):
            status = fleet.there["r0"].status
            body = {**BODY, "max_tokens": 400, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_lines())
                assert status()["unfinished_requests"] == 1
            await until(lambda: status()["unfinished_requests"] == 0)
            assert fleet.there["r0"].status()["engine"]["aborted_requests"] == 1  # type: ignore

    asyncio.run(run())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_an_ingress_has_a_port_of_its_own_from_begin_to_end() -> None:
    """A stream that has begun on it ends before the ingress does."""

    async def run() -> None:
        port = free_port()
        async with contextlib.AsyncExitStack() as until_end:
            fleet, behind_proxy = await until_end.enter_async_context(served(1, port))
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S
            ) as own:
                tokens = await streamed(own)
                assert tokens == await streamed(behind_proxy)
                begun = asyncio.create_task(streamed(own, max_tokens=200))
                status = fleet.there["r0"].status
                await until(lambda: status()["unfinished_requests"] == 1)
                await until_end.aclose()
                assert (await begun)[:30] == tokens
                with contextlib.suppress(httpx.ConnectError):
                    await own.get("/health")
                    raise AssertionError("nobody listens any more")

    asyncio.run(run())


def test_ingresses_on_one_host_share_the_port_and_others_do_not() -> None:
    async def run() -> None:
        api, port = ApiConfig(coordinator=""), free_port()
        first, second = (OwnPort(None, api, "127.0.0.1", port) for _ in range(2))  # type: ignore
        await first.begin()
        await second.begin()
        await first.end()
        await second.end()
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            other.listen()
            told: list[dict[str, Any]] = []

            async def receive() -> dict[str, Any]:
                return {"type": "lifespan.startup"}

            async def send(message: Any) -> None:
                told.append(message)

            await AsgiApp(None, first)({"type": "lifespan"}, receive, send)  # type: ignore
        assert told[0]["type"] == "lifespan.startup.failed"
        assert f"--port {port}" in told[0]["message"]

    asyncio.run(run())
