"""Drafts on a model with recurrent layers: whatever is proposed, tokens are those of serial plain
decoding.

A rejected draft leaves its inputs in the ring of its slot, behind the length of the sequence, where
the tokens that follow lie over them. The state itself never takes a draft in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.devices import CpuDevice
from tests.support.attention_model import VOCABULARY
from tests.support.capturing_cpu import CapturingCpu
from tests.support.drafters import DRAFTERS
from tests.support.harness import (
    Job,
    assert_all_is_back,
    greedy,
    make_engine,
    random_prompts,
    run_at,
)
from tests.support.hybrid_model import HYBRID_MODELS, HybridAttentionModel
from tests.support.late_device import LateDevice
from tests.support.poison import poison_states

TOKENS = 36
LENGTHS = (5, 19, 1, 40, 140, 8)
_SAMPLED: dict[str, Any] = {"num_tokens_to_generate": TOKENS, "termination_id": -1}
JOBS = [
    Job(
        prompt,
        greedy(TOKENS, seed=number)
        if number % 2
        else SamplingParams(temperature=0.9, seed=number, **_SAMPLED),
    )
    for number, prompt in enumerate(random_prompts(3, LENGTHS, VOCABULARY))
]
"""A job's number is its seed, by which drafters know it."""
ARRIVALS = {0: JOBS[:4], 3: JOBS[4:5], 9: JOBS[5:]}
ROOMY: dict[str, Any] = {"max_requests": 6}
EVICTIONS: dict[str, Any] = {
    "max_requests": 5, "max_tokens": 40, "num_kv_blocks": 26, "block_size_tokens": 8,
    "paused_buffer_size_gb": 1e-9,
}  # fmt: skip


@pytest.fixture(scope="module", params=HYBRID_MODELS, ids=lambda kind: kind.pattern)
def model(request: pytest.FixtureRequest) -> HybridAttentionModel:
    made: HybridAttentionModel = request.param()
    return made


@pytest.fixture(scope="module")
def serial(model: HybridAttentionModel) -> list[list[int]]:
    """Each request alone, without drafts."""
    engine = make_engine(model, lookahead=0, max_requests=1)
    found = [engine.generate([job.prompt], job.params)[0].generated_tokens for job in JOBS]
    engine.close()
    assert min(len(set(tokens)) for tokens in found) > 8, "a dull model hides wrong states"
    return found


def drafting_engine(
    model: HybridAttentionModel, serial: list[list[int]], drafter: str, count: int, **config: Any
) -> DynamicInferenceEngine:
    answers = [[*job.prompt, *tokens] for job, tokens in zip(JOBS, serial, strict=True)]
    engine = make_engine(
        model, drafter=DRAFTERS[drafter](answers, VOCABULARY), num_speculative_tokens=count,
        **config,
    )  # fmt: skip
    poison_states(engine)
    return engine


@pytest.mark.pairs
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize(
    ("drafter", "count"), [*((drafter, 3) for drafter in DRAFTERS), ("fickle", 1)]
)
def test_tokens_are_those_of_serial_plain_decoding(
    model: HybridAttentionModel,
    serial: list[list[int]],
    drafter: str,
    count: int,
    lookahead: int,
) -> None:
    """With room, and with evictions.

    Break one of these, and it fails:

    - `flush_kernels.next_bases` and `next_bases.reference`: flush up to a row's last query token
      (`first + width - 1`)
    - `FlushRule.ring_length`: leave the widths out
    """
    seen: Counter[str] = Counter()
    for settings in (ROOMY, EVICTIONS):
        device = LateDevice() if settings is ROOMY else CpuDevice()
        engine = drafting_engine(
            model, serial, drafter, count, device=device, lookahead=lookahead, **settings
        )
        assert run_at(engine, ARRIVALS) == serial, settings
        seen.update({name: int(value) for name, value in engine.stats().items()})
        engine.close()
        assert_all_is_back(engine)
    assert seen["evictions"] > 0
    assert seen["drafted_tokens"] > 150
    assert (seen["accepted_tokens"] > 100) == (drafter != "wrong")
    assert seen["accepted_tokens"] > 0 or drafter == "wrong"


@pytest.mark.parametrize("lookahead", [1, 3])
def test_requests_beside_one_that_ends_unforeseen(
    model: HybridAttentionModel, serial: list[list[int]], lookahead: int
) -> None:
    """Inside a row, with more drafts accepted behind it."""
    jobs, wanted = [], []
    for number, (job, tokens) in enumerate(zip(JOBS, serial, strict=True)):
        at = tokens.index(tokens[3 + 3 * number])
        jobs.append(Job(job.prompt, replace(job.params, stop_token_ids=[tokens[at]])))
        wanted.append(tokens[: at + 1])
    engine = drafting_engine(model, serial, "oracle", 3, lookahead=lookahead, max_requests=3)
    assert run_at(engine, {0: jobs}) == wanted
    engine.close()
    assert_all_is_back(engine)


def test_captured_steps(model: HybridAttentionModel, serial: list[list[int]]) -> None:
    engine = drafting_engine(
        model, serial, "fickle", 3, device=CapturingCpu(), lookahead=2, num_cuda_graphs=3, **ROOMY
    )
    assert run_at(engine, ARRIVALS) == serial
    assert engine.stats()["captured_steps"] > 20
    engine.close()
