"""/tokenize and /detokenize, with the fields of vLLM's endpoints of these names, and Anthropic's
/v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from megatron_async.server.answers.message_writer import message_error_body
from megatron_async.server.chat.tool_choice import tool_plan
from megatron_async.server.fields.ask_messages import CountTokensRequest, count_tokens
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.not_served import KnownFields, refuse_what_is_not_served
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.request_bodies import ChatRequest, Message, NamedTool, Tool
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange, read_body
from megatron_async.server.http.replies import reply_json

MOST_TOKENS = 2**20
"""Tokens that become one text: each may be hundreds of characters."""


class TokenizeRequest(KnownFields, kw_only=True):
    """The body of /tokenize: a text, or a chat as of /v1/chat/completions.

    Attributes:
        add_special_tokens: None: with a text, and not with a chat, whose template has them.
        return_token_strs: give the vocabulary's name of each token, too.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    model: str | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


OF_CHATS = (
    "tools", "tool_choice", "parallel_tool_calls", "documents", "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
)  # fmt: skip
"""Fields of /tokenize that only the template of a chat reads."""


class DetokenizeRequest(msgspec.Struct):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class TokenizeRoutes:
    """Handlers of these paths."""

    def __init__(self, model_now: Callable[[], Awaitable[ServedModel]], limits: Limits) -> None:
        self._model_now, self._limits = model_now, limits

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("POST", "/tokenize", self._tokenize, is_logged=True),
            Route("POST", "/detokenize", self._detokenize, is_logged=True),
            Route(
                "POST", "/v1/messages/count_tokens", self._count_tokens, is_logged=True,
                error_body=message_error_body,
            ),
        ]  # fmt: skip

    async def _tokenize(self, exchange: Exchange, _: str) -> None:
        answer = await self._read(exchange, TokenizeRequest, self._tokens)
        await reply_json(exchange.send, answer)

    async def _read[K, T](
        self, exchange: Exchange, kind: type[K], work: Callable[[K, ServedModel], T]
    ) -> T:
        body = await exchange.body(self._limits.body_bytes)
        served = await self._model_now()
        return await read_body(body, lambda: work(decode_body(body, kind, self._limits), served))

    async def _count_tokens(self, exchange: Exchange, _: str) -> None:
        tokens = await self._read(exchange, CountTokensRequest, count_tokens)
        await reply_json(exchange.send, {"input_tokens": tokens})

    def _tokens(self, request: TokenizeRequest, served: ServedModel) -> dict[str, Any]:
        served.name(request.model)
        refuse_what_is_not_served(request, of_prompts=True)
        of_chat = {name: getattr(request, name) for name in OF_CHATS}
        if request.messages is not None:
            if request.prompt is not None:
                raise Refusal("prompt and messages were both given: give one.", param="prompt")
            chat = ChatRequest(messages=request.messages, **of_chat)
            plan = tool_plan(chat, served.chat, served.limits.tools)
            text = served.chat.render(chat, plan.tools)
            tokens = served.tokenize(text, bool(request.add_special_tokens), "messages")
        elif request.prompt is None:
            raise Refusal("give prompt or messages.", param="prompt")
        else:
            if given := next((name for name, value in of_chat.items() if value), None):
                raise Refusal(
                    f"{given} was given with a prompt, which no template reads: give messages, or "
                    f"leave {given} out.", param=given,
                )  # fmt: skip
            adds = request.add_special_tokens is not False
            tokens = served.tokenize(request.prompt, adds, "prompt")
        names: list[str] | None = None
        if request.return_token_strs and served.tokenizer is not None:
            backend = served.tokenizer.backend
            names = [backend.id_to_token(token) or "" for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": served.card.max_sequence_length,
            "tokens": tokens,
            "token_strs": names,
        }

    async def _detokenize(self, exchange: Exchange, _: str) -> None:
        text = await self._read(exchange, DetokenizeRequest, self._text)
        await reply_json(exchange.send, {"prompt": text})

    def _text(self, request: DetokenizeRequest, served: ServedModel) -> str:
        served.name(request.model)
        if served.tokenizer is None:
            raise Refusal("this server has no tokenizer for the model.")
        if len(request.tokens) > MOST_TOKENS:
            raise Refusal(
                f"tokens has {len(request.tokens)} tokens, and {MOST_TOKENS} are allowed: send "
                "several requests.", param="tokens",
            )  # fmt: skip
        wrong = [token for token in request.tokens if not 0 <= token < served.card.vocab_size]
        if wrong:
            raise Refusal(f"token id {wrong[0]} is out of range.", param="tokens")
        return served.tokenizer.detokenize(request.tokens, request.skip_special_tokens)
