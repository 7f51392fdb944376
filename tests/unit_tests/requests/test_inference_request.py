"""A request: its text, its events, and Megatron's names for its parts."""

import time

import numpy as np
import pytest

from megatron_async.requests.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from megatron_async.requests.sampling_params import SamplingParams


def make(calls=None, **params):
    def detokenize(tokens):
        if calls is not None:
            calls.append(list(tokens))
        return " ".join(map(str, tokens))

    return DynamicInferenceRequest(
        request_id=5,
        prompt_tokens=np.array([1, 2], np.int32),
        sampling_params=SamplingParams(**params),
        detokenizer=detokenize,
        generated_tokens=[7, 8, 9],
    )


@pytest.mark.parametrize(
    ("reason", "keep", "text"),
    [
        ("length", False, "7 8 9"),
        ("termination_id", False, "7 8"),
        ("stop_token", False, "7 8"),
        ("stop_token", True, "7 8 9"),
        ("aborted", False, "7 8 9"),
    ],
)
def test_text_leaves_out_the_token_that_ended_it(reason, keep, text):
    calls = []
    request = make(calls, detokenize_stop_sequence=keep)
    request.finish_reason = reason
    assert request.generated_text == text
    assert request.generated_text == text
    assert len(calls) == 1, "made once, when asked for"


def test_text_of_an_unfinished_request_goes_on():
    request = make()
    assert request.generated_text == "7 8 9"
    request.generated_tokens.append(10)
    assert request.generated_text == "7 8 9 10"


def test_without_a_tokenizer_there_is_no_text():
    request = DynamicInferenceRequest(request_id=0, sampling_params=SamplingParams())
    request.finish_reason = "length"
    assert request.generated_text is None


def test_events_are_stamped_in_order():
    request, before = make(), time.time()
    for kind in DynamicInferenceEventType:
        request.add_event(kind)
    assert [event.type for event in request.events] == list(DynamicInferenceEventType)
    stamps = [event.timestamp for event in request.events]
    assert before <= stamps[0]
    assert stamps == sorted(stamps)


def test_megatrons_names():
    request = make()
    assert [status.value for status in Status] == [1, 2, 3, 4, 5]
    assert (request.succeeded(), request.failed()) == (False, False)
    request.status = Status.COMPLETED
    assert (request.succeeded(), request.failed()) == (True, False)
    request.status = Status.FAILED
    assert (request.succeeded(), request.failed()) == (False, True)
    assert request.requests == [request]
    assert request.merge() is request
    assert request.generated_length == 3
    assert str(request) == "request 5, FAILED, prompt len 2, gen len 3"


def test_requests_are_told_apart_by_identity():
    assert make() != make()
