"""`AsyncCoordinatorClient`: send requests to a coordinator's replicas, on an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.remote_request import Completion, RemoteRequest, TokenChunk
from megatron_async.serving.request_message import check_request, request_message
from megatron_async.serving.token_client import TokenClient

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""


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
        reader.number = self._send(message, params, reader)
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
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
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
