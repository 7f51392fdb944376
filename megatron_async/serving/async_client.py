"""`AsyncCoordinatorClient`: send requests to a coordinator's replicas, on an asyncio loop;
`RemoteRequest`: a request that was sent, for `await` and `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, override

import msgspec
import numpy as np

from megatron_async.errors import CoordinatorLost, RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import Ended, Span, exception_of
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.readers import TokenLogProbs, TokenReader, prompt_log_probs_of
from megatron_async.serving.token_client import TokenClient, check_request, request_message
from megatron_async.text.token_text import TokenText

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended; the fields are those of `DynamicInferenceRequest`.

    Attributes:
        failure: kind (name of an exception) and message, or None.
        replica: name of the replica that served it last; "" if none did.
        attempts: number of replicas that it was given to.
        weight_versions, kv_versions: spans; see `Ended`.
    """

    prompt_tokens: list[int] = []
    generated_tokens: list[int] = []
    generated_text: str | None = None
    finish_reason: str | None = None
    generated_log_probs: list[float] | None = None
    prompt_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    num_cached_tokens: int | None = None
    ttft: float | None = None
    latency: float | None = None
    failure: tuple[str, str] | None = None
    replica: str = ""
    attempts: int = 0
    weight_versions: list[Span] | None = None
    kv_versions: list[Span] | None = None

    @property
    def error(self) -> Exception | None:
        """Why it failed, as an exception of `megatron_async.errors` where there is one."""
        return None if self.failure is None else exception_of(*self.failure)


class TokenChunk(msgspec.Struct, frozen=True):
    """New token ids of a request, and new text that later tokens cannot change (None without
    a tokenizer)."""

    tokens: list[int]
    text: str | None


class RemoteRequest(TokenReader, AsyncIterator[TokenChunk]):
    """A request that was sent: `await request.completion()`, and, before that, `async for chunk in
    request`. A slow reader gets larger chunks. The tokenizer is None if the model has none, or if
    the replica makes the texts (`makes_text`)."""

    def __init__(
        self, prompt: str | list[int], params: SamplingParams, tokenizer: Any, makes_text: bool
    ) -> None:
        super().__init__()
        self._prompt = prompt
        self._params = params
        self._tokenizer = tokenizer
        self._text: TokenText | None = None
        if tokenizer is not None:
            self._text = TokenText(tokenizer, params, prompt)
        self._texts: list[str] | None = [] if makes_text else None
        """Texts of the replica that no chunk has returned yet."""
        self._log_probs: list[TokenLogProbs] = []
        self._num_read = 0
        self._sent: list[str] = []
        self._news = asyncio.Event()
        self._end: Ended | None = None
        self._completion: Completion | None = None

    # ---- What the client tells ---------------------------------------------------------------

    @override
    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        if log_probs is not None:
            self._log_probs.append(log_probs)
        self._news.set()

    @override
    def text(self, text: str) -> None:
        if self._texts is not None:
            self._texts.append(text)
        self._news.set()

    @override
    def ended(self, end: Ended) -> None:
        self._end = end
        self._news.set()

    # ---- What readers ask --------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no further tokens or text will come."""
        return self._end is not None

    async def completion(self) -> Completion:
        """How it ended; `error` says why it failed.

        Raises:
            CoordinatorLost: the coordinator was lost before the request ended.
        """
        while self._end is None:
            await self._wait()
        if self._end.failure is not None and self._end.failure[0] == CoordinatorLost.__name__:
            raise CoordinatorLost(self._end.failure[1])
        if self._completion is None:
            self._take()
            self._completion = self._complete(self._end)
        return self._completion

    async def __anext__(self) -> TokenChunk:
        while True:
            chunk = self._take()
            if chunk.tokens or chunk.text:
                return chunk
            if self._end is not None:
                error = (await self.completion()).error
                if error is not None:
                    raise error
                raise StopAsyncIteration
            await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _take(self) -> TokenChunk:
        """All that is there and no chunk has had."""
        tokens = self._tokens_from(self._num_read)
        self._num_read += len(tokens)
        if self._texts is not None:
            text: str | None = "".join(self._texts)
            self._texts.clear()
        elif self._text is not None:
            text = self._text.push(tokens)
            if self._end is not None:
                text += self._text.end(self._end.finish_reason, self._end.stop_words_from)
        else:
            text = None
        if text:
            self._sent.append(text)
        return TokenChunk(tokens, text)

    def _tokens_from(self, first: int) -> list[int]:
        return memoryview(self.generated).cast("i")[first:].tolist()

    def _complete(self, end: Ended) -> Completion:
        prompt = end.prompt_tokens
        top_n, asked = self._params.top_n_logprobs, self._params.return_log_probs
        of_prompt = prompt_log_probs_of(end)
        has_text = self._texts is not None or self._text is not None
        given = [] if isinstance(self._prompt, str) else self._prompt
        values = [value for part in self._log_probs for value in part.chosen.tolist()]
        return Completion(
            prompt_tokens=given if prompt is None else memoryview(prompt).cast("i").tolist(),
            generated_tokens=self._tokens_from(0),
            generated_text="".join(self._sent) if has_text else None,
            finish_reason=end.finish_reason,
            generated_log_probs=values if asked else None,
            prompt_log_probs=None if of_prompt is None else of_prompt.chosen.tolist(),
            generated_top_n_logprobs=self._by_text(self._log_probs) if asked and top_n else None,
            prompt_top_n_logprobs=None if of_prompt is None else self._by_text([of_prompt]),
            num_cached_tokens=end.num_cached_tokens,
            ttft=end.ttft,
            latency=end.latency,
            failure=end.failure,
            replica=end.replica,
            attempts=end.attempts,
            weight_versions=end.weight_versions,
            kv_versions=end.kv_versions,
        )

    def _by_text(self, parts: Sequence[TokenLogProbs]) -> list[dict[str, float]] | None:
        """At each token the likeliest ones by text, or by id where the client has no tokenizer."""
        places: list[dict[str, float]] = []
        for part in parts:
            if part.top_ids is None or part.top is None:
                return None
            for ids, values in zip(part.top_ids.tolist(), part.top.tolist(), strict=True):
                places.append({})
                for token, value in zip(ids, values, strict=True):
                    if value > -np.inf:  # filters may leave fewer
                        places[-1].setdefault(self._name(token), value)
        return places

    def _name(self, token: int) -> str:
        return str(token) if self._tokenizer is None else self._tokenizer.detokenize([token])


