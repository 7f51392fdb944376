"""OpenAI's own client, whatever its series: what people use most of it, and its errors.

    BASE_URL=http://127.0.0.1:8000/v1 API_KEY=k MODEL=smollm2 python scripts/clients/ask_openai.py

scripts/check_clients.sh runs it with several series.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import openai

MODEL = os.environ["MODEL"]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint the wall.", "parameters": SCHEMA},
}
MESSAGES: list[Any] = [{"role": "user", "content": "Which color has the sky? One word."}]


def client(key: str | None = None) -> openai.OpenAI:
    """A client of the server under test, with its key or another."""
    return openai.OpenAI(
        base_url=os.environ["BASE_URL"], api_key=key or os.environ["API_KEY"], max_retries=0
    )


def check_completions(api: openai.OpenAI) -> None:
    """Whole and streamed answers to a text, and to several prompts of token ids."""
    whole = api.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0)
    assert whole.choices[0].finish_reason == "length", whole
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8, whole.usage
    chunks = list(
        api.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, stream=True
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text, (text, whole.choices[0].text)
    ids = api.completions.create(model=MODEL, prompt=[[1, 2], [3]], max_tokens=2, n=2, logprobs=2)
    assert [choice.index for choice in ids.choices] == [0, 1, 2, 3]
    log_probs = ids.choices[0].logprobs
    assert log_probs is not None
    assert len(log_probs.token_logprobs or []) == 2


def check_chat(api: openai.OpenAI) -> None:
    """Whole and streamed chat, usage, log probs, a schema, and a tool that must be called."""
    whole = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = whole.choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) == 6 or choice.finish_reason == "stop"
    stream = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    assert chunks[-1].usage is not None
    assert not chunks[-1].choices
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == (choice.message.content or ""), (text, choice.message.content)
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "wall", "schema": SCHEMA, "strict": True},
    }
    answer = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=60, response_format=schema
    )
    assert json.loads(answer.choices[0].message.content or "")["color"] in ("red", "blue")
    tools: Any = [TOOL]
    called = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=120, tools=tools, tool_choice="required"
    )
    calls: Any = called.choices[0].message.tool_calls or []
    function = calls[0].function
    assert function.name == "paint"
    assert json.loads(function.arguments)["color"] in ("red", "blue")


def check_responses(api: openai.OpenAI) -> None:
    """Created and streamed, with a schema, and with a tool that must be called."""
    asked: Any = {"model": MODEL, "input": "Say hello.", "temperature": 0}
    whole = api.responses.create(**asked)
    with api.responses.stream(**asked) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert whole.output_text == final.output_text == "".join(parts), (whole, final)
    form: Any = {"format": {"type": "json_schema", "name": "wall", "schema": SCHEMA}}
    held = api.responses.create(model=MODEL, input=MESSAGES, max_output_tokens=60, text=form)
    assert json.loads(held.output_text)["color"] in ("red", "blue")
    tools: Any = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]
    called: Any = api.responses.create(
        model=MODEL, input=MESSAGES, max_output_tokens=120, tools=tools, tool_choice="required"
    )
    assert json.loads(called.output[0].arguments)["color"] in ("red", "blue")


def error_of(kind: type[openai.APIStatusError], ask: Callable[[], Any]) -> openai.APIStatusError:
    """The error that a call raises, which must be of this kind."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_errors(api: openai.OpenAI) -> None:
    """Each fault has the exception that people catch, and a message."""
    chat = api.chat.completions
    error_of(openai.AuthenticationError, lambda: client("wrong").models.list())
    unknown = error_of(
        openai.NotFoundError, lambda: chat.create(model="no-such-model", messages=MESSAGES)
    )
    if unknown.code != "model_not_found":
        raise unknown
    negative = error_of(
        openai.BadRequestError,
        lambda: chat.create(model=MODEL, messages=MESSAGES, temperature=-1.0),
    )
    if "temperature" not in str(negative):
        raise negative


def main() -> None:
    """All checks; the first that fails raises."""
    api = client()
    assert MODEL in [model.id for model in api.models.list()]
    check_completions(api)
    check_chat(api)
    check_responses(api)
    check_errors(api)
    print(f"openai {openai.__version__}: all well")


if __name__ == "__main__":
    main()
