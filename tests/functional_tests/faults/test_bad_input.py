"""Bad input fails alone, with a message that names the value and the remedy."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import LLM, SamplingParams, Status
from megatron_async.checkpoints import CheckpointError
from megatron_async.errors import (
    ConfigurationError,
    OutOfMemoryError,
    RequestAborted,
    RequestError,
    StepFailed,
)
from tests.support.harness import (
    EngineFactory,
    Job,
    assert_all_is_back,
    drain,
    fail_call,
    greedy,
    run_together,
)

GOOD = [3, 1, 4, 1, 5]
TINY_LIMITS = {"max_sequence_length": 200, "block_size_tokens": 16, "num_kv_blocks": 6}


@pytest.fixture(scope="module")
def tiny_llm() -> Iterator[LLM]:
    settings = {"device": "cpu", "lookahead": 1, "check_integrity": True, "max_requests": 8}
    with LLM("dummy:tiny", **settings, **TINY_LIMITS) as llm:
        yield llm


# Words of the value and of the remedy that the message must have.
BAD_PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ([], ("prompt is empty", "at least one token")),
    "id too large": ([5, 512], ("512", "position 1", "0 to 511")),
    "negative id": ([-1, 5], ("-1", "position 0", "0 to 511")),
    "not integers": ([0.5, 1.5], ("float64", "list of integers")),
    "not flat": (np.ones((2, 2), int), ("2-dimensional", "flat list")),
    "too long": ([7] * 201, ("201 tokens", "max_sequence_length=200", "shorten")),
    "no room for one token": ([7] * 200, ("200 tokens", "max_sequence_length=200", "shorten")),
    "larger than the pool": ([7] * 97, ("KV blocks", "6 (96 tokens)", "num_kv_blocks")),
    "text without a tokenizer": ("Hello", ("tokenizer", "token ids")),
}
BAD_PARAMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "temperature below 0": ({"temperature": -0.5}, ("temperature=-0.5", "0 (greedy) or more")),
    "temperature NaN": ({"temperature": math.nan}, ("temperature=nan", "0 (greedy) or more")),
    "temperature infinite": ({"temperature": math.inf}, ("temperature=inf", "0 (greedy) or more")),
    "top_p above 1": ({"top_p": 1.5}, ("top_p=1.5", "between 0 (off) and 1")),
    "top_p below 0": ({"top_p": -0.1}, ("top_p=-0.1", "between 0 (off) and 1")),
    "top_p NaN": ({"top_p": math.nan}, ("top_p=nan", "between 0 (off) and 1")),
    "min_p above 1": ({"min_p": 2.0}, ("min_p=2.0", "between 0 (off) and 1")),
    "min_p below 0": ({"min_p": -1.0}, ("min_p=-1.0", "between 0 (off) and 1")),
    "top_k below 0": ({"top_k": -1}, ("top_k=-1", "0 (off) or more")),
    "top_k no integer": ({"top_k": 2.5}, ("top_k=2.5", "integer")),
    "seed below 0": ({"seed": -3}, ("seed=-3", "between 0 and 2**63 - 1")),
    "both limits": (
        {"num_tokens_to_generate": 4, "num_tokens_total": 9},
        ("num_tokens_to_generate=4", "num_tokens_total=9", "give one"),
    ),
    "no token": ({"num_tokens_to_generate": 0}, ("num_tokens_to_generate=0", "1 or more")),
    "total within the prompt": (
        {"num_tokens_to_generate": None, "num_tokens_total": 5},
        ("num_tokens_total=5", "prompt of 5 tokens", "raise it"),
    ),
    "pool too small for all": (
        {"num_tokens_to_generate": 150},
        ("155 tokens", "KV blocks", "lower num_tokens_to_generate"),
    ),
    "stop id out of range": ({"stop_token_ids": [1, 999]}, ("stop_token_ids=999", "0 to 511")),
    "termination id": ({"termination_id": 512}, ("termination_id=512", "0 to 511")),
    "alternatives without log probs": (
        {"top_n_logprobs": 2},
        ("top_n_logprobs=2", "return_log_probs=True"),
    ),
}


def check_fails_alone(llm: LLM, prompt: Any, params: SamplingParams, words: Any) -> None:
    """The bad request between two good ones."""
    good = greedy(6)
    outputs = llm.generate([GOOD, prompt, GOOD], [good, params, good])
    assert [output.status for output in outputs] == [
        Status.COMPLETED,
        Status.FAILED,
        Status.COMPLETED,
    ]
    assert len(outputs[0].generated_tokens) == 6
    assert outputs[0].generated_tokens == outputs[2].generated_tokens
    failed = outputs[1]
    assert isinstance(failed.error, ValueError)
    for word in words:
        assert word in str(failed.error)
    assert failed.finish_reason == "error"
    assert failed.generated_tokens == []
    drain(llm.engine)
    assert_all_is_back(llm.engine)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt(tiny_llm: LLM, name: str) -> None:
    prompt, words = BAD_PROMPTS[name]
    check_fails_alone(tiny_llm, prompt, greedy(6), words)


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_sampling_params(tiny_llm: LLM, name: str) -> None:
    changes, words = BAD_PARAMS[name]
    check_fails_alone(tiny_llm, GOOD, greedy(6, **changes), words)


def test_empty_text(smollm2_llm: LLM) -> None:
    outputs = smollm2_llm.generate(["", "Hello"], greedy(2))
    assert outputs[0].status == Status.FAILED
    assert "the prompt is empty" in str(outputs[0].error)
    assert outputs[1].status == Status.COMPLETED
    assert len(outputs[1].generated_tokens) == 2


def test_all_bad_at_once(tiny_llm: LLM) -> None:
    bad = [prompt for prompt, _ in BAD_PROMPTS.values()]
    outputs = tiny_llm.generate([*bad, GOOD], greedy(6))
    assert [output.failed() for output in outputs] == [True] * len(bad) + [False]


def test_as_many_params_as_prompts(tiny_llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params were given for 3 prompts: give one"):
        tiny_llm.generate([GOOD] * 3, [greedy(1)] * 2)
    assert_all_is_back(tiny_llm.engine)


def test_duplicate_request_id(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine()
    first = engine.add_request(7, GOOD, greedy(6))
    engine.step_modern()
    with pytest.raises(RequestError, match=r"request id 7 is in use .* choose another"):
        engine.add_request(7, [1, 2], greedy(6))
    drain(engine)
    assert first.result().succeeded()
    assert len(first.result().generated_tokens) == 6
    again = engine.add_request(7, GOOD, greedy(6))  # ended, so the id is free
    drain(engine)
    assert again.result().generated_tokens == first.result().generated_tokens


def test_abort(make_tiny_engine: EngineFactory) -> None:
    engine = make_tiny_engine(max_requests=1, lookahead=2)
    running = engine.add_request(0, GOOD, greedy(50))
    waiting = engine.add_request(1, GOOD, greedy(50))
    last = engine.add_request(2, GOOD, greedy(5))
    for _ in range(6):
        engine.step_modern()
    engine.abort_request(0)
    engine.abort_request(1)
    with pytest.raises(KeyError):
        engine.abort_request(0)
    drain(engine)
    for future in (running, waiting):
        assert future.result().status == Status.FAILED
        assert isinstance(future.result().error, RequestAborted)
    tokens = running.result().generated_tokens
    assert 1 <= len(tokens) <= 6  # what was booked stays with it
    expected = run_together(make_tiny_engine(lookahead=0), [Job(GOOD, greedy(50))])[0]
    assert tokens == expected[: len(tokens)]
    assert last.result().generated_tokens == expected[:5]
    assert waiting.result().generated_tokens == []


# ---- Construction -----------------------------------------------------------------------------

BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "typo": ({"lookahed": 1}, ConfigurationError, "'lookahed' .* Did you mean 'lookahead'"),
    "another engine's name": (
        {"max_model_len": 128},
        ConfigurationError,
        "Did you mean 'max_sequence_length'",
    ),
    "another engine's name of LLM's own": (
        {"tensor_parallel_size": 2},
        ConfigurationError,
        "mean 'tensor_model_parallel_size'",
    ),
    "unknown mode": (
        {"async_sched_mode": "fast"},
        ConfigurationError,
        "async_sched_mode='fast' .* 'legacy' .* 'async'",
    ),
    "mode against lookahead": (
        {"async_sched_mode": "legacy", "lookahead": 2},
        ConfigurationError,
        "'legacy' means lookahead 0, but lookahead=2 .* Give one",
    ),
    "negative lookahead": ({"lookahead": -1}, ConfigurationError, "lookahead=-1 .* at least 0"),
    "too long for the model": (
        {"max_sequence_length": 5000},
        ConfigurationError,
        "max_sequence_length=5000, .* at most 4096 .* lower",
    ),
    "budget below rows": (
        {"max_tokens": 4, "max_requests": 8},
        ConfigurationError,
        "max_tokens=4 .* max_requests=8: .* Raise max_tokens or lower max_requests",
    ),
    "more memory than there is": (
        {"buffer_size_gb": 1e6},
        OutOfMemoryError,
        r"buffer_size_gb=1e\+06 needs .* GiB on cpu, but .* is free. At most num_kv_blocks=",
    ),
    "more blocks than fit": (
        {"num_kv_blocks": 10**12},
        OutOfMemoryError,
        "num_kv_blocks=1000000000000 needs .* At most num_kv_blocks=",
    ),
    "less than a block": (
        {"buffer_size_gb": 1e-4},
        OutOfMemoryError,
        "buffer_size_gb=0.0001 holds no usable KV block: .* Give at least buffer_size_gb=",
    ),
    "no memory": ({"buffer_size_gb": -1}, ConfigurationError, "buffer_size_gb=-1 .* above 0"),
    "unknown device": ({"device": "tpu"}, ConfigurationError, "device='tpu' .* 'cpu', 'cuda'"),
    "unknown dtype": ({"dtype": "int3"}, ValueError, "'int3' .* float32, bfloat16"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_setting(name: str) -> None:
    settings, error, message = BAD_SETTINGS[name]
    with pytest.raises(error, match=message):
        LLM("dummy:tiny", **{"device": "cpu", **settings})


@pytest.mark.parametrize(("mode", "lookahead"), [("legacy", 0), ("async", 1)])
def test_megatrons_names_of_modes(mode: str, lookahead: int) -> None:
    with LLM("dummy:tiny", device="cpu", async_sched_mode=mode, num_kv_blocks=8) as llm:
        assert llm.engine.lookahead == lookahead


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(
        ConfigurationError, match=r"device='cuda', .* no usable GPU .* device='cpu'"
    ):
        LLM("dummy:tiny", device="cuda")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm", "'smollm': no such .* did you mean 'smollm2'"),
        ("dummy:huge", "unknown shape 'huge'; known: .*tiny"),
        ("/no/such/model.gguf", "/no/such/model.gguf.*no such file"),
    ],
)
def test_unknown_model(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(name, device="cpu")


# ---- An exception inside a step ---------------------------------------------------------------


class OutOfLuck(RuntimeError):
    """Not an error of ours."""


@pytest.mark.parametrize("fails_in", ["forward", "sample"])
def test_exception_in_a_step(make_tiny_engine, lookahead, fails_in: str):
    """Requests of the step fail with the cause; those that join later are served, and served
    right."""
    job = Job([9, 8, 7], greedy(20))
    want = run_together(make_tiny_engine(lookahead=0), [job])[0]
    engine = make_tiny_engine(lookahead=lookahead, max_requests=2, block_size_tokens=4)
    controller = engine.controller
    wrapped = controller.inference_wrapped_model
    owner = wrapped if fails_in == "forward" else controller.sampler
    fail_call(owner, fails_in, 5, OutOfLuck("the fifth step"))
    # Two run, one waits for a slot: it is not in the step that fails.
    futures = [engine.add_request(number, job.prompt, job.params) for number in range(3)]
    drain(engine)
    for future in futures[:2]:
        request = future.result()
        assert request.status == Status.FAILED
        assert isinstance(request.error, StepFailed)
        assert isinstance(request.error.__cause__, OutOfLuck)
        assert "the fifth step" in str(request.error)
        assert request.generated_tokens == want[:4]
    assert futures[2].result().generated_tokens == want
    assert engine.stats()["failed_steps"] == 1
    assert engine.stats()["failed_requests"] == 2
    assert run_together(engine, [job]) == [want]