class AsyncCoordinatorClient(TokenClient):
    """Sends requests to a coordinator; use it with `async with`.

    When the coordinator is lost, unfinished requests fail with `CoordinatorLost`; the next call
    connects again. Arguments and attributes are those of `TokenClient`.
    """

    async def __aenter__(self) -> AsyncCoordinatorClient:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        traceparent: str = "",
    ) -> RemoteRequest:
        """Send one request.

        Args:
            prompt: text or token ids.
            sampling_params: defaults when None.
            priority: requests of higher priority go first.
            traceparent: of a trace; see `TokenClient.send`.

        Raises:
            CoordinatorLost: there is none.
            ReplicaLost: it has no replica, and none came within `replica_timeout_s`.
            RequestError: a value of the request cannot be sent.
        """
        params = sampling_params or SamplingParams()
        given = prompt if isinstance(prompt, str) else _token_ids(prompt)
        message = request_message(given, params, priority, traceparent=traceparent)
        check_request(message)
        await self._first_replica.wait(self.stats)
        card = await self.card()
        reader = RemoteRequest(given, params, await self._text_of(card), card.replica_makes_text)
        await self._open()
        self._send(message, params, reader)
        return reader

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        raise_on_failure: bool = True,
    ) -> list[Completion]:
        """Generate for one prompt or many, all at once.

        Args:
            prompts: a text, a list of token ids, or a list of those.
            sampling_params: for all prompts, or one for each.
            raise_on_failure: raise when a request fails, and abort the others. False: the others
                are not affected, and a completion that failed has its `error`.

        Returns:
            a completion for each prompt, in order.

        Raises:
            CoordinatorLost: there is none, or it died.
            ReplicaLost: it has no replica, and none came within `replica_timeout_s`.
            Exception: the error of the first failed request, in order of prompts; not with
                `raise_on_failure=False`.
        """
        batch = [prompts] if is_one_prompt(prompts) else list(prompts)
        if isinstance(sampling_params, Sequence):
            each: Sequence[SamplingParams | None] = sampling_params
        else:
            each = [sampling_params] * len(batch)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(each)} sampling_params were given for {len(batch)} prompts: give one for "
                "all, or one for each."
            )
        requests: list[RemoteRequest] = []
        try:
            for prompt, params in zip(batch, each, strict=True):
                requests.append(await self.submit(prompt, params))
            completions = []
            for number, request in enumerate(requests):
                completions.append(await request.completion())
                error = completions[-1].error
                if error is not None and raise_on_failure:
                    if len(requests) > 1:
                        error.add_note(
                            f"This was prompt {number} of {len(requests)}; with "
                            "raise_on_failure=False the others go on, and it has an `error`."
                        )
                    raise error
            return completions
        except BaseException:
            for request in requests:
                self.abort(request)
            raise

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> AsyncIterator[TokenChunk]:
        """The tokens and text of one request while they are made. To stop reading (`aclose`) aborts
        the request.

        Raises:
            CoordinatorLost, and the error of the request, after the last chunk.
        """
        request = await self.submit(prompt, sampling_params, priority)
        try:
            async for chunk in request:
                yield chunk
        finally:
            self.abort(request)

    async def _text_of(self, card: ModelCard) -> Any:
        """The tokenizer of a card, read once."""
        if self._tokenizer is None or self._tokenizer[0] != card.digest:
            self._tokenizer = card.digest, await asyncio.to_thread(card.tokenizer)
        return self._tokenizer[1]

    async def pause_replica(self, name: str) -> None:
        """Stop a replica's engine until `resume_replica`; its requests wait.

        Raises:
            ValueError: there is no replica of that name, it is leaving, or other replicas need its
                experts.
        """
        await self._ask("pause", name)

    async def drain_replica(self, name: str) -> None:
        """Send a replica no further requests until `resume_replica`; it finishes its own."""
        await self._ask("drain", name)

    async def resume_replica(self, name: str) -> None:
        """Let a paused or drained replica go on."""
        await self._ask("resume", name)

    async def move_replica(self, name: str) -> None:
        """Let other replicas go on with a replica's requests, and send it no further ones until
        `resume_replica`."""
        await self.ask("move", replica=name)

    async def remove_replica(self, name: str) -> None:
        """Let a replica finish its requests, then end its process."""
        await self._ask("remove", name)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt, and no list of prompts."""
    if isinstance(prompts, str):
        return True
    first = prompts[0] if len(prompts) else ""
    return not isinstance(first, str) and not hasattr(first, "__len__")


def _token_ids(prompt: Any) -> list[int]:
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not all(type(token) is int for token in tokens):
        raise RequestError(f"the prompt {prompt!r} is neither a text nor a list of token ids.")
    return tokens
