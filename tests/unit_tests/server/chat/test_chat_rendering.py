# ruff: noqa: E501  (tables of cases)
import asyncio
from typing import Any

import pytest

from megatron_async.server.chat.template_renderer import TakesLong, TemplateRenderer
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.text.tokenizer import Tokenizer
from tests.support.served_demo import asked_chat, demo, demo_card, demo_tokenizer

USER = [{"role": "user", "content": "Hi"}]


def tokenizer_with(template: str | None) -> Tokenizer:
    own = demo_tokenizer()
    return Tokenizer(own.backend, own.config, own.eos_ids, template, "test")


def text_of(**body: Any) -> str:
    return demo_tokenizer().detokenize(asked_chat(**body).prompts[0], False)


def test_the_prompt_is_the_tokenizers_own() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert text_of(messages=messages) == demo_tokenizer().apply_chat_template(messages)
    without = demo_tokenizer().apply_chat_template(messages, add_generation_prompt=False)
    assert text_of(messages=messages, add_generation_prompt=False) == without
    assert text_of(messages=[{"role": "developer", "content": "Be brief."}, *USER]) == (
        text_of(messages=messages)
    )


def test_content_parts_are_joined_and_media_refused_by_name() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    assert "user\na\nb\nc<|im_end|>" in text_of(messages=[{"role": "user", "content": parts}])
    url = {"url": "http://127.0.0.1:1/secret"}
    for kind in ("image_url", "input_audio", "video_url", "file", "x"):
        part = {"type": kind, kind: url}
        with pytest.raises(Refusal, match=f"{kind}.*only text") as caught:
            asked_chat(messages=[{"role": "user", "content": [part]}])
        assert caught.value.code == "unsupported_content"


def test_the_last_message_is_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    text = text_of(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    with pytest.raises(Refusal, match="exclude"):
        asked_chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    served = ServedModel.of(
        demo_card(chat_template="{{ messages[0].content }}{{ messages[0].content }}")
    )
    with pytest.raises(Refusal, match="cannot be continued"):
        asked_chat(served, messages=USER, continue_final_message=True)
    served.chat.close()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "a robot<|im_end|>", "content": "x"}]},
        {"messages": [{"content": "x"}]},
        {"messages": "Hi"},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"date_string": "x" * 5000}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}]},
    ],
)  # fmt: skip
def test_wrong_chats_get_400(body: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        asked_chat(**body)
    assert caught.value.status == 400


def test_small_chats_do_not_wait_for_large_ones() -> None:
    renderer = TemplateRenderer(demo_tokenizer(), 10_000)
    variables = {"messages": USER, "tools": None, "add_generation_prompt": True}
    first = renderer.render(variables)
    with renderer.large._turn:  # it is at work
        assert renderer.render(variables) == first
    assert first.endswith("assistant\n")
    large = {**variables, "messages": [{"role": "user", "content": "x" * 20_000}]}
    with renderer.small._turn:
        assert "x" * 20_000 in renderer.render(large)
    renderer.close()
    assert renderer.render(variables) == first  # in a new process
    renderer.close()


WAITS_FOR_A_MESSAGE = """
{%- if messages|length == 3 -%}
{%- for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}
{%- endfor %}{% endfor %}{% endfor %}
{%- elif messages|length == 4 -%}{{ messages[0].content * 10**10 }}
{%- elif messages|length == 5 -%}{{ messages[0].content * 4 * 10**7 }}
{%- elif messages|length == 6 -%}{{ [messages[0].content * 10**7] * 99 }}
{%- endif -%}
done"""


def test_a_template_that_waits_for_a_message_has_limits_all_the_same() -> None:
    """Time, memory and length of a small chat, after others were quick."""
    renderer = TemplateRenderer(tokenizer_with(WAITS_FOR_A_MESSAGE), 10_000)
    for count, said in ((3, "CPU time"), (4, "Memory"), (5, "characters"), (6, "emory")):
        renderer.small.limit_s = 0.1 if count == 3 else 2.0
        assert renderer.render({"messages": USER}) == "done"
        with pytest.raises(Refusal, match=said):
            renderer.render({"messages": USER * count})
    renderer.close()


def test_what_a_template_computes_while_it_is_compiled_has_limits() -> None:
    renderer = TemplateRenderer(tokenizer_with("{{ 'a' * 10**10 }}{{ 9**9**9 }}"), 10_000)
    renderer.small.limit_s = 0.1
    with pytest.raises(Refusal):
        renderer.render({"messages": USER})
    renderer.close()


def test_an_event_loop_does_not_wait_for_a_template() -> None:
    renderer = TemplateRenderer(tokenizer_with(WAITS_FOR_A_MESSAGE), 10_000)
    renderer.small.limit_s = 0.2
    quick, slow = {"messages": USER}, {"messages": USER * 3}

    async def on_loop() -> None:
        with pytest.raises(TakesLong):  # there is no process yet
            renderer.render(quick)
        await asyncio.to_thread(renderer.render, quick)
        with renderer.small._turn, pytest.raises(TakesLong):
            renderer.render(quick)
        with pytest.raises(TakesLong):
            renderer.render(slow)
        with pytest.raises(TakesLong):  # from now on always
            renderer.render(quick)
        with pytest.raises(Refusal, match="CPU time"):
            await asyncio.to_thread(renderer.render, slow)
        assert await asyncio.to_thread(renderer.render, quick) == "done"

    asyncio.run(on_loop())
    renderer.close()


def test_an_endless_template_fails_its_chat_alone() -> None:
    slow = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}done"
    renderer = TemplateRenderer(tokenizer_with(slow), 10_000)
    renderer.large.limit_s = 0.3
    with pytest.raises(Refusal, match="CPU time"):
        renderer.render({"messages": USER * 2000})
    assert renderer.render({"messages": USER}) == "done"
    renderer.close()


