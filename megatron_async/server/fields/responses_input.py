"""Items of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_async.server.chat.messages import ROLE, arguments_of, text_of
from megatron_async.server.fields.chat_request import FunctionCall, Message, MessageToolCall
from megatron_async.server.fields.refusal import Refusal


def input_messages(
    given: str | Sequence[dict[str, Any]], instructions: str | None
) -> list[Message]:
    """The chat that a request describes.

    Items of the assistant that stand together (reasoning, text, calls) are one message, as chat
    templates write them.

    Args:
        given: the request's `input`.
        instructions: become, or come before, the system message.

    Raises:
        Refusal: an item is of a kind that is not served, or lacks a field.
    """
    found: list[Message] = []
    if isinstance(given, str):
        found.append(Message(role="user", content=given))
    else:
        for place, item in enumerate(given):
            _add(found, item, f"input[{place}]")
    if instructions:
        if found and found[0].role in ("system", "developer"):
            instructions += f"\n\n{found.pop(0).content}"
        found.insert(0, Message(role="system", content=instructions))
    return found


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function: its own name, behind that of its group if it is in one."""
    return f"{namespace}.{name}" if namespace else name


def _add(found: list[Message], item: dict[str, Any], param: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(found, item, param)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list):
                raise Refusal(f"{param}.content must be a list of parts.", param=param)
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            thought = "\n".join(text for text in texts if isinstance(text, str))
            assistant = _assistant(found, begins=True)
            assistant.reasoning_content = (assistant.reasoning_content or "") + thought
        case "function_call":
            namespace = item.get("namespace")
            call = FunctionCall(
                name=full_name(
                    namespace if isinstance(namespace, str) else None, _text(item, "name", param)
                ),
                arguments=arguments_of(_text(item, "arguments", param), param),
            )
            assistant = _assistant(found)
            calls = assistant.tool_calls or []
            calls.append(MessageToolCall(function=call, id=_text(item, "call_id", param)))
            assistant.tool_calls = calls
        case "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise Refusal(f"{param}.output must be a text or a list of parts.", param=param)
            text, call_id = text_of(output, f"{param}.output"), _text(item, "call_id", param)
            found.append(Message(role="tool", content=text, tool_call_id=call_id))
        case "additional_tools":
            pass  # `ask_responses` has read them
        case other:
            raise Refusal(
                f"{param} is of type {str(other)[:60]!r}, which is not served: send messages, "
                "reasoning, function calls and their outputs.", param=param,
            )  # fmt: skip


def _add_message(found: list[Message], item: dict[str, Any], param: str) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise Refusal(
            f"{param} has no role: give user, assistant, system or developer.", param=param
        )
    if not isinstance(content, str | list):
        raise Refusal(f"{param}.content must be a text or a list of parts.", param=param)
    text = text_of(content, f"{param}.content")
    if role != "assistant":
        found.append(Message(role=role, content=text))
        return
    assistant = _assistant(found)
    assistant.content = f"{assistant.content}\n{text}" if assistant.content else text


def _assistant(found: list[Message], begins: bool = False) -> Message:
    """The message of the assistant that is being put together; a new one where the last message
    is another's or, for what `begins` a turn, has calls or text already."""
    last = found[-1] if found else None
    is_done = last is None or last.role != "assistant"
    if last is not None and begins:
        is_done = is_done or bool(last.content or last.tool_calls)
    if is_done or last is None:
        last = Message(role="assistant")
        found.append(last)
    return last


def _text(item: dict[str, Any], name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise Refusal(f"{param}.{name} is missing or no text: give it.", param=param)
    return value
