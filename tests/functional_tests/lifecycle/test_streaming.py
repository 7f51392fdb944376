"""Streams give what the finished request has, whatever the reader's speed."""

import asyncio
import sys
import time
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.errors import RequestAborted
from megatron_async.requests import stream_wakeups
from megatron_async.requests.streaming import RequestStream, StreamChunk
from tests.support.harness import TINY, EngineFactory, drain, greedy, make_engine, random_prompts
from tests.support.patience import PATIENCE_S

TOKENS = 30
PROMPTS = random_prompts(11, (4, 19, 33, 7))


class Bytes:
    """A tokenizer of bytes: most tokens of the tiny model are a part of a character."""

    eod = -1

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        # Lead bytes and continuations at random: half of them are no characters.
        raw = bytes(0xC3 if token % 2 else 0x80 + token % 64 for token in tokens)
        return raw.decode("utf-8", errors="replace")


class Pieces(Bytes):
    """With texts that are the bytes of tokens, as most models have."""

    byte_pieces: ClassVar = {token: b"%c" % (97 + token % 26) for token in range(TINY.vocab_size)}

    def detokenize(self, tokens: list[int]) -> str:
        return b"".join(map(self.byte_pieces.__getitem__, tokens)).decode()


async def read(stream: RequestStream, pause: float = 0.0) -> list[StreamChunk]:
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        await asyncio.sleep(pause)
    return chunks


async def serve(
    engine: DynamicInferenceEngine, params: list[SamplingParams], pause: float = 0.0
) -> list[list[StreamChunk]]:
    """Chunks of requests that are streamed while `run_engine` steps."""
    runner = asyncio.create_task(engine.run_engine())
    try:
        readers = []
        for number, (prompt, mine) in enumerate(zip(PROMPTS, params, strict=True)):
            future = engine.add_request(number, prompt, mine)
            readers.append((future, asyncio.create_task(read(engine.stream(number), pause))))
        chunks = []
        for future, reader in readers:
            request = await asyncio.wait_for(future, PATIENCE_S)
            mine = await asyncio.wait_for(reader, PATIENCE_S)
            assert [t for chunk in mine for t in chunk.tokens] == request.generated_tokens
            assert "".join(chunk.text or "" for chunk in mine) == request.generated_text
            chunks.append(mine)
        return chunks
    finally:
        runner.cancel()
        while engine.has_unfinished_requests():  # steps in flight, of zombie rows alone
            await engine.async_step()


@pytest.fixture
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are woken without rest, so that what comes does not hang on this machine's speed."""
    monkeypatch.setattr(stream_wakeups, "WAKE_EVERY_S", 0.0)


@pytest.mark.usefixtures("at_every_step")
@pytest.mark.parametrize("pressed", [False, True], ids=["roomy", "evictions"])
def test_chunks_add_up(make_tiny_engine: EngineFactory, lookahead: int, pressed: bool) -> None:
    memory = {"num_kv_blocks": 9, "block_size_tokens": 8, "paused_buffer_size_gb": 1e-9}
    engine = make_tiny_engine(lookahead=lookahead, tokenizer=Bytes(), **(memory if pressed else {}))
    chunks = asyncio.run(serve(engine, [greedy(TOKENS)] * len(PROMPTS)))
    assert (engine.stats()["evictions"] > 0) == pressed
    # A crowded machine joins some.
    assert max(map(len, chunks)) > TOKENS // 6, "chunks come while tokens are made"


def test_a_stop_word_is_never_sent(make_tiny_engine: EngineFactory) -> None:
    plain = make_tiny_engine(tokenizer=Bytes())
    texts = [request.generated_text or "" for request in plain.generate(PROMPTS, greedy(TOKENS))]
    drain(plain)
    params = [greedy(TOKENS, stop_words=["never", text[9:13]]) for text in texts]
    chunks = asyncio.run(serve(make_tiny_engine(tokenizer=Bytes()), params))
    for text, mine in zip(texts, chunks, strict=True):
        assert "".join(chunk.text or "" for chunk in mine) == text[: text.find(text[9:13])]


@pytest.mark.usefixtures("at_every_step")
def test_a_slow_reader_gets_larger_chunks_and_stalls_nobody(make_tiny_engine):
    engine = make_tiny_engine(tokenizer=Bytes())
    fast = asyncio.run(serve(engine, [greedy(TOKENS)] * len(PROMPTS)))
    steps = engine.stats()["steps"]
    slow = asyncio.run(serve(engine, [greedy(TOKENS)] * len(PROMPTS), pause=0.2))
    assert engine.stats()["steps"] == 2 * steps
    assert max(map(len, slow)) < min(map(len, fast))


