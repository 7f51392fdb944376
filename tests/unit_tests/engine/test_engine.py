"""The engine over a real tiny model: bad requests, aborts, failures, futures, statistics."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch

from megatron_async import SamplingParams, Status
from megatron_async.errors import RequestAborted, RequestError, StepFailed
from tests.unit_tests.engine.engines_under_test import GREEDY, PROMPTS, engine_around


def run(engine):
    ended = []
    while engine.has_unfinished_requests():
        ended += engine.step_modern()["finished_request_records"]
    return {request.request_id: request for request in ended}


BAD_REQUESTS = [
    ([], {}, ("empty",)),
    ([1, 512], {}, ("512", "position 1", "0 to 511")),
    ([-1], {}, ("-1", "0 to 511")),
    ([[1, 2]], {}, ("flat list",)),
    ([0.5], {}, ("flat list", "float64")),
    (list(range(128)), {}, ("128 tokens", "max_sequence_length=128")),
    ([1], {"temperature": -0.1}, ("temperature=-0.1", "0 (greedy) or more")),
    ([1], {"temperature": float("nan")}, ("temperature=nan",)),
    ([1], {"temperature": float("inf")}, ("temperature=inf",)),
    ([1], {"top_p": 1.1}, ("top_p=1.1", "between 0 (off) and 1")),
    ([1], {"top_p": -0.1}, ("top_p=-0.1",)),
    ([1], {"min_p": 2}, ("min_p=2",)),
    ([1], {"top_k": -1}, ("top_k=-1", "0 (off) or more")),
    ([1], {"top_k": 1.5}, ("top_k=1.5", "integer")),
    ([1], {"seed": -3}, ("seed=-3",)),
    ([1], {"num_tokens_to_generate": 0}, ("num_tokens_to_generate=0", "1 or more")),
    ([1], {"num_tokens_to_generate": 3, "num_tokens_total": 4}, ("one of them",)),
    ([1, 2, 3], {"num_tokens_total": 3, "num_tokens_to_generate": None}, ("num_tokens_total=3",)),
    ([1], {"stop_token_ids": [600]}, ("stop_token_ids=600", "0 to 511")),
    ([1], {"termination_id": -2}, ("termination_id=-2", "-1 for none")),
    ([1], {"stop_token_ids": 5}, ("stop_token_ids=5", "a list")),
    ([1], {"stop_words": ["x"]}, ("stop_words", "no tokenizer", "stop_token_ids")),
    ([1], {"stop_words": [""]}, ("stop_words=['']", "none empty")),
    ([1], {"stop_words": "x"}, ("stop_words='x'", "list of strings")),
    ([1], {"stop_words": [7]}, ("stop_words=[7]", "list of strings")),
    ([1], {"top_n_logprobs": 2}, ("top_n_logprobs=2", "return_log_probs=True")),
]


@pytest.mark.parametrize(("prompt", "changes", "words"), BAD_REQUESTS)
def test_a_bad_request_fails_alone(make_engine, expected, prompt, changes, words):
    engine = make_engine()
    good = engine.add_request(0, PROMPTS[0], GREEDY)
    params = SamplingParams(**{"num_tokens_to_generate": 12, "temperature": 1.0} | changes)
    bad = engine.add_request(1, prompt, params)
    ended = run(engine)
    assert bad.result() is ended[1]
    assert ended[1].status == Status.FAILED
    assert isinstance(ended[1].error, RequestError)
    assert all(word in str(ended[1].error) for word in words), ended[1].error
    assert good.result().generated_tokens == expected[0]


@pytest.mark.parametrize("request_id", ["a", 1.5, None, True, [1], 2**63, -(2**63) - 1])
def test_a_request_id_must_be_an_integer_of_64_bits(make_engine, expected, request_id):
    engine = make_engine()
    engine.add_request(1, PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match="must be an integer, -2\\*\\*63 to"):
        engine.add_request(request_id, PROMPTS[1], GREEDY)
    assert run(engine)[1].generated_tokens == expected[0]


@pytest.mark.parametrize("request_id", [-1, 2**63 - 1, -(2**63), np.int64(3)])
def test_any_such_integer_will_do(make_engine, expected, request_id):
    engine = make_engine()
    engine.add_request(request_id, PROMPTS[0], GREEDY)
    assert run(engine)[int(request_id)].generated_tokens == expected[0]


def test_parameters_of_a_wrong_type_and_a_broken_tokenizer_fail_alone(make_engine, expected):
    class Broken:
        def tokenize(self, text):
            raise TypeError(f"cannot read {text!r}")

        def detokenize(self, tokens):
            return str(tokens)

    engine = make_engine()
    engine.controller.tokenizer = Broken()
    good = engine.add_request(0, PROMPTS[0], GREEDY)
    wrong = engine.add_request(1, [1], {"temperature": 0}).result()
    broken = engine.add_request(2, "text", GREEDY).result()
    assert "sampling_params is a builtins.dict: give a megatron_async.SamplingParams" in str(
        wrong.error
    )
    assert str(broken.error) == "cannot read 'text'"
    assert {i: r.status for i, r in run(engine).items()} == {
        0: Status.COMPLETED,
        1: Status.FAILED,
        2: Status.FAILED,
    }
    assert good.result().generated_tokens == expected[0]


def test_a_request_larger_than_the_pool(make_engine):
    engine = make_engine(num_kv_blocks=2)
    fits = SamplingParams(num_tokens_to_generate=30, termination_id=-1)
    too_large = SamplingParams(num_tokens_to_generate=31, termination_id=-1)
    requests = engine.generate([[1, 2, 3], [1, 2, 3]], [fits, too_large])
    assert [request.status for request in requests] == [Status.COMPLETED, Status.FAILED]
    assert len(requests[0].generated_tokens) == 30
    for word in ("34 tokens", "3 KV blocks", "pool has 2", "num_kv_blocks"):
        assert word in str(requests[1].error)


def test_a_duplicate_id_leaves_the_first_alone(make_engine, expected):
    engine = make_engine()
    engine.add_request(7, PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match="request id 7 is in use"):
        engine.add_request(7, PROMPTS[1], GREEDY)
    assert run(engine)[7].generated_tokens == expected[0]
    engine.add_request(7, PROMPTS[1], GREEDY)  # free again
    assert run(engine)[7].generated_tokens == expected[1]


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_abort(make_engine, expected, lookahead, after):
    engine = make_engine(lookahead=lookahead, max_requests=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(i, prompt, GREEDY)
    for _ in range(after):
        engine.step_modern()
    for victim in (1, 3):  # one active, one waiting
        engine.abort_request(victim)
    ended = run(engine)
    for i in (0, 2):
        assert ended[i].generated_tokens == expected[i]
    for i in (1, 3):
        assert isinstance(ended[i].error, RequestAborted)
        assert ended[i].finish_reason == "aborted"
        assert ended[i].generated_tokens == expected[i][: len(ended[i].generated_tokens)]
    with pytest.raises(KeyError):
        engine.abort_request(1)


def test_an_exception_in_the_forward_pass_fails_its_step_alone(make_engine, expected, lookahead):
    engine = make_engine(lookahead=lookahead)
    wrapped = engine.controller.inference_wrapped_model
    forward, calls = wrapped.forward, []

    def faulty(view):
        calls.append(view.dims)
        if len(calls) == 4:
            raise FloatingPointError("made up")
        return forward(view)

    wrapped.forward = faulty
    for i in (0, 1):
        engine.add_request(i, PROMPTS[i], GREEDY)
    ended = {}
    while not ended:
        for request in engine.step_modern()["finished_request_records"]:
            ended[request.request_id] = request
    assert sorted(ended) == [0, 1]
    for request in ended.values():
        assert request.status == Status.FAILED
        assert isinstance(request.error, StepFailed)
        assert isinstance(request.error.__cause__, FloatingPointError)
        booked = request.generated_tokens
        assert booked == expected[request.request_id][: len(booked)]
    after = engine.generate(PROMPTS, GREEDY)
    assert [request.generated_tokens for request in after] == expected
    assert engine.stats()["failed_steps"] == 1


def test_requests_outside_of_a_failed_step_go_on(make_engine, expected, lookahead):
    """Two run when the step fails; one waits, and one is admitted only once they are gone."""
    engine = make_engine(lookahead=lookahead, max_requests=3)
    wrapped = engine.controller.inference_wrapped_model
    forward, calls = wrapped.forward, []

    def faulty(view):
        calls.append(1)
        if len(calls) == 3:
            raise FloatingPointError("made up")
        return forward(view)

    wrapped.forward = faulty
    ended = {}

    def step():
        for request in engine.step_modern()["finished_request_records"]:
            ended[request.request_id] = request

    for i in (0, 1):
        engine.add_request(i, PROMPTS[i], GREEDY)
    for _ in range(3):  # the third is launched, and fails, with requests 0 and 1
        step()
    for i in (2, 3):  # may be launched behind it before that is known
        engine.add_request(i, PROMPTS[i], GREEDY)
    while engine.has_unfinished_requests():
        step()
    for i in (0, 1):
        assert isinstance(ended[i].error, StepFailed)
        assert str(ended[i].error) == "step 2 failed: FloatingPointError('made up')"
        assert ended[i].finish_reason == "error"
    for i in (2, 3):
        assert ended[i].status == Status.COMPLETED
        assert ended[i].generated_tokens == expected[i]
    assert engine.stats()["failed_steps"] == 1
    assert engine.stats()["failed_requests"] == 2


def test_generate_with_good_and_bad_prompts(make_engine, expected):
    engine = make_engine()
    prompts = [PROMPTS[0], [], PROMPTS[1], [512], "no tokenizer", PROMPTS[3]]
    requests = engine.generate(prompts, GREEDY)
    found = [r.generated_tokens if r.error is None else type(r.error) for r in requests]
    assert found[:4] == [expected[0], RequestError, expected[1], RequestError]
    assert isinstance(requests[4].error, ValueError)
    assert "needs a tokenizer" in str(requests[4].error)
    assert found[5] == expected[3]
    assert engine.generate([[], [512]], GREEDY)[1].status == Status.FAILED


def test_async_step_and_futures(make_engine, expected, lookahead):
    engine = make_engine(lookahead=lookahead)

    async def client(i):
        await asyncio.sleep(0.002 * i)
        return await engine.add_request(i, PROMPTS[i], GREEDY)

    async def server(clients):
        while not all(task.done() for task in clients):
            await engine.async_step()
            await asyncio.sleep(0)

    async def main():
        clients = [asyncio.create_task(client(i)) for i in range(len(PROMPTS))]
        await server(clients)
        return [task.result().generated_tokens for task in clients]

    assert asyncio.run(main()) == expected


def test_reasons_and_limits(make_engine, expected):
    engine = make_engine()
    first = expected[0]
    stop = next(i for i in range(1, 12) if first[i] not in first[:i])
    requests = engine.generate(
        [PROMPTS[0]] * 4,
        [
            SamplingParams(temperature=0.0, num_tokens_to_generate=3, termination_id=-1),
            SamplingParams(temperature=0.0, num_tokens_total=5, termination_id=-1),
            SamplingParams(temperature=0.0, termination_id=first[stop]),
            SamplingParams(temperature=0.0, termination_id=-1, stop_token_ids=[3, first[stop]]),
        ],
    )
    ends = [(request.finish_reason, request.generated_length) for request in requests]
    assert ends[:2] == [("length", 3), ("length", 2)]
    assert ends[2:] == [("termination_id", stop + 1), ("stop_token", stop + 1)]
    for request in requests:
        assert request.generated_tokens == first[: request.generated_length]
        assert 0 < request.ttft <= request.latency


def test_a_sequence_ends_at_the_longest_length(make_engine):
    engine = make_engine(max_sequence_length=20)
    [request] = engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, termination_id=-1))
    assert request.generated_length == 17
    [cut] = engine.generate(
        [[1, 2, 3]], SamplingParams(temperature=0.0, termination_id=-1, num_tokens_to_generate=100)
    )
    assert cut.generated_tokens == request.generated_tokens


def test_outputs_carry_every_token_once(make_engine, expected):
    engine = make_engine(lookahead=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(i, prompt, GREEDY)
    streamed = {i: [] for i in range(len(PROMPTS))}
    while engine.has_unfinished_requests():
        report = engine.step_modern()
        for output in report["outputs"]:
            for request_id, token in zip(output.token_request_ids, output.tokens, strict=True):
                streamed[int(request_id)].append(int(token))
    assert list(streamed.values()) == expected


def test_overlap_ratio_counts_bursts_apart(make_engine):
    for lookahead, ratio in ((0, 0.0), (1, 1.0), (3, 1.0)):
        engine = make_engine(lookahead=lookahead)
        for _ in range(3):
            engine.generate(PROMPTS, GREEDY)
        assert engine.stats()["overlap_ratio"] == ratio
        assert engine.stats()["generated_tokens"] == 3 * 4 * 12


def test_prompts_may_be_arrays_and_tensors(make_engine, expected):
    engine = make_engine()
    prompts = [np.array(PROMPTS[0]), torch.tensor(PROMPTS[0]), tuple(PROMPTS[0])]
    assert [r.generated_tokens for r in engine.generate(prompts, GREEDY)] == [expected[0]] * 3
    with pytest.raises(RequestError, match="2 sampling_params were given for 1 prompts"):
        engine.generate([[1]], [GREEDY, GREEDY])


def test_default_seeds_differ_by_request_and_repeat(make_engine):
    params = SamplingParams(num_tokens_to_generate=12, termination_id=-1)
    runs = []
    for _ in range(2):
        engine = make_engine()
        runs.append([r.generated_tokens for r in engine.generate([[1, 2]] * 3, params)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


@pytest.mark.parametrize("priority", [1.5, True, "high", 2**20 + 1, None])
def test_a_bad_priority_fails_its_request_alone(make_engine, priority):
    engine = make_engine()
    engine.add_request(0, [1, 2], GREEDY, priority=priority)
    engine.add_request(1, [1, 2], GREEDY, priority=7)
    ended = run(engine)
    assert isinstance(ended[0].error, RequestError)
    assert f"priority={priority!r}" in str(ended[0].error)
    assert ended[1].status == Status.COMPLETED


def test_memory_of_a_closed_engine_is_free_without_a_search_for_cycles(model):
    """Requests that never ended must not lead from the context back to the engine."""

    class Tokenizer:
        def tokenize(self, text):
            return [1, 2, 3]

        def detokenize(self, tokens):
            return "text"

    engine = engine_around(model, tokenizer=Tokenizer())
    for number in range(3):
        engine.add_request(number, "text", SamplingParams(num_tokens_to_generate=9))
    engine.step_modern()
    cache = weakref.ref(engine.context.gpu_view.kv_cache)
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del engine
        assert cache() is None
    finally:
        gc.enable()
