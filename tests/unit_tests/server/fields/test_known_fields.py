"""Every known field of every endpoint is served there, or refused by name."""

import json
import re
from typing import Any

import msgspec
import pytest

from megatron_async.errors import EngineStopped, SequenceTooLong
from megatron_async.server.endpoints import ENDPOINTS
from megatron_async.server.fields.ask_messages import CountTokensRequest
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.not_served import NEUTRAL, REMEDIES, ZERO_ASKS, not_served_by
from megatron_async.server.fields.refusal import OF_ENGINE, Refusal, refusal_of
from megatron_async.server.fields.served_model import CPU_ANSWER_TOKENS, ServedModel
from megatron_async.server.http.openapi import openapi
from megatron_async.serving.replica_status import failed_of
from tests.support.served_demo import CONTEXT, THINKING, demo, demo_card

CHAT = [{"role": "user", "content": "Hi"}]
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 9},
}
LIMIT_OF = {
    "/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens",
}  # fmt: skip
VLLMS = """
frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop
temperature top_p use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs bad_words echo
add_special_tokens structured_outputs return_token_ids return_tokens_as_token_ids
kv_transfer_params vllm_xargs repetition_detection request_id return_weight_versions max_version_lag
"""
OF_CHATS = """
top_logprobs max_completion_tokens tools tool_choice reasoning_effort parallel_tool_calls
thinking_token_budget include_reasoning add_generation_prompt continue_final_message documents
chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs audio modalities verbosity
web_search_options functions function_call
"""
"""Fields of vLLM 0.25's and OpenAI's requests that change an answer."""


def asked(path: str, served: ServedModel | None = None, **body: Any) -> Any:
    endpoint = ENDPOINTS[path]
    text = json.dumps(SMALLEST[path] | body).encode()
    return endpoint.ask(decode_body(text, endpoint.kind, Limits()), served or demo(), Caller())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_an_endpoint_does_not_declare_it_refuses(path: str) -> None:
    refused = not_served_by(ENDPOINTS[path].kind)
    assert "use_beam_search" in refused
    for name in refused:
        asks, asks_not = ([0], []) if name in ZERO_ASKS else ([], [0])
        for value in ({"a": 1}, "x", 2, *asks):
            with pytest.raises(Refusal, match=f"^{name} was given, and ") as caught:
                asked(path, **{name: value})
            assert (caught.value.status, caught.value.param) == (400, name)
        for nothing in (None, False, *asks_not, "", [], {}, NEUTRAL.get(name)):
            assert asked(path, **{name: nothing})


def test_the_lists_of_openai_and_vllm_have_no_field_that_is_passed_over() -> None:
    for path, known in (("/v1/completions", VLLMS), ("/v1/chat/completions", VLLMS + OF_CHATS)):
        kind = ENDPOINTS[path].kind
        assert set(known.split()) <= {*kind.__struct_fields__, *not_served_by(kind)}


def test_who_gives_anothers_name_is_told_the_own_one() -> None:
    for path, name, own in (
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "messages", "input"),
        ("/v1/chat/completions", "prompt", "messages"),
        ("/v1/messages", "stop", "stop_sequences"),
        ("/v1/completions", "input", "prompt"),
    ):
        with pytest.raises(Refusal, match=f"this endpoint calls it {own}"):
            asked(path, **{name: "5"})
    with pytest.raises(Refusal, match="verbosity"):
        asked("/v1/responses", text={"verbosity": "low"})
    assert asked("/v1/responses", text={"verbosity": "medium"})


def test_what_asks_for_nothing_is_served() -> None:
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert asked("/v1/messages", context_management=keeps)  # of Claude Code, in each request
    for keep in ({"type": "thinking_turns", "value": 1}, None):
        edits = [{"type": "clear_thinking_20251015", "keep": keep}]
        with pytest.raises(Refusal, match="context_management"):
            asked("/v1/messages", context_management={"edits": edits})
    assert asked("/v1/chat/completions", top_logprobs=0)
    with pytest.raises(Refusal, match="top_logprobs"):
        asked("/v1/chat/completions", top_logprobs=1)


