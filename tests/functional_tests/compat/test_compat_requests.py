"""Requests in Megatron's classes: the answers are those of our engine, and come back whole."""

from typing import Any

import pytest
import torch
from megatron.core.inference.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Status,
)
from megatron.core.inference.sampling_params import SamplingParams

import megatron_async
from megatron_async.compat.conversions.sampling import to_megatron_params, to_own_params
from megatron_async.errors import RequestError
from tests.support.compat_trio import PROMPTS, compat_engine, drive, greedy_params
from tests.support.harness import drain, make_engine
from tests.support.letter_tokenizers import EOS, make_ascii_tokenizer

TOKENS = 10


def own_answers(model: torch.nn.Module, params: megatron_async.SamplingParams) -> list[Any]:
    engine = make_engine(
        model, tokenizer=make_ascii_tokenizer(), max_requests=8, block_size_tokens=16, lookahead=0
    )
    answers = engine.generate(PROMPTS, params)
    engine.close()
    return answers


def own_params(**changes: Any) -> megatron_async.SamplingParams:
    return megatron_async.SamplingParams(
        **{"top_k": 1, "num_tokens_to_generate": TOKENS, "termination_id": -1} | changes
    )


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_answers_are_those_of_our_engine(tiny_model: torch.nn.Module, mode: str) -> None:
    expected = own_answers(tiny_model, own_params(return_log_probs=True, top_n_logprobs=3))
    params = greedy_params(TOKENS, return_log_probs=True, top_n_logprobs=3)
    with compat_engine(
        tiny_model, async_sched_mode=mode, materialize_only_last_token_logits=False
    ) as engine:
        found = drive(engine, PROMPTS, params)
    assert len({token for request in found for token in request.generated_tokens}) > 10
    for number, (request, own) in enumerate(zip(found, expected, strict=True)):
        assert type(request) is DynamicInferenceRequest
        assert (request.request_id, request.status) == (number, Status.COMPLETED)
        assert request.generated_tokens == own.generated_tokens
        assert request.generated_length == TOKENS
        assert request.prompt == PROMPTS[number]
        assert request.prompt_tokens.dtype == torch.int64
        assert request.prompt_tokens.tolist() == own.prompt_tokens.tolist()
        assert request.generated_text == own.generated_text
        assert request.generated_log_probs == pytest.approx(own.generated_log_probs, abs=1e-5)
        assert request.prompt_log_probs == pytest.approx(own.prompt_log_probs, abs=1e-5)
        assert len(request.prompt_log_probs) == len(own.prompt_tokens) - 1
        for ours, theirs in (
            (own.generated_top_n_logprobs, request.generated_top_n_logprobs),
            (own.prompt_top_n_logprobs, request.prompt_top_n_logprobs),
        ):
            assert [list(place) for place in theirs] == [list(place) for place in ours]
        assert 0 < request.ttft <= request.latency
        assert request.tpot == pytest.approx([(request.latency - request.ttft) / (TOKENS - 1)])
        kinds = [event.type.name for event in request.events]
        assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", "FINISH"]


def test_processed_log_probs_are_a_setting_of_the_engine(tiny_model: torch.nn.Module) -> None:
    asked = {"temperature": 0.7, "top_k": 3, "seed": 5}
    own = own_answers(
        tiny_model, own_params(return_log_probs=True, logprobs_mode="processed", **asked)
    )
    raw = own_answers(tiny_model, own_params(return_log_probs=True, **asked))
    params = greedy_params(TOKENS, return_log_probs=True, temperature=0.7, top_k=3)
    params.add_attributes({"seed": 5})
    with compat_engine(tiny_model, logprobs_mode="processed_logprobs") as engine:
        found = drive(engine, PROMPTS, params)
    for request, processed, plain in zip(found, own, raw, strict=True):
        assert request.generated_tokens == processed.generated_tokens
        expected = processed.generated_log_probs
        assert request.generated_log_probs == pytest.approx(expected, abs=1e-5)
        assert request.generated_log_probs != pytest.approx(plain.generated_log_probs, abs=1e-2)


