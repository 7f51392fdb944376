"""Hybrid models on several ranks say what they say on one, also by `LLM` as users call it. What
each kind of parallelism does at other lookaheads, under pressure and in chunks is in its own
tests."""

from functools import cache
from typing import Any

import pytest

from megatron_async.models.parallel_state import ParallelSizes
from tests.support.hybrid_ranks import (
    CASES,
    JOBS,
    MODELS,
    NUMBERS,
    PLENTY,
    STAGES,
    RankRun,
    alone,
    pools,
    serve_all,
    serve_mine,
    store_lively,
)
from tests.support.ranks import run_ranks

Stored = dict[str, tuple[str, list[list[int]]]]
EVERY = (0, 1, 2, 3)
"""Numbers of all cases. Models that several ways of sharing take run some of them on each way, so
that model and case meet, and way and case."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Folders of lively models, and what they say on one rank."""
    return store_lively(MODELS, tmp_path_factory.mktemp("hybrid"), alone)


def check(ranks: list[list[RankRun]], expected: list[list[int]], cases: tuple[int, ...]) -> None:
    """Both ranks said the same in the same steps."""
    for number, one, other in zip(cases, *ranks, strict=True):
        settings = CASES[number]
        assert one == other, settings
        assert one.tokens == expected, settings
        assert (one.evictions > 0) == ("num_kv_blocks" in settings), settings
        assert one.captured_steps > 10 or "num_cuda_graphs" not in settings
        assert one.prefix_cache_snapshot_hits == settings["enable_prefix_caching"]


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "cases"),
    [
        ("attention behind", False, (1, 2)),
        ("one group", False, EVERY),
        ("gated delta", False, (0, 3)),
        ("gated delta", True, EVERY),
    ],
)
def test_tensor_parallel(stored, name: str, sequence_parallel: bool, cases: tuple[int, ...]):
    folder, expected = stored[name]
    sizes = ParallelSizes(2, sequence_parallel=sequence_parallel)
    found = run_ranks(2, serve_all, folder, sizes, cases)
    check([runs for _, runs in found], expected, cases)


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("attention behind", (0, 3)),
        ("attention ahead", EVERY),
        ("both on both", EVERY),
        ("gated delta", (1, 2)),
    ],
)
def test_pipeline(stored: Stored, name: str, cases: tuple[int, ...]) -> None:
    """A stage may have no attention, or no recurrent layer.

    Break one of these, and it fails:

    - `is_recurrent`: look at the pattern of one stage (then stages cut prompts in other places)
    - `max_paused_blocks`: divide by a block of no bytes
    """
    folder, expected = stored[name]
    sizes = ParallelSizes(pipeline_model_parallel=2)
    found = run_ranks(2, serve_all, folder, sizes, cases)
    assert "|".join(layers for layers, _ in found) == STAGES[name]
    check([runs for _, runs in found], expected, cases)


def test_the_stage_with_attention_sizes_the_pool(stored: Stored) -> None:
    """Blocks take no memory on the other one, which gives enough of them for every request."""
    first, second = run_ranks(2, pools, stored["attention behind"][0])
    assert first == second
    assert first[0] == PLENTY["max_requests"] * 512 // PLENTY["block_size_tokens"]
    assert 0 < first[1] < first[0]


@pytest.mark.parametrize(("name", "cases"), [("attention behind", (0, 3)), ("gated delta", (1, 2))])
def test_experts(stored: Stored, name: str, cases: tuple[int, ...]) -> None:
    folder, expected = stored[name]
    ranks = run_ranks(2, serve_mine, folder, cases)
    for number, *pair in zip(cases, *ranks, strict=True):
        settings = CASES[number]
        assert pair[0].steps == pair[1].steps, settings
        said = {n: t for ns, run in zip(NUMBERS, pair, strict=True)
                for n, t in zip(ns, run.tokens, strict=True)}  # fmt: skip
        assert [said[number] for number in range(len(JOBS))] == expected, settings
        assert any(run.evictions for run in pair) == ("num_kv_blocks" in settings), settings
        hits = sum(run.prefix_cache_snapshot_hits for run in pair)
        assert hits == settings["enable_prefix_caching"]


