"""`ENDPOINTS`: a row for each endpoint that generates; docs/extending.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_async.server.answers.choice_writer import ChatWriter, CompletionWriter
from megatron_async.server.answers.items import ItemWriter
from megatron_async.server.answers.message_writer import MessageWriter, message_error_body
from megatron_async.server.answers.response_writer import ResponseWriter
from megatron_async.server.fields.ask import ask_chat, ask_completion
from megatron_async.server.fields.ask_messages import MessagesRequest, ask_messages
from megatron_async.server.fields.ask_responses import ResponsesRequest, ask_responses
from megatron_async.server.fields.asked import Asked, AskedChoice, Caller
from megatron_async.server.fields.not_served import KnownFields
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.request_bodies import ChatRequest, CompletionRequest
from megatron_async.server.fields.served_model import ServedModel


class Endpoint(NamedTuple):
    """The endpoint of one path. `kind` is the body that a request has."""

    kind: type[KnownFields]
    ask: Callable[[Any, ServedModel, Caller], Asked]
    writer: Callable[[Asked, AskedChoice, ServedModel], ItemWriter]
    error_body: Callable[[Refusal], bytes] = Refusal.body


ENDPOINTS = {
    "/v1/completions": Endpoint(CompletionRequest, ask_completion, CompletionWriter),
    "/v1/chat/completions": Endpoint(ChatRequest, ask_chat, ChatWriter),
    "/v1/responses": Endpoint(ResponsesRequest, ask_responses, ResponseWriter),
    "/v1/messages": Endpoint(MessagesRequest, ask_messages, MessageWriter, message_error_body),
}