def test_prompt_log_probs_that_were_left_out_are_an_empty_list(tiny_model: torch.nn.Module) -> None:
    params = greedy_params(4, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2)
    with compat_engine(tiny_model) as engine:
        (found,) = drive(engine, PROMPTS[:1], params)
    assert (found.prompt_log_probs, found.prompt_top_n_logprobs) == ([], [])
    found.prompt_log_probs = [0.0]  # a field, as scripts set it
    assert len(found.generated_log_probs) == len(found.generated_top_n_logprobs) == 4


def test_a_record_goes_over_a_wire_and_back(tiny_model: torch.nn.Module) -> None:
    params = greedy_params(5, return_log_probs=True, return_prompt_tokens=True)
    with compat_engine(tiny_model, track_generated_token_events=True) as engine:
        future = engine.add_request(3, PROMPTS[0], params)
        drain(engine)
        record = future.result()
    assert type(record) is DynamicInferenceRequestRecord
    assert record.latency == record[0].latency
    # Tuples arrive as lists, as with msgpack.
    wire = record.serialize()
    wire["requests"] = [_as_lists(request) for request in wire["requests"]]
    back = DynamicInferenceRequestRecord.deserialize(wire)
    merged, sent = back.merge(), record.merge()
    assert merged.generated_tokens == sent.generated_tokens
    assert merged.prompt_tokens.tolist() == sent.prompt_tokens.tolist()
    assert merged.generated_log_probs == sent.generated_log_probs
    assert [e.type for e in merged.events] == [e.type for e in sent.events]
    assert merged.sampling_params == sent.sampling_params
    assert back[0].prompt_length == len(PROMPTS[0])


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def test_the_prompt_is_left_out_of_the_wire_unless_asked_for(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        (found,) = drive(engine, PROMPTS[:1], greedy_params(2))
    wire = found.serialize()
    assert (wire["prompt_tokens"], wire["prompt_length"]) == (None, len(PROMPTS[0]))


def test_what_the_parameters_meant_is_written_into_them(tiny_model: torch.nn.Module) -> None:
    each = [
        SamplingParams(top_k=1, num_tokens_total=9),
        SamplingParams(top_k=1, termination_id=-1),
        greedy_params(500),
    ]
    with compat_engine(tiny_model, max_sequence_length=32) as engine:
        found = drive(engine, ["hello", "ab", "a"], each)
    limits = [request.sampling_params.num_tokens_to_generate for request in found]
    assert limits == [4, 30, 31]
    assert [request.sampling_params.num_tokens_total for request in found] == [None] * 3
    assert [request.sampling_params.termination_id for request in found] == [EOS, -1, -1]
    assert [len(request.generated_tokens) for request in found[1:]] == [30, 31]
    assert each[0].num_tokens_total == 9, "the caller's own parameters stay"


def test_the_terminating_token_stays_a_token_and_leaves_the_text(tiny_model):
    with compat_engine(tiny_model) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(6))
        tokens = plain.generated_tokens
        end = next(token for token in tokens[2:] if token not in tokens[:2])
        engine.controller.tokenizer._eos_ids = [end]
        cut, kept = drive(
            engine, [PROMPTS[0]] * 2,
            [greedy_params(6, termination_id=end),
             greedy_params(6, termination_id=end, detokenize_stop_sequence=True)],
        )  # fmt: skip
    until = tokens[: tokens.index(end) + 1]
    assert cut.generated_tokens == kept.generated_tokens == until
    detokenize = make_ascii_tokenizer().detokenize
    assert kept.generated_text == detokenize(until)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_word_ends_a_request_and_is_taken_from_its_tokens(tiny_model, keeps: bool):
    with compat_engine(tiny_model) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(TOKENS, return_log_probs=True))
        word = plain.generated_text[4:6]
        (found,) = drive(
            engine, PROMPTS[:1],
            greedy_params(
                TOKENS, return_log_probs=True, stop_words=[word], detokenize_stop_sequence=keeps
            ),
        )  # fmt: skip
    kept = 6 if keeps else 4
    assert plain.generated_text.index(word) == 4
    assert found.generated_text == plain.generated_text[:kept]
    # As in Megatron: without the word, unless it is asked for.
    assert found.generated_tokens == plain.generated_tokens[:kept]
    assert len(found.generated_log_probs) == found.generated_length == kept


