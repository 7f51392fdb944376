"""Readers of a client: tokens, log probs and ends of a real engine, in the order of the steps,
however little the sockets take at once; its own text where the tokenizer cannot be sent; and which
fault fails which request."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from megatron_async import (
    LLM,
    DynamicInferenceContext,
    InferenceConfig,
    SamplingParams,
    StructuredOutput,
)
from megatron_async.errors import RequestError
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.serving import connection, replica, replica_status, token_emitter
from megatron_async.serving.async_client import AsyncCoordinatorClient
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.link import Link
from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs, TokenReader, prompt_log_probs_of
from megatron_async.serving.replica import Replica, serve_replica
from megatron_async.serving.token_client import TokenClient
from tests.support.harness import EngineFactory, greedy
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import Ranks
from tests.support.serving_processes import CONFIG, ENGINE, KeepingReader


class Reader(TokenReader):
    """Keeps what it is told."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.pieces: list[list[int]] = []
        self.log_probs: list[TokenLogProbs] = []
        self.texts: list[str] = []
        self.fails_at = fails_at
        self.end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        assert not self.end.done()
        if len(self.pieces) == self.fails_at:
            raise ZeroDivisionError("a reader's own fault")
        self.pieces.append(tokens.tolist())
        if log_probs is not None:
            self.log_probs.append(log_probs)

    def text(self, text: str) -> None:
        self.texts.append(text)

    def ended(self, end: Ended) -> None:
        self.end.set_result(end)

    @property
    def all(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]


Run = Callable[[Callable[[AsyncCoordinatorClient], Coroutine[Any, Any, None]]], None]


class Told(Exception):
    """The error of a tokenizer of a user's own."""


class Own:
    """A tokenizer of a class that no client has."""

    eod = -1
    fails = False

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        if self.fails:
            raise Told("no such token")
        return "".join(chr(97 + token % 26) for token in tokens)


def served(*engines: Any) -> Iterator[Run]:
    """Runs work with a client of a coordinator that has these replicas."""
    coordinator = Coordinator("tcp://127.0.0.1:*")
    threads = [threading.Thread(target=coordinator.run, daemon=True)]
    for engine, name in zip(engines, "ab", strict=False):
        one = Replica(engine, coordinator.address, "tiny", name)
        serve = partial(asyncio.run, one.run())
        threads.append(threading.Thread(target=serve, daemon=True))
    for thread in threads:
        thread.start()

    def run(work: Callable[[AsyncCoordinatorClient], Coroutine[Any, Any, None]]) -> None:
        async def with_client() -> None:
            async with AsyncCoordinatorClient(coordinator.address) as client:
                await asyncio.wait_for(client.card(), PATIENCE_S)
                await asyncio.wait_for(work(client), PATIENCE_S)

        asyncio.run(with_client())

    yield run

    async def remove(client: AsyncCoordinatorClient) -> None:
        for name in (await client.stats())["replicas"]:
            await client.remove_replica(name)

    run(remove)
    for thread in threads[1:]:
        thread.join(PATIENCE_S)
    coordinator.stop()
    threads[0].join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    for engine in engines:
        while engine.has_unfinished_requests():  # a step behind a stop word that the host found
            engine.step_modern()


@pytest.fixture
def with_client(make_tiny_engine: EngineFactory) -> Iterator[Run]:
    yield from served(make_tiny_engine(lookahead=1, tokenizer=make_ascii_tokenizer()))


def test_readers_are_told_what_one_engine_gives(with_client: Run, make_tiny_engine):
    """Log probs too, of rows with other numbers of alternatives in one message."""
    wants = [
        {}, {"return_log_probs": True, "top_n_logprobs": 3}, {"return_log_probs": True},
        {"return_log_probs": True, "top_n_logprobs": 20, "skip_prompt_log_probs": True},
    ]  # fmt: skip
    params = [greedy(12 + 3 * n, termination_id=-1, **want) for n, want in enumerate(wants)]
    prompts = [[5, 9, n] for n in range(len(params))]
    alone = make_tiny_engine(lookahead=1, tokenizer=make_ascii_tokenizer())
    expected = alone.generate(prompts, params)

    async def work(client: AsyncCoordinatorClient) -> None:
        flushes = []
        client.after_message = lambda: flushes.append(1)
        readers = [Reader() for _ in params]
        for prompt, mine, reader in zip(prompts, params, readers, strict=True):
            client.send(prompt, mine, reader)
        for reader, request in zip(readers, expected, strict=True):
            end = await reader.end
            assert end.error is None
            assert reader.all == request.generated_tokens
            assert len(reader.pieces) > 3, "tokens come while they are made"
            assert (end.finish_reason, end.num_prompt_tokens) == ("length", 3)
            assert end.num_generated_tokens == len(reader.all)
            assert end.ttft is not None
            assert end.queue_s is not None
            check_log_probs(reader, end, request)
        assert len(flushes) >= max(len(reader.pieces) for reader in readers) // 2

    with_client(work)