def test_an_aborted_request_ends_its_stream_with_the_error(make_tiny_engine: EngineFactory) -> None:
    async def run() -> list[StreamChunk]:
        engine = make_tiny_engine()
        engine.add_request(7, PROMPTS[0], greedy(TOKENS))
        stream, chunks = engine.stream(7), []
        for _ in range(5):
            await engine.async_step()
            if engine.stats()["generated_tokens"] > len(chunks):
                chunks.append(await anext(stream))
        engine.abort_request(7)
        with pytest.raises(RequestAborted):
            await anext(stream)
        while engine.has_unfinished_requests():
            await engine.async_step()
        return chunks

    chunks = asyncio.run(run())
    assert chunks
    assert all(chunk.text is None for chunk in chunks)


def test_closing_the_engine_answers_everybody(tiny_model: torch.nn.Module) -> None:
    async def run() -> None:
        engine = make_engine(tiny_model, num_kv_blocks=64, max_requests=1)
        futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(2)]
        readers = [asyncio.create_task(read(engine.stream(i))) for i in range(2)]
        for _ in range(5):
            await engine.async_step()
        engine.close()
        for future, reader in zip(futures, readers, strict=True):
            request = await asyncio.wait_for(future, PATIENCE_S)
            assert request.finish_reason == "aborted"
            with pytest.raises(RequestAborted, match="closed"):
                await asyncio.wait_for(reader, PATIENCE_S)

    asyncio.run(run())


def test_nobody_to_stream(make_tiny_engine: EngineFactory) -> None:
    with pytest.raises(KeyError, match="no unfinished request has the id 3: it was never added"):
        make_tiny_engine().stream(3)


def test_the_engine_wakes_up_for_a_late_request(make_tiny_engine: EngineFactory) -> None:
    async def run() -> None:
        engine = make_tiny_engine()
        runner = asyncio.create_task(engine.run_engine())
        for number in range(3):
            future = engine.add_request(number, PROMPTS[0], greedy(3))
            request = await asyncio.wait_for(future, PATIENCE_S)
            assert len(request.generated_tokens) == 3
            while engine.has_unfinished_requests():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)  # idle
        runner.cancel()

    asyncio.run(run())


def test_real_text(smollm2_llm: LLM) -> None:
    async def run() -> None:
        engine = smollm2_llm.engine
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=12)
        future = engine.add_request(990, "Say something in Chinese: 你好", params)
        reader = asyncio.create_task(read(engine.stream(990)))
        while engine.has_unfinished_requests():
            await engine.async_step()
        chunks = await reader
        assert "".join(c.text or "" for c in chunks) == (await future).generated_text

    asyncio.run(run())


