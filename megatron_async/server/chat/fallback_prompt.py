"""Tools for models whose template does not support them: described in the system message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_async.server.chat.call_formats import CallFormat

INTRODUCTION = (
    "You may call functions. Each line below describes one as JSON.\n{tools}\n"
    "To call a function, answer with its name and arguments like this, and nothing else:\n{example}"
)


def with_tools_told(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], tool_format: CallFormat
) -> list[dict[str, Any]]:
    """The messages with a description of tools in the system message; calls and their results as
    plain text.

    Args:
        messages: for a template.
        tools: as OpenAI writes them.
        tool_format: how calls are to be written.
    """
    told = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INTRODUCTION.format(tools=told, example=tool_format.written("NAME", "{...}"))
    found = [_plain(message, tool_format) for message in messages]
    if found[0]["role"] == "system":
        text = f"{found[0]['content']}\n\n{text}".lstrip()
        found = found[1:]
    return [{"role": "system", "content": text}, *found]


def _plain(message: dict[str, Any], tool_format: CallFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the call: {message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(
        tool_format.written(
            call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        )
        for call in calls
    )
    return {"role": message["role"], "content": f"{message['content']}\n{written}".lstrip()}
