"""Calls as Llama 3.1 and later write them: the answer is JSON, {"name": ..., "parameters": {...}}.

Several are divided by semicolons; `<|python_tag|>` may come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import override

from megatron_async.server.chat.calls_reader import CallMarks, CallsReader
from megatron_async.server.chat.json_calls import call_rules
from megatron_async.server.chat.tool_format import CallReader, OfferedTool, ToolFormat

OPEN = "<|python_tag|>"


class Llama3JsonFormat(ToolFormat):
    """Calls as models of Llama 3 write them: bare JSON objects with `parameters`."""

    name = "llama3_json"
    special: tuple[str, ...] = (OPEN,)

    def reader(self) -> CallReader:
        """A new reader."""
        return CallsReader(CallMarks(OPEN, between=" \n\t\r;,", is_bare=True))

    @override
    def grammar(self, tools: Sequence[OfferedTool], many: bool, special: Mapping[str, int]) -> str:
        more = '("; " call)*' if many else ""
        return f"calls: call {more}\n" + call_rules(tools, "parameters")

    @override
    def written(self, name: str, arguments: str) -> str:
        return f'{{"name": "{name}", "parameters": {arguments}}}'
