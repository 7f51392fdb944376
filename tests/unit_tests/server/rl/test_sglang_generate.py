"""`/generate`: SGLang's fields as the engine is asked, and its answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_async.server.answers.answer import Answer
from megatron_async.server.fields.asked import NOBODY, Asked
from megatron_async.server.fields.json_body import Limits, decode_body
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.rl.sglang_generate import GENERATE, GenerateWriter
from megatron_async.serving.messages import Ended, PromptLogProbs
from megatron_async.serving.readers import TokenLogProbs
from tests.support.served_demo import demo, demo_tokenizer

SLIME = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_new_tokens": 40, "stop": None,
    "stop_token_ids": [7], "skip_special_tokens": False, "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}  # fmt: skip
"""What slime 624b824a sends as `sampling_params` (`sglang_rollout.py`)."""


def asked(**body: Any) -> Asked:
    """What the engine is asked for a body."""
    request = decode_body(msgspec.json.encode(body), GENERATE.kind, Limits())
    return GENERATE.ask(request, demo(), NOBODY)


def answered(one: Asked, ids: list[int], **end: Any) -> Any:
    """The answer of these tokens, each of log prob -0.5 and with one likelier token."""
    answer = Answer(GENERATE.writer, one, demo())
    size = len(ids)
    top = TokenLogProbs(
        np.full(size, -0.5, np.float32), np.full((size, 1), 9, np.int32),
        np.full((size, 1), -0.25, np.float32),
    )  # fmt: skip
    wants = one.choices[0].params.return_log_probs
    answer.choices[0].push(ids, top if wants else None)
    answer.choices[0].end(Ended(number=0, num_prompt_tokens=3, latency=0.5, **end))
    return msgspec.json.decode(answer.body())


def test_slimes_request_is_a_completion() -> None:
    one = asked(input_ids=[1, 2, 3], sampling_params=SLIME, return_logprob=True, rid="x-1")
    params = one.choices[0].params
    assert (one.prompts, one.style.id) == ([[1, 2, 3]], "x-1")
    assert (params.temperature, params.top_p, params.top_k) == (0.8, 0.9, 50)
    assert (params.num_tokens_to_generate, params.return_log_probs) == (40, True)
    assert 7 in (params.stop_token_ids or ())
    assert params.detokenize_stop_sequence
    assert params.skip_prompt_log_probs
    assert asked(text="Hi").choices[0].params.num_tokens_to_generate == 128


def test_the_answer_has_what_slime_reads() -> None:
    one = asked(input_ids=[1, 2, 3], return_logprob=True, top_logprobs_num=1)
    body = answered(one, [4, 5], finish_reason="length")
    assert body["output_ids"] == [4, 5]
    meta = body["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 4, None], [-0.5, 5, None]]
    assert meta["output_top_logprobs"] == [[[-0.25, 9, None]]] * 2
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 0)
    assert "input_token_logprobs" not in meta
    plain = answered(asked(input_ids=[1]), [4], finish_reason="termination_id")
    assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": 4}
    assert "output_token_logprobs" not in plain["meta_info"]
    for why in ("aborted", "weight_update"):
        body = answered(asked(input_ids=[1]), [4], finish_reason=why)
        assert body["output_ids"] == [4]
        assert body["meta_info"]["finish_reason"]["type"] == "abort"


def test_events_of_a_stream_have_all_so_far(monkeypatch) -> None:
    """Break it: leave `_num_sent` as it is, and tokens with a text are told twice. Each log prob
    is written once, however many events have it."""
    written, write = list[int](), GenerateWriter._one

    def note(self: GenerateWriter, token: int, value: float) -> list[Any]:
        written.append(token)
        return write(self, token, value)

    monkeypatch.setattr(GenerateWriter, "_one", note)
    one = asked(input_ids=[1, 2, 3], stream=True, return_logprob=True, logprob_start_len=0)
    answer, ids = Answer(GENERATE.writer, one, demo()), demo_tokenizer().tokenize("Hello, again é!")
    log_probs, events = TokenLogProbs(np.full(len(ids), -0.5, np.float32)), b""
    for place, token in enumerate(ids):
        events += answer.choices[0].push([token], log_probs[place : place + 1])
    of_prompt = PromptLogProbs(0, np.full(2, -0.25, np.float32).tobytes())
    end = Ended(number=0, finish_reason="length", num_prompt_tokens=3, prompt_log_probs=of_prompt)
    *lines, done = (events + answer.choices[0].end(end)).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    told = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]
    wanted = [ids[: n + 1] for n in range(len(ids))]
    assert [each["output_ids"] for each in told] == [*wanted, ids]
    assert all(each["text"].startswith(before["text"]) for before, each in pairwise(told))
    assert told[-1]["text"] == "Hello, again é!"
    metas = [each["meta_info"] for each in told]
    assert [meta["finish_reason"] for meta in metas[:-1]] == [None] * len(ids)
    assert metas[-1]["finish_reason"] == {"type": "length", "length": len(ids)}
    counts = [len(meta["output_token_logprobs"]) for meta in metas]
    assert counts == [*range(1, len(ids) + 1), len(ids)]
    assert metas[-1]["input_token_logprobs"][0] == [None, 1, None]
    assert metas[-1]["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
    assert written == [*ids, 1, 2, 3]


def test_several_answers_are_a_list() -> None:
    one = asked(input_ids=[1], sampling_params={"n": 2, "sampling_seed": 4})
    assert [choice.params.seed for choice in one.choices] == [4, 5]
    answer = Answer(GENERATE.writer, one, demo())
    for choice, token in zip(answer.choices, (4, 5), strict=True):
        choice.push([token])
        choice.end(Ended(number=0, finish_reason="length"))
    assert [each["output_ids"] for each in msgspec.json.decode(answer.body())] == [[4], [5]]
    streamed = Answer(GENERATE.writer, asked(input_ids=[1], stream=True,
                      sampling_params={"n": 2}), demo())  # fmt: skip
    (event,) = streamed.choices[1].push([6]).decode().split("\n\n")[:-1]
    assert msgspec.json.decode(event.removeprefix("data: "))["index"] == 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": [1], "text": "Hi"}, "input_ids"),
        ({}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n=0"),
        ({"input_ids": [1], "sampling_params": {"n": 10**9}}, "n=1000000000"),
        ({"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len"),
        ({"input_ids": [1], "routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"custom_params": {}}}, "custom_params"),
        ({"input_ids": [1], "sampling_params": {"top_p": 2}}, "top_p"),
        ({"input_ids": [1], "custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
        ({"input_ids": [1], "rid": "a b"}, "rid"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1], "max_version_lag": 0}, "max_version_lag"),
    ],
)
def test_what_is_not_served_is_refused_in_sglangs_words(body: Any, named: str) -> None:
    with pytest.raises(Refusal, match=named):
        asked(**body)
