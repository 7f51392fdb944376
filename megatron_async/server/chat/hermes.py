"""Calls as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write them: `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_async.server.chat.calls_reader import CallMarks, CallsReader
from megatron_async.server.chat.json_calls import call_rules, mark
from megatron_async.server.chat.tool_format import CallReader, OfferedTool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat:
    """See the module."""

    name = "hermes"
    special: tuple[str, ...] = (OPEN, CLOSE)

    def reader(self) -> CallReader:
        """A new reader."""
        return CallsReader(CallMarks(OPEN, CLOSE))

    def grammar(self, tools: Sequence[OfferedTool], many: bool, special: Mapping[str, int]) -> str:
        """See `ToolFormat`."""
        one = f'{mark(OPEN, special)} "\\n" call "\\n" {mark(CLOSE, special)}'
        more = f'("\\n" {one})*' if many else ""
        return f"calls: {one} {more}\n" + call_rules(tools, "arguments")

    def written(self, name: str, arguments: str) -> str:
        """See `ToolFormat`."""
        return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'
