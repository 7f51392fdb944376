"""An engine with keys and values in fp8: its model's answers with rounded keys and values, whatever
the schedule."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.models.attention import PagedSelfAttention
from megatron_async.ops.attention.narrow_cache import KEYS, VALUES, narrowed, scales_of, widened
from megatron_async.ops.attention.rope_append import rope_append
from tests.support.drafters import DRAFTERS
from tests.support.harness import (
    TINY,
    Job,
    greedy,
    make_engine,
    make_model,
    random_prompts,
    run_alone,
    run_at,
)

PARAMS = greedy(24)
JOBS = [Job(prompt, PARAMS) for prompt in random_prompts(3, (3, 40, 11, 1, 26, 37))]
PREFIXED = [Job([*JOBS[1].prompt[:33], *job.prompt[:3]], PARAMS) for job in JOBS[2:]]


def scaled_model() -> torch.nn.Module:
    """A model whose heads have scales of their own, by which some numbers are clamped."""
    model = make_model(TINY)
    layers = [each for each in model.modules() if isinstance(each, PagedSelfAttention)]
    for number, layer in enumerate(layers, 1):
        keys = torch.tensor([0.002, 0.03]) * number
        layer.cache_scales = scales_of(keys, keys.flip(0) / 2)
    return model


def engine_of(model: torch.nn.Module, **settings: Any) -> Any:
    sizes = {"block_size_tokens": 8, "num_kv_blocks": 64, "max_requests": 6}
    return make_engine(model, **{**sizes, "kv_cache_dtype": "fp8", **settings})


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Serial answers."""
    engine = engine_of(scaled_model(), lookahead=0, max_requests=1, enable_prefix_caching=False)
    found = {"jobs": run_alone(engine, JOBS), "prefixed": run_alone(engine, PREFIXED)}
    engine.close()
    return found


def test_answers_are_those_of_rounded_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 cache whose keys and values went through e4m3 before attention, a chunk's own ones
    too. Break it: scales of keys for values, or a chunk's own keys not rounded."""
    found, model, scored = [], scaled_model(), replace(PARAMS, return_log_probs=True)
    layers = [each.cache_scales for each in model.modules() if isinstance(each, PagedSelfAttention)]
    for settings in ({}, {"kv_cache_dtype": "model"}):
        engine = engine_of(model, max_tokens=16, **settings)
        view = engine.context.gpu_view

        def append(qkv: Any, cos: Any, sin: Any, positions: Any, places: Any, keys: Any,
                   values: Any, *rest: Any, caches: Any = view.kv_cache) -> Any:  # fmt: skip
            query = rope_append.reference(qkv, cos, sin, positions, places, keys, values, *rest)
            layer = next(i for i in range(2) if caches.layer(i)[0].data_ptr() == keys.data_ptr())
            scales = layers[layer]
            assert scales is not None
            for of, cache in (KEYS, keys), (VALUES, values):
                flat = cache.flatten(0, 1)
                stored = narrowed(flat[places], scales, of)
                flat[places] = widened(stored, scales, of, torch.float32)
            return query

        if settings:
            monkeypatch.setattr(view.ops, "rope_append", append)
        found.append(engine.generate([job.prompt for job in JOBS], scored))
        engine.close()
    plain = make_engine(model, num_kv_blocks=64).generate([job.prompt for job in JOBS], scored)
    for narrow, rounded, whole in zip(*found, plain, strict=True):
        assert narrow.generated_tokens == rounded.generated_tokens
        expected = rounded.generated_log_probs
        assert narrow.generated_log_probs == pytest.approx(expected, abs=1e-3)
        assert whole.generated_log_probs != pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {"lookahead": 0},
        {"lookahead": 2},
        {"max_tokens": 6, "lookahead": 1},
        {"num_kv_blocks": 14, "max_tokens": 9, "lookahead": 2},
        {"speculative_method": "ngram", "num_speculative_tokens": 3},
        {"invalidation": "rollback"},
        {"enable_sleep_mode": True, "block_size_tokens": 3},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_answers_do_not_depend_on_the_schedule(
    settings: dict[str, Any], alone: dict[str, list[list[int]]]
) -> None:
    """Chunks, prefix hits, evictions, drafts, steps taken back."""
    engine = engine_of(scaled_model(), **settings)
    arrivals = {0: JOBS[:2], 3: JOBS[2:3], 4: JOBS[3:5], 9: JOBS[5:]}
    assert run_at(engine, arrivals) == alone["jobs"]
    if settings.get("invalidation") != "rollback":
        assert run_at(engine, {0: PREFIXED[:2], 2: PREFIXED[2:]}, 10) == alone["prefixed"]
        assert engine.stats()["prefix_cache_hits"] > 0
    if "num_kv_blocks" in settings:
        assert engine.stats()["evictions"] > 0


@pytest.mark.parametrize("name", ["oracle", "fickle"])
def test_drafts_do_not_change_answers(name: str, alone: dict[str, list[list[int]]]) -> None:
    """Several tokens a row, some of them rejected, whose keys are written over."""
    answers = zip(JOBS, alone["jobs"], strict=True)
    drafter = DRAFTERS[name]([[*job.prompt, *said] for job, said in answers], TINY.vocab_size)
    jobs = [Job(job.prompt, replace(PARAMS, seed=number)) for number, job in enumerate(JOBS)]
    engine = engine_of(scaled_model(), num_speculative_tokens=2, drafter=drafter)
    assert run_at(engine, {0: jobs}) == alone["jobs"]
    assert engine.stats()["accepted_tokens"] > 0


def test_the_pool_has_twice_the_blocks_of_16_bits() -> None:
    model = make_model(TINY).bfloat16()
    model.config.params_dtype = torch.bfloat16
    blocks, sizes = [], {"buffer_size_gb": 0.001, "enable_prefix_caching": False}
    for dtype in ("fp8", "model", "auto"):
        engine = make_engine(model, kv_cache_dtype=dtype, **sizes)
        blocks.append(engine.context.blocks.total + 1)
        keys, _ = engine.context.gpu_view.kv_cache.layer(0)
        assert keys.element_size() == (1 if dtype == "fp8" else 2)
    assert blocks[0] // 2 == blocks[1] == blocks[2]


def test_scales_outlive_a_cache_that_is_given_back() -> None:
    engine = engine_of(scaled_model())
    cache = engine.context.gpu_view.kv_cache
    before = [cache.scales_of_layer(index) for index in range(2)]
    first = run_at(engine, {0: JOBS[:2]})
    engine.suspend(free_kv_cache=True)
    engine.resume()
    assert [cache.scales_of_layer(index) for index in range(2)] == before
    assert run_at(engine, {0: JOBS[:2]}, 20) == first


def test_layers_without_scales_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = scaled_model()
    for engine in (engine_of(model), engine_of(make_model(TINY), kv_cache_dtype="model")):
        engine.close()
    assert "in fp8" not in caplog.text
    engine_of(make_model(TINY)).close()
    assert caplog.text.count("no scales for 2 of 2 layers, where 1 is taken") == 1
