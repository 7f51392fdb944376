"""Calls as Mistral's models write them: `[TOOL_CALLS]` and a list of objects; newer ones a name and
its arguments, with `[ARGS]` between them or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import override

from megatron_async.server.chat.calls_reader import CallMarks, CallsReader
from megatron_async.server.chat.json_calls import call_rules, mark
from megatron_async.server.chat.tool_format import CallReader, OfferedTool, ToolFormat

OPEN = "[TOOL_CALLS]"


class MistralFormat(ToolFormat):
    """Calls as models of Mistral write them: a mark and a JSON list of calls."""

    name = "mistral"
    special: tuple[str, ...] = (OPEN, "[ARGS]")

    def reader(self) -> CallReader:
        """A new reader."""
        return CallsReader(CallMarks(OPEN, between=" \n\t\r,[]", is_named=True))

    def grammar(self, tools: Sequence[OfferedTool], many: bool, special: Mapping[str, int]) -> str:
        """The rule of a list of calls, the form that older models know too."""
        more = '(", " call)*' if many else ""
        return f'calls: {mark(OPEN, special)} "[" call {more} "]"\n' + call_rules(
            tools, "arguments"
        )

    @override
    def written(self, name: str, arguments: str) -> str:
        return f'{OPEN}[{{"name": "{name}", "arguments": {arguments}}}]'
