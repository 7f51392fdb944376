"""Blocks of window layers go back while their requests run: tokens are those of an engine that
keeps all, and a block that nobody owns holds NaN."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.device_state.cache_layout import BlockNeeds, cache_layout
from megatron_async.errors import ConfigurationError, PoolTooSmall
from tests.support.harness import (
    TINY,
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_alone,
    run_at,
)
from tests.support.poison import poison_blocks

MODELS = {
    "windows alone": replace(TINY, sliding_window=7),
    "every second": replace(TINY, sliding_window=16, window_attn_skip_freq=2),
    "two tables of windows": replace(
        TINY, sliding_window=5, window_attn_skip_freq=(1, 0, 1), num_layers=3, pattern=""
    ),
}
STEM = random_prompts(3, (64,))[0]
PROMPTS = random_prompts(11, (1, 16, 17, 63, 100)) + [
    STEM[:size] + tail for size, tail in zip((64, 40, 33), random_prompts(4, (1, 9, 17)))
]
JOBS = [Job(prompt, greedy(24)) for prompt in PROMPTS]
NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 3}
SETTINGS: list[dict[str, Any]] = [
    {"lookahead": 1, "max_tokens": 61, "num_kv_blocks": 256},
    {"lookahead": 2, "max_tokens": 7, "num_kv_blocks": 96, "block_size_tokens": 8},
    {"lookahead": 2, "max_tokens": 61, "num_kv_blocks": 70},
    {"lookahead": 1, "max_tokens": 30, "num_kv_blocks": 72, "enable_prefix_caching": False},
    {
        "lookahead": 2,
        "max_tokens": 61,
        "num_kv_blocks": 100,
        "block_size_tokens": 2,
        "enable_prefix_caching": False,
        **NGRAM,
    },
]
Answers = dict[str, tuple[torch.nn.Module, list[list[int]]]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Each model, and the tokens of each job alone in blocks that no sequence fills."""
    found = {}
    for name, architecture in MODELS.items():
        model = make_model(architecture)
        engine = make_engine(model, lookahead=0, block_size_tokens=256, max_requests=2)
        found[name] = model, run_alone(engine, JOBS)
        engine.close()
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_in_small_pools(name: str, settings: dict[str, Any], answers: Answers) -> None:
    """Break it:
    - `first_needed`: a key later (a block goes back one step early)
    - `_leave_behind`: `at_most` for `at_least`
    - `_in_window`: no blocks are looked for
    """
    if "windows" in name and "speculative_method" in settings:
        pytest.skip("the n-gram drafter wants the blocks of whole sequences")
    model, expected = answers[name]
    engine = make_engine(model, **{"block_size_tokens": 4, "max_requests": 5, **settings})
    blocks = poison_blocks(engine)
    if engine.context.drafts is not None:
        engine.context.drafts.chooses_widths = False  # all steps are wide
    assert run_at(engine, {0: JOBS[:3], 9: JOBS[3:]}) == expected
    if settings.get("enable_prefix_caching", True):
        assert run_at(engine, {0: JOBS[5:], 4: JOBS[:5]}) == [*expected[5:], *expected[:5]]
        assert engine.stats()["prefix_cache_hits"] > 100
    assert_all_is_back(engine)
    blocks.check_free_blocks()


def test_steps_that_are_taken_back(answers: Answers) -> None:
    """Break it: `_least` is always None, so that the bound counts steps that are taken back."""
    model, expected = answers["every second"]
    # The others end where nobody foresees it, and with them all steps in flight.
    jobs = [
        Job(job.prompt, greedy(24, termination_id=tokens[7 + 2 * n])) if n % 2 else job
        for n, (job, tokens) in enumerate(zip(JOBS, expected))
    ]
    ends = [
        tokens[: tokens.index(job.params.termination_id) + 1] if n % 2 else tokens
        for n, (job, tokens) in enumerate(zip(jobs, expected))
    ]
    engine = make_engine(
        model,
        lookahead=2,
        invalidation="rollback",
        enable_prefix_caching=False,
        block_size_tokens=1,
        max_tokens=40,
        max_requests=4,
        num_kv_blocks=700,
    )
    blocks = poison_blocks(engine)
    assert run_at(engine, {0: jobs[:4], 5: jobs[4:]}) == ends
    assert engine.stats()["discarded_steps"] > 4
    assert_all_is_back(engine)
    blocks.check_free_blocks()