def check_log_probs(reader: Reader, end: Ended, request: Any, rtol: float = 1e-5) -> None:
    if not request.sampling_params.return_log_probs:
        assert reader.log_probs == []
        return
    chosen = np.concatenate([part.chosen for part in reader.log_probs])
    np.testing.assert_allclose(chosen, request.generated_log_probs, rtol=rtol)
    top_n = request.sampling_params.top_n_logprobs
    if not top_n:
        assert all(part.top_ids is None for part in reader.log_probs)
    else:
        ids = np.concatenate(
            [part.top_ids for part in reader.log_probs if part.top_ids is not None]
        )
        told = request.log_probs.generated_top_n()
        assert ids.tolist() == [[token for token, _ in place] for place in told]
    if request.sampling_params.skip_prompt_log_probs:
        assert end.prompt_log_probs is None
    else:
        of_prompt = prompt_log_probs_of(end)
        assert of_prompt is not None
        np.testing.assert_allclose(of_prompt.chosen, request.prompt_log_probs, rtol=1e-5)


def test_a_readers_fault_is_its_own(with_client: Run) -> None:
    async def work(client: AsyncCoordinatorClient) -> None:
        bad, good = Reader(fails_at=2), Reader()
        for reader in (bad, good):
            client.send([1, 2], greedy(20, termination_id=-1), reader)
        end = await bad.end
        assert end.failure is not None
        assert end.failure[0] == "ZeroDivisionError"
        assert (await good.end).error is None
        assert len(good.all) == 20
        while (await client.stats())["unfinished_requests"]:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="at most 128"):
            client.send([1], greedy(2), good, label="x" * 129)

    with_client(work)


def test_a_text_prompt_is_told_as_tokens(with_client: Run) -> None:
    async def work(client: AsyncCoordinatorClient) -> None:
        (answer,) = await client.generate("hello", greedy(5, termination_id=-1))
        assert answer.prompt_tokens == list(b"hello")
        tokenizer = make_ascii_tokenizer()
        assert answer.generated_text == tokenizer.detokenize(answer.generated_tokens)

    with_client(work)


@pytest.mark.parametrize("fails", [False, True])
def test_texts_of_a_tokenizer_that_cannot_be_sent(make_tiny_engine, fails: bool):
    own = Own()
    own.fails = fails
    run = served(make_tiny_engine(lookahead=1, tokenizer=own))

    async def work(client: AsyncCoordinatorClient) -> None:
        assert (await client.card()).replica_makes_text
        params = greedy(30, termination_id=-1)
        (answer,) = await client.generate([[1, 2]], params, raise_on_failure=False)
        if fails:
            assert "no such token" in str(answer.error)
            return
        expected = own.detokenize(answer.generated_tokens)
        assert answer.generated_text == expected
        texts = [chunk.text or "" async for chunk in client.stream([1, 2], params)]
        assert "".join(texts) == expected
        assert len(texts) > 3
        stopped = greedy(30, termination_id=-1, stop_words=[expected[10:13]])
        (answer,) = await client.generate([[1, 2]], stopped)
        assert answer.generated_text == expected[: expected.find(expected[10:13])]
        reader = Reader()
        stopped.stop_words = ["no such text", expected[10:13]]
        client.send([1, 2], stopped, reader)
        assert (await reader.end).stop_word == expected[10:13]

    next(run)(work)
    next(run, None)


