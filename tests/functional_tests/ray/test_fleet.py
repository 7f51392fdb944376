"""A fleet of engines in this process, without its manager: requests are sent again when a replica
is lost, and nothing is told twice or lost. Its HTTP routes are plain ASGI: uvicorn's own protocol
stands for a proxy."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
import uvicorn

from megatron_async import LLM
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.errors import ReplicaLost
from megatron_async.ray.client import FleetClient
from megatron_async.ray.messages import decode_batch
from megatron_async.ray.replica import FleetReplica
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.answer_stream import StreamHub
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.http.asgi_app import AsgiApp, OwnPort, make_app
from megatron_async.serving.messages import Ended
from megatron_async.serving.records import CoordinatorConfig
from tests.support.harness import greedy, make_engine, make_model
from tests.support.patience import PATIENCE_S
from tests.support.ranks import free_port
from tests.support.serving_processes import ENGINE, KeepingReader
from tests.support.trained_weights import train

STREAMS = 12
MODEL: list[Any] = []


def new_engine() -> DynamicInferenceEngine:
    if not MODEL:
        MODEL.append(make_model())
    return make_engine(MODEL[0])


class InProcess:
    """Carries bytes to replicas in this process. `kill` drops a replica as its process' death
    would: nothing more comes of it, and its calls raise."""

    def __init__(self, engines: Sequence[DynamicInferenceEngine]) -> None:
        self.engines = {f"r{number}": engine for number, engine in enumerate(engines)}
        self.there = {
            name: FleetReplica(engine, "tiny", name) for name, engine in self.engines.items()
        }
        self.dead: dict[str, asyncio.Event] = {name: asyncio.Event() for name in self.there}
        self.batches = 0
        self.runs = [asyncio.create_task(each.run()) for each in self.there.values()]

    async def serve(self, data: bytes, replica: str) -> AsyncIterator[bytes]:
        gone = asyncio.ensure_future(self.dead[replica].wait())
        batches = self.there[replica].serve(data)
        try:
            while True:
                coming = asyncio.ensure_future(anext(batches))  # type: ignore[call-overload]
                coming.add_done_callback(lambda each: each.cancelled() or each.exception())
                await asyncio.wait([coming, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                    raise ReplicaLost(f"{replica} is dead")
                try:
                    batch = coming.result()
                except StopAsyncIteration:
                    return
                self.batches += 1
                yield batch
        finally:
            gone.cancel()

    async def abort(self, replica: str, number: int) -> None:
        self.there[replica].abort(number)

    async def hello(self, replica: str) -> bytes:
        return self.there[replica].hello

    async def card(self) -> bytes:
        return next(iter(self.there.values())).card

    async def update(self, replica: str, data: bytes) -> bytes:
        return await self.there[replica].updated(data)

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        alive = {name: each for name, each in self.there.items() if not self.dead[name].is_set()}
        return {name: each.status() for name, each in alive.items()}

    def kill(self, name: str) -> None:
        self.dead[name].set()

    async def close(self) -> None:
        for run in self.runs:
            run.cancel()
        await asyncio.gather(*self.runs, return_exceptions=True)
        for name, is_dead in self.dead.items():
            if is_dead.is_set():  # its requests ended with it
                self.engines[name].close()


@contextlib.asynccontextmanager
async def fleet_of(count: int, **config: Any) -> AsyncIterator[tuple[InProcess, FleetClient]]:
    fleet = InProcess([new_engine() for _ in range(count)])
    client = FleetClient(fleet, CoordinatorConfig(**config), ingress=3)
    try:
        await until_all_are_there(client, count)
        yield fleet, client
    finally:
        await client.close()
        await fleet.close()


async def until_all_are_there(client: FleetClient, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await client.ask("health"))["replicas"] < count:
            await asyncio.sleep(0.001)


def ask_all(client: FleetClient, params: SamplingParams) -> list[KeepingReader]:
    readers = [KeepingReader() for _ in range(STREAMS)]
    for number, reader in enumerate(readers):
        client.send([5 + number, 7, 11], params, reader)
    return readers


async def ends_of(readers: list[KeepingReader]) -> list[Ended]:
    return await asyncio.wait_for(asyncio.gather(*(reader.end for reader in readers)), PATIENCE_S)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def calm_answers(params: SamplingParams) -> list[list[int]]:
    async with fleet_of(2) as (_, client):
        readers = ask_all(client, params)
        assert {end.finish_reason for end in await ends_of(readers)} == {"length"}
        return [reader.got for reader in readers]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_replicas_streams_go_on_with_the_same_tokens(temperature: float) -> None:
    params = SamplingParams(num_tokens_to_generate=40, temperature=temperature)

    async def run() -> None:
        calm = await calm_answers(params)
        assert len(set(map(tuple, calm))) > 3
        async with fleet_of(2) as (fleet, client):
            readers = ask_all(client, params)
            await until(lambda: sum(len(reader.got) >= 5 for reader in readers) >= STREAMS // 2)
            had = [len(reader.got) for reader in readers]
            assert any(0 < count < 40 for count in had)
            fleet.kill("r0")
            ends = await ends_of(readers)
            assert [reader.got for reader in readers] == calm
            stats = await client.ask("stats")
            assert stats["retried_requests"] > 0
            assert stats["completed_requests"] == STREAMS
            assert {end.attempts for end in ends} == {1, 2}
            assert stats["unfinished_requests"] == stats["failed_requests"] == 0

    asyncio.run(run())


def test_without_retries_the_dead_replicas_requests_fail_alone() -> None:
    async def run() -> None:
        async with fleet_of(2, on_replica_death="fail") as (fleet, client):
            readers = ask_all(client, greedy(40))
            await until(lambda: all(reader.got for reader in readers))
            fleet.kill("r0")
            kinds = [end.failure and end.failure[0] for end in await ends_of(readers)]
            assert kinds.count("ReplicaLost") == kinds.count(None) == STREAMS // 2

    asyncio.run(run())


def test_with_no_replica_left_a_request_fails_after_its_retries() -> None:
    async def run() -> None:
        async with fleet_of(1, no_replica_timeout_s=0.5) as (fleet, client):
            fleet.kill("r0")
            (reader,) = (KeepingReader(),)
            client.send([1, 2], greedy(4), reader)
            (end,) = await ends_of([reader])
            assert end.failure is not None
            assert end.failure[0] == "ReplicaLost"
            assert (await client.ask("health"))["replicas"] == 0

    asyncio.run(run())


def test_bad_requests_and_refused_ones_fail_alone() -> None:
    async def run() -> None:
        async with fleet_of(1, max_unfinished=2) as (_, client):
            readers = [KeepingReader() for _ in range(3)]
            client.send([1, 2], SamplingParams(stop_token_ids=[10**6]), readers[0])
            client.send([1, 2], greedy(4), readers[1])
            client.send([1, 2], greedy(4), readers[2])
            ends = await ends_of(readers)
            kinds = [end.failure and end.failure[0] for end in ends]
            assert kinds == ["RequestError", None, "Overloaded"]

    asyncio.run(run())


def test_an_abort_ends_one_request_and_frees_its_slot() -> None:
    async def run() -> None:
        async with fleet_of(1) as (fleet, client):
            readers = [KeepingReader(), KeepingReader()]
            numbers = [client.send([1, 2 + n], greedy(60), r) for n, r in enumerate(readers)]
            await until(lambda: all(reader.got for reader in readers))
            client.abort(numbers[0])
            ends = await ends_of(readers)
            assert [end.finish_reason for end in ends] == ["aborted", "length"]
            assert len(readers[0].got) < len(readers[1].got) == 60
            assert fleet.there["r0"].status()["unfinished_requests"] == 0

    asyncio.run(run())


def test_streams_share_batches_that_are_5_ms_apart() -> None:
    async def run() -> None:
        async with fleet_of(1) as (fleet, client):
            loop = asyncio.get_running_loop()
            start = loop.time()
            readers = ask_all(client, greedy(40))
            await ends_of(readers)
            assert fleet.batches <= (loop.time() - start) / 0.005 + 2
            assert fleet.batches < STREAMS * 40 / 4

    asyncio.run(run())


def test_two_ingresses_are_told_their_own_requests_only() -> None:
    async def run() -> None:
        async with fleet_of(1) as (fleet, client):
            told: list[set[int]] = []

            class Watching(InProcess):
                def __init__(self) -> None:
                    self.__dict__.update(fleet.__dict__)

                async def serve(self, data: bytes, replica: str) -> AsyncIterator[bytes]:
                    async for batch in fleet.serve(data, replica):
                        numbers = decode_batch(batch).begun
                        told.append({number >> 32 for number in numbers})
                        yield batch

            other = FleetClient(Watching(), ingress=4)
            readers = [*ask_all(client, greedy(12)), *ask_all(other, greedy(12))]
            await ends_of(readers)
            assert [r.got for r in readers[:STREAMS]] == [r.got for r in readers[STREAMS:]]
            assert set().union(*told) == {4}
            await other.close()

    asyncio.run(run())


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


def test_weights_of_a_fleet_are_replaced_and_other_ingresses_learn_of_it(tmp_path) -> None:
    params = SamplingParams(num_tokens_to_generate=8, seed=3)

    async def answers(client: FleetClient) -> list[list[int]]:
        readers = ask_all(client, params)
        ends = await ends_of(readers)
        assert {end.weight_versions[0][0] for end in ends if end.weight_versions} <= {"new"}
        return [reader.got for reader in readers]

    async def main() -> None:
        with LLM("dummy:tiny", **ENGINE) as one, LLM("dummy:tiny", **ENGINE) as two:
            fleet = InProcess([one.engine, two.engine])
            client, other = (FleetClient(fleet, ingress=number) for number in (3, 4))
            try:
                await until_all_are_there(client, 2)
                await until_all_are_there(other, 2)
                before = await answers(client)
                key = (await client.ask("weights_begin", version="new"))["round"]
                with pytest.raises(ValueError, match="no update"):
                    await other.ask("weights_load", round=key, folder="x")
                whole = train(tmp_path / "new", 0).items()
                message = [[n, "F32", list(t.shape), t.numpy().tobytes()] for n, t in whole]
                await client.ask("weights_load", round=key, tensors=message)
                assert set((await client.ask("weights_finish", round=key))["replicas"]) == {
                    "r0", "r1",
                }  # fmt: skip
                after = await answers(client)
                assert after != before
                async with asyncio.timeout(PATIENCE_S):
                    while (await other.ask("health")).get("weight_version") != "new":
                        await asyncio.sleep(0.01)
                assert await answers(other) == after
            finally:
                await client.close()
                await other.close()
                await fleet.close()

    asyncio.run(main())
