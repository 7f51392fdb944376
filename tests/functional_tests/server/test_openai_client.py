"""OpenAI's own client, and raw HTTP, against the demo model behind `megatron-async serve`."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from megatron_async import LLM, SamplingParams
from tests.support.patience import eventually
from tests.support.served import KEY, Served

# All tests of this file, so that they stay together (`tests/conftest.py`) and share a service.
pytestmark = pytest.mark.usefixtures("smollm2_llm")

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(service: Served) -> openai.OpenAI:
    url = f"http://127.0.0.1:{service.port}/v1"
    return openai.OpenAI(api_key=KEY, base_url=url, max_retries=0)


def test_answers_are_those_of_the_engine(client: openai.OpenAI, smollm2_llm: LLM) -> None:
    """Whole, streamed and in process: one text."""
    assert smollm2_llm.tokenizer is not None
    chat = smollm2_llm.tokenizer.apply_chat_template(CHAT)
    ids = smollm2_llm.tokenizer.tokenize(chat, add_special_tokens=False)
    params = SamplingParams(num_tokens_to_generate=12, temperature=0.8, seed=5)
    expected = smollm2_llm.generate([ids], params)[0].generated_text
    asked = {"model": "smollm2", "messages": CHAT, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage is not None
    assert whole.usage is not None  # cached tokens differ: the first one filled the cache
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == len(ids) + len(chunks) - 3
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    by_ids = client.completions.create(
        model="smollm2", prompt=ids, max_tokens=12, temperature=0.8, seed=5
    )
    assert by_ids.choices[0].text == expected


def test_choices_log_probs_and_formats(client: openai.OpenAI) -> None:
    several = client.completions.create(
        model="smollm2", prompt=["One", "Two"], n=2, max_tokens=4, seed=3, logprobs=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage is not None
    assert several.usage.completion_tokens == 16
    again = client.completions.create(model="smollm2", prompt="One", max_tokens=4, seed=4)
    assert again.choices[0].text == several.choices[1].text  # choice i has seed + i
    log_probs = several.choices[0].logprobs
    assert log_probs is not None
    assert "".join(log_probs.tokens or ()) == several.choices[0].text
    scored = client.completions.create(
        model="smollm2", prompt="Paris is the capital", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert scored.text == "Paris is the capital"
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    schema = {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 10}},
        "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    held = client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )  # fmt: skip
    assert set(json.loads(held.choices[0].message.content or "")) == {"city"}


def test_responses(client: openai.OpenAI) -> None:
    """Created and streamed they are the chat's answer; calls and their outputs go round."""
    asked = {"model": "smollm2", "input": "What is the capital of France?", "temperature": 0}
    chat = client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=12, temperature=0
    )
    whole = client.responses.create(**asked, max_output_tokens=12)
    assert whole.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert whole.usage is not None
    assert whole.usage.total_tokens == chat.usage.total_tokens
    with client.responses.stream(**asked, max_output_tokens=12) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(parts) == whole.output_text
    tools = [{"type": "function", "name": "paint", "parameters": {
        "type": "object", "properties": {"color": {"enum": ["red", "blue"]}},
        "required": ["color"], "additionalProperties": False,
    }}]  # fmt: skip
    called = client.responses.create(**asked, tools=tools, tool_choice="required")
    call = called.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["color"] in ("red", "blue")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again = client.responses.create(
        model="smollm2", max_output_tokens=4, tools=tools,
        input=[{"role": "user", "content": "Paint."}, call.model_dump(), output],
    )  # fmt: skip
    assert again.status == "incomplete"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id=whole.id)


def test_messages_over_a_socket(client: openai.OpenAI, service: Served) -> None:
    """Anthropic's protocol as its bytes: the key's header, events, errors."""
    chat = client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=12, temperature=0
    )
    body = {"model": "smollm2", "max_tokens": 12, "messages": CHAT, "temperature": 0}

    def post(path: str, body: dict[str, object], key: str) -> tuple[str, str]:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-api-key: {key}\r\n"
        )
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", service.port), 60) as raw:
            raw.sendall(head.encode() + data)
            answer = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
        begin, _, rest = answer.partition("\r\n\r\n")
        return begin.partition("\r\n")[0], rest

    status, answer = post("/v1/messages", body, KEY)
    assert status == "HTTP/1.1 200 OK"
    whole = json.loads(answer)
    assert whole["content"][0]["text"] == chat.choices[0].message.content
    _, answer = post("/v1/messages", {**body, "stream": True}, KEY)
    events = [json.loads(line[6:]) for line in answer.split("\n") if line.startswith("data: ")]
    texts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    assert events[-1] == {"type": "message_stop"}
    _, answer = post("/v1/messages/count_tokens", {"messages": CHAT}, KEY)
    assert chat.usage is not None
    assert json.loads(answer) == {"input_tokens": chat.usage.prompt_tokens}
    for given, key, number, kind in (
        (body, "wrong", 401, "authentication_error"),
        ({**body, "model": "x"}, KEY, 404, "not_found_error"),
        ({"messages": CHAT}, KEY, 400, "invalid_request_error"),
    ):  # fmt: skip
        status, answer = post("/v1/messages", given, key)
        assert f" {number} " in status
        assert json.loads(answer)["type"] == "error"
        assert json.loads(answer)["error"]["type"] == kind


def test_errors_are_the_clients_own(client: openai.OpenAI, service: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    for field in ({"temperature": -1}, {"n": 0}, {"max_tokens": 0}, {"top_p": 2}, {"seed": 2**70}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="smollm2", prompt="a", **field)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="smollm2", prompt="a b " * 5000, max_tokens=2)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()
    assert (
        service.request("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": -1})[0]
        == 400
    )
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_who_leaves_is_aborted_and_others_go_on(client: openai.OpenAI, service: Served) -> None:
    def of(name: str) -> float:
        _, text = service.request("/metrics")
        line = next(line for line in text.splitlines() if line.startswith(name))
        return float(line.split()[-1])

    stream = client.completions.create(
        model="smollm2", prompt="Once", max_tokens=2000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    eventually(lambda: of("megatron_async_slots_in_use") == 0, "the first to be aborted")
    raw = socket.create_connection(("127.0.0.1", service.port))
    body = json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}).encode()
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        + KEY.encode() + b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body) + body
    )  # fmt: skip
    eventually(lambda: of("megatron_async_slots_in_use") >= 1, "the second request to run")
    raw.close()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(
            lambda n: client.completions.create(model="smollm2", prompt="a", max_tokens=4, seed=n),
            range(4),
        ))  # fmt: skip
    assert len(answers) == 4
    eventually(lambda: of("megatron_async_slots_in_use") == 0, "the second to be aborted")
