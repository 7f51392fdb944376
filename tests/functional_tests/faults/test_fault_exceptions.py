"""Exceptions at every place that runs foreign or fallible code: the requests concerned fail, and
the engine goes on as before, overlap included."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, Status
from megatron_async.errors import StepFailed
from megatron_async.requests.streaming import RequestStream
from tests.support.harness import EngineFactory, drain, fail_call, greedy, random_prompts
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import Letters
from tests.support.step_watch import StepWatch

TOKENS = 16
PROMPTS = random_prompts(61, (7, 12, 4, 9))


class MadeUpError(Exception):
    """Raised by tests alone."""


@pytest.fixture(params=[0, 1, 2])
def engine(make_tiny_engine: EngineFactory, request: Any) -> DynamicInferenceEngine:
    return make_tiny_engine(
        lookahead=request.param, device=LateDevice(), tokenizer=Letters(), max_requests=2
    )


def check_goes_on(engine: DynamicInferenceEngine, expected: list[list[int]]) -> None:
    """All is served as if nothing had happened, and every step but the first overlaps."""
    before = engine.statistics.steps, engine.statistics.overlapped_steps
    futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in (0, 1)]
    watch = StepWatch(engine)
    while engine.has_unfinished_requests():
        watch.before_step()
        engine.step_modern()
        watch.after_step()
    assert [future.result().generated_tokens for future in futures] == expected[:2]
    steps = engine.statistics.steps - before[0]
    overlapped = engine.statistics.overlapped_steps - before[1]
    assert overlapped == (steps - 1 if engine.lookahead else 0)


PLACES: dict[str, Callable[[DynamicInferenceEngine], tuple[Any, str]]] = {
    "unpacking": lambda engine: (engine.context.gpu_view, "begin_step"),
    "forward": lambda engine: (engine.controller.inference_wrapped_model, "forward"),
    "attention": lambda engine: (engine.context.gpu_view, "attention"),
    "sampler": lambda engine: (engine.controller.sampler, "sample"),
    "feed-back": lambda engine: (engine.context.gpu_view, "feed_back"),
}


@pytest.mark.pairs
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", [1, 6])
def test_a_step_whose_own_work_raises(engine, expected, place: str, call: int):
    """Two requests are served when it happens, two wait and are served.

    Break one of these, and it fails:

    - `_run_guarded`: no `expect_step`, so that later steps read others' bookkeeping
    - `_run_guarded`: no `except`
    - `StepBooking._fail`: no `release`, or no `requests.end`
    """
    owner, name = PLACES[place](engine)
    fail_call(owner, name, call, MadeUpError(name))
    futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(4)]
    drain(engine)
    found = [future.result() for future in futures]
    assert engine.stats()["failed_steps"] == 1
    for number, request in enumerate(found[:2]):
        assert isinstance(request.error, StepFailed)
        assert isinstance(request.error.__cause__, MadeUpError)
        tokens = request.generated_tokens
        assert tokens == expected[number][: len(tokens)]
    assert [request.generated_tokens for request in found[2:]] == expected[2:]
    check_goes_on(engine, expected)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_failed_step_spares_its_slot_s_next_owner(make_tiny_engine, expected, lookahead):
    """The step of a request that is aborted fails when another has its slot already. Break
    `StepBooking._fail`: `held` all true."""
    engine = make_tiny_engine(lookahead=lookahead, device=LateDevice(), max_requests=2)
    fail_call(engine.controller.sampler, "sample", 5, MadeUpError)
    engine.add_request(0, PROMPTS[0], greedy(TOKENS))
    for _ in range(5):
        engine.step_modern()
    engine.abort_request(0)
    following = engine.add_request(1, PROMPTS[1], greedy(TOKENS))
    drain(engine)
    assert engine.stats()["failed_steps"] == 1
    assert following.result().generated_tokens == expected[1]
    check_goes_on(engine, expected)


def test_a_consumer_of_reports_that_raises(engine, expected):
    """The error comes out of `generate`; the requests are still there, and go on. Break `generate`:
    close the engine, or abort the requests, when `on_step` raises."""
    calls = 0

    def on_step(report: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MadeUpError

    other = engine.add_request(50, PROMPTS[3], greedy(TOKENS))
    with pytest.raises(MadeUpError):
        engine.generate(PROMPTS[:2], greedy(TOKENS), on_step)
    ended = []
    while engine.has_unfinished_requests():
        ended += engine.step_modern()["finished_request_records"]
    assert other.result().generated_tokens == expected[3]
    assert sorted(r.generated_tokens for r in ended) == sorted([*expected[:2], expected[3]])
    check_goes_on(engine, expected)


def test_readers_and_futures_that_fail_stop_nobody(engine, expected):
    """One reader raises, one is cancelled, a future is cancelled, and a callback raises.

    Break one of these, and it fails:

    - `RequestRegistry.end`: set the result of a future that is `cancelled()`
    - `notify_streams`: wait for a reader instead of waking it
    """
    reports: list[dict[str, Any]] = []

    async def read(stream: RequestStream, chunks: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in stream:
            tokens += chunk.tokens
            chunks -= 1
            if not chunks:
                raise MadeUpError
        return tokens

    def callback(future: asyncio.Future[Any]) -> None:
        raise MadeUpError

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, c: reports.append(c))
        futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(4)]
        raising = asyncio.create_task(read(engine.stream(0), 3))
        cancelled = asyncio.create_task(read(engine.stream(0), 99))
        patient = asyncio.create_task(read(engine.stream(0), 99))
        futures[1].cancel()
        futures[2].add_done_callback(callback)
        for step in range(500):
            if not engine.has_unfinished_requests():
                break
            await engine.async_step()
            await asyncio.sleep(0)
            if step == 6:
                cancelled.cancel()
        with pytest.raises(MadeUpError):
            await raising
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await patient == expected[0]
        assert futures[1].cancelled()
        for number in (0, 2, 3):
            assert futures[number].result().generated_tokens == expected[number]
        assert [type(context["exception"]) for context in reports] == [MadeUpError]

    asyncio.run(run())
    assert engine.stats()["finished_requests"] == 4
    check_goes_on(engine, expected)


def test_a_detokenizer_that_raises(engine: DynamicInferenceEngine, expected: list[list[int]]):
    """In the match of stop words it fails its request; in a stream, its reader; in
    `generated_text`, its reader. No step fails. Break `StepBooking._emit`: no `except` around
    `_finish_reason`."""

    class Faulty(Letters):
        """Cannot decode a certain token of each of the first three answers."""

        def detokenize(self, tokens: list[int]) -> str:
            if any(expected[number][5] in tokens for number in range(3)):
                raise MadeUpError
            return super().detokenize(tokens)

    engine.controller.tokenizer = Faulty()

    async def run() -> None:
        params = [greedy(TOKENS)] * 4
        params[0] = greedy(TOKENS, stop_words=["never"])
        futures = [engine.add_request(i, PROMPTS[i], params[i]) for i in range(4)]
        stream = engine.stream(1)
        while engine.has_unfinished_requests():
            await engine.async_step()
        matched, streamed, asked, _ = [future.result() for future in futures]
        assert matched.status == Status.FAILED
        assert isinstance(matched.error, MadeUpError)
        assert matched.generated_tokens == expected[0][: len(matched.generated_tokens)]
        with pytest.raises(MadeUpError):
            async for _chunk in stream:
                pass
        with pytest.raises(MadeUpError):
            asked.generated_text  # noqa: B018
        assert [r.generated_tokens for r in (streamed, asked)] == expected[1:3]

    asyncio.run(run())
    assert engine.stats()["failed_steps"] == 0
    assert engine.stats()["failed_requests"] == 1
    check_goes_on(engine, expected)


@pytest.mark.parametrize("interrupt", [MadeUpError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["pack", "launch", "deliver"])
def test_a_launch_that_raises_on_the_host(
    engine: DynamicInferenceEngine,
    expected: list[list[int]],
    place: str,
    interrupt: type[BaseException],
) -> None:
    """An error fails the step; what interrupts goes to the caller, and all requests are prefilled
    again. Break `StepLoop`'s `enqueue_failed_step`, or `Turn.__exit__`: the engine says "none
    can run" from then on."""
    owner, name = {
        "pack": (engine.context._staging, "pack"),
        "launch": (engine.controller, "enqueue_step"),
        "deliver": (engine.controller, "_deliver"),
    }[place]
    fail_call(owner, name, 4, interrupt("the fourth launch"))
    futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
    interrupted = 0
    while engine.has_unfinished_requests():
        try:
            engine.step_modern()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == (interrupt is KeyboardInterrupt)
    failed = [n for n, future in enumerate(futures) if future.result().error is not None]
    assert interrupted or 0 < len(failed) <= 2  # those of one step
    assert not (interrupted and failed)
    for number, future in enumerate(futures):
        request = future.result()
        if number in failed:
            assert isinstance(request.error, StepFailed)
            assert "the fourth launch" in str(request.error)
            wanted = expected[number][: request.generated_length]
            assert request.generated_tokens == wanted
        else:
            assert request.generated_tokens == expected[number]
    again = engine.generate(PROMPTS, greedy(TOKENS))
    assert [request.generated_tokens for request in again] == expected
    assert engine.stats()["failed_steps"] == 1 - interrupted
