"""Messages of a chat as templates expect them: one text each, arguments of calls as objects."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megatron_async.server.fields.json_body import Limits, check_shape
from megatron_async.server.fields.refusal import Refusal, not_allowed
from megatron_async.server.fields.request_bodies import ChatRequest, Message

_NO_LETTER = re.compile(r"[^A-Za-z0-9]")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
KWARGS = frozenset(
    {
        "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking",
        "clear_thinking", "date_string", "builtin_tools", "tools_in_user_message", "system_message",
        "model_identity", "force_nonempty_content", "truncate_history_thinking", "low_effort",
        "reasoning_budget",
    }
)  # fmt: skip
"""Variables of templates that a request may set: none of them is code or replaces the chat."""
MAX_KWARG = 4096
"""Characters of a variable's JSON text."""
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Roles: which there are, the template says ("tool", "ipython", "context"), but none can write a
special token."""


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for a template."""
    if not messages:
        raise Refusal("messages is empty: give at least one message.", param="messages")
    return [_one(message, place) for place, message in enumerate(messages)]


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """Variables of the template that a request sets."""
    found = dict(request.chat_template_kwargs or {})
    for name, value in found.items():
        if name not in KWARGS:
            raise Refusal(
                f"chat_template_kwargs has {name[:100]!r}: this server allows only "
                f"{', '.join(sorted(KWARGS))}.", param="chat_template_kwargs",
            )  # fmt: skip
        if len(msgspec.json.encode(value)) > MAX_KWARG:
            raise Refusal(
                f"chat_template_kwargs.{name} is too long: {MAX_KWARG} characters are allowed.",
                param="chat_template_kwargs",
            )
    if request.reasoning_effort is not None:
        found.setdefault("reasoning_effort", request.reasoning_effort[:MAX_KWARG])
    return found


def with_json_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of `template_messages` with the arguments of calls as JSON text."""
    found = copy.deepcopy(list(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return found


def with_ids_of(messages: Sequence[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """The messages with ids of calls that have so many letters and digits, the last ones of each:
    Mistral's templates reject others, which clients have from other models and endpoints."""
    found = copy.deepcopy(list(messages))
    for message in found:
        names = [
            (message, "tool_call_id"),
            *((call, "id") for call in message.get("tool_calls", ())),
        ]
        for holder, key in names:
            if key in holder:
                holder[key] = _NO_LETTER.sub("", holder[key])[-length:].rjust(length, "0")
    return found


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message."""
    return str(messages[-1]["content"] or "")


def _one(message: Message, place: int) -> dict[str, Any]:
    param = f"messages[{place}]"
    if not ROLE.fullmatch(message.role):
        raise not_allowed(f"{param}.role", message.role, "a word, as user, assistant or tool")
    found: dict[str, Any] = {
        # Templates are older than OpenAI's newer name of it.
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content, f"{param}.content"),
    }
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(call.function.arguments, param),
                },
            }
            for call in message.tool_calls
        ]
    return found


def text_of(content: str | list[Any] | None, param: str) -> str:
    """The text of a content, of all its parts; `param` names the content in a refusal of what is no
    text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, param) for part in content)


def _part(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise Refusal(
            f"{param} has a part of type {str(kind)[:50]!r}: only text is served, no images, "
            "audio, video or files, and no URL is fetched.",
            param=param, code="unsupported_content",
        )  # fmt: skip
    text = part.get("refusal" if kind == "refusal" else "text", part.get(str(kind)))
    if not isinstance(text, str):
        raise Refusal(f"{param} has a part without text: give its `text`.", param=param)
    return text


def arguments_of(arguments: str | dict[str, Any] | None, param: str) -> dict[str, Any]:
    """The arguments of a call in a message, which `param` names."""
    if not arguments:
        return {}
    if isinstance(arguments, str):
        text = arguments.encode()
        check_shape(text, Limits())
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Refusal(
                f"{param} has a call whose arguments are not the JSON text of an object.",
                param=param,
            )
        return found
    return arguments
