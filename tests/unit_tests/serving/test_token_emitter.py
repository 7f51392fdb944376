"""What a replica's emitter tells and when, to readers of tokens and of steps."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.observe.timeline import MOST_SPANS, STEPS, Span, StepWindow, Timeline
from megatron_async.planning.step_output import StepOutput
from megatron_async.serving import engine_verbs, token_emitter
from megatron_async.serving.engine_verbs import StepWatch
from megatron_async.serving.messages import Ended, LogProbRows, StepTokens
from megatron_async.serving.step_arrays import StepArrays, by_row
from megatron_async.serving.token_emitter import FEW, TokenEmitter
from megatron_async.serving.token_routes import SMALLEST, TokenRoutes

NONE = np.empty(0, np.int64)
MANY = FEW + 1
Scene = Callable[[TokenEmitter, list[StepTokens]], Coroutine[Any, Any, None]]


def output(token: int, rows: int = MANY, first: int = -1) -> StepOutput:
    """Every row yields `token`; row `first` its first."""
    every = np.arange(rows)
    return StepOutput(
        step=token, slots=every, request_ids=every, tokens=np.full(rows, token, np.int32),
        rows=every, is_first=every == first, stopped=every < 0, ended=every < 0,
        failed_slots=NONE, zombie_rows=0,
    )  # fmt: skip


def tokens(message: StepTokens) -> list[int]:
    """Tokens of request 0."""
    return of_request(message, 0)


def of_request(message: StepTokens, number: int) -> list[int]:
    """A request's tokens, in their order."""
    message = by_row(message)
    counts = np.frombuffer(message.counts, np.int32)
    owners = np.repeat(np.frombuffer(message.numbers, np.int64), counts)
    return np.frombuffer(message.tokens, np.int32)[owners == number].tolist()


def play(scene: Scene, monkeypatch: Any) -> list[list[int]]:
    """Play a scene in which a message is due every 0.2 s; row 0's tokens of each message."""
    monkeypatch.setattr(token_emitter, "EVERY_S", 0.2)
    sent: list[StepTokens] = []

    async def main() -> None:
        emitter = TokenEmitter(sent.append)
        emitter.booked(output(0))
        await turn()
        assert len(sent) == 1, "nothing was told before: the first step is told at once"
        await scene(emitter, sent)

    asyncio.run(main())
    return [tokens(message) for message in sent]


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_steps_in_quick_succession_share_a_message(monkeypatch: Any) -> None:
    async def scene(emitter: TokenEmitter, sent: list[StepTokens]) -> None:
        for token in (1, 2, 3):
            emitter.booked(output(token))
            await turn()
        assert len(sent) == 1
        await asyncio.sleep(0.3)
        assert len(sent) == 2
        await asyncio.sleep(0.2)
        emitter.booked(output(4))  # nothing was told for so long
        await turn()
        assert len(sent) == 3

    assert play(scene, monkeypatch) == [[0], [1, 2, 3], [4]]


def test_few_tokens_and_first_ones_are_told_at_once(monkeypatch: Any) -> None:
    async def scene(emitter: TokenEmitter, _sent: list[StepTokens]) -> None:
        emitter.booked(output(1, rows=FEW))
        await turn()
        emitter.booked(output(2))
        await turn()
        emitter.booked(output(3, first=7))
        await turn()
        await asyncio.sleep(0.3)  # and the timer tells nothing twice

    assert play(scene, monkeypatch) == [[0], [1], [2, 3]]


def test_an_end_comes_at_once_behind_its_tokens(monkeypatch: Any) -> None:
    async def scene(emitter: TokenEmitter, sent: list[StepTokens]) -> None:
        emitter.booked(output(1))
        await turn()
        emitter.booked(output(2))
        emitter.end(Ended(0, "length"))
        await turn()
        assert [ended.number for ended in sent[-1].ends] == [0]
        assert not sent[0].ends
        emitter.end(Ended(1, "length"))  # an end alone
        await turn()
        assert [ended.number for ended in sent[-1].ends] == [1]

    assert play(scene, monkeypatch) == [[0], [1, 2], []]


def test_what_is_flushed_or_forgotten_does_not_come_later(monkeypatch: Any) -> None:
    async def scene(emitter: TokenEmitter, _sent: list[StepTokens]) -> None:
        emitter.booked(output(1))
        emitter.flush()
        emitter.booked(output(2))
        emitter.forget()
        await asyncio.sleep(0.3)

    assert play(scene, monkeypatch) == [[0], [1]]


