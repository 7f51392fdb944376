"""Routes that generate: from a body to requests, and from tokens to an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_async.errors import ConfigurationError, CoordinatorLost, ReplicaLost, RequestError
from megatron_async.server.answer_stream import AnswerStream, StreamHub
from megatron_async.server.answers.answer import Answer
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.endpoints import ENDPOINTS, Endpoint
from megatron_async.server.fields.asked import Asked
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange, read_body
from megatron_async.server.http.openapi import openapi
from megatron_async.server.http.replies import ClientGone, reply, reply_json
from megatron_async.server.http.tokenize_routes import TokenizeRoutes
from megatron_async.server.rl.sglang_generate import GENERATE
from megatron_async.server.tracing import RequestTracer
from megatron_async.serving.token_client import RequestClient

LOADED_EVERY_S = 1.0
"""Between two looks whether a first replica has its model."""


class _Collected:
    """Waits for all choices of an answer that is not streamed.

    Attributes:
        done: done when all have ended, or one has failed.
    """

    def __init__(self, choices: int) -> None:
        self.feeds = [ChoiceFeed(self._hear) for _ in range(choices)]
        self._unended = choices
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _hear(self, feed: ChoiceFeed, _: bool) -> None:
        if feed.end is None:
            return
        self._unended -= 1
        if (self._unended == 0 or feed.end.failure is not None) and not self.done.done():
            self.done.set_result(None)


class GenerateRoutes:
    """Handlers of the model."""

    def __init__(
        self,
        client: RequestClient,
        config: ApiConfig,
        hub: StreamHub,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._client, self._config, self._hub, self._tracer = client, config, hub, tracer
        self._limits = Limits(
            body_bytes=config.max_body_bytes, answer_tokens=config.default_max_tokens
        )
        self._served: ServedModel | None = None
        self._loading = asyncio.Lock()
        self.shown_name = config.served_names[0] if config.served_names else ""

    def routes(self) -> list[Route]:
        """The routes."""
        endpoints = dict(ENDPOINTS)
        if self._config.as_megatron:
            for path in ("/completions", "/chat/completions"):
                endpoints[path] = ENDPOINTS["/v1" + path]
        if self._config.rl_api == "sglang":
            endpoints["/generate"] = GENERATE
        return [
            Route("GET", "/v1/models", self._models),
            Route("GET", "/v1/models/*", self._model),
            *(
                Route(
                    "POST",
                    path,
                    partial(self._generate, one),
                    error_body=one.error_body,
                    is_logged=True,
                )
                for path, one in endpoints.items()
            ),
            *TokenizeRoutes(self._model_now, self._limits).routes(),
            Route("GET", "/openapi.json", self._openapi),
        ]

    async def _model_now(self) -> ServedModel:
        """The model that is served now (503: no replica has loaded one yet); read again when the
        replicas have another one."""
        if self._served is None:
            state = await self._client.ask("health")
            if state["state"] in ("loading", "restarting", "dead"):
                raise Refusal(
                    f"the service is {state['state']}: ask /ready until it says 200.", 503,
                    code="not_ready", kind="server_error",
                )  # fmt: skip
        card = await self._client.card()
        if self._served is not None and self._served.card.digest == card.digest:
            return self._served
        async with self._loading:
            if self._served is None or self._served.card.digest != card.digest:
                config = self._config
                self._served = await asyncio.to_thread(
                    ServedModel.of, card, config.served_names, self._limits, config.tool_parser,
                    config.chat_template, config.as_megatron, config.reasoning_parser,
                )  # fmt: skip
        return self._served

    async def prepare(self) -> None:
        """Once a replica has a model, make what else the first requests would wait for. Faults
        of the model are their errors."""
        with contextlib.suppress(CoordinatorLost, ReplicaLost, Refusal, ConfigurationError):
            while (await self._client.ask("health"))["state"] == "loading":
                await asyncio.sleep(LOADED_EVERY_S)
            served = await self._model_now()
            await asyncio.to_thread(served.chat.prepare)

    # ---- Answers -----------------------------------------------------------------------------

    async def _generate(self, endpoint: Endpoint, exchange: Exchange, _: str) -> None:
        if self._tracer is None:
            await self._answer(endpoint, exchange)
            return
        trace = exchange.trace = self._tracer.begin(exchange.scope, exchange.headers)
        try:
            await self._answer(endpoint, exchange)
        except BaseException as error:
            trace.end(error)
            raise
        trace.end(None)

    async def _answer(self, endpoint: Endpoint, exchange: Exchange) -> None:
        body = await exchange.body(self._limits.body_bytes)
        served, kind, caller = await self._model_now(), endpoint.kind, exchange.caller
        asked = await read_body(
            body, lambda: endpoint.ask(decode_body(body, kind, self._limits), served, caller)
        )
        answer = partial(Answer, endpoint.writer, asked, served)
        if asked.style.is_stream:
            await self._stream(exchange, asked, answer)
        else:
            await self._whole(exchange, asked, answer)

    async def _whole(
        self, exchange: Exchange, asked: Asked, make_answer: Callable[..., Answer]
    ) -> None:
        collected = _Collected(len(asked.choices))
        numbers: list[int] = []

        def gone() -> None:
            if not collected.done.done():
                collected.done.set_exception(ClientGone())

        exchange.connection.tell_when_lost(gone)
        try:
            self._send(asked, collected.feeds, exchange, numbers)
            await collected.done
            self._check_ends(asked, collected.feeds)
        finally:
            exchange.connection.tell_when_lost(None)
            self._abort(numbers)  # those that have ended stay as they are
        answer = make_answer()
        for feed, choice in zip(collected.feeds, answer.choices, strict=True):
            choice.push(*feed.take())
            if feed.end is not None:
                choice.end(feed.end)
            await asyncio.sleep(0)  # other answers are written between two choices
        await reply(exchange.send, answer.body())

    async def _stream(
        self, exchange: Exchange, asked: Asked, make_answer: Callable[..., Answer]
    ) -> None:
        numbers: list[int] = []
        connection = exchange.connection
        stream = AnswerStream(self._hub, len(asked.choices), lambda: self._abort(numbers))
        connection.tell_when_lost(stream.give_up)
        try:
            self._send(asked, stream.feeds, exchange, numbers)
            # What writes the answer is made while the engine works for it.
            answer = make_answer(self._config.one_event_a_token)
            stream.open(connection, exchange.begin_events, answer.choices, answer.begin)
            await stream.done
            if not stream.has_begun and not connection.is_gone:
                self._check_ends(asked, stream.feeds)
        except BaseException:
            stream.give_up()
            raise
        finally:
            connection.tell_when_lost(None)
        if not connection.is_gone:
            await exchange.send({"type": "http.response.body", "body": b""})

    def _send(
        self, asked: Asked, readers: list[Any], exchange: Exchange, numbers: list[int]
    ) -> None:
        """Send an answer's requests; their numbers are put into `numbers` one by one."""
        if exchange.note is not None:
            exchange.note.sent(asked, readers)
        if exchange.trace is not None:
            exchange.trace.sent(asked, readers)
        traceparent = exchange.traceparent
        for choice, reader in zip(asked.choices, readers, strict=True):
            reader.keeps_aborted = self._config.rl_api != "none"
            prompt = asked.prompts[choice.prompt]
            try:
                numbers.append(
                    self._client.send(
                        prompt, choice.params, reader, asked.priority, exchange.caller.owner,
                        asked.style.id, traceparent,
                    )
                )  # fmt: skip
            except RequestError as error:
                self._abort(numbers)
                raise asked.style.refusal("RequestError", str(error)) from error

    def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            self._client.abort(number)

    def _check_ends(self, asked: Asked, feeds: list[ChoiceFeed]) -> None:
        """Raise the Refusal of a choice that has failed."""
        for feed in feeds:
            if feed.end is not None and feed.end.failure is not None:
                raise asked.style.refusal(*feed.end.failure)

    # ---- The model ---------------------------------------------------------------------------

    async def _models(self, exchange: Exchange, _: str) -> None:
        served = await self._model_now()
        await reply_json(
            exchange.send,
            {"object": "list", "data": [_model_object(name, served) for name in served.names]},
        )

    async def _model(self, exchange: Exchange, name: str) -> None:
        served = await self._model_now()
        await reply_json(exchange.send, _model_object(served.name(name), served))

    async def _openapi(self, exchange: Exchange, _: str) -> None:
        await reply(exchange.send, openapi())


def _model_object(name: str, served: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "megatron_async",
        "root": served.card.model,
        "max_model_len": served.card.max_sequence_length,
        "batch_invariant_mode": served.card.batch_invariant_mode,
        "generation_defaults": {**served.defaults.told(), "max_tokens": served.answer_tokens},
    }
