"""A client's books of a request: what comes again is compared and not told twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import RequestEnd, TokenLogProbs
from megatron_async.serving.sent_requests import SentRequest


class Told:
    """Keeps what a reader is told."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        chosen = None if log_probs is None else log_probs.chosen.tolist()
        self.all.append((tokens.tolist(), chosen))

    def text(self, text: str) -> None:
        self.all.append(text)

    def ended(self, end: RequestEnd) -> None:
        self.all.append(end.finish_reason)


def tell(request: SentRequest, *tokens: int, asks: bool = False) -> bool:
    data = np.array(tokens, np.int32)
    log_probs = TokenLogProbs(data.astype(np.float32)) if asks else None
    return request.tokens(memoryview(data), log_probs)


def test_what_comes_again_is_told_once() -> None:
    told = Told()
    request = SentRequest(told, 0)
    assert tell(request, 1, 2, 3, asks=True)
    request.text("one two")
    for first in ((1,), (1, 2)):
        request.again()
        assert tell(request, *first, asks=True)
    request.text("one ")
    assert tell(request, 3, 4, 5, asks=True)
    request.text("two three")
    assert tell(request, 6, asks=True)
    assert not request.contradicts(Ended(0, "length"))
    request.ended(Ended(0, "length", text=" four"))
    expected = [([1, 2, 3], [1.0, 2.0, 3.0]), "one two", ([4, 5], [4.0, 5.0]), " three"]
    assert told.all == [*expected, ([6], [6.0]), " four", "length"]
    assert np.frombuffer(request.generated, np.int32).tolist() == [1, 2, 3, 4, 5, 6]


def test_other_tokens_and_an_early_end_contradict() -> None:
    for tokens in ((9,), (1, 9), (1, 2, 9, 4)):
        request = SentRequest(Told(), 0)
        tell(request, 1, 2, 3)
        request.again()
        assert not tell(request, *tokens)
    request = SentRequest(Told(), 0)
    tell(request, 1, 2, 3)
    request.again()
    assert tell(request, 1, 2)
    assert request.contradicts(Ended(0, "length"))
    assert not request.contradicts(Ended(0, "error", ("ReplicaLost", "gone")))
    assert tell(request, 3)
    assert not request.contradicts(Ended(0, "length"))


def test_nothing_delivered_contradicts_nothing() -> None:
    request = SentRequest(Told(), 0)
    request.again()
    assert not request.contradicts(Ended(0, "length"))
    assert tell(request, 5)
