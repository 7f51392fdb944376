"""Models split over tensor-parallel ranks say what one rank says, on every rank."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_async import LLM, SamplingParams, StructuredOutput
from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.text import structured_output
from tests.support.capturing_cpu import CapturingCpu
from tests.support.drafters import DRAFTERS
from tests.support.harness import (
    CPU,
    Job,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_at,
    run_together,
)
from tests.support.letter_tokenizers import make_ascii_tokenizer
from tests.support.ranks import run_ranks

ODD = ModelArchitecture(
    "qwen2", 2, 32, 4, 2, 8, 64, 131, add_qkv_bias=True, max_position_embeddings=1024
)
"""Two KV heads, and a vocabulary that two ranks cannot halve."""
SAMPLED = [
    greedy(20),
    SamplingParams(temperature=0.9, seed=1, num_tokens_to_generate=20, termination_id=-1),
    SamplingParams(temperature=0.8, top_k=9, seed=2, num_tokens_to_generate=9, termination_id=-1),
]
"""Steps with a filtered row gather logits, others exchange scores and tokens."""
JOBS = [
    Job(prompt, params)
    for prompt, params in zip(
        random_prompts(3, (3, 40, 11, 1, 26, 7), 131), SAMPLED * 2, strict=True
    )
]
ARRIVALS = {0: JOBS[:2], 3: JOBS[2:3], 4: JOBS[3:5], 9: JOBS[5:]}
GRAMMARS: list[dict[str, Any]] = [
    {"structured_output": StructuredOutput(regex=r"(\d{3}-){1,4}[a-f]{5}")},
    {"termination_id": -1},
    {"structured_output": StructuredOutput(regex=r"(red|green|blue){2}"), "top_k": 9},
]
PLENTY: dict[str, Any] = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_requests": 6}
SCARCE: dict[str, Any] = {
    "num_kv_blocks": 9,
    "block_size_tokens": 8,
    "max_requests": 6,
    "max_tokens": 9,
}
"""Chunked prefill, pauses and evictions."""
CASES: list[tuple[bool, dict[str, Any]]] = [
    (False, {"lookahead": 0, **SCARCE}),
    (False, {"lookahead": 1, **SCARCE}),
    (False, {"lookahead": 2, "num_cuda_graphs": 2, **PLENTY}),
    (True, {"lookahead": 1, **PLENTY}),
    (True, {"lookahead": 2, **SCARCE}),
    (False, {"lookahead": 1, "kv_cache_dtype": "fp8", **SCARCE}),
]
"""With and without sequence parallelism, by settings of the engine."""
SEEDED = [
    Job(job.prompt, replace(job.params, seed=number, frequency_penalty=number % 2))
    for number, job in enumerate(JOBS)
]
"""A job's number is its seed, by which drafters know it."""
DRAFTS: list[tuple[int, str, int, dict[str, Any]]] = [
    (0, "oracle", 3, PLENTY),
    (1, "fickle", 3, SCARCE | {"max_tokens": 24}),
    (2, "oracle", 1, PLENTY | {"num_cuda_graphs": 2}),
]
"""Lookahead, drafter, drafts, settings."""


def load(name: str, ranks: int, sequence_parallel: bool = False) -> torch.nn.Module:
    source = open_model(name)
    sizes = ParallelSizes(ranks, sequence_parallel=sequence_parallel)
    model = build_model(source.architecture, torch.float32, CPU, sizes=sizes)
    source.load_weights(model)
    return model


def run_case(model: torch.nn.Module, config: dict[str, Any], staggered: bool) -> dict[str, Any]:
    """Tokens, events and a digest of all logits of one engine."""
    device = CapturingCpu() if "num_cuda_graphs" in config else None
    engine = make_engine(model, device=device, **config)
    wrapper, digest = engine.controller.inference_wrapped_model, hashlib.sha256()
    forward, calls = wrapper.forward, wrapper.collectives.calls
    calls.clear()  # of steps that were captured

    def watched(view: Any, *stage: Any) -> torch.Tensor:
        logits = forward(view, *stage)
        whole = logits if wrapper.shard is None else wrapper.shard.gather(logits)
        assert whole.shape == (view.dims.rows, wrapper.vocab_size)
        digest.update(whole.numpy().tobytes())
        return logits

    wrapper.forward = watched
    tokens = run_at(engine, ARRIVALS) if staggered else run_together(engine, JOBS)
    stats = engine.stats()
    engine.close()
    return {
        "choices": calls["choice by all-gather"],
        "tokens": tokens,
        "logits": digest.hexdigest(),
        "events": {name: stats[name] for name in ("steps", "pauses", "evictions")},
    }