PROMPTS = [[1, 2, 3], list(range(40, 90)), [7], list(range(30))]


def _llm(model: str = "dummy:tiny", **options: Any) -> Any:
    from megatron_async import LLM

    settings = {"num_kv_blocks": 64, "block_size_tokens": 16, "max_sequence_length": 256, **options}
    return LLM(model, dtype="float32", **settings)


def _params(count: int) -> Any:
    from megatron_async import SamplingParams

    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2},
        {"temperature": 0.0, "return_log_probs": True},
    ]
    return [SamplingParams(num_tokens_to_generate=12, termination_id=-1, **kind) for kind in kinds]


def generate(**options: Any) -> list[list[int]] | None:
    """What a rank returns from its `generate`."""
    with _llm(**options) as llm:
        share = slice(llm.data_parallel_rank, None, llm.data_parallel_size)
        outputs = llm.generate(PROMPTS[share], _params(4)[share])
        assert bool(outputs) == llm.is_primary_rank
        assert all(output.error is None for output in outputs)
        again = llm.generate(PROMPTS[:1], _params(4)[:1])
        assert len(again) == len(outputs[:1])
        return [output.generated_tokens for output in outputs] if outputs else None


def _call(options: dict[str, Any]) -> Any:
    return generate(**options)


@cache
def one_rank(device: str, model: str = "dummy:tiny") -> list[list[int]]:
    """Dummy weights are others on another device."""
    tokens = generate(model=model, device=device)
    assert tokens is not None
    return tokens


def on_devices(ranks: int) -> pytest.MarkDecorator:
    """On the CPU, and on as many GPUs as there are ranks."""
    return pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpus(ranks))]
    )


@on_devices(2)
def test_data_parallel_replicas(device):
    tokens = one_rank(device)
    assert run_ranks(2, _call, {"device": device}) == [tokens[0::2], tokens[1::2]]


@on_devices(2)
def test_pipeline_stages(device):
    options = {"device": device, "pipeline_model_parallel_size": 2, "check_ranks_agree": True}
    assert run_ranks(2, _call, options) == [one_rank(device), None]


@on_devices(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(device, sequence_parallel):
    options = {
        "device": device,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": sequence_parallel,
        "check_ranks_agree": True,
    }
    assert run_ranks(2, _call, options) == [one_rank(device), None]


@on_devices(4)
def test_tensor_parallel_replicas(device):
    options, tokens = {"device": device, "tensor_model_parallel_size": 2}, one_rank(device)
    assert run_ranks(4, _call, options) == [tokens[0::2], None, tokens[1::2], None]


@on_devices(4)
def test_tensor_parallel_stages(device):
    options = {
        "device": device,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "check_ranks_agree": True,
    }
    assert run_ranks(4, _call, options) == [one_rank(device), None, None, None]


SCARCE = {"num_kv_blocks": 9, "block_size_tokens": 8, "max_tokens": 11, "max_requests": 3}
"""Prompts come in chunks, and two requests of a rank evict each other."""
EXPERTS: dict[str, Any] = {"model": "dummy:tiny-moe", "expert_model_parallel_size": 2}


@on_devices(2)
@pytest.mark.parametrize(
    "settings", [{"lookahead": 0}, {"lookahead": 1}, {"lookahead": 2, **SCARCE}], ids=str
)
def test_expert_parallel_replicas(device, settings):
    tokens = one_rank(device, EXPERTS["model"])
    options = {"device": device, **EXPERTS, **settings}
    assert run_ranks(2, _call, options) == [tokens[0::2], tokens[1::2]]


@on_devices(4)
def test_tensor_and_expert_parallel_ranks(device):
    tokens = one_rank(device, EXPERTS["model"])
    options = {
        "device": device, **EXPERTS, "tensor_model_parallel_size": 2, "check_ranks_agree": True,
    }  # fmt: skip
    assert run_ranks(4, _call, options) == [tokens[0::2], None, tokens[1::2], None]
