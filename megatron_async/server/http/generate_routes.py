"""Completions and chats: from a body to requests, and from tokens to an answer."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.server.answer_stream import AnswerStream
from megatron_async.server.answers.stream import StreamAnswer
from megatron_async.server.answers.whole import WholeAnswer, whole
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.choice_feed import ChoiceFeed
from megatron_async.server.fields.ask import ask, is_quick
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.body import decode_body
from megatron_async.server.fields.chat_request import ChatRequest
from megatron_async.server.fields.completion_request import CompletionRequest
from megatron_async.server.fields.limits import Limits
from megatron_async.server.fields.refusal import Refusal, refusal_of
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.server.fields.shared_fields import SharedFields
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import ClientGone, Exchange
from megatron_async.server.http.openapi import openapi
from megatron_async.server.http.replies import EVENTS, reply, reply_json
from megatron_async.server.http.tokenize_routes import TokenizeRoutes
from megatron_async.server.stream_hub import StreamHub
from megatron_async.serving.token_client import TokenClient


class _Collected:
    """Waits for all choices of an answer that is not streamed.

    Attributes:
        feeds: the readers of its choices.
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
    """Handlers of the model.

    Args:
        client: of the coordinator.
        config: of the process.
        hub: writes streams.
    """

    def __init__(self, client: TokenClient, config: ApiConfig, hub: StreamHub) -> None:
        self._client, self._config, self._hub = client, config, hub
        self._limits = Limits(body_bytes=config.max_body_bytes)
        self._served: ServedModel | None = None
        self._loading = asyncio.Lock()
        self.shown_name = config.served_names[0] if config.served_names else ""

    def routes(self) -> list[Route]:
        """What they serve."""
        return [
            Route("GET", "/v1/models", self._models),
            Route("GET", "/v1/models/*", self._model),
            Route("POST", "/v1/completions", self._completions),
            Route("POST", "/v1/chat/completions", self._chat),
            *TokenizeRoutes(self._model_now, self._limits).routes(),
            Route("GET", "/openapi.json", self._openapi),
        ]

    async def _model_now(self) -> ServedModel:
        """What is served now; read again when the replicas have another model.

        Raises:
            Refusal: 503, no replica has loaded a model yet.
        """
        if self._served is None:
            state = await self._client.ask("health")
            if state["state"] in ("loading", "dead"):
                raise Refusal(
                    f"the service is {state['state']}: ask /ready until it says 200.", 503,
                    code="not_ready", kind="server_error",
                )  # fmt: skip
        card = await self._client.card()
        async with self._loading:
            if self._served is None or self._served.card.digest != card.digest:
                config = self._config
                self._served = await asyncio.to_thread(
                    ServedModel.of, card, config.served_names, self._limits, config.tool_parser
                )
        return self._served

    # ---- Answers -----------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange, _: str) -> None:
        await self._generate(exchange, CompletionRequest)

    async def _chat(self, exchange: Exchange, _: str) -> None:
        await self._generate(exchange, ChatRequest)

    async def _generate(self, exchange: Exchange, kind: type[SharedFields]) -> None:
        body = await exchange.body(self._limits.body_bytes)
        served = await self._model_now()
        if is_quick(body):
            asked = self._asked(body, kind, served, exchange.caller)
        else:
            asked = await asyncio.to_thread(self._asked, body, kind, served, exchange.caller)
        if asked.style.is_stream:
            await self._stream(exchange, asked, served)
        else:
            await self._whole(exchange, asked, served)

    def _asked(
        self, body: bytes, kind: type[SharedFields], served: ServedModel, caller: Caller
    ) -> Asked:
        return ask(decode_body(body, kind, self._limits), served, caller)

    async def _whole(self, exchange: Exchange, asked: Asked, served: ServedModel) -> None:
        collected = _Collected(len(asked.choices))
        numbers: list[int] = []

        def gone() -> None:
            if not collected.done.done():
                collected.done.set_exception(ClientGone())

        exchange.connection.tell_when_lost(gone)
        try:
            self._send(asked, collected.feeds, exchange, numbers)
            await collected.done
            self._check_ends(collected.feeds)
        finally:
            exchange.connection.tell_when_lost(None)
            self._abort(numbers)  # those that have ended stay as they are
        answer = WholeAnswer(asked, served)
        for feed, collector in zip(collected.feeds, answer.collectors, strict=True):
            collector.push(*feed.take())
            if feed.end is not None:
                collector.end(feed.end)
        await reply(exchange.send, whole(answer))

    async def _stream(self, exchange: Exchange, asked: Asked, served: ServedModel) -> None:
        numbers: list[int] = []
        connection = exchange.connection
        answer = StreamAnswer(asked, served, self._config.one_event_a_token)
        stream = AnswerStream(
            self._hub, answer.formatters, answer.begin, lambda: self._abort(numbers)
        )
        connection.tell_when_lost(stream.give_up)
        try:
            self._send(asked, stream.feeds, exchange, numbers)
            await stream.begun
            if not connection.is_gone:
                self._check_ends(stream.feeds)
                headers = EVENTS
                if exchange.scope["http_version"] == "1.0":
                    connection.write_without_chunks()
                    headers = [*EVENTS, (b"connection", b"close")]
                await exchange.send(
                    {"type": "http.response.start", "status": 200, "headers": headers}
                )
                stream.open(connection)
                await stream.done
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
        for choice, reader in zip(asked.choices, readers, strict=True):
            prompt = asked.prompts[choice.prompt]
            try:
                numbers.append(
                    self._client.send(
                        prompt, choice.params, reader, asked.priority, exchange.caller.owner,
                        asked.style.id,
                    )
                )  # fmt: skip
            except RequestError as error:
                self._abort(numbers)
                raise Refusal(str(error)) from error

    def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            self._client.abort(number)

    def _check_ends(self, feeds: list[ChoiceFeed]) -> None:
        """Raise the Refusal of a choice that has failed."""
        for feed in feeds:
            if feed.end is not None and feed.end.failure is not None:
                raise refusal_of(*feed.end.failure)

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
    }
