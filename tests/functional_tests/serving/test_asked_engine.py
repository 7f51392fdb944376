"""What the server asks, an engine serves; what it tells is formatted as it is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatron_async import LLM
from megatron_async.server.fields.asked import Asked
from megatron_async.serving.readers import RequestEnd, TokenLogProbs
from tests.support.served_demo import answer_of, asked_chat, asked_completion, demo

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", max_sequence_length=512)


def served(llm: LLM, asked: Asked) -> dict[str, Any]:
    answer = answer_of(asked, is_stream=False)
    prompts = [asked.prompts[one.prompt] for one in asked.choices]
    results = llm.generate(prompts, [one.params for one in asked.choices])
    for choice, result in zip(answer.choices, results):
        log_probs = prompt_log_probs = None
        if result.log_probs is not None:
            log_probs = TokenLogProbs(np.array(result.log_probs.generated(), np.float32))
            prompt = result.log_probs.prompt()
            if prompt is not None:
                prompt_log_probs = TokenLogProbs(np.array(prompt, np.float32))
        choice.push(result.generated_tokens, log_probs)
        choice.end(
            RequestEnd(
                result.finish_reason,
                num_prompt_tokens=len(result.prompt_tokens),
                stop_words_from=result.stop_words_from,
                prompt_log_probs=prompt_log_probs,
            )
        )
        if not asked.style.is_scoring and asked.style.id.startswith("cmpl-"):
            found = choice.whole()["text"]
            assert found == result.generated_text
    found = json.loads(answer.body())
    assert isinstance(found, dict)
    return found


def test_a_forced_call_of_a_small_model_is_a_call(llm: LLM) -> None:
    asked = asked_chat(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, seed=1)
    choice = served(llm, asked)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")


def test_seeds_stop_words_and_defaults(llm: LLM) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time", "seed": 3, "max_tokens": 12}
    fields["temperature"] = 1
    both = served(llm, asked_completion(n=2, **fields))["choices"]
    second = served(llm, asked_completion(**(fields | {"seed": 4})))["choices"][0]
    assert both[0]["text"] != both[1]["text"] == second["text"]
    greedy = served(llm, asked_completion(prompt="One, two,", top_p=0, max_tokens=8))
    text = greedy["choices"][0]["text"]
    assert text == served(llm, asked_completion(prompt="One, two,", temperature=0, max_tokens=8))[
        "choices"][0]["text"]  # fmt: skip
    word = text[3:6]
    asked = asked_completion(prompt="One, two,", temperature=0, max_tokens=8, stop=word)
    cut = served(llm, asked)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(word)], "stop")


def test_scoring_is_the_log_probs_of_the_prompt(llm: LLM) -> None:
    ids = [list(demo().tokenizer.tokenize("The capital of France is Paris"))]  # type: ignore[union-attr]
    asked = asked_completion(prompt=ids, echo=True, logprobs=0, max_tokens=0)
    found = served(llm, asked)["choices"][0]["logprobs"]
    expected = llm.generate(ids, asked.choices[0].params)[0].prompt_log_probs
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(expected)
    assert "".join(found["tokens"]) == "The capital of France is Paris"
