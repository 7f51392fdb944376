"""`TokenReader`, to which a client gives the tokens of its requests, its arguments and errors; and
`RequestClient`, the client as an HTTP process sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_async import errors
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import Ended
from megatron_async.serving.model_card import ModelCard


class RemoteError(RuntimeError):
    """A request failed on a replica with an exception that has no class here; the message begins
    with its name."""


def exception_of(kind: str, message: str) -> Exception:
    """The exception of a failure.

    Args:
        kind: name of its class.
        message: its text.
    """
    known = ValueError if kind == "ValueError" else getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known(message)
    return RemoteError(f"{kind}: {message}")


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log probs of some tokens of a request.

    Attributes:
        chosen: float32 `[n]`, of the tokens themselves.
        top_ids: int32 `[n, k]`: the likeliest tokens at each place, likeliest first; None if they
            were not asked for.
        top: float32 `[n, k]`, their log probs; -inf where filters left fewer.
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    top: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, words: NDArray[np.int32], top_n: int, wanted: int) -> TokenLogProbs:
        """Make log probs of words as they travel.

        Args:
            words: int32 `[n, 1 + 2 * top_n]`; see `messages.LogProbRows`.
            top_n: alternatives that are there.
            wanted: of these, how many the request asked for.
        """
        floats = words.view(np.float32)
        if not wanted:
            return cls(floats[:, 0])
        return cls(
            floats[:, 0], words[:, 1 : 1 + wanted], floats[:, 1 + top_n : 1 + top_n + wanted]
        )

    def __getitem__(self, places: slice) -> TokenLogProbs:
        if self.top_ids is None or self.top is None:
            return TokenLogProbs(self.chosen[places])
        return TokenLogProbs(self.chosen[places], self.top_ids[places], self.top[places])


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended; the fields are those of `messages.Ended`.

    Attributes:
        prompt_tokens: int32 `[n]` where the prompt was a text and a replica had it, else None.
        prompt_log_probs: of the prompt's tokens but the first; None if they were not asked for.
    """

    finish_reason: str | None
    failure: tuple[str, str] | None = None
    stop_words_from: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    num_generated_tokens: int = 0
    prompt_tokens: NDArray[np.int32] | None = None
    prompt_log_probs: TokenLogProbs | None = None
    ttft: float | None = None
    latency: float | None = None
    queue_s: float | None = None
    replica: str = ""
    attempts: int = 0
    record: bytes | None = None
    stop_word: str | None = None

    @property
    def error(self) -> Exception | None:
        """Why it failed, as an exception of `megatron_async.errors` where there is one."""
        return None if self.failure is None else exception_of(*self.failure)

    @classmethod
    def of(cls, ended: Ended) -> RequestEnd:
        """Make an end of the message that tells it."""
        prompt, log_probs = ended.prompt_tokens, None
        if (found := ended.prompt_log_probs) is not None:
            words = np.frombuffer(found.words, np.int32).reshape(-1, 1 + 2 * found.top_n)
            log_probs = TokenLogProbs.of(words, found.top_n, found.top_n)
        return cls(
            ended.finish_reason,
            ended.failure,
            ended.stop_words_from,
            ended.num_prompt_tokens,
            ended.num_cached_tokens,
            ended.num_generated_tokens,
            None if prompt is None else np.frombuffer(prompt, np.int32),
            log_probs,
            ended.ttft,
            ended.latency,
            ended.queue_s,
            ended.replica,
            ended.attempts,
            ended.record,
            ended.stop_word,
        )


class TokenReader(Protocol):
    """Called on the client's event loop with the tokens, texts and end of one request. It must
    neither block nor await. An exception that it raises fails only this request."""

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        """New tokens.

        Args:
            tokens: int32 (format "i") `[n]`, n > 0: a view of a message; copy it to keep it. It is
                no array, because for one token a view takes a third of the time.
            log_probs: of the tokens; None if they were not asked for.
        """

    def text(self, text: str) -> None:
        """New text, after its tokens; only if the replica makes texts."""

    def ended(self, end: RequestEnd) -> None:
        """The request has ended; no further call follows."""


class RequestClient(Protocol):
    """Implemented by `TokenClient` and `FleetClient`."""

    def send(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams,
        reader: TokenReader,
        priority: int = 0,
        owner: str = "",
        label: str = "",
        traceparent: str = "",
    ) -> int:
        """Send one request; see `TokenClient.send`."""

    def abort(self, number: int) -> None:
        """End a request that `send` returned; one that has ended stays as it is."""

    async def card(self) -> ModelCard:
        """The card of the served model; waits for the first replica."""

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask something of the service, or tell it what to do; ValueError: it cannot do that."""