def test_first_tokens_leave_before_the_step_is_over(monkeypatch: Any) -> None:
    """First tokens wait for no turn of the loop, but with an end, which comes in the next turn.
    Break it: `_send_soon` for all of them."""

    async def scene(emitter: TokenEmitter, sent: list[StepTokens]) -> None:
        emitter.booked(output(1, first=0))
        assert len(sent) == 2
        ended = replace(output(2, first=1), ended=np.arange(MANY) == 3)
        emitter.booked(ended)
        assert len(sent) == 2
        emitter.end(Ended(3, "length"))
        await turn()
        assert [end.number for end in sent[2].ends] == [3]

    assert play(scene, monkeypatch) == [[0], [1], [2]]


def test_steps_of_the_same_requests_are_rows_of_several_tokens(monkeypatch: Any) -> None:
    """Each row of a message costs its reader time. Break it: `_are_one_each` returns False; or
    `by_row` makes the table without its `.T`."""

    async def scene(emitter: TokenEmitter, sent: list[StepTokens]) -> None:
        for step in (1, 2, 3):
            tokens_ = np.arange(MANY, dtype=np.int32) + 100 * step
            emitter.booked(replace(output(step), tokens=tokens_))
        emitter.flush()
        assert len(sent[1].numbers) == 8 * MANY
        assert len(by_row(sent[1]).counts) == 4 * MANY
        assert [of_request(sent[1], 5), of_request(sent[1], MANY - 1)] == [
            [105, 205, 305],
            [100 * step + MANY - 1 for step in (1, 2, 3)],
        ]
        emitter.booked(output(4))
        emitter.booked(output(5, rows=MANY + 1))  # another request has joined
        emitter.flush()
        assert len(sent[2].numbers) == 8 * (2 * MANY + 1)
        assert of_request(sent[2], 0) == [4, 5]
        assert of_request(sent[2], MANY) == [5]

    play(scene, monkeypatch)


@pytest.fixture(scope="module", params=[0, 1, 2], ids="lookahead {}".format)
def engine(request: pytest.FixtureRequest) -> Iterator[DynamicInferenceEngine]:
    sizes = {"num_kv_blocks": 32, "block_size_tokens": 16}
    with LLM("dummy:tiny", device="cpu", **sizes, lookahead=request.param) as llm:
        yield llm.engine


def run(engine: DynamicInferenceEngine, tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=-1)
    return engine.generate([[1, 2, 3]], params)[0].generated_tokens


def test_a_window_has_its_steps_and_ends(engine: DynamicInferenceEngine) -> None:
    expected = run(engine, 40)

    async def watched() -> tuple[dict, dict]:
        watch = StepWatch(engine)
        first = watch.look()
        assert isinstance(engine.tracer.timeline, StepWindow)
        assert run(engine, 40) == expected  # more steps than a window has
        assert engine.tracer.timeline is None  # nobody has looked meanwhile
        return first, watch.look()

    first, second = asyncio.run(watched())
    assert first["spans"] == []
    assert second["steps"] - first["steps"] == 40
    assert second["generated_tokens"] - first["generated_tokens"] == 40
    assert second["lookahead"] == engine.lookahead
    of_device = [step for lane, name, step, _, _ in second["spans"] if lane == 1]
    assert STEPS - engine.lookahead <= len(set(of_device)) <= STEPS + 1
    assert of_device[0] == first["steps"]
    assert min(start for _, _, _, start, _ in second["spans"]) == 0
    assert all(length >= 0 for *_, length in second["spans"])
    names = {name for lane, name, *_ in second["spans"] if lane == 0}
    assert {"prepare_step", "launch_step", "resolve", "update_requests", "emit"} <= names
    told = dict(second["reasons"])
    assert told[first["steps"]] == "after_idle"
    if engine.lookahead == 0:
        assert set(told.values()) == {"after_idle", "serial"}
        assert len(told) == len(set(of_device))
    else:
        assert len(told) == 1


def test_who_goes_away_costs_nothing_any_more(engine: DynamicInferenceEngine, monkeypatch):
    monkeypatch.setattr(engine_verbs, "LEASE_S", 0.05)

    async def watched() -> None:
        StepWatch(engine).look()
        assert engine.tracer.timeline is not None
        await asyncio.sleep(0.2)  # an idle engine has no steps that would end the window

    asyncio.run(watched())
    assert engine.tracer.timeline is None


def test_a_profile_under_way_is_looked_at_and_left_alone(engine: DynamicInferenceEngine) -> None:
    async def watched() -> dict:
        profile = engine.tracer.timeline = Timeline()
        watch = StepWatch(engine)
        run(engine, 4)
        told = watch.look()
        assert engine.tracer.timeline is profile
        engine.tracer.timeline = None
        return told

    assert len([1 for lane, *_ in asyncio.run(watched())["spans"] if lane == 1]) == 4


