"""`ResponseWriter`: an answer in OpenAI's Responses API, whole or as its events.

Names of events and fields are those of OpenAI's specification (openai-openapi, ResponseStreamEvent)
as its own client reads them.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, override

from megatron_async.server.answers.items import Item, ItemResult, ItemWriter, Kind, named_event
from megatron_async.server.answers.log_prob_json import of_chat, places
from megatron_async.server.fields.ask_responses import full_name
from megatron_async.server.fields.asked import Asked, AskedChoice
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.readers import TokenLogProbs

PREFIXES: dict[Kind, str] = {"thought": "rs_", "text": "msg_", "call": "fc_"}
CALL_PREFIX = "call_"


class ResponseWriter(ItemWriter):
    """Writes one response; an `ItemWriter`."""

    tells_empty = True

    def __init__(self, asked: Asked, choice: AskedChoice, served: ServedModel) -> None:
        super().__init__(asked, choice, served)
        self._sequence = 0
        self._log_probs: list[dict[str, Any]] = []
        """Log probs of tokens whose text has not come."""
        self._items: list[Item] = []
        # Functions of groups by their full names, which the model calls them by.
        self._grouped: dict[str, tuple[str, str]] = {
            full_name(group["name"], tool["name"] or ""): (group["name"], tool["name"])
            for group in self.style.repeated.get("tools", ())
            for tool in group.get("tools") or ()
        }

    @override
    def new_id(self, kind: Kind) -> str:
        """An id with the prefix that OpenAI gives items of this kind."""
        return PREFIXES[kind] + secrets.token_hex(12)

    @override
    def begun(self) -> bytes:
        """`response.created` and `response.in_progress`, both with the empty response."""
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    @override
    def took(self, tokens: list[int], log_probs: TokenLogProbs | None) -> None:
        top_n = self.style.top_n
        if log_probs is not None and top_n is not None:
            found = places(tokens, log_probs, top_n)
            self._log_probs += of_chat(found, self.served.names_of_tokens, False)

    @override
    def opened(self, item: Item) -> bytes:
        """`response.output_item.added` and, but for calls, `response.content_part.added`."""
        self._items.append(item)
        begun = self._item(item, "in_progress") | ({} if item.kind == "call" else {"content": []})
        events = self._event("response.output_item.added", output_index=item.place, item=begun)
        if item.kind != "call":
            events += self._of_part(item, "response.content_part.added", part=_part(item))
        return events

    @override
    def more(self, item: Item, text: str) -> bytes:
        """The `delta` event of the kind: of text, of reasoning, of arguments."""
        log_probs, self._log_probs = self._log_probs, []
        item.texts.append(text)
        if item.kind == "call":
            name = "response.function_call_arguments.delta"
            return self._of_item(item, name, delta=text)
        if item.kind == "thought":
            return self._of_part(item, "response.reasoning_text.delta", delta=text)
        item.log_probs += log_probs
        return self._of_part(item, "response.output_text.delta", delta=text, logprobs=log_probs)

    @override
    def closed(self, item: Item) -> bytes:
        """The `done` events: of the text, of its part, of the item."""
        text = item.text
        if item.kind == "call":
            name = "response.function_call_arguments.done"
            _, own = self._name(item)
            events = self._of_item(item, name, name=own, arguments=text)
        elif item.kind == "thought":
            events = self._of_part(item, "response.reasoning_text.done", text=text)
        else:
            events = self._of_part(
                item, "response.output_text.done", text=text, logprobs=item.log_probs
            )
        if item.kind != "call":
            events += self._of_part(item, "response.content_part.done", part=_part(item))
        done = self._item(item, "completed")
        return events + self._event("response.output_item.done", output_index=item.place, item=done)

    @override
    def finished(self, result: ItemResult) -> bytes:
        """`response.completed`, or `response.incomplete` at the limit of tokens."""
        body = self.whole(result)
        return self._event(f"response.{body['status']}", response=body)

    @override
    def failed(self, refusal: Refusal) -> bytes:
        """`response.failed`, with what had come."""
        error = {"code": "server_error", "message": refusal.message}
        output = [self._item(item, "incomplete") for item in self._items]
        response = self._response("failed", output) | {"error": error}
        return self._event("response.failed", response=response)

    @override
    def whole(self, result: ItemResult) -> dict[str, Any]:
        """The response object; its last item is "incomplete" where the limit of tokens cut it."""
        is_cut = result.reason == "length"
        last = len(result.items) - 1
        output = [
            self._item(item, "incomplete" if is_cut and item.place == last else "completed")
            for item in result.items
        ]
        found = self._response("incomplete" if is_cut else "completed", output)
        if is_cut:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            found["completed_at"] = int(time.time())
        prompt_tokens = result.end.num_prompt_tokens
        found["usage"] = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": result.end.num_cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": result.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": result.thought_tokens},
            "total_tokens": prompt_tokens + result.generated_tokens,
        }
        return found

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        style = self.style
        return {
            "id": style.id,
            "object": "response",
            "created_at": style.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": style.model,
            "output": output,
            "usage": None,
            **style.repeated,
        }

    def _name(self, item: Item) -> tuple[str | None, str]:
        """The group of a called function, or None, and its name there."""
        return self._grouped.get(item.name, (None, item.name))

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        """An item of `output`, as far as it has come."""
        found: dict[str, Any] = {"id": item.id, "status": status}
        if item.kind == "call":
            group, own = self._name(item)
            call_id = CALL_PREFIX + item.id.removeprefix(PREFIXES["call"])
            return found | {
                "type": "function_call",
                "call_id": call_id,
                "name": own,
                "arguments": item.text,
                **({} if group is None else {"namespace": group}),
            }
        if item.kind == "thought":
            return found | {
                "type": "reasoning",
                "summary": [],
                "content": [_part(item)],
                "encrypted_content": None,
            }
        return found | {"type": "message", "role": "assistant", "content": [_part(item)]}

    def _of_item(self, item: Item, event: str, /, **fields: Any) -> bytes:
        return self._event(event, item_id=item.id, output_index=item.place, **fields)

    def _of_part(self, item: Item, event: str, /, **fields: Any) -> bytes:
        return self._of_item(item, event, content_index=0, **fields)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return named_event(event, {"sequence_number": number, **fields})


def _part(item: Item) -> dict[str, Any]:
    if item.kind == "thought":
        return {"type": "reasoning_text", "text": item.text}
    return {
        "type": "output_text",
        "text": item.text,
        "annotations": [],
        "logprobs": list(item.log_probs),
    }