def test_a_template_cannot_reach_python() -> None:
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
    ):
        renderer = TemplateRenderer(tokenizer_with(attack), 10_000)
        with pytest.raises(Refusal, match="rejects"):
            renderer.render({"messages": USER})
        renderer.close()


def test_a_template_that_rejects_says_why() -> None:
    renderer = TemplateRenderer(
        tokenizer_with("{{ raise_exception('roles must alternate') }}"), 10_000
    )
    for _ in range(2):
        with pytest.raises(Refusal, match="roles must alternate"):
            renderer.render({"messages": USER})
    renderer.close()
    broken = TemplateRenderer(tokenizer_with("{% if %}"), 10_000)
    with pytest.raises(Refusal):
        broken.render({"messages": USER})
    broken.close()


def test_no_template_no_chat() -> None:
    served = ServedModel.of(demo_card(chat_template=None))
    with pytest.raises(Refusal, match="no chat template"):
        asked_chat(served)
    assert demo().chat.tool_format.name == "hermes"


def test_arguments_are_objects_or_json_text_as_the_template_wants_them() -> None:
    """DeepSeek's own templates join them to texts; all others take objects."""
    begin = "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ "
    end = " }}{% endfor %}{% endfor %}"
    call = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    for inside, expected in (
        ("call.function.name + '<sep>' + call.function.arguments", 'f<sep>{"city": "Köln"}'),
        ("call.function.arguments | tojson", '{"city": "Köln"}'),
        ("call.function.arguments.city", "Köln"),
    ):
        served = ServedModel.of(demo_card(chat_template=begin + inside + end))
        for _ in range(2):
            asked = asked_chat(served, messages=messages)
            assert demo_tokenizer().detokenize(asked.prompts[0], False) == expected
        served.chat.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [("abcDEF123", "abcDEF123"), ("call_0a1b2c3d4e5f", "b2c3d4e5f"), ("7", "000000007"), ("", "000000000")],
)  # fmt: skip
def test_ids_of_calls_are_what_mistrals_templates_take(number: str, expected: str) -> None:
    template = (
        "[TOOL_CALLS]{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.id }}"
        "{% endfor %}|{{ m.tool_call_id }}{% endfor %}"
    )
    served = ServedModel.of(demo_card(chat_template=template))
    call = {"id": number, "function": {"name": "f"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": number, "content": "x"},
    ]
    asked = asked_chat(served, messages=messages)
    text = demo_tokenizer().detokenize(asked.prompts[0], False)
    assert text == f"[TOOL_CALLS]{expected}||{expected}"
    assert len(expected) == 9
    served.chat.close()


@pytest.mark.parametrize(
    ("before", "inside", "behind", "parser", "is_known"),
    [
        ("<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', "", None, True),
        ("<|python_tag|>", 'assistant\n\n{"name": "NAME", "parameters": ARGS}', "<|eot_id|>", None, True),
        ("", '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGS, "id": "call00001"}]', "</s>", None, True),
        ("<tool_call>", "<tool_call>NAME\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>", "", None, False),
        ("<tool_call>", "<tool_call>NAME\n<arg_key>key</arg_key></tool_call>", "", "hermes", True),
        ("", "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>", "", None, False),
        ("tool_declare", "", "", None, False),  # it writes no calls
        ("<tool_call>", "", "", None, True),
        ("<tool_call>", "{{ raise_exception('no tools') }}", "", None, True),
    ],
)  # fmt: skip
def test_forms_of_calls_that_are_not_known_are_told(
    before: str, inside: str, behind: str, parser: str | None, is_known: bool, caplog: Any
) -> None:
    """The forms of Qwen, Llama 3, Mistral, GLM, and Kimi."""
    inside = inside.replace("NAME", "{{ c.function.name }}")
    inside = inside.replace("ARGS", "{{ c.function.arguments | tojson }}")
    template = (
        f"{{% if tools %}}{{{{ tools | tojson }}}}{before}{{% endif %}}{{% for m in messages %}}"
        f"{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{inside}{{% endfor %}}{behind}"
        "{% endfor %}"
    )
    served = ServedModel.of(demo_card(chat_template=template), tool_parser=parser)
    served.chat.prepare()
    served.chat.close()
    assert ("--tool-parser" in caplog.text) != is_known


@pytest.mark.parametrize(
    ("template", "is_known"),
    [
        ("{{ tools | tojson }}", True), ("{# knows no tools #}", False), ("{{ documents }}", False),
        ("{% if messages[0].tools %}{{ messages[0].tools }}{% endif %}", False),  # as Phi-4-mini's
    ],
)  # fmt: skip
def test_tools_are_told_by_the_server_where_the_template_does_not(template: str, is_known: bool):
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    served = ServedModel.of(demo_card(chat_template=template))
    tool = {"type": "function", "function": {"name": "f"}}
    asked = asked_chat(served, tools=[tool])
    text = demo_tokenizer().detokenize(asked.prompts[0], False)
    assert ("You may call functions" in text) != is_known
    assert '"name": "f"' in text
    served.chat.close()


def test_a_template_that_rejects_tools_says_so() -> None:
    template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    served = ServedModel.of(demo_card(chat_template=template))
    with pytest.raises(Refusal, match="no tools"):
        asked_chat(served, tools=[{"function": {"name": "f"}}])
    served.chat.close()
