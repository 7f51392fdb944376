"""Requests that cannot even be added: what panics fails alone, what interrupts leaves nothing."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import RequestError
from tests.support.harness import (
    EngineFactory,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    random_prompts,
)
from tests.support.patience import PATIENCE_S

TOKENS = 12
PROMPTS = random_prompts(81, (7, 5))


class Panic(BaseException):
    """What a library in Rust raises when it panics is no `Exception`."""


class Tokenizer:
    """Raises what it is told to; otherwise a token is a letter."""

    eod = -1
    raises: type[BaseException] | None = None

    def tokenize(self, text: str) -> list[int]:
        if self.raises is not None:
            raise self.raises("over this text")
        return [ord(letter) % 128 for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture(params=[0, 1, 2])
def engine(make_tiny_engine: EngineFactory, request: Any) -> DynamicInferenceEngine:
    return make_tiny_engine(lookahead=request.param, tokenizer=Tokenizer())


def check_serves(engine: DynamicInferenceEngine, expected: list[int]) -> None:
    """A runner that was idle serves a request and is idle again; it does not spin."""

    async def main() -> None:
        runner = asyncio.create_task(engine.run_engine())
        turns = 0
        while turns < 50:  # a runner that spins would never let go
            await asyncio.sleep(0)
            turns += 1
        future = engine.add_request(7, PROMPTS[0], greedy(TOKENS))
        assert (await asyncio.wait_for(future, PATIENCE_S)).generated_tokens == expected
        runner.cancel()

    asyncio.run(main())


@pytest.fixture(scope="module")
def expected(tiny_model: Any) -> list[int]:
    engine = make_engine(tiny_model, lookahead=0)
    tokens = engine.generate([PROMPTS[0]], greedy(TOKENS))[0].generated_tokens
    engine.close()
    return tokens


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupt_leaves_nothing(engine, expected, error: type[BaseException]):
    """Break `add_request`: enter the request before it is prepared."""
    running = engine.add_request(0, PROMPTS[0], greedy(TOKENS))
    engine.step_modern()
    engine.controller.tokenizer.raises = error
    with pytest.raises(error):
        engine.add_request(1, "text", greedy(3))
    engine.controller.tokenizer.raises = None
    with pytest.raises(KeyError):
        engine.get_request(1)
    again = engine.add_request(1, "text", greedy(3))  # its id is free
    drain(engine)
    assert running.result().generated_tokens == expected
    assert again.result().succeeded()
    assert engine.stats()["failed_requests"] == 0
    engine.controller.tokenizer.raises = error
    with pytest.raises(error):
        engine.add_request(2, "text", greedy(3))
    check_serves(engine, expected)


def test_a_panic_fails_its_request_alone(engine: DynamicInferenceEngine, expected: list[int]):
    """Break `prepare_request`: no `except BaseException`."""
    running = engine.add_request(0, PROMPTS[0], greedy(TOKENS))
    engine.step_modern()
    engine.controller.tokenizer.raises = Panic
    failed = engine.add_request(1, "text", greedy(3)).result()
    assert isinstance(failed.error, RequestError)
    assert "Panic: over this text" in str(failed.error)
    assert isinstance(failed.error.__cause__, Panic)
    drain(engine)
    assert running.result().generated_tokens == expected
    check_serves(engine, expected)


def test_parameters_that_cannot_be_copied_fail_their_request_alone(engine, expected):
    """Break `add_request`: copy them before the `try`."""

    def tokens() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    bad: Any = tokens()
    request = engine.add_request(0, PROMPTS[0], SamplingParams(stop_token_ids=bad)).result()
    assert isinstance(request.error, ZeroDivisionError)
    drain(engine)
    check_serves(engine, expected)


PLACES: dict[str, Callable[[DynamicInferenceEngine], tuple[Any, str]]] = {
    "queue": lambda engine: (engine.context.waiting, "add"),
    "listener": lambda engine: (engine.listeners[-1], "added"),
    "group": lambda engine: (engine.group, "added"),
}


@pytest.mark.pairs
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_what_raises_when_it_is_queued_takes_it_back(
    engine: DynamicInferenceEngine,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    is_late: bool,
    error: type[BaseException],
) -> None:
    """Break `add_request`: no `withdraw`, or no `waiting.remove`."""
    engine.listeners.append(EngineListener())
    owner, name = PLACES[place](engine)
    method = getattr(owner, name)

    def raises(argument: Any) -> None:
        if is_late:
            method(argument)
        raise error(place)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raises)
        with pytest.raises(error, match=place):
            engine.add_request(1, PROMPTS[1], greedy(TOKENS))
    with pytest.raises(KeyError):
        engine.get_request(1)
    drain(engine)
    assert_all_is_back(engine)
    check_serves(engine, expected)
