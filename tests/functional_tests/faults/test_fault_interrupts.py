"""Ctrl-C, and what else is no error of a step: where it takes effect, and what it leaves."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.errors import RequestAborted, StepFailed
from megatron_async.interrupts import HeldInterrupts
from tests.support.attention_model import AttentionModel
from tests.support.bytecodes import AtBytecode, ctrl_c
from tests.support.harness import drain, fail_call, greedy, make_engine
from tests.support.interrupted import MOMENTS, PROMPTS, TOKENS, At, expected, model, right
from tests.support.patience import PATIENCE_S

__all__ = ["expected", "model"]
pytestmark = pytest.mark.usefixtures("usual_handler")
STRIDE = 97
"""One bytecode of a call's end is tried, then the one so many behind it."""


@pytest.fixture
def engine(model: AttentionModel, lookahead: int) -> Iterator[DynamicInferenceEngine]:
    made = make_engine(model, lookahead=lookahead, max_requests=4, max_sequence_length=64)
    yield made
    drain(made)


@pytest.mark.parametrize("moment", [*MOMENTS, "reporting"])
def test_ctrl_c_waits_for_the_end_of_a_turn(engine, expected, moment: str, monkeypatch):
    """All of a turn is done, and no report loses what it had. Break `_end_turn`: no `take_back`; or
    `step_modern`: keep a step's outputs in a local variable."""
    listener = At(moment, ctrl_c)
    engine.listeners.append(listener)
    if moment == "reporting":  # with the last tokens, and requests that have ended
        monkeypatch.setattr(engine.tracer, "collect", listener._at)
    listener._call = 2 if moment in ("added", "ended") else TOKENS
    futures, tokens, ended, interrupts = [], {}, [], 0
    for number, prompt in enumerate(PROMPTS):
        try:
            futures.append(engine.add_request(number, prompt, greedy(TOKENS)))
        except KeyboardInterrupt:
            interrupts += 1
            with pytest.raises(KeyError):
                engine.get_request(number)
            futures.append(engine.add_request(number, prompt, greedy(TOKENS)))
    while engine.has_unfinished_requests():
        try:
            report = engine.step_modern()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        ended += report["finished_request_records"]
        for output in report["outputs"]:
            for number, token in zip(output.token_request_ids, output.tokens, strict=True):
                tokens.setdefault(int(number), []).append(int(token))
    assert interrupts == listener.passed == 1
    assert [future.result().generated_tokens for future in futures] == expected
    assert [tokens[number] for number in range(len(PROMPTS))] == expected
    assert sorted(request.request_id for request in ended) == [0, 1, 2]


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_an_interrupted_generate_leaves(engine, expected, moment: str):
    """The call's requests are aborted, and are in nobody's reports; those of others go on. Break
    `_abandon`: no abort, or no `forget_ended`."""
    other = engine.add_request(77, PROMPTS[0], greedy(TOKENS))
    engine.listeners.append(At(moment, ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1:], greedy(TOKENS))
    assert len(engine.requests) == (0 if other.done() else 1)
    reported: list[int] = []
    found = engine.generate(
        PROMPTS, greedy(TOKENS),
        lambda report: reported.extend(r.request_id for r in report["finished_request_records"]),
    )  # fmt: skip
    assert [request.generated_tokens for request in found] == expected
    assert other.result().generated_tokens == expected[0]
    assert set(reported) - {77} == {request.request_id for request in found}


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_again_while_an_interrupted_generate_ends(
    engine: DynamicInferenceEngine,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    signals: int,
) -> None:
    """At any bytecode of that: all of its requests end all the same, and others go on. Of two
    signals the second takes effect at once. Break `generate`: call `_abandon` once."""
    abandon, number, tried = engine._abandon, 1, 0
    other = engine.add_request(77, PROMPTS[0], greedy(TOKENS))
    interrupted: AtBytecode | None = None

    def act() -> None:
        for _ in range(signals):
            ctrl_c()

    def traced(*arguments: Any) -> None:
        nonlocal interrupted
        if interrupted is not None:
            return abandon(*arguments)
        with AtBytecode(number, act) as interrupted:
            return abandon(*arguments)

    monkeypatch.setattr(engine, "_abandon", traced)
    while interrupted is None or interrupted.where is not None:
        interrupted = None
        engine.listeners.append(At("launched", ctrl_c, call=2))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, greedy(TOKENS))
        engine.listeners.pop()
        assert interrupted is not None
        number, tried = number + STRIDE, tried + 1
        assert len(engine.requests) == (77 in engine.requests), interrupted.where
        assert right(engine, expected), interrupted.where
    assert tried > 10
    found = other.result()
    assert found.generated_tokens == expected[0] or isinstance(found.error, StepFailed)


