"""The n-gram drafter cannot be seen in the output, its drafts are those of a search in Python, and
a text that repeats itself comes several tokens at once."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import load_recording
from megatron_async.lab.replay import Replay
from tests.support.attention_model import AttentionModel
from tests.support.capturing_cpu import CapturingCpu
from tests.support.cycling_model import CyclingHybridModel, CyclingModel
from tests.support.draft_watches import NgramWatch, wanted_drafts
from tests.support.drawn_drafts import DrawnSchedules
from tests.support.harness import Job, alone_once, greedy, kept, make_engine, run_at

PARTS, DRAWS = 2, 11
KINDS = (CyclingModel, CyclingHybridModel)
MODELS: dict[str, torch.nn.Module] = {}


def model_of(kind: type[AttentionModel]) -> AttentionModel:
    """One of each kind."""
    if kind.__name__ not in MODELS:
        MODELS[kind.__name__] = kind()
    found = MODELS[kind.__name__]
    assert isinstance(found, AttentionModel)
    return found


@cache
def serial_of(kind: type[AttentionModel]) -> DynamicInferenceEngine:
    """Plain decoding by one of each kind; it is never closed, as it is shared."""
    return kept(make_engine(model_of(kind), lookahead=0))


def ngram_engine(model: torch.nn.Module, count: int, **config: Any) -> DynamicInferenceEngine:
    return make_engine(
        model, speculative_method="ngram", num_speculative_tokens=count, **config
    )  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_tokens_are_those_of_plain_decoding(part: int) -> None:
    """Modes, 1 to 4 drafts, lookahead 0 to 2, both models, borders of blocks, small pools, aborts
    and stops, drawn by a seed.

    Break one of these, and it fails:

    - `ngram_drafts.reference`: `places <= last`; `best % PLACES` without the 1; no `scatter_` of
      the last token
    - `unpack_step_reference`: do not store tokens of chunks
    - `unpack_rows`: `brought` without the request's own number
    """
    drawn = DrawnSchedules({kind.__name__: model_of(kind) for kind in KINDS})
    for seed in range(part * DRAWS, (part + 1) * DRAWS):
        name = KINDS[seed % 2].__name__
        watch = drawn.play(seed, name, "ngram", 1 + seed // 2 % 4, seed // 8 % 3, NgramWatch)
        drawn.seen["found"] += watch.found
    drawn.close()
    seen = drawn.seen
    wanted = ("evictions", "zombie_rows", "aborted", "prefix_cache_hits", "fewer_drafts_request",
              "fewer_drafts_length", "fewer_drafts_nothing_found", "fewer_drafts_narrow_step",
              "fewer_drafts_blocks")  # fmt: skip
    assert [name for name in wanted if not seen[name]] == [], seen
    assert seen["found"] > 100
    assert seen["drafted_tokens"] > 100
    assert seen["accepted_tokens"] > 0.5 * seen["drafted_tokens"], seen


def replayed(answer: list[int], prompt: int, count: int) -> int:
    """Steps that decode takes with drafts looked up in the answer so far, every step wide."""
    length, steps = prompt + 1, 0
    while length < len(answer):
        drafts = wanted_drafts(answer[:length], count)
        right = 0
        while right < count and length + right < len(answer) - 1:
            if drafts[right] != answer[length + right]:
                break
            right += 1
        length, steps = length + 1 + right, steps + 1
    return steps


@pytest.mark.pairs
@pytest.mark.parametrize("kind", [CyclingModel, CyclingHybridModel])
@pytest.mark.parametrize("count", [1, 3])
def test_a_text_that_repeats_itself(kind: type[AttentionModel], lookahead: int, count: int) -> None:
    """Such a text takes about the steps that its drafts allow: a stale read would show here. Break
    one of these, and it fails: `DraftBooks.width_for` always 1; `store_drafts.reference` without
    slots; `_learn` with the second token; `NgramDrafter` without the last token."""
    model, tokens = model_of(kind), 90
    jobs = [Job([1 + n, 5, 7 + n], greedy(tokens, seed=n, temperature=0.5 * n)) for n in range(2)]
    plain = alone_once(serial_of(kind), jobs)
    for job, answer in zip(jobs, plain, strict=True):
        least = replayed([*job.prompt, *answer], len(job.prompt), count)
        assert least < (0.75 if count == 1 else 0.65) * tokens
        engine = ngram_engine(model, count, lookahead=lookahead, block_size_tokens=4)
        watch = NgramWatch(engine)
        assert run_at(engine, {0: [job]})[0] == answer
        stats = engine.stats()
        engine.close()
        # The prefill; steps until drafts are reported, and zombies; a few of a wrong width.
        useful = stats["steps"] - stats["zombie_steps"] - 1
        assert least <= useful + 1 <= least + 5 * lookahead + 4, stats
        assert watch.found > 10
        rows = stats["drafted_tokens_at_1"]
        assert stats["mean_accepted_length"] == 1 + stats["accepted_tokens"] / rows
        assert stats["accepted_tokens"] == sum(
            stats[f"accepted_tokens_at_{place}"] for place in range(1, count + 1)
        )


def test_drafts_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"no layers for multi-token prediction.*'ngram'"):
        make_engine(model_of(CyclingModel), speculative_method="mtp")
    with pytest.raises(ConfigurationError, match=r"speculative_method='n-gram' is unknown"):
        InferenceConfig(speculative_method="n-gram")
    with pytest.raises(ConfigurationError, match=r"rollback.*num_speculative_tokens=3"):
        InferenceConfig(speculative_method="ngram", invalidation="rollback")
    assert InferenceConfig(speculative_method="ngram").num_speculative_tokens == 3
    assert InferenceConfig(speculative_method="none").speculative_method is None
    assert InferenceConfig(speculative_method="ngram", max_tokens=64).max_requests == 16
    # Already resolved settings are settings too: recordings and contexts make such.
    config = InferenceConfig(speculative_method="ngram", num_speculative_tokens=2)
    assert replace(config, lookahead=2).num_speculative_tokens == 2


@pytest.mark.parametrize("wanted", [3, -1, 1.5])
def test_a_request_asks_for_drafts_that_there_are_not(wanted: Any) -> None:
    engine = ngram_engine(model_of(CyclingModel), 2)
    request = engine.generate([[1, 2]], greedy(4, num_speculative_tokens=wanted))[0]
    engine.close()
    assert f"num_speculative_tokens={wanted}" in str(request.error)


def test_requests_that_ask_for_fewer(lookahead: int) -> None:
    """Each row brings no more than its request asks for, beside others."""
    model = model_of(CyclingModel)
    params = [greedy(60, num_speculative_tokens=n) for n in (0, 1, 3, None)]
    prompts = [[1, 5, 7]] * len(params)
    engine = ngram_engine(model, 3, lookahead=lookahead, block_size_tokens=4)
    launch, most = engine.controller.enqueue_step, np.zeros(len(params), dtype=int)

    def launch_and_look(plan: Any) -> Any:
        requests = engine.context.slots.request_id[plan.slots]
        np.maximum.at(most, requests, plan.widths)
        return launch(plan)

    engine.controller.enqueue_step = launch_and_look  # type: ignore[method-assign]
    found = engine.generate(prompts, params)
    assert len({tuple(request.generated_tokens) for request in found}) == 1
    assert most.tolist() == [1, 2, 4, 4]
    assert engine.stats()["fewer_drafts_request"] > 20


def test_captured_steps() -> None:
    """Both widths are captured, and the lookup is a part of each graph."""
    model = model_of(CyclingModel)
    jobs = [Job([1 + n, 5, 7], greedy(40)) for n in range(3)]
    serial = make_engine(model, lookahead=0)
    expected = [run_at(serial, {0: [job]})[0] for job in jobs]
    serial.close()
    engine = ngram_engine(
        model, 3, device=CapturingCpu(), lookahead=2, num_cuda_graphs=2, max_requests=4,
        block_size_tokens=4,
    )  # fmt: skip
    engine.controller.create_cuda_graphs()
    watch = NgramWatch(engine)
    assert run_at(engine, {0: jobs[:2], 3: jobs[2:]}) == expected
    stats = engine.stats()
    assert stats["captured_steps"] > 10
    assert stats["accepted_tokens"] > 20
    assert stats["fewer_drafts_narrow_step"] + stats["fewer_drafts_nothing_found"] > 0
    assert watch.found > 20


def test_record_and_replay(tiny_model: torch.nn.Module, tmp_path: Path) -> None:
    """A replay has no drafts of its own: it takes the recorded ones, and chooses the same widths.
    `Recorder` without drafts plans other widths."""
    engine = ngram_engine(tiny_model, 3, lookahead=1, max_requests=3, max_tokens=40)
    recorder = Recorder(engine, tmp_path / "run.rec")
    jobs = [Job([1 + n, 5, 7], greedy(50)) for n in range(4)]
    run_at(engine, {0: jobs[:2], 5: jobs[2:]})
    recorder.close()
    assert engine.stats()["accepted_tokens"] > 0
    assert Replay(load_recording(tmp_path / "run.rec")).run() == engine.stats()["steps"]
