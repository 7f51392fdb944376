"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them: `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import override

from megatron_async.server.chat.calls_reader import CallMarks, CallsReader
from megatron_async.server.chat.json_calls import call_rules, mark
from megatron_async.server.chat.tool_format import CallReader, OfferedTool, ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """Calls as models of Hermes, Qwen and others write them: a JSON object between two marks for
    each call."""

    name = "hermes"
    special: tuple[str, ...] = (OPEN, CLOSE)

    def reader(self) -> CallReader:
        """A new reader."""
        return CallsReader(CallMarks(OPEN, CLOSE))

    @override
    def grammar(self, tools: Sequence[OfferedTool], many: bool, special: Mapping[str, int]) -> str:
        one = f'{mark(OPEN, special)} "\\n" call "\\n" {mark(CLOSE, special)}'
        more = f'("\\n" {one})*' if many else ""
        return f"calls: {one} {more}\n" + call_rules(tools, "arguments")

    @override
    def written(self, name: str, arguments: str) -> str:
        return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'