@pytest.mark.parametrize(
    ("tokenizer", "wants"),
    [
        (Own, {"temperature": 0.9, "echo": True, "stop_words": ["no such text", "qqqq"]}),
        (make_ascii_tokenizer, {"return_log_probs": True, "top_n_logprobs": 2}),
        (make_ascii_tokenizer, {"structured_output": StructuredOutput(regex="[a-d]{300}")}),
    ],
    ids=["own texts", "log probs", "grammar"],
)
def test_a_moved_request_goes_on_as_on_one_engine(
    make_tiny_engine, tokenizer: Any, wants: Any, monkeypatch: pytest.MonkeyPatch
):
    """There and back, each time from an engine that stands still, so that nothing ends before."""
    engines = [make_tiny_engine(lookahead=1, tokenizer=tokenizer()) for _ in range(3)]
    params, prompt = SamplingParams(num_tokens_to_generate=120, termination_id=-1, **wants), [5, 9]
    (expected,) = engines[2].generate([prompt], params)
    told: list[str | None] = []

    def ended_of(request: Any, *arguments: Any) -> Ended:
        told.append(request.finish_reason)
        return replica_status.ended_of(request, *arguments)

    monkeypatch.setattr(replica, "ended_of", ended_of)

    async def work(client: AsyncCoordinatorClient) -> None:
        reader = Reader()
        client.send(prompt, params, reader, label="mine")
        for count in (5, 60):
            while len(reader.all) < count:
                await asyncio.sleep(0)
            replicas = (await client.stats())["replicas"].items()
            (there,) = (name for name, each in replicas if each["unfinished_requests"])
            await client.pause_replica(there)
            answer = await client.ask("move", label="mine")
            assert answer == {"replicas": {there: {"moved": 1}}}
            await client.resume_replica(there)
        end = await reader.end
        assert end.error is None
        assert reader.all == expected.generated_tokens
        assert (end.num_generated_tokens, end.replica == there) == (120, False)
        check_log_probs(reader, end, expected, 1e-4)
        if tokenizer is Own:
            assert "".join(reader.texts) == expected.generated_text
        assert (await client.stats())["moved_requests"] == 2
        assert told == [expected.finish_reason]

    run = served(*engines[:2])
    next(run)(work)
    next(run, None)


def test_a_trace_reaches_the_engine_and_the_logs(with_client: Run, caplog):
    caplog.set_level("INFO", "megatron_async")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    header = f"00-{trace}-00f067aa0ba902b7-01"

    async def work(client: AsyncCoordinatorClient) -> None:
        await (await client.submit([1, 2], greedy(4))).completion()
        assert trace not in caplog.text
        request = await client.submit([1, 2], greedy(4), traceparent=header)
        completion = await request.completion()
        assert completion.error is None
        readers = [Reader(), Reader()]
        client.send([1, 2], greedy(4, temperature=-1.0), readers[0], traceparent=header)
        assert (await readers[0].end).failure is not None
        for bad in ("x", header[:-1], 5):
            with pytest.raises(RequestError, match="traceparent="):
                client.send([1, 2], greedy(4), readers[1], traceparent=bad)  # type: ignore[arg-type]

    with_client(work)
    lines = [r.getMessage() for r in caplog.records if trace in r.getMessage()]
    about = [line.partition(f"(trace {trace}) ")[2] for line in lines]
    assert about[0] == "goes to replica a."
    assert about[1] == "came, with 2 prompt tokens."
    assert about[2].startswith("ended (length): 4 tokens")
    assert about[3] == "goes to replica a."
    assert "temperature=-1.0" in about[-1]


STREAMS, SHORTEST = 40, 60


class Numbers:
    """Every step's rows sample its number: tokens of a request that rise are in order."""

    def __init__(self) -> None:
        self.step = 0

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        self.step += 1
        return np.full(plan.num_rows, self.step, np.int32), np.ones(plan.num_rows, np.int32)


async def ask(address: str, secret: bytes | None, connected: list[bool]) -> None:
    """Requests of many lengths, which come by and by: first tokens and ends are between steps."""
    client = TokenClient(address, secret=secret)
    await client.open()
    await client.card()
    connected.append(True)
    readers = []
    for number in range(STREAMS):
        length = SHORTEST + 3 * number
        readers.append((length, KeepingReader()))
        params = SamplingParams(num_tokens_to_generate=length, termination_id=-1)
        client.send([1, 2, 3], params, readers[-1][1])
        await asyncio.sleep(0.001 * (number % 3))
    for length, reader in readers:
        end = await asyncio.wait_for(reader.end, PATIENCE_S)
        assert end.finish_reason == "length"
        steps = np.diff(reader.got)
        assert len(reader.got) == length
        assert (steps > 0).all(), reader.got
    await client.close()