def test_segments_are_the_texts_of_the_tokens(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        future = engine.add_request(0, "abc", greedy_params(3, return_segments=True))
        drain(engine)
        request = future.result()[0]
    assert request.segments[:3] == ["a", "b", "c"]
    assert "".join(request.generated_segments) == request.generated_text
    assert request.segments[3:] == request.generated_segments


def test_attributes_of_ours_are_honoured_and_unknown_ones_fail_their_request(tiny_model):
    ours, unknown = greedy_params(6), greedy_params(6)
    with compat_engine(tiny_model) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(6))
        banned = plain.generated_tokens[0]
        ours.add_attributes({"logit_bias": {banned: -100.0}})
        unknown.add_attributes({"min_length": 4, "eod_id": 153})
        biased, failed, again = drive(engine, [PROMPTS[0]] * 3, [ours, unknown, greedy_params(6)])
    assert banned not in biased.generated_tokens
    assert again.generated_tokens == plain.generated_tokens
    assert failed.failed()
    error = next(e for e in failed.events if e.type is DynamicInferenceEventType.ERROR_NONTRANSIENT)
    assert isinstance(error.payload, RequestError)
    assert "eod_id, min_length" in str(error.payload)


def test_positions_of_megatrons_parameters() -> None:
    given = SamplingParams(0.5, 7, 0.9, True, True)
    own = to_own_params(given, "raw_logprobs")
    assert (own.temperature, own.top_k, own.top_p) == (0.5, 7, 0.9)
    assert (own.return_log_probs, own.skip_prompt_log_probs) == (True, True)


def test_parameters_there_and_back() -> None:
    own = megatron_async.SamplingParams(
        0.3, 5, 0.8, 0.1, seed=7, stop_words=["x"], logit_bias={1: 2.0}, min_tokens=2,
        logprobs_mode="processed",
    )  # fmt: skip
    theirs = to_megatron_params(own)
    assert type(theirs) is SamplingParams
    assert to_own_params(theirs, "raw_logprobs") == own
    assert to_own_params(SamplingParams.deserialize(theirs.serialize()), "raw_logprobs") == own


def test_our_own_parameters_are_taken_too(tiny_model: torch.nn.Module) -> None:
    with compat_engine(tiny_model) as engine:
        (plain,) = drive(engine, PROMPTS[:1], greedy_params(4))
        future = engine.add_request(0, PROMPTS[0], own_params(num_tokens_to_generate=4))
        drain(engine)
        request = future.result().merge()
    assert request.generated_tokens == plain.generated_tokens
    assert type(request.sampling_params) is SamplingParams


@pytest.mark.parametrize(
    "prompt", [[104, 101, 108, 108, 111], torch.tensor([104, 101, 108, 108, 111])]
)
def test_prompts_as_tokens(tiny_model: torch.nn.Module, prompt: Any) -> None:
    with compat_engine(tiny_model) as engine:
        by_text, by_tokens = drive(engine, ["hello", prompt], greedy_params(4))
    assert by_tokens.generated_tokens == by_text.generated_tokens
    assert by_tokens.prompt == "hello"


def test_beginning_of_sequence_is_the_callers_choice(tiny_model: torch.nn.Module) -> None:
    """Megatron takes away what a tokenizer puts in front by itself."""

    class Beginning:
        bos, eod = 1, EOS

        def tokenize(self, text: str) -> list[int]:
            return [1, 1, *text.encode()]

        def detokenize(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    with compat_engine(tiny_model) as engine:
        engine.controller.tokenizer = Beginning()
        without, with_it = drive(
            engine, ["ab", "ab"], [greedy_params(1), greedy_params(1, add_BOS=True)]
        )
    assert without.prompt_tokens.tolist() == [97, 98]
    assert with_it.prompt_tokens.tolist() == [1, 97, 98]


def test_a_tokenizer_that_fails_fails_its_request_alone(tiny_model: torch.nn.Module) -> None:
    real = make_ascii_tokenizer()

    class Failing:
        eod, bos = EOS, None
        detokenize = real.detokenize

        def tokenize(self, text: str) -> list[int]:
            if text == "bad":
                raise KeyError("no such piece")
            return real.tokenize(text)

    with compat_engine(tiny_model) as engine:
        engine.controller.tokenizer = Failing()
        failed, fine = drive(engine, ["bad", "good"], greedy_params(3))
    assert failed.failed()
    assert "no such piece" in str(failed.events[1].payload)
    assert fine.succeeded()
    assert len(fine.generated_tokens) == 3
