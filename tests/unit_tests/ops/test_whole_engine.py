"""A whole engine in the bit-stable mode, on a GPU or in Triton's interpreter: a request's bits are
those that it has alone, and bugs that change the order of a sum are found.

More schedules than CI plays, and others, on a GPU (in the interpreter one takes a second or two):

    export MEGATRON_ASYNC_FUZZ_SCHEDULES=500 MEGATRON_ASYNC_FUZZ_SEED=100
    pytest tests/unit_tests/ops/test_whole_engine.py -k company
"""

import os
from dataclasses import replace
from functools import partial

import pytest

from tests.support.company import Company
from tests.support.harness import drain, greedy, random_prompts
from tests.support.planted_order_bugs import ORDER_BUGS, Plant
from tests.support.staged_weights import StagedWeights
from tests.unit_tests.ops.bit_stable_engines import (
    ARCHITECTURES,
    PART_HERE,
    VOCABULARY,
    make_stable_engine,
    make_weights,
    use_interpreter,
)
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("matrix_units")
SEEDS = {
    "qwen": [2, 7, 18],
    "qwen fp8": [18],
    "nemotron": [0, 2, 9],
    "next": [0],
    "windows": [18],
}
"""Schedules that have, several together, what `EVENTS` names, in the interpreter."""
SCHEDULES = int(os.environ.get("MEGATRON_ASYNC_FUZZ_SCHEDULES", "12"))
FIRST_SEED = int(os.environ.get("MEGATRON_ASYNC_FUZZ_SEED", "0"))
JOBS = 4
EVENTS = ("evictions", "prefix_cache_hits", "accepted_tokens", "overlapped_steps", "suspended")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_interpreter(monkeypatch)


def company(kind: str) -> Company:
    kind, _, cache = kind.partition(" ")
    drafts = ("", "ngram", "fickle", *(["mtp"] if kind == "qwen" else []))
    make = partial(make_stable_engine, ARCHITECTURES[kind], kv_cache_dtype=cache or "model")
    return Company(make, PART_HERE, VOCABULARY, drafts, tables=1 + (kind == "windows"))


@pytest.mark.parametrize("kind", SEEDS)
def test_a_request_has_its_bits_in_any_company(device: str, kind: str) -> None:
    """In batches, by chunks, behind a prefix that is found, with drafts, padded, evicted."""
    some, seeds = company(kind), SEEDS[kind]
    is_asked = "MEGATRON_ASYNC_FUZZ_SCHEDULES" in os.environ
    if is_asked or not INTERPRETED:
        seeds = [*range(FIRST_SEED, FIRST_SEED + SCHEDULES)]
    found = [line for seed in seeds for line in some.differences(seed, JOBS)]
    assert not found
    # The schedules are worth their name.
    wanted = [*EVENTS, *(f"drafts: {kind}" for kind in some.drafts if kind)]
    is_asked |= len(seeds) == 1
    assert is_asked or not [event for event in wanted if not some.counts[event]], some.counts


def test_new_weights_and_a_score(device: str) -> None:
    """What is generated behind an update has the bits of a score by the new weights, and what came
    before it those of a score by the old ones."""
    architecture = replace(ARCHITECTURES["nemotron"], pattern="M*", num_layers=2)
    make = partial(make_stable_engine, architecture)
    engine, new = make(make_weights(architecture)), make_weights(architecture, seed=1)
    params = greedy(5, return_log_probs=True, skip_prompt_log_probs=True)
    prompts = random_prompts(3, (PART_HERE + 9, 5), VOCABULARY)
    futures = [engine.add_request(n, prompt, params) for n, prompt in enumerate(prompts)]
    for _ in range(3):
        engine.step_modern()
    engine.updating.stage(1, StagedWeights(engine, new))
    engine.updating.commit(1, "new", "recompute")
    drain(engine)
    answers = [future.result() for future in futures]
    known = [[*answer.prompt_tokens, *answer.generated_tokens] for answer in answers]
    by_old, by_new = (each.score(known) for each in (make(make_weights(architecture)), engine))
    for answer, old, new in zip(answers, by_old, by_new, strict=True):
        (_, _, border), (version, _, _) = answer.weight_versions
        assert version == "new"
        log_probs, count = answer.generated_log_probs, len(answer.generated_tokens)
        assert log_probs[:border] == old.prompt_log_probs[-count:][:border]
        assert log_probs[border:] == new.prompt_log_probs[-count:][border:]


@pytest.mark.parametrize("plant", ORDER_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    """Other bits in company than alone, by the same engine with the bug."""
    plant(monkeypatch)
    layers, seed = ORDER_BUGS[plant]
    kind = ARCHITECTURES["nemotron" if "M" in layers else "qwen"]
    few = {"num_layers": len(layers), "mtp_pattern": "", "mtp_num_depths": 0}
    make = partial(make_stable_engine, replace(kind, pattern=layers, **few))
    assert Company(make, PART_HERE, VOCABULARY, drafts=("",)).differences(seed, jobs=2)
