"""The demo model as a server knows it, and answers made of texts."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from megatron_async.checkpoints import open_model
from megatron_async.server.answers.answer import Answer
from megatron_async.server.endpoints import ENDPOINTS, Endpoint
from megatron_async.server.fields.asked import Asked, Caller
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.request_bodies import ChatRequest, CompletionRequest
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.messages import Ended, PromptLogProbs
from megatron_async.serving.model_card import ModelCard
from megatron_async.serving.readers import TokenLogProbs
from megatron_async.text.tokenizer import Tokenizer

CONTEXT = 2048
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif enable_thinking %}<think>\n{% endif %}"
)
"""A template in Qwen's manner."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
"""Tools of chats: one whose schema has all that one needs, and one without any."""


@cache
def demo_tokenizer() -> Tokenizer:
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    return tokenizer


def demo_card(**changed: Any) -> ModelCard:
    tokenizer = demo_tokenizer()
    fields: dict[str, Any] = {
        "model": "smollm2",
        "tokenizer_json": tokenizer.backend.to_str().encode(),
        "tokenizer_config": tokenizer.config,
        "chat_template": tokenizer.chat_template,
        "eos_ids": [*tokenizer.eos_ids, 0],
        "max_sequence_length": CONTEXT,
        "vocab_size": 49152,
        "block_size_tokens": 16,
    }
    return ModelCard(**(fields | changed))


@cache
def demo(template: str | None = None) -> ServedModel:
    changed = {} if template is None else {"chat_template": template}
    return ServedModel.of(demo_card(**changed), limits=Limits(choices=8, prompts=4))


def asked_completion(served: ServedModel | None = None, **body: Any) -> Asked:
    return asked_raw(CompletionRequest, json.dumps(body).encode(), served)


def asked_chat(served: ServedModel | None = None, **body: Any) -> Asked:
    body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return asked_raw(ChatRequest, json.dumps(body).encode(), served)


def asked_raw(
    kind: type, body: bytes, served: ServedModel | None = None, caller: Caller | None = None
) -> Asked:
    served = served or demo()
    (ask,) = (endpoint.ask for endpoint in ENDPOINTS.values() if endpoint.kind is kind)
    return ask(decode_body(body, kind, served.limits), served, caller or Caller())


def tokens_of(text: str, ends: bool = True) -> list[int]:
    ids = demo_tokenizer().tokenize(text, add_special_tokens=False)
    return [*ids, 2] if ends else ids


def log_probs_of(tokens: Sequence[int], top_n: int = 2) -> TokenLogProbs:
    """Log probs -1, -1.5 ...; the likeliest tokens are the token and those with the next ids."""
    chosen = -1 - 0.5 * np.arange(len(tokens), dtype=np.float32)
    ids = np.array(tokens, np.int32)[:, None] + np.arange(top_n, dtype=np.int32)
    top = chosen[:, None] - np.arange(top_n, dtype=np.float32)
    return TokenLogProbs(chosen, ids, top)


def told(log_probs: TokenLogProbs) -> PromptLogProbs:
    """A prompt's log probs as a replica tells them."""
    assert log_probs.top_ids is not None
    assert log_probs.top is not None
    parts = (
        log_probs.chosen[:, None].view(np.int32),
        log_probs.top_ids,
        log_probs.top.view(np.int32),
    )
    return PromptLogProbs(log_probs.top.shape[1], np.concatenate(parts, axis=1).tobytes())


def end_of(asked: Asked, reason: str = "termination_id", **fields: Any) -> Ended:
    prompt = asked.prompts[0]
    if asked.choices[0].params.return_log_probs:
        fields.setdefault("prompt_log_probs", told(log_probs_of(prompt[1:])))
    return Ended(0, reason, num_prompt_tokens=len(prompt), num_cached_tokens=1, **fields)


def endpoint_of(asked: Asked) -> Endpoint:
    """The endpoint whose answers have ids as this one."""
    begin, _, _ = asked.style.id.replace("_", "-").partition("-")
    paths = {"cmpl": "completions", "chatcmpl": "chat/completions", "resp": "responses"}
    return ENDPOINTS["/v1/" + paths.get(begin, "messages")]


def answer_of(
    asked: Asked,
    served: ServedModel | None = None,
    is_stream: bool | None = None,
    one_event_a_token: bool = False,
) -> Answer:
    """An answer to be filled; streamed as it was asked, or as is said."""
    if is_stream is not None:
        style = msgspec.structs.replace(asked.style, is_stream=is_stream)
        asked = msgspec.structs.replace(asked, style=style)
    return Answer(endpoint_of(asked).writer, asked, served or demo(), one_event_a_token)


def streamed(
    asked: Asked,
    text: str,
    served: ServedModel | None = None,
    each: int = 1,
    reason: str = "termination_id",
) -> list[dict[str, Any]]:
    """The events of an answer whose choices all have this text; `[DONE]` is checked."""
    answer = answer_of(asked, served, is_stream=True)
    data = answer.begin()
    tokens = tokens_of(text, reason == "termination_id")
    wants = asked.choices[0].params.return_log_probs
    found = log_probs_of(tokens) if wants else None
    for choice in answer.choices:
        for i in range(0, len(tokens), each):
            part = found[i : i + each] if found is not None else None
            data += choice.push(tokens[i : i + each], part)
        data += choice.end(end_of(asked, reason))
    return events_of(data)


def events_of(data: bytes) -> list[dict[str, Any]]:
    *events, last, rest = data.decode().split("\n\n")
    assert last == "data: [DONE]"
    assert rest == ""
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event[len("data: ") :]) for event in events]


def answered(
    asked: Asked, text: str, served: ServedModel | None = None, reason: str = "termination_id"
) -> dict[str, Any]:
    answer = answer_of(asked, served, is_stream=False)
    tokens = tokens_of(text, reason == "termination_id")
    wants = asked.choices[0].params.return_log_probs
    for choice in answer.choices:
        choice.push(tokens, log_probs_of(tokens) if wants else None)
        choice.end(end_of(asked, reason))
    found: dict[str, Any] = json.loads(answer.body())
    return found


def named_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream that names them; the name is the `type` of each."""
    found = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, fields = event.split("\n")
        found.append(json.loads(fields.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