def test_a_stream_echoes_the_prompt_first(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(lookahead=1, tokenizer=Bytes())
    params = [greedy(TOKENS, echo=True, stop_words=["never there"])] * len(PROMPTS)
    chunks = asyncio.run(serve(engine, params))[0]
    request = engine.generate([PROMPTS[0]], params[0])[0]
    drain(engine)
    assert "".join(chunk.text for chunk in chunks) == request.generated_text
    assert request.generated_text.startswith(Bytes().detokenize(PROMPTS[0]))


class Counting(np.ndarray):
    """Counts the elements that become Python's."""

    counted = 0

    def tolist(self) -> list[int]:
        Counting.counted += self.size
        return super().tolist()


@pytest.mark.usefixtures("at_every_step")
@pytest.mark.parametrize("with_pieces", [False, True], ids=["any tokenizer", "byte-level"])
def test_a_long_answer_costs_what_is_new(make_tiny_engine, lookahead, with_pieces: bool):
    """Tokens that are read and detokenized, counted: no chunk touches what earlier chunks had. A
    stream that reads the whole answer each time reads 90,000 tokens of these 300, once when it is
    woken and once before it waits again."""
    length, decoded = 300, 0

    class Letters:
        eod = -1
        byte_pieces = dict.fromkeys(range(TINY.vocab_size), b"x") if with_pieces else None

        def detokenize(self, tokens: list[int]) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return "x" * len(tokens)

    async def run() -> list[StreamChunk]:
        engine = make_tiny_engine(lookahead=lookahead, tokenizer=Letters())
        slots = engine.context.slots
        slots.tokens = slots.tokens.view(Counting)
        engine.add_request(0, PROMPTS[0], greedy(length))
        reader = asyncio.create_task(read(engine.stream(0)))
        runner = asyncio.create_task(engine.run_engine())
        chunks = await asyncio.wait_for(reader, PATIENCE_S)
        runner.cancel()
        while engine.has_unfinished_requests():
            await engine.async_step()
        return chunks

    Counting.counted = 0
    chunks = asyncio.run(run())
    assert sum(len(chunk.tokens) for chunk in chunks) == length
    assert "".join(chunk.text or "" for chunk in chunks) == "x" * length
    assert len(chunks) > length // 4
    # Once by the stream, once at the request's end.
    assert Counting.counted <= 2 * length
    # At the end the answer is detokenized once; before, each token with a few as context.
    assert decoded <= (length if with_pieces else 30 * length)


def test_only_first_tokens_and_ends_are_told_at_once(make_tiny_engine, lookahead, monkeypatch):
    """Without a timer that fires, a reader gets the first token, and the rest with the end."""
    monkeypatch.setattr(stream_wakeups, "WAKE_EVERY_S", 1e6)

    async def read_at_once(stream: RequestStream) -> list[StreamChunk]:
        # No pause between chunks, in which a step may be booked.
        return [chunk async for chunk in stream]

    async def run() -> list[list[StreamChunk]]:
        engine = make_tiny_engine(lookahead=lookahead)
        engine.requests.readers._rests_until = time.monotonic() + 1e6
        futures = [engine.add_request(i, p, greedy(TOKENS)) for i, p in enumerate(PROMPTS)]
        streams = [engine.stream(i) for i in range(len(PROMPTS))]
        readers = [asyncio.create_task(read_at_once(stream)) for stream in streams]
        await asyncio.sleep(0)
        runner = asyncio.create_task(engine.run_engine())
        chunks = await asyncio.wait_for(asyncio.gather(*readers), PATIENCE_S)
        runner.cancel()
        while engine.has_unfinished_requests():
            await engine.async_step()
        for future, mine in zip(futures, chunks, strict=True):
            tokens = [token for chunk in mine for token in chunk.tokens]
            assert tokens == future.result().generated_tokens
        return chunks

    for mine in asyncio.run(run()):
        assert [len(chunk.tokens) for chunk in mine] == [1, TOKENS - 1]


def test_readers_are_woken_although_nobody_steps_any_more(make_tiny_engine: EngineFactory) -> None:
    """What a pause has booked comes soon, and not when the engine goes on."""

    async def run() -> None:
        engine = make_tiny_engine(lookahead=2)
        engine.add_request(0, PROMPTS[0], greedy(TOKENS))
        chunks: list[StreamChunk] = []

        async def note() -> None:
            async for chunk in engine.stream(0):
                chunks.append(chunk)

        reader = asyncio.create_task(note())
        for _ in range(6):
            await engine.async_step()
        engine.pause()
        booked = engine.stats()["generated_tokens"]
        async with asyncio.timeout(PATIENCE_S):
            while sum(len(chunk.tokens) for chunk in chunks) < booked:
                await asyncio.sleep(0.001)
        engine.unpause()
        while engine.has_unfinished_requests():
            await engine.async_step()
        await reader

    asyncio.run(run())


def test_two_engines_on_one_loop(make_tiny_engine: EngineFactory, lookahead: int) -> None:
    """Both get on, and a coroutine that has nothing to do with them is served meanwhile."""

    async def run() -> int:
        engines = [make_tiny_engine(lookahead=lookahead, tokenizer=Bytes()) for _ in range(2)]
        turns = 0

        async def bystander() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(bystander())
        params = [greedy(TOKENS)] * len(PROMPTS)
        await asyncio.gather(*(serve(engine, params) for engine in engines))
        task.cancel()
        return turns

    assert asyncio.run(run()) > TOKENS


MOST_CALLS = 18
"""Python functions that are called, or go on, for a token of a stream that comes alone: the half of
them asyncio's."""


def calls_of(engine: DynamicInferenceEngine, steps: int, streams: int) -> int:
    """Calls of Python functions in so many steps of 8 requests of which some are streamed, a token
    at a time."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async def main() -> None:
        for number in range(8):
            engine.add_request(number, PROMPTS[number % 4], greedy(2 * TOKENS))
        readers = [asyncio.create_task(read_all(engine.stream(n))) for n in range(streams)]
        for step in range(steps + 5):
            if step == 5:
                sys.setprofile(count)
            engine.step_modern()
            for _ in range(3):
                await asyncio.sleep(0)
        sys.setprofile(None)
        drain(engine)
        await asyncio.gather(*readers)

    async def read_all(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    asyncio.run(main())
    return calls


def test_a_token_of_a_stream_takes_few_calls(make_tiny_engine, monkeypatch):
    """Unlike time, calls do not depend on the machine. Break `RequestStream.__anext__`: look for
    tokens again before each wait."""
    monkeypatch.setattr(stream_wakeups, "WAKE_EVERY_S", 0.0)
    engine = make_tiny_engine(tokenizer=Pieces(), check_integrity=False, late_launch=False)
    steps = 20
    with_streams, without = (calls_of(engine, steps, streams) for streams in (8, 0))
    assert 8 * steps * 8 < with_streams - without < 8 * steps * MOST_CALLS