def test_the_length_of_windows_alone_has_no_limit(answers: Answers) -> None:
    """A pool of 40 tokens serves 400; with a full layer it does not."""
    model, _ = answers["windows alone"]
    settings = {"num_kv_blocks": 10, "block_size_tokens": 4, "max_tokens": 16, "max_requests": 2}
    job = Job(random_prompts(2, (300,))[0], greedy(100))
    engine = make_engine(model, **settings)
    expected = make_engine(model, block_size_tokens=256, max_requests=1)
    assert run_at(engine, {0: [job]}) == run_at(expected, {0: [job]})
    mixed = make_engine(answers["every second"][0], **settings)
    error = mixed.generate([job.prompt], job.params)[0].error
    drain(mixed)
    assert isinstance(error, PoolTooSmall)
    assert "needs 10" in str(error)


def test_a_long_prompt_holds_a_window_and_a_chunk(answers: Answers) -> None:
    model, _ = answers["every second"]
    engine = make_engine(model, block_size_tokens=4, max_tokens=16, max_requests=1, lookahead=1)
    engine.add_request(0, random_prompts(2, (400,))[0], greedy(40))
    most = 0
    while engine.has_unfinished_requests():
        engine.step_modern()
        slots, blocks = engine.context.slots, engine.context.blocks
        if slots.num_blocks[0]:
            most = max(most, blocks.total - blocks.allocatable - int(slots.num_blocks[0]))
    # The window's 16 keys and the chunk's 16, and a block more at each end.
    assert most <= slots.needs.span(16, 16)
    assert most >= 8


@pytest.mark.parametrize(
    ("stages", "windows", "layers"),
    [
        ([[0] * 5], (0,), [5]),
        ([[7] * 5], (7,), [5]),
        ([[128, 0] * 12], (0, 128), [12]),
        ([([512] * 5 + [0]) * 4 + [512] * 2], (0, *[512] * 6), [4]),
        ([([1024] * 5 + [0]) * 10 + [1024] * 2], (0, *[1024] * 5), [11]),
        ([[0] * 31 + [9]], (0, 0, 0, 0, 9), [8]),
        ([[8, 0, 4, 0, 8]], (0, 4, 8), [2]),
        ([[128, 0] * 6, [128, 0] * 6], (0, 128), [6, 6]),
        ([[128, 128, 0], [128, 0]], (0, 128, 128), [1, 1]),
        ([[]], (0,), [0]),
    ],
)
def test_layouts(stages: list[list[int]], windows: tuple[int, ...], layers: list[int]) -> None:
    for index, stage in enumerate(stages):
        layout = cache_layout(stages, index)
        assert layout.windows == windows
        assert layout.layers == layers[index]
        assert len(set(layout.places)) == len(stage)
        assert [windows[table] for table, _ in layout.places] == stage
        assert all(place < layout.layers for _, place in layout.places)


def test_needs_of_blocks() -> None:
    alone, mixed = BlockNeeds((9,), 4, 2), BlockNeeds((0, 0, 9), 4, 2)
    assert alone.span(9, 2) == 4  # 10 keys from any place of a block on
    assert [alone.of(n) for n in (1, 4, 5, 999)] == [1, 4, 4, 4]
    assert [mixed.of(n) for n in (1, 4, 5, 10)] == [3, 12, 14, 24]
    assert [alone.longest(total, 50) for total in (3, 4)] == [3, 50]
    assert [mixed.longest(total, 50) for total in (2, 12, 15, 24, 999)] == [0, 4, 5, 10, 50]


@pytest.mark.parametrize("settings", [NGRAM, {"enable_routing_replay": True}])
def test_what_reads_whole_sequences_is_refused_by_name(
    settings: dict[str, Any], answers: Answers
) -> None:
    architecture = MODELS["windows alone"]
    if "enable_routing_replay" in settings:
        sizes = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
        architecture = replace(architecture, **sizes, pattern="")
    with pytest.raises(ConfigurationError, match="a window of 7 keys, whose blocks go back"):
        make_engine(make_model(architecture), **settings)