@pytest.mark.parametrize(
    ("is_here", "secret"),
    [(True, None), (False, None), (False, b"0123456789abcdef")],
    ids=["one host", "two hosts", "two hosts, encrypted"],
)
def test_tokens_come_in_order(is_here: bool, secret: bytes | None, monkeypatch: Any) -> None:
    """Break it: `Link._put` writes although something waits, or `flush` forgets what is left of a
    message that was written in part."""
    if sys.platform != "linux" and is_here:
        pytest.skip("abstract sockets are Linux'")
    taken: list[int] = []
    connected: list[bool] = []
    write = Link._write

    def write_in_part(self: Link, data: bytes | memoryview) -> int:
        """Now and then the socket is full, or takes a part."""
        most = (len(data), 5, len(data), 0, 1)[len(taken) % 5] if connected else len(data)
        taken.append(write(self, data[:most]) if most else 0)
        return taken[-1]

    monkeypatch.setattr(Link, "_write", write_in_part)
    if not is_here:
        monkeypatch.setattr(connection, "connect_here", lambda _: None)
    monkeypatch.setattr(token_emitter, "EVERY_S", 0.02)  # however slow this machine is now
    coordinator = Coordinator("tcp://127.0.0.1:*", secret=secret)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    shape = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
    config = InferenceConfig(
        max_requests=STREAMS, max_tokens=4 * STREAMS, max_sequence_length=512, num_kv_blocks=1000,
        block_size_tokens=16, enable_prefix_caching=False, lookahead=1,
    )  # fmt: skip

    peers: list[list[bool]] = []

    async def main() -> None:
        engine = ModelLessEngine(shape, config, Numbers())
        replica = Replica(engine, coordinator.address, "none", "a", secret=secret)
        running = asyncio.create_task(replica.run())
        await asyncio.to_thread(asyncio.run, ask(coordinator.address, secret, connected))
        peers.append([peer.is_here for peer in coordinator._peers.values()])
        replica.leave()
        await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(main())
    coordinator.stop()
    thread.join(PATIENCE_S)
    assert {here for each in peers for here in each} == {is_here}


TOKENS = 60


def _params() -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=TOKENS, termination_id=-1, seed=5)


def _replica(address: str) -> None:
    with LLM("dummy:tiny-moe", **ENGINE, expert_model_parallel_size=2) as llm:
        serve_replica(llm, address, "tiny-moe", "moe")


def test_it_helps_until_the_last_has_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megatron_async")
    coordinator = Coordinator("tcp://127.0.0.1:*", CONFIG)
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    job = Ranks(2, _replica, coordinator.address)
    with LLM("dummy:tiny-moe", **ENGINE) as llm:
        alone = llm.generate([1, 2, 3], _params())[0].generated_tokens
    with CoordinatorClient(coordinator.address) as client:

        def states() -> dict[str, str]:
            return {name: each["state"] for name, each in client.stats()["replicas"].items()}

        def interrupt(name: str) -> None:
            pid = job.processes[int(name[-1])].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)

        eventually(lambda: len(states()) == 2, "both replicas")
        stream = client.stream([1, 2, 3], _params())
        tokens = list(next(stream).tokens)
        found = client.stats()["replicas"].items()
        first = next(name for name, each in found if each["unfinished_requests"])
        other = next(name for name in states() if name != first)
        with pytest.raises(ValueError, match="drain it"):
            client.pause_replica(first)
        client.remove_replica(first)
        for chunk in stream:
            tokens += chunk.tokens
        assert tokens == alone
        eventually(lambda: states()[first] == "helping", "the first to leave")
        assert f"Replica {first} has left, and helps" in caplog.text
        interrupt(first)
        # A request of the other needs the experts of the one that has left.
        stream = client.stream([1, 2, 3], _params())
        tokens = list(next(stream).tokens)
        assert states() == {first: "helping", other: "ready"}
        interrupt(other)
        for chunk in stream:
            tokens += chunk.tokens
        assert tokens == alone
        for outcome in job.join():
            assert (outcome.exit_code, outcome.error) == (0, "")
        eventually(lambda: not states(), "both to be gone")
    coordinator.stop()
    thread.join(PATIENCE_S)
