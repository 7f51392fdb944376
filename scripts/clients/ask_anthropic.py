"""Anthropic's own client: messages whole and streamed, thoughts, tools, numbers of tokens, errors.

    BASE_URL=http://127.0.0.1:8000/v1 API_KEY=k MODEL=m python scripts/clients/ask_anthropic.py

scripts/check_clients.sh runs it.
"""

import os
from typing import Any

import anthropic  # type: ignore[import-not-found]

MODEL = os.environ["MODEL"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "paint", "description": "Paint the wall.", "input_schema": SCHEMA}


def client(key: str) -> anthropic.Anthropic:
    """A client of the server under test; it adds "/v1" itself."""
    url = os.environ["BASE_URL"].removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def main() -> None:
    """All checks; the first that fails raises."""
    api: Any = client(os.environ["API_KEY"])
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 8,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Say hello."}],
        "extra_body": {"temperature": 0},  # newer series have no argument for it
    }
    whole = api.messages.create(**asked)
    with api.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == final.content[0].text == text, (whole, final)
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = api.messages.count_tokens(
        model=MODEL, system=asked["system"], messages=asked["messages"]
    )
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    tools = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 120}
    with api.messages.stream(**{**asked, **tools}) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use", called
    call = called.content[-1]
    assert call.input["color"] in ("red", "blue"), call
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "The wall is painted."},
        ]},
    ]  # fmt: skip
    assert api.messages.create(**{**asked, "messages": turns, "tools": [TOOL]}).content
    stopped = api.messages.create(**asked, stop_sequences=[text[2:5]])
    assert stopped.stop_reason == "stop_sequence", stopped
    assert stopped.stop_sequence == text[2:5], stopped
    for key, model, kind in (
        ("wrong", MODEL, anthropic.AuthenticationError),
        (os.environ["API_KEY"], "no-such-model", anthropic.NotFoundError),
    ):
        try:
            client(key).messages.create(**{**asked, "model": model})
        except kind as error:
            body: Any = error.body
            if body["type"] != "error":
                raise
        else:
            raise AssertionError(f"no {kind.__name__}")
    print(f"anthropic {anthropic.__version__}: all well")


if __name__ == "__main__":
    main()
