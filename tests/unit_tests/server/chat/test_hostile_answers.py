"""A model can be made to write any text (by `logit_bias`): it is read in linear time."""

from __future__ import annotations

import time

import pytest

from megatron_async.server.chat.call_formats import FORMATS
from megatron_async.server.chat.calls_reader import CallsReader
from megatron_async.server.chat.thoughts import ThoughtReader

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOKENS = 3000


def seconds(name: str, begun: str, token: str, count: int) -> float:
    """CPU time to read an answer, token by token."""
    reader = ThoughtReader(False, CallsReader(FORMATS[name], TOOLS))
    start = time.process_time()
    reader.push(begun)
    for _ in range(count):
        reader.push(token)
    reader.end()
    return time.process_time() - start


@pytest.mark.parametrize(
    ("name", "begun", "token"),
    [
        ("hermes", "", " " * 64),
        ("hermes", "<think>", "\n" * 16),
        ("hermes", "word<tool_call>", " " * 16),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\"),
        ("hermes", "", '<tool_call>{"name"'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b</parameter>", " " * 8),
        ("llama3_json", '{"name": ', " " * 8),
        ("deepseek_v31", "<\uff5ctool\u2581calls\u2581begin\uff5c>", " " * 16),
    ],
)
def test_four_times_the_tokens_take_about_four_times_as_long(
    name: str, begun: str, token: str
) -> None:
    once = seconds(name, begun, token, TOKENS)
    assert seconds(name, begun, token, 4 * TOKENS) < 9 * once + 0.1  # the square: 16 times
