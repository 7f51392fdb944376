# ruff: noqa: E501  (tables of cases)
import json
from typing import Any

import pytest

from megatron_async.planning.admission import MAX_PRIORITY as ENGINES_MAX_PRIORITY
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.server.fields.asked import Caller
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.fields.request_bodies import CompletionRequest
from megatron_async.server.fields.sampling_fields import MAX_PRIORITY
from megatron_async.server.fields.served_model import ServedModel
from tests.support.served_demo import (
    CONTEXT,
    asked_chat,
    asked_completion,
    asked_raw,
    demo,
    demo_card,
)


def params_of(**body: Any) -> SamplingParams:
    return asked_completion(prompt="Hello", **body).choices[0].params


def refusal(chat: bool = False, **body: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        asked_chat(**body) if chat else asked_completion(**({"prompt": "Hello"} | body))
    error = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return caught.value


def test_defaults_are_the_likeliest_token_and_openais() -> None:
    params = params_of()
    assert params.num_tokens_to_generate == 16
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0, 1, 0, None)
    assert params.stop_token_ids == [0]  # the card's second end; the first is the engine's own
    assert params.termination_id is None
    assert not params.return_log_probs
    assert asked_chat().choices[0].params.num_tokens_to_generate is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"top_p": 0}, {"top_p": 0, "top_k": 1}),
        ({"top_p": 1e-30, "top_k": 5}, {"top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**12}, {"top_k": 0}),
        ({"temperature": 1e-300}, {"temperature": 0}),
        ({"ignore_eos": True}, {"termination_id": -1, "stop_token_ids": None}),
        ({"stop": "x"}, {"stop_words": ["x"]}),
        ({"stop": ["x", "y"], "include_stop_str_in_output": True}, {"stop_words": ["x", "y"], "detokenize_stop_sequence": True}),
        ({"logit_bias": {"5": -100, "6": 1.5}}, {"logit_bias": {5: -100, 6: 1.5}}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"seed": -(2**63)}, {"seed": 0}),
        ({"max_tokens": CONTEXT - 1}, {"num_tokens_to_generate": CONTEXT - 1}),
        ({"max_completion_tokens": 7}, {"num_tokens_to_generate": 7}),
        ({"max_completion_tokens": 7, "max_tokens": 8}, {"num_tokens_to_generate": 8}),
        ({"logprobs": 0}, {"return_log_probs": True, "top_n_logprobs": 0, "skip_prompt_log_probs": True}),
        ({"logprobs": 3, "echo": True}, {"top_n_logprobs": 3, "skip_prompt_log_probs": False, "echo": True}),
        ({"prompt_logprobs": 2, "logprobs": 1}, {"top_n_logprobs": 2, "skip_prompt_log_probs": False}),
        ({"max_tokens": 0, "echo": True}, {"num_tokens_to_generate": 0}),
        ({"max_tokens": None, "temperature": None, "stop": None, "n": None, "seed": None}, {"temperature": 0}),
        ({"unknown": {"of": ["any", "kind"]}}, {"temperature": 0}),
        ({"top_p": 0.9}, {"temperature": 1, "top_p": 0.9}),
        ({"min_p": 0.1, "temperature": 0.5}, {"temperature": 0.5, "min_p": 0.1}),
    ],
)  # fmt: skip
def test_fields_in_the_engines_words(body: dict[str, Any], expected: dict[str, Any]) -> None:
    params = params_of(**body)
    params.validate(49152)
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**4000]}, "prompt"),
        ({"prompt": [5] * CONTEXT}, "prompt"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 5, "prompt": ["a", "b"]}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e30}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        ({"prompt": [[5], [5] * (CONTEXT - 10)], "max_tokens": 11}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"max_version_lag": -1}, "max_version_lag"),
        ({"max_version_lag": 10**30}, "max_version_lag"),
        ({"max_version_lag": 1.5}, "max_version_lag"),
        ({"max_version_lag": "1"}, "max_version_lag"),
        ({"max_version_lag": True}, "max_version_lag"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(513)}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"lora_request": {"name": "x"}}, "lora_request"),
        ({"suffix": "x"}, "suffix"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a" * 65}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": "no JSON"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_is_impossible_gets_400(body: dict[str, Any], param: str) -> None:
    found = refusal(**body)
    assert (found.status, found.param) == (400, param), found.message


def test_an_unknown_model_gets_404() -> None:
    found = refusal(model="other")
    assert (found.status, found.code, found.param) == (404, "model_not_found", "model")
    assert len(refusal(model="x" * 10**6).message) < 500
    named = ServedModel.of(demo_card(tokenizer_json=None), ["first", "second"])
    asked = asked_completion(named, model="second", prompt=[1])
    assert asked.style.model == "second"


def test_too_long_a_prompt_says_so_in_openais_code() -> None:
    assert refusal(prompt=[5] * CONTEXT).code == "context_length_exceeded"
    assert refusal(prompt="a " * 200_000).code == "context_length_exceeded"
    kept = asked_completion(prompt=list(range(100)), truncate_prompt_tokens=3).prompts[0]
    assert list(kept) == [97, 98, 99]
    for side, kept in (("right", [0, 1, 2]), ("left", [97, 98, 99])):
        cut = {"truncate_prompt_tokens": 3, "truncation_side": side}
        assert list(asked_completion(prompt=list(range(100)), **cut).prompts[0]) == kept
    for limit, left in (({}, CONTEXT - 1), ({"max_tokens": 100}, CONTEXT - 100)):
        body = {"prompt": [5] * 9999, "truncate_prompt_tokens": -1, **limit}
        assert len(asked_completion(**body).prompts[0]) == left


def test_choice_i_has_seed_plus_i() -> None:
    asked = asked_completion(prompt=["a", "b"], n=3, seed=2**63 - 2)
    seeds = [choice.params.seed for choice in asked.choices]
    assert seeds == [2**63 - 2, 2**63 - 1, 0] * 2
    assert [choice.prompt for choice in asked.choices] == [0, 0, 0, 1, 1, 1]
    assert [choice.index for choice in asked.choices] == list(range(6))


def test_priority_is_negated_and_clamped_without_the_admin_key() -> None:
    def priority(wanted: int, caller: Caller) -> int:
        body = json.dumps({"prompt": "a", "priority": wanted}).encode()
        return asked_raw(CompletionRequest, body, caller=caller).priority

    assert priority(-5, Caller()) == 0
    assert priority(5, Caller()) == -5
    assert priority(-5, Caller(is_admin=True)) == 5
    assert priority(-(10**30), Caller(is_admin=True)) == MAX_PRIORITY
    assert priority(10**30, Caller()) == -MAX_PRIORITY
    assert MAX_PRIORITY == ENGINES_MAX_PRIORITY


def test_a_salt_is_of_its_key() -> None:
    def salt(owner: str, text: str | None) -> str | None:
        body = json.dumps({"prompt": "a", "cache_salt": text}).encode()
        asked = asked_raw(CompletionRequest, body, caller=Caller(owner))
        return asked.choices[0].params.cache_salt

    found = {salt("a", "s"), salt("b", "s"), salt("a", "t"), salt("a:1", "s"), salt("a", "1:s")}
    assert len(found) == 5
    assert salt("a", "s") == salt("a", "s")
    assert salt("a", None) is None


def test_defaults_of_the_generation_config() -> None:
    config = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "do_sample": True,
    }  # fmt: skip
    served = ServedModel.of(demo_card(generation_config=config))
    params = asked_completion(served, prompt="a", top_p=0.5).choices[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)
    assert (params.num_tokens_to_generate, params.repetition_penalty) == (16, 1)
    assert asked_chat(served).choices[0].params.num_tokens_to_generate == 7
    served.chat.close()


def test_the_answers_log_probs_are_bounded() -> None:
    served = demo()
    most = served.limits.log_prob_values
    assert most > 4 * 2000 * 21 * 8
    small = ServedModel.of(demo_card(tokenizer_json=None, max_sequence_length=200_000))
    with pytest.raises(Refusal, match="values"):
        asked_completion(small, prompt=[5] * 100_000, prompt_logprobs=20)


def test_without_a_tokenizer_ids_are_served_and_texts_refused() -> None:
    served = ServedModel.of(demo_card(tokenizer_json=None))
    assert asked_completion(served, prompt=[1, 2]).prompts == [[1, 2]]
    for body in ({"prompt": "a"}, {"prompt": [1], "stop": "x"}):
        with pytest.raises(Refusal, match="tokenizer"):
            asked_completion(served, **body)
    with pytest.raises(Refusal, match="chat template"):
        asked_chat(served)
    texts = ServedModel.of(demo_card(tokenizer_json=None, replica_makes_text=True))
    assert asked_completion(texts, prompt="a").prompts == ["a"]
