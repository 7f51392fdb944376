"""Messages of Anthropic's API as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_async.server.chat.messages import text_of
from megatron_async.server.fields.chat_request import FunctionCall, Message, MessageToolCall
from megatron_async.server.fields.messages_request import AnthropicMessage
from megatron_async.server.fields.refusal import Refusal, not_allowed

FAILED = "Error: "
"""Stands before the text of a tool's result that has `is_error`: templates know no such mark."""


def chat_messages(
    given: Sequence[AnthropicMessage], system: str | Sequence[dict[str, Any]] | None
) -> list[Message]:
    """The chat that a request describes.

    Args:
        given: its `messages`.
        system: its system prompt.

    Raises:
        Refusal: a block is of a kind that is not served (images, documents), or lacks a field.
    """
    found: list[Message] = []
    if system:
        text = system if isinstance(system, str) else _joined(system, "system")
        found.append(Message(role="system", content=text))
    for place, message in enumerate(given):
        param = f"messages[{place}]"
        if message.role == "assistant":
            found.append(_of_assistant(message, param))
        elif message.role == "system" and found:
            # Claude Code's, where many templates take none: what is said to the model there.
            content = message.content
            text = content if isinstance(content, str) else _joined(content, param)
            role = "user"
            if found[-1].role in ("user", "system"):
                last = found.pop()
                role, text = last.role, f"{text_of(last.content, param)}\n{text}"
            found.append(Message(role=role, content=text))
        elif message.role in ("user", "system"):
            found += _of_user(message, param)
        else:
            raise not_allowed(f"{param}.role", message.role[:60], '"user" or "assistant"')
    return found


def _of_user(message: AnthropicMessage, param: str) -> list[Message]:
    """Results of tools are messages of their own, before and between what the user says."""
    content = message.content
    if isinstance(content, str):
        return [Message(role=message.role, content=content)]
    found: list[Message] = []
    said: list[str | dict[str, Any]] = []
    for block in content:
        if block.get("type") != "tool_result":
            said.append(_text_block(block, param))
            continue
        if said:
            found.append(Message(role=message.role, content=said))
            said = []
        result = block.get("content") or ""
        text = result if isinstance(result, str) else _joined(result, param)
        text = FAILED + text if block.get("is_error") else text
        number = _field(block, "tool_use_id", param)
        found.append(Message(role="tool", content=text, tool_call_id=number))
    if said or not found:
        found.append(Message(role=message.role, content=said))
    return found


def _of_assistant(message: AnthropicMessage, param: str) -> Message:
    content = message.content
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts: list[str | dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for block in content:
        match block.get("type"):
            case "thinking":
                thoughts.append(_field(block, "thinking", param))
            case "redacted_thinking":
                continue  # another model's, which nobody here can read
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise Refusal(f"{param}: a tool_use has no input object: give it.", param=param)
                function = FunctionCall(name=_field(block, "name", param), arguments=given)
                calls.append(MessageToolCall(function=function, id=_field(block, "id", param)))
            case _:
                texts.append(_text_block(block, param))
    return Message(
        role="assistant",
        content=texts or None,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _joined(blocks: Any, param: str) -> str:
    if not isinstance(blocks, list | tuple):
        raise Refusal(f"{param} must be a text or a list of blocks.", param=param)
    return "\n".join(str(_text_block(block, param)["text"]) for block in blocks)


def _text_block(block: Any, param: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise Refusal(
            f"{param} has a block of type {str(kind)[:60]!r} that is not served here: only text, "
            "thinking, tool_use (of the assistant) and tool_result (of the user) are; no images, "
            "no documents, and no URL is fetched.", param=param, code="unsupported_content",
        )  # fmt: skip
    return {"type": "text", "text": _field(block, "text", param)}


def _field(block: dict[str, Any], name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refusal(f"{param}: a block has no {name}, or no text there: give it.", param=param)
    return value