def test_only_what_changes_a_prompt_is_refused_where_nothing_is_generated() -> None:
    refused = not_served_by(CountTokensRequest, of_prompts=True)
    assert "documents" in refused
    assert "n" not in refused


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_limit_beyond_the_context_is_refused_with_the_room(path: str) -> None:
    (prompt,) = asked(path).prompts
    name, room = LIMIT_OF[path], CONTEXT - len(prompt)
    assert asked(path, **{name: room}).choices[0].params.num_tokens_to_generate == room
    for most in (room + 1, 10**18):
        with pytest.raises(Refusal, match="exceed context limit") as caught:
            asked(path, **{name: most})
        # The words and numbers that Claude Code reads, to ask again.
        told = r"length and `(\w+)` exceed context limit: (\d+) \+ (\d+) > (\d+)"
        found = re.search(told, str(caught.value))
        assert found is not None
        assert found.groups() == (name, str(CONTEXT - room), str(most), str(CONTEXT))
        assert f"at most {room}," in str(caught.value)
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("device", "own", "servers", "expected"),
    [
        ("cpu", None, None, CPU_ANSWER_TOKENS),
        ("cuda", None, None, None),
        ("", None, None, None),
        ("cpu", 7, None, 7),
        ("cpu", None, 2000, 2000),
        ("cuda", 7, 5, 5),
        ("cuda", 5, 7, 5),
    ],
)
def test_an_answer_without_a_limit(
    device: str, own: int | None, servers: int | None, expected: int | None
) -> None:
    config = {} if own is None else {"max_new_tokens": own}
    card = demo_card(device=device, generation_config=config)
    served = ServedModel.of(card, limits=Limits(answer_tokens=servers))
    for path in ("/v1/chat/completions", "/v1/responses"):
        found = asked(path, served).choices[0].params.num_tokens_to_generate
        assert found == expected
        # A request for so many at least gets them.
        least = asked(path, served, min_tokens=1500).choices[0].params
        assert least.min_tokens == 1500
        assert least.num_tokens_to_generate == (expected and max(expected, 1500))
    assert asked("/v1/completions", served).choices[0].params.num_tokens_to_generate == 16
    served.chat.close()


def test_the_description_has_only_what_is_served() -> None:
    schemas = json.loads(openapi())["components"]["schemas"]
    for endpoint in ENDPOINTS.values():
        names = set(schemas[endpoint.kind.__name__]["properties"])
        assert names == {*endpoint.kind.__struct_fields__} - {*not_served_by(endpoint.kind)}


def test_an_answers_id_ends_with_the_requests() -> None:
    assert asked("/v1/completions", request_id="mine-1").style.id == "cmpl-mine-1"
    assert asked("/v1/chat/completions", request_id="mine-1").style.id == "chatcmpl-mine-1"


def test_remedies_are_of_fields_that_structs_have() -> None:
    for endpoint in ENDPOINTS.values():
        assert issubclass(endpoint.kind, msgspec.Struct)
        assert set(REMEDIES) <= set(endpoint.kind.__struct_fields__)


SHARED = {"stop", "stop_sequences", "response_format", "messages", "max_completion_tokens"}
SCHEMAS = [{"type": "integer", "minimum": 2**60}, {"type": "number", "multipleOf": -1}]


def bodies_of(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Field -> a value that only the engine's own checks, or those of a chat, refuse."""
    stop = "stop_sequences" if path == "/v1/messages" else "stop"
    found: list[tuple[str, Any]] = [(stop, ["x" * 257]), (stop, [""]), (stop, ["x"] * 65)]
    found.append(("structured_outputs", {"choice": ["a"] * 10_001}))
    if path == "/v1/completions":
        return [(name, {name: value}) for name, value in found]
    chats = path == "/v1/chat/completions"
    for schema in SCHEMAS:
        given = {"type": "json_schema", "name": "x", "schema": schema}
        if chats:
            found.append(("response_format", {"type": "json_schema", "json_schema": given}))
        elif path == "/v1/responses":
            found.append(("text", {"format": given}))
        else:
            found.append(("output_config", {"format": given}))
    schema_key = "input_schema" if path == "/v1/messages" else "parameters"
    tools: list[tuple[str, Any]] = []
    wrong = {"properties": {"a": SCHEMAS[1]}}
    for name, schema in (("a b", {"type": "object"}), ("f", {"type": "string"}), ("f", wrong)):
        tool = {"name": name, schema_key: schema, "strict": True}
        tools.append(("tools", [{"type": "function", "function": tool} if chats else tool]))
    return [(name, {name: value}) for name, value in found + tools]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_errors_name_the_fields_of_their_endpoint(path: str) -> None:
    known = set(ENDPOINTS[path].kind.__struct_fields__) - set(not_served_by(ENDPOINTS[path].kind))
    for name, body in bodies_of(path):
        with pytest.raises(Refusal) as caught:
            asked(path, **body)
        param, message = caught.value.param or "", caught.value.message
        assert re.split(r"[.\[]", param)[0] == name, message
        assert message.startswith(name), message
        strangers = (SHARED | set(OF_ENGINE)) - known
        assert not strangers & set(re.findall(r"\w+", message)), message
        if name == "tools" and "/chat" not in path:
            assert "function." not in message
        assert name != "tools" or "json_schema" not in message


FORMAT: dict[str, Any] = {"type": "json_schema", "schema": {}}
"""Format of Messages and Responses."""
OF_OPENAI = {"type": "json_schema", "json_schema": {"schema": {}}}
AS_REGEX = {"structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", AS_REGEX, "structured_outputs"),
        ("/v1/completions", {"response_format": OF_OPENAI}, "response_format"),
        ("/v1/chat/completions", {"response_format": OF_OPENAI}, "response_format"),
        ("/v1/responses", {"text": {"format": FORMAT}}, "text.format"),
        ("/v1/messages", {"output_config": {"format": FORMAT}}, "output_config.format"),
        ("/v1/messages", AS_REGEX, "structured_outputs"),
        ("/v1/responses", {"tool_choice": "required"}, "tools"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tools"),
    ],
)
def test_formats_that_do_not_compile_are_told_by_their_field(
    path: str, body: dict[str, Any], field: str
) -> None:
    """Break `AnswerStyle.refusal`: leave the field out."""
    if "tool_choice" in body:
        body = body | {"tools": [{"name": "f"}]}
    late = asked(path, **body).style.refusal(
        "RequestError", "structured_output cannot be compiled: x."
    )
    assert (late.message, late.param) == (f"{field} cannot be compiled: x.", field)