def test_a_window_keeps_no_more_than_it_may() -> None:
    ended = []
    window = StepWindow(lambda: ended.append(1))
    for step in range(MOST_SPANS + 5):
        window.add(Span("cpu", "resolve", step, 0.0, 1.0))
    assert (len(window.spans), window.dropped) == (MOST_SPANS, 5)
    for step in range(STEPS):
        assert not ended
        window.add(Span("cpu", "step", step, 0.0, 1.0))
    assert ended == [1]


HERE, THERE = 3, 4
"""Replicas."""


def routes(clients: list[int], replicas: list[int]) -> TokenRoutes:
    """Requests 0, 1, ... of these clients, at these replicas; clients call them 100, 101, ..."""
    made = TokenRoutes()
    for place, (client, replica) in enumerate(zip(clients, replicas, strict=True)):
        made.give(made.add(client, 100 + place), replica)
    return made


def step(numbers: list[int], counts: list[int]) -> StepTokens:
    tokens = np.arange(sum(counts), dtype=np.int32)
    return StepTokens(
        np.array(numbers, np.int64).tobytes(), np.array(counts, np.int32).tobytes(),
        tokens.tobytes(),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.sampled_from([HERE, THERE])), min_size=1, max_size=4),
    st.data(),
)
def test_it_agrees_with_split(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    """Break it: `whole` that does not look at clients, at the replica, or at numbers."""
    made = [routes([c for c, _ in requests], [r for _, r in requests]) for _ in range(2)]
    rows = data.draw(st.lists(st.integers(0, len(requests)), min_size=1, max_size=4, unique=True))
    count = data.draw(st.integers(0, 2))
    message = step(rows, [count] * len(rows))
    found = made[0].whole(HERE, message)
    parts = dict(made[1].split(HERE, StepArrays.of(message)))
    is_usual = count and rows[-1] < len(requests) and max(rows) < len(requests)
    is_usual = is_usual and {requests[row] for row in rows} in ({(1, HERE)}, {(2, HERE)})
    assert (found is not None) == bool(is_usual)
    if found is not None:
        assert dict([found]) == parts
        assert (made[0].started == made[1].started).all()
    else:
        assert not made[0].started.any()


@pytest.mark.parametrize(
    "broken",
    [
        StepTokens(),
        StepTokens(bytes(8), bytes([1, 0, 0, 0]), b""),
        StepTokens(bytes(7), bytes([1, 0, 0, 0]), bytes(4)),
        StepTokens(bytes(8), bytes([1, 0, 0]), bytes(4)),
        StepTokens(bytes(8), bytes([255, 255, 255, 255]), bytes(4)),
        StepTokens(bytes(8), bytes([2, 0, 0, 0]), bytes(4)),
        StepTokens(bytes(8), bytes([1, 0, 0, 0]) * 2, bytes(4)),
        StepTokens(bytes(8), bytes([1, 0, 0, 0]), bytes(4), LogProbRows(b"", 0, b"")),
    ],
)
def test_it_takes_nothing_that_does_not_fit(broken: StepTokens) -> None:
    assert routes([1], [HERE]).whole(HERE, broken) is None


def test_a_number_at_the_place_of_another_is_nobodys() -> None:
    """Break it: `whole` that does not compare numbers."""
    assert routes([1], [HERE]).whole(HERE, step([SMALLEST], [1])) is None


def test_steps_of_the_same_requests_become_rows() -> None:
    """Break it: `by_row` without `.T`."""
    numbers, tokens = np.array([5, 6], np.int64), np.array([1, 10, 2, 20, 3, 30], np.int32)
    end = Ended(5, "length")
    told = by_row(StepTokens(numbers.tobytes(), b"", tokens.tobytes(), None, [], [end], 3))
    arrays = StepArrays.of(told)
    assert arrays.numbers.tolist() == [5, 6]
    assert arrays.counts.tolist() == [3, 3]
    assert arrays.tokens.tolist() == [1, 2, 3, 10, 20, 30]
    assert told.ends == [end]


@pytest.mark.parametrize(
    ("numbers", "size", "steps"),
    [(b"", 0, 1), (b"", 0, 2**31 - 1), (bytes(8), 4, 2), (bytes(9), 4, 1), (bytes(16), 12, 2)],
)
def test_steps_that_do_not_fit_are_no_steps(numbers: bytes, size: int, steps: int) -> None:
    """A replica that tells them is lost, as with other arrays that do not fit."""
    with pytest.raises(ValueError, match="do not fit together"):
        by_row(StepTokens(numbers, b"", bytes(size), steps=steps))