def run_cases(name: str, ranks: int) -> list[dict[str, Any]]:
    models = {shard: load(name, ranks, shard) for shard in (False, True)}
    return [
        run_case(models[sequence_parallel], config, staggered=number % 2 == 1)
        for number, (sequence_parallel, config) in enumerate(CASES)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with lively weights, biases included."""
    model = make_model(ODD)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3, generator=generator)
    path = tmp_path_factory.mktemp("odd")
    save_huggingface(model, ODD, None, path)
    return path


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, list[list[int]]]:
    """What one rank says, by the dtype of keys and values."""
    said = {}
    for dtype in ("model", "fp8"):
        config = {"lookahead": 0, "kv_cache_dtype": dtype, **PLENTY}
        said[dtype] = run_case(load(str(folder), 1), config, staggered=False)["tokens"]
        assert len(set(map(tuple, said[dtype]))) == len(JOBS), "the model tells prompts apart"
    assert said["fp8"] != said["model"]
    return said


def test_two_ranks_say_what_one_says(folder: Path, one_rank: dict[str, list[list[int]]]) -> None:
    first, second = run_ranks(2, run_cases, str(folder), 2)
    assert first == second  # logits too, bit for bit
    for number, case in enumerate(first):
        dtype = CASES[number][1].get("kv_cache_dtype", "model")
        assert case["tokens"] == one_rank[dtype], CASES[number]
        assert 0 < case["choices"] < case["events"]["steps"], CASES[number]
    for case, (_, config) in zip(first, CASES, strict=True):
        if "max_tokens" in config:
            assert case["events"]["pauses"] > 0
            assert case["events"]["evictions"] > 0


def log_probs(name: str, ranks: int, sequence_parallel: bool) -> dict[str, list[float]]:
    engine = make_engine(load(name, ranks, sequence_parallel), max_tokens=13, **PLENTY)
    params = greedy(6, return_log_probs=True, top_n_logprobs=3)
    found = engine.generate([job.prompt for job in JOBS[:3]], [params] * 3)
    engine.close()
    return {
        "prompt": [p for r in found for p in r.prompt_log_probs],
        "generated": [p for r in found for p in r.generated_log_probs],
    }


def both_log_probs(name: str) -> list[dict[str, list[float]]]:
    return [log_probs(name, 2, sequence_parallel) for sequence_parallel in (False, True)]


def test_log_probs_are_those_of_one_rank(folder: Path) -> None:
    expected = log_probs(str(folder), 1, False)
    for found in run_ranks(2, both_log_probs, str(folder)):
        for kind in found:
            assert kind["prompt"] == pytest.approx(expected["prompt"], abs=1e-4)
            assert kind["generated"] == pytest.approx(expected["generated"], abs=1e-4)


@mock.patch.object(structured_output, "ALLOWANCE_S", 60.0)
def constrained_tokens(name: str, ranks: int) -> list[list[int]]:
    """Tokens of rows under a grammar and others, which share steps. Each rank schedules for itself
    here, and ends no request for the CPU time of its grammar: its clock is its own, and the other
    rank would go on with that request."""
    tokenizer = make_ascii_tokenizer()
    engine = make_engine(load(name, ranks), tokenizer=tokenizer, lookahead=2, **PLENTY)
    params = [
        SamplingParams(temperature=1.0, seed=number, num_tokens_to_generate=30, **options)
        for number, options in enumerate(GRAMMARS)
    ]
    prompts = [[ord("a") + number] * 4 for number in range(len(params))]
    for each in params:  # for the same reason none may wait for a grammar
        if each.structured_output is not None:
            engine.grammars.begin(each.structured_output).result()
    found = engine.generate(prompts, params)
    engine.close()
    for request, options in zip(found, GRAMMARS, strict=True):
        if (output := options.get("structured_output")) is not None:
            assert re.fullmatch(output.regex, request.generated_text), request
    return [request.generated_tokens for request in found]


def test_grammars_are_those_of_one_rank(folder: Path) -> None:
    expected = constrained_tokens(str(folder), 1)
    assert run_ranks(2, constrained_tokens, str(folder), 2) == [expected] * 2


def drafted_tokens(name: str, ranks: int, answers: list[list[int]]) -> list[Any]:
    """Tokens and counters with drafts: of an oracle and of a fickle one, with memory and without,
    and in captured steps."""
    model, found = load(name, ranks), []
    for lookahead, drafter, count, settings in DRAFTS:
        engine = make_engine(
            model, device=CapturingCpu() if "num_cuda_graphs" in settings else None,
            drafter=DRAFTERS[drafter](answers, 131), lookahead=lookahead,
            num_speculative_tokens=count, **settings,
        )  # fmt: skip
        tokens, stats = run_at(engine, {0: SEEDED[:2], 3: SEEDED[2:]}), engine.stats()
        engine.close()
        names = ("steps", "pauses", "accepted_tokens")
        found.append((tokens, {name: stats[name] for name in names}))
    return found


def test_drafts_are_those_of_one_rank(folder: Path) -> None:
    engine = make_engine(load(str(folder), 1), lookahead=0, **PLENTY)
    expected = run_together(engine, SEEDED)
    engine.close()
    answers = [[*job.prompt, *tokens] for job, tokens in zip(SEEDED, expected, strict=True)]
    first, second = run_ranks(2, drafted_tokens, str(folder), 2, answers)
    assert first == second
    for (tokens, stats), run in zip(first, DRAFTS, strict=True):
        assert tokens == expected, run
        assert stats["accepted_tokens"] > 10, run
        assert (stats["pauses"] > 0) == ("max_tokens" in run[3]), run


def tokens_of_three(folder: str) -> list[list[int]]:
    engine = make_engine(load(folder, 3), **PLENTY)
    tokens = run_at(engine, ARRIVALS)
    engine.close()
    return tokens


def test_three_ranks(tmp_path: Path) -> None:
    """The demo model's nine heads and three KV heads; a vocabulary that three cannot share."""
    shape = replace(
        DUMMY_SHAPES["smollm2-135m"],
        num_layers=3,
        pattern="",
        vocab_size=131,
        tie_word_embeddings=False,
    )
    model = make_model(shape)
    save_huggingface(model, shape, None, tmp_path)
    engine = make_engine(model, lookahead=0, **PLENTY)
    expected = run_at(engine, ARRIVALS)
    engine.close()
    assert min(len(set(tokens)) for tokens in expected) > 5, "a dull model hides wrong shards"
    assert run_ranks(3, tokens_of_three, str(tmp_path)) == [expected] * 3


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, r"tensor_model_parallel_size=3 does not divide .* 2 key/value heads.*one of 1, 2"),
        ({}, 4, r"does not divide the model's 2 key/value heads"),
        ({"ffn_hidden_size": 63}, 2, r"does not divide the model's 63 MLP units.*use one of 1\."),
    ],
)
def test_sizes_that_do_not_divide(changes: dict[str, int], ranks: int, message: str) -> None:
    architecture = replace(ODD, **changes)
    with pytest.raises(ConfigurationError, match=message):
        build_model(architecture, torch.float32, CPU, sizes=ParallelSizes(ranks))


def test_an_llm_refuses_before_it_loads() -> None:
    with pytest.raises(ConfigurationError, match="key/value heads"):
        LLM("dummy:tiny", device="cpu", tensor_model_parallel_size=4)


def test_sequence_parallelism_of_transformer_engine_layers_is_refused() -> None:
    sizes = ParallelSizes(2, sequence_parallel=True)
    with pytest.raises(ConfigurationError, match="transformer_impl='local'"):
        build_model(ODD, torch.float32, CPU, "transformer_engine", sizes)
