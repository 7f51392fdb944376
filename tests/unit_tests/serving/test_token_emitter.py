"""What a replica's emitter tells, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_async.planning.step_output import StepOutput
from megatron_async.serving import token_emitter
from megatron_async.serving.messages import Ended, StepTokens
from megatron_async.serving.step_arrays import by_row
from megatron_async.serving.token_emitter import FEW, TokenEmitter

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
    """Of request 0."""
    return of_request(message, 0)


def of_request(message: StepTokens, number: int) -> list[int]:
    """Its tokens, in their order."""
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
    """They wait for no turn of the loop, but with an end, which comes in the next turn.

    Break it: `_send_soon` for all of them.
    """

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
    """Who reads the message pays for each row.

    Break it: `_are_one_each` returns False; or `by_row` makes the table without its `.T`.
    """

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