@pytest.mark.parametrize("error", [SystemExit, MemoryError, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_what_cuts_a_step_short_fails_its_requests_at_most(
    engine: DynamicInferenceEngine,
    expected: list[list[int]],
    moment: str,
    error: type[BaseException],
) -> None:
    """Break `Turn.__exit__`: no `_make_whole`."""

    def act() -> None:
        raise error(moment)

    engine.listeners.append(At(moment, act))
    futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
    with pytest.raises(error, match=moment):
        drain(engine)
    drain(engine)
    for future, tokens in zip(futures, expected, strict=True):
        request = future.result()
        assert request.error is None or isinstance(request.error, StepFailed)
        assert request.generated_tokens == tokens[: request.generated_length]
        assert request.error is not None or request.generated_length == TOKENS
    assert right(engine, expected)


def test_requests_that_fail_have_the_tokens_that_were_told(engine, expected, monkeypatch):
    """A step's tokens are stored and it is cut short before they count. Break `StepBooking.mend`:
    `num_known` stays as that step has left it."""
    find_ends, calls = engine.booking._find_ends, iter(range(100))

    def cut_short(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError("planted")
        return find_ends(*arguments)

    monkeypatch.setattr(engine.booking, "_find_ends", cut_short)
    futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
    told: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
    while engine.has_unfinished_requests():
        try:
            report = engine.step_modern()
        except MemoryError:
            continue
        for output in report["outputs"]:
            for number, token in zip(output.token_request_ids, output.tokens, strict=True):
                told[int(number)].append(int(token))
    failed = [future.result() for future in futures if future.result().error]
    assert failed
    assert all(0 < request.generated_length < TOKENS for request in failed)
    assert [future.result().generated_tokens for future in futures] == list(told.values())
    assert all(tokens == whole[: len(tokens)] for tokens, whole in zip(told.values(), expected))


def test_a_second_ctrl_c_takes_effect_at_once(engine, expected):
    """A step may never end. Break `HeldInterrupts._note`: note each signal."""
    listener = At("launching", lambda: [ctrl_c(), ctrl_c()])
    engine.listeners.append(listener)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, greedy(TOKENS))
    assert listener.passed == 0
    assert right(engine, expected)


def test_the_programs_own_handler_is_called(engine, expected):
    """Behind the turn, once for each signal, on the frame where the signal came. Break
    `HeldInterrupts.end`: do not call it."""
    events: list[str] = []
    signal.signal(signal.SIGINT, lambda number, frame: events.append(frame.f_code.co_name))
    try:
        engine.listeners.append(At("launching", ctrl_c))
        engine.listeners.append(At("launched", lambda: events.append("launched")))
        assert right(engine, expected)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert events == ["launched", "ctrl_c"]


def test_a_handler_of_an_event_loop_is_called(engine, expected):
    async def main() -> int:
        loop, calls = asyncio.get_running_loop(), 0

        def told() -> None:
            nonlocal calls
            calls += 1

        loop.add_signal_handler(signal.SIGINT, told)
        engine.listeners.append(At("booked", ctrl_c))
        futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
        while engine.has_unfinished_requests():
            await engine.async_step()
        await asyncio.sleep(0)
        loop.remove_signal_handler(signal.SIGINT)
        assert [future.result().generated_tokens for future in futures] == expected
        return calls

    assert asyncio.run(main()) == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_asyncio_cancels_its_main_task(engine, expected, moment: str):
    """`asyncio.run` has a handler of its own, which cancels the task."""
    engine.listeners.append(At(moment, ctrl_c))
    requests = []  # the futures are of an event loop that is closed then

    async def main() -> None:
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(number, prompt, greedy(TOKENS))
            requests.append(engine.get_request(number))
        await engine.run_engine()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    drain(engine)
    assert [request.generated_tokens for request in requests] == expected


def test_another_thread_holds_nothing(engine: DynamicInferenceEngine, expected: list[list[int]]):
    handlers, found = [], []
    engine.listeners.append(At("booked", lambda: handlers.append(signal.getsignal(signal.SIGINT))))
    thread = threading.Thread(target=lambda: found.append(right(engine, expected)))
    thread.start()
    thread.join()
    assert found == [True]
    assert handlers == [signal.default_int_handler]


def test_an_engine_within_another_one_s_turn(engine, model, expected):
    """The inner one's turn ends in the outer one's, at whose end Ctrl-C takes effect."""
    inner = make_engine(model, lookahead=1, max_sequence_length=64)
    inner.listeners.append(At("launching", ctrl_c))
    listener = At("booked", lambda: inner.generate(PROMPTS[:1], greedy(TOKENS)))
    engine.listeners.append(listener)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, greedy(TOKENS))
    assert listener.passed == 1
    assert right(engine, expected)


@pytest.mark.parametrize("stop", ["pause", "suspend", "suspend and free", "close"])
def test_a_stop_that_is_interrupted_may_be_repeated(model, expected, stop: str, monkeypatch):
    engine = make_engine(model, lookahead=2, max_requests=4, max_sequence_length=64)
    calls = {
        "pause": engine.pause,
        "suspend": engine.suspend,
        "suspend and free": lambda: engine.suspend(True),
        "close": engine.close,
    }
    futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
    for _ in range(3):
        engine.step_modern()
    fail_call(engine.group, "wait", 2, KeyboardInterrupt)
    if stop == "close":
        monkeypatch.setattr(engine.grammars, "close", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        calls[stop]()
    monkeypatch.undo()
    calls[stop]()
    if stop == "close":
        assert all(isinstance(future.result().error, RequestAborted) for future in futures)
        return
    engine.unpause()
    engine.resume()
    drain(engine)
    assert [future.result().generated_tokens for future in futures] == expected


def test_a_loop_that_is_cancelled_at_any_await_begins_again(engine, expected):
    """Steps in flight of requests that are gone are resolved by the next `run_engine`. Break that:
    wait for requests first."""

    async def main() -> None:
        for turns in range(40):
            runner = asyncio.create_task(engine.run_engine())
            futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
            for _ in range(turns):
                await asyncio.sleep(0)
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
            for number, future in enumerate(futures):
                if not future.done():
                    engine.abort_request(number)
            for _ in range(turns % 4):  # loops that find steps in flight, and no request
                runner = asyncio.create_task(engine.run_engine())
                for _ in range(turns % 3):
                    await asyncio.sleep(0)
                runner.cancel()
                await asyncio.gather(runner, return_exceptions=True)
            runner = asyncio.create_task(engine.run_engine())
            while engine.has_unfinished_requests():
                await asyncio.sleep(0)
            step = asyncio.create_task(engine.async_step())  # another's, beside an idle loop
            futures = [engine.add_request(n, p, greedy(TOKENS)) for n, p in enumerate(PROMPTS)]
            for _ in range(turns % 5):
                await asyncio.sleep(0)
            step.cancel()
            for number in (0, 2):
                if not futures[number].done():
                    engine.abort_request(number)
            assert (await futures[1]).generated_tokens == expected[1]
            while engine.has_unfinished_requests():
                await asyncio.sleep(0)
            runner.cancel()
            await asyncio.gather(runner, step, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_holds_interrupts_too() -> None:
    """A child's main thread is the thread that has forked. Break it: no `register_at_fork`."""
    codes = []

    def fork() -> None:
        child, code = os.fork(), 1
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return
        try:
            with HeldInterrupts():
                ctrl_c()
                code = 2
        except KeyboardInterrupt:
            code -= 2
        finally:
            os._exit(abs(code))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert codes == [0]
