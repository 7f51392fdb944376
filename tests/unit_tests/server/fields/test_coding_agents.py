"""First requests of coding agents, in the form in which they send them, are served.

Forms: Claude Code 2.1 and Codex 0.17x, by what users of gateways have published of their requests
(claude-code issue 96101, llama.cpp pull request 20623, token_proxy issue 307).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_async.server.endpoints import ENDPOINTS
from megatron_async.server.fields.ask import NOBODY
from megatron_async.server.fields.asked import Asked
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.refusal import Refusal
from tests.support.served_demo import THINKING, demo

KEPT = {"cache_control": {"type": "ephemeral"}}
BASH = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "command": {"description": "The command to execute", "type": "string"},
        "timeout": {"description": "Optional timeout in milliseconds", "type": "number"},
        "run_in_background": {"type": "boolean"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "smollm2",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nFiles: none\n</system-reminder>"},
                {"type": "text", "text": "List the files.", **KEPT},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "# Environment", **KEPT}]},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code.", **KEPT},
        {"type": "text", "text": "Use tools.", **KEPT},
    ],
    "tools": [
        {"name": "Bash", "description": "Executes a command", "input_schema": BASH},
        {"name": "Read", "description": "Reads", "input_schema": BASH, **KEPT},
    ],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
    "max_tokens": 1000,
    "thinking": {"type": "enabled", "budget_tokens": 999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
CODEX: dict[str, Any] = {
    "model": "smollm2",
    "instructions": "You are Codex.",
    "input": [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [
                {"type": "namespace", "name": "files", "tools": [
                    {"type": "function", "name": "view", "strict": False, "parameters": BASH},
                    {"type": "custom", "name": "exec", "format": {"type": "grammar"}},
                ]},
            ],
        },
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions instructions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "List the files."}],
        },
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": BASH},
        {"type": "custom", "name": "apply_patch", "description": "Edits", "format": {
            "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "parameters": BASH},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019d6c12-17e6-7691-b810-b9c846d44539",
    "client_metadata": {"x-codex-installation-id": "0"},
}  # fmt: skip


def asked(path: str, body: dict[str, Any], template: str | None = THINKING) -> Asked:
    endpoint, served = ENDPOINTS[path], demo(template)
    found = endpoint.ask(
        decode_body(json.dumps(body).encode(), endpoint.kind, Limits()), served, NOBODY
    )
    assert isinstance(found, Asked)
    return found


def prompt(found: Asked, template: str | None = THINKING) -> str:
    tokenizer = demo(template).tokenizer
    ids = found.prompts[0]
    assert tokenizer is not None
    assert not isinstance(ids, str)
    return tokenizer.detokenize(list(ids), skip_special_tokens=False)


def test_claude_code() -> None:
    found = asked("/v1/messages", CLAUDE_CODE)
    said = prompt(found)
    assert found.style.is_stream
    assert list(found.style.chat.tools) == ["Bash", "Read"]
    for words in ("You are Claude Code.\nUse tools.", "List the files.", "# Environment"):
        assert words in said
    assert said.endswith("<think>\n")
    assert found.choices[0].params.num_tokens_to_generate == 1000


def test_a_system_message_in_the_middle_is_served_by_strict_templates() -> None:
    """Break `chat_messages`: leave it as it is."""
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}|{% endfor %}<think>"
    )
    said = prompt(asked("/v1/messages", CLAUDE_CODE, strict), strict)
    assert "List the files.\n# Environment|" in said
    middle = [{"role": "system", "content": "More."}, {"role": "user", "content": "Go on."}]
    body = CLAUDE_CODE | {"messages": [*middle[:1], *CLAUDE_CODE["messages"], *middle]}
    said = prompt(asked("/v1/messages", body, strict), strict)
    assert "Use tools.\nMore.\n" in said
    assert "# Environment\nMore.|user: Go on.|" in said


@pytest.mark.parametrize(
    ("thinking", "end"),
    [
        ({"type": "enabled"}, "<think>\n"),
        ({"type": "adaptive", "display": "summarized"}, "<think>\n"),
        ({"type": "disabled"}, "</think>\n\n"),
    ],
)
def test_thinking_is_the_templates(thinking: dict[str, Any], end: str) -> None:
    body = CLAUDE_CODE | {"thinking": thinking}
    assert prompt(asked("/v1/messages", body)).endswith(end)
    budget = "{{ thinking_budget }} {{ thinking }} <think>"
    said = prompt(asked("/v1/messages", CLAUDE_CODE, budget), budget)
    assert said.startswith("999 True")
    if thinking["type"] == "enabled":
        with pytest.raises(Refusal, match="no thoughts") as caught:
            asked("/v1/messages", body, None)
        assert caught.value.param == "thinking"
    else:
        assert asked("/v1/messages", body, None)


def test_codex() -> None:
    found = asked("/v1/responses", CODEX)
    assert found.style.is_stream
    assert list(found.style.chat.tools) == ["exec_command", "files.view"]
    assert [tool["name"] for tool in found.style.repeated["tools"]] == ["exec_command", "files"]
    said = prompt(found)
    for words in ("You are Codex.\n\n<permissions instructions>", "List the files."):
        assert words in said
    wrong = CODEX | {"input": [{"type": "additional_tools", "tools": 5}]}
    with pytest.raises(Refusal, match="Expected `array`") as caught:
        asked("/v1/responses", wrong)
    assert caught.value.param == "input[0].tools"
