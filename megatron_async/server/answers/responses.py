"""Shapes of answers, for `/openapi.json`; answers themselves are spliced and encoded from dicts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from megatron_async.server.answers.usage import Usage


class ErrorDetail(msgspec.Struct):
    """The error's text."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorDetail


class CompletionLogProbs(msgspec.Struct):
    """Log probs of a choice of /v1/completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A choice of /v1/completions."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None = None


class CompletionAnswer(msgspec.Struct):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogProb(msgspec.Struct):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogProb(TopLogProb):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogProb]


class ChatLogProbs(msgspec.Struct):
    """Log probs of a choice of /v1/chat/completions."""

    content: list[ChatLogProb] | None
    refusal: list[ChatLogProb] | None


class CalledFunction(msgspec.Struct):
    """A function with the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """A choice of /v1/chat/completions."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None = None


class ChatAnswer(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


ANSWERS: tuple[Any, ...] = (CompletionAnswer, ChatAnswer, ErrorAnswer)
