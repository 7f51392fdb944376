"""Lark rules for calls that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from megatron_async.server.chat.tool_format import OfferedTool


def call_rules(tools: Sequence[OfferedTool], arguments: str) -> str:
    """Rules whose rule `call` is one object that calls a tool.

    Each tool's schema is a grammar of its own, so that references inside it hold.

    Args:
        tools: any of which may be called.
        arguments: the key of the arguments.
    """
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
        rules.append(f'call_{i}: {json.dumps(begin)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(tool.parameters)}")
    return "\n".join(rules) + "\n"


def mark(text: str, special: Mapping[str, int]) -> str:
    """A mark in Lark: llguidance's way to write a token by its id, or the text."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text)
