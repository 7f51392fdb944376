"""A client's books of a request: what comes again is compared and not told twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import RequestEnd, TokenLogProbs, TokenReader


class Told(TokenReader):
    """Keeps what a reader is told."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        chosen = None if log_probs is None else log_probs.chosen.tolist()
        self.all.append((tokens.tolist(), chosen))

    def text(self, text: str) -> None:
        self.all.append(text)

    def ended(self, end: RequestEnd) -> None:
        self.all.append(end.finish_reason)
        self.failure = end.failure


def tell(request: TokenReader, *tokens: int, asks: bool = False) -> bool:
    data = np.array(tokens, np.int32)
    log_probs = TokenLogProbs(data.astype(np.float32)) if asks else None
    return request.hear_tokens(memoryview(data), log_probs)


def failure_of(request: Told, ended: Ended) -> tuple[str, str] | None:
    request.hear_end(ended)
    return request.failure


def test_what_comes_again_is_told_once() -> None:
    request = Told()
    assert tell(request, 1, 2, 3, asks=True)
    request.hear_text("one two")
    for first in ((1,), (1, 2)):
        request.again()
        assert tell(request, *first, asks=True)
    request.hear_text("one ")
    assert tell(request, 3, 4, 5, asks=True)
    request.hear_text("two three")
    assert tell(request, 6, asks=True)
    assert failure_of(request, Ended(0, "length", text=" four")) is None
    expected = [([1, 2, 3], [1.0, 2.0, 3.0]), "one two", ([4, 5], [4.0, 5.0]), " three"]
    assert request.all == [*expected, ([6], [6.0]), " four", "length"]
    assert np.frombuffer(request.generated, np.int32).tolist() == [1, 2, 3, 4, 5, 6]


def test_other_tokens_and_an_early_end_contradict() -> None:
    for tokens in ((9,), (1, 9), (1, 2, 9, 4)):
        request = Told()
        tell(request, 1, 2, 3)
        request.again()
        assert not tell(request, *tokens)
    request = Told()
    tell(request, 1, 2, 3)
    request.again()
    assert tell(request, 1, 2)
    assert failure_of(request, Ended(0, "length")) == ("ReplicaLost", request.why_lost())
    gone = ("ReplicaLost", "gone")
    assert failure_of(request, Ended(0, "error", gone)) == gone
    assert tell(request, 3)
    assert failure_of(request, Ended(0, "length")) is None


def test_nothing_delivered_contradicts_nothing() -> None:
    request = Told()
    request.again()
    assert failure_of(request, Ended(0, "length")) is None
    assert tell(request, 5)