def test_items_that_are_wrong_are_named_by_their_place_in_the_request() -> None:
    image = {"role": "user", "content": [{"type": "input_image"}]}
    call = {"type": "function_call", "name": "f", "arguments": "[]", "call_id": "c"}
    said = {"role": "assistant", "content": "A"}
    for wrong, param in ((image, "input[2].content"), (call, "input[2]")):
        with pytest.raises(Refusal) as caught:
            asked("/v1/responses", instructions="I", input=[said, said, wrong])
        assert caught.value.param == param
    bad = {"type": "function", "name": "a b"}
    behind = [{"type": "web_search"}, bad]
    group = {"type": "namespace", "name": "n", "tools": behind}
    added = [{"role": "user", "content": "A"}, {"type": "additional_tools", "tools": behind}]
    for body, place in (
        ({"tools": behind}, "tools[1]"),
        ({"tools": [group]}, "tools[0].tools[1]"),
        ({"input": added}, "input[1].tools[1]"),
    ):
        with pytest.raises(Refusal) as caught:
            asked("/v1/responses", **body)
        assert caught.value.param == f"{place}.name"
        assert caught.value.message.startswith(f"{place}.name=")
    with pytest.raises(Refusal, match="input is empty"):
        asked("/v1/responses", input=[])


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (SequenceTooLong("too long"), 400, "too long"),
        (msgspec.DecodeError("no map"), 400, "fields: no map"),
        (EngineStopped("it is closed"), 503, "it is closed"),
        (TypeError("of ours"), 500, "TypeError"),
    ],
)
def test_what_fails_in_a_replica_is_the_clients_fault_only_where_it_is(
    error: Exception, status: int, told: str
) -> None:
    failure = failed_of(1, error, "replica-0").failure
    assert failure is not None
    refusal = refusal_of(*failure)
    assert refusal.status == status
    assert told in refusal.message
    assert (refusal.code == "context_length_exceeded") == isinstance(error, SequenceTooLong)
    assert ("of ours" in refusal.message) is False


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


def asked_by_agent(path: str, body: dict[str, Any], template: str | None = THINKING) -> Asked:
    endpoint, served = ENDPOINTS[path], demo(template)
    found = endpoint.ask(
        decode_body(json.dumps(body).encode(), endpoint.kind, Limits()), served, Caller()
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
    found = asked_by_agent("/v1/messages", CLAUDE_CODE)
    said = prompt(found)
    assert found.style.is_stream
    assert list(found.style.chat.plan.offered) == ["Bash", "Read"]
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
    said = prompt(asked_by_agent("/v1/messages", CLAUDE_CODE, strict), strict)
    assert "List the files.\n# Environment|" in said
    middle = [{"role": "system", "content": "More."}, {"role": "user", "content": "Go on."}]
    body = CLAUDE_CODE | {"messages": [*middle[:1], *CLAUDE_CODE["messages"], *middle]}
    said = prompt(asked_by_agent("/v1/messages", body, strict), strict)
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
    assert prompt(asked_by_agent("/v1/messages", body)).endswith(end)
    budget = "{{ thinking_budget }} {{ thinking }} <think>"
    said = prompt(asked_by_agent("/v1/messages", CLAUDE_CODE, budget), budget)
    assert said.startswith("999 True")
    if thinking["type"] == "enabled":
        with pytest.raises(Refusal, match="no thoughts") as caught:
            asked_by_agent("/v1/messages", body, None)
        assert caught.value.param == "thinking"
    else:
        assert asked_by_agent("/v1/messages", body, None)


def test_codex() -> None:
    found = asked_by_agent("/v1/responses", CODEX)
    assert found.style.is_stream
    assert list(found.style.chat.plan.offered) == ["exec_command", "files.view"]
    assert [tool["name"] for tool in found.style.repeated["tools"]] == ["exec_command", "files"]
    said = prompt(found)
    for words in ("You are Codex.\n\n<permissions instructions>", "List the files."):
        assert words in said
    wrong = CODEX | {"input": [{"type": "additional_tools", "tools": 5}]}
    with pytest.raises(Refusal, match="Expected `array`") as caught:
        asked_by_agent("/v1/responses", wrong)
    assert caught.value.param == "input[0].tools"
