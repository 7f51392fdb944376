"""`MessageWriter`: an answer in Anthropic's Messages API, whole or as its events; and its errors.

Names of events and fields are those that Anthropic's own client reads (package `anthropic`,
types/raw_message_stream_event.py).
"""

from __future__ import annotations

import secrets
from typing import Any, override

import msgspec

from megatron_async.server.answers.items import Item, ItemResult, ItemWriter, Kind, named_event
from megatron_async.server.fields.refusal import Refusal

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""OpenAI's word for how an answer ended -> Anthropic's."""
ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
"""Status of HTTP -> Anthropic's type of error; of others "invalid_request_error"."""


def message_error(refusal: Refusal) -> dict[str, Any]:
    """The fields of an error object but its type, which is "error"."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {"error": {"type": kind, "message": refusal.message}}


def message_error_body(refusal: Refusal) -> bytes:
    """An error object of Anthropic's API, as JSON text."""
    return msgspec.json.encode({"type": "error", **message_error(refusal)})


class MessageWriter(ItemWriter):
    """Writes one message; an `ItemWriter`."""

    @override
    def new_id(self, kind: Kind) -> str:
        """An id of a call; other blocks have none."""
        return "toolu_" + secrets.token_hex(12) if kind == "call" else ""

    @override
    def begun(self) -> bytes:
        """`message_start`, with the tokens of the prompt."""
        usage = {
            "input_tokens": len(self.asked.prompts[0]),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        return named_event("message_start", {"message": self._message([], None, None, usage)})

    @override
    def opened(self, item: Item) -> bytes:
        """`content_block_start`, with an empty block."""
        block = {"index": item.place, "content_block": _block(item)}
        return named_event("content_block_start", block)

    @override
    def more(self, item: Item, text: str) -> bytes:
        """`content_block_delta`."""
        item.texts.append(text)
        if item.kind == "call":
            return _delta(item, "input_json_delta", "partial_json", text)
        if item.kind == "thought":
            return _delta(item, "thinking_delta", "thinking", text)
        return _delta(item, "text_delta", "text", text)

    @override
    def closed(self, item: Item) -> bytes:
        """`content_block_stop`; of a thought, the signature that clients keep comes before."""
        signed = b""
        if item.kind == "thought":
            signed = _delta(item, "signature_delta", "signature", "")
        return signed + named_event("content_block_stop", {"index": item.place})

    @override
    def finished(self, result: ItemResult) -> bytes:
        """`message_delta`, which says why the message stopped, and `message_stop`."""
        delta = {"stop_reason": _stop_reason(result), "stop_sequence": result.stop_word}
        return named_event(
            "message_delta", {"delta": delta, "usage": _usage(result)}
        ) + named_event("message_stop", {})

    @override
    def failed(self, refusal: Refusal) -> bytes:
        """`error`."""
        return named_event("error", message_error(refusal))

    @override
    def whole(self, result: ItemResult) -> dict[str, Any]:
        """The message object."""
        blocks = [_block(item) for item in result.items]
        return self._message(blocks, _stop_reason(result), result.stop_word, _usage(result))

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self.style.id,
            "type": "message",
            "role": "assistant",
            "model": self.style.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


def _delta(item: Item, kind: str, name: str, text: str) -> bytes:
    delta = {"type": kind, name: text}
    return named_event("content_block_delta", {"index": item.place, "delta": delta})


def _block(item: Item) -> dict[str, Any]:
    """A block of a message's content, as far as it has come."""
    if item.kind == "call":
        return {
            "type": "tool_use", "id": item.id, "name": item.name,
            "input": msgspec.Raw(item.text.encode() or b"{}"),
        }  # fmt: skip
    if item.kind == "thought":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    return {"type": "text", "text": item.text}


def _stop_reason(result: ItemResult) -> str:
    if result.stop_word is not None:
        return "stop_sequence"
    has_calls = any(item.kind == "call" for item in result.items)
    is_call = has_calls and result.reason == "stop"  # of a call that was forced
    return "tool_use" if is_call else STOP_REASONS[result.reason]


def _usage(result: ItemResult) -> dict[str, Any]:
    """Anthropic counts tokens that a cache had apart from the others of the prompt."""
    cached = result.end.num_cached_tokens or 0
    return {
        "input_tokens": result.end.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": result.generated_tokens,
    }
