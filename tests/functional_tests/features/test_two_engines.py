"""Several engines around one model: what a step leaves for its own later parts is the step's, not
the model's."""

import threading
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.harness import drain, greedy, make_engine, make_model, random_prompts
from tests.support.late_device import LateDevice

TOKENS = 8
PROMPTS = random_prompts(91, (9, 4, 17), 512)
OTHERS = random_prompts(92, (11,), 512)


@pytest.fixture(scope="module", params=["tiny-mtp", "tiny-hybrid-mtp"])
def model(request: Any) -> torch.nn.Module:
    return make_model(DUMMY_SHAPES[request.param], with_mtp=True)


def engine_of(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return make_engine(
        model, lookahead=1, speculative_method="mtp", num_speculative_tokens=2, max_requests=4,
        max_sequence_length=64, num_kv_blocks=32, **settings,
    )  # fmt: skip


def said(engine: DynamicInferenceEngine, prompts: list[list[int]]) -> list[list[int]]:
    requests = engine.generate(prompts, greedy(TOKENS))
    assert all(request.error is None for request in requests), [r.error for r in requests]
    drain(engine)
    return [request.generated_tokens for request in requests]


def test_another_engine_runs_in_the_middle_of_a_step(model: torch.nn.Module) -> None:
    """Break `PagedHybridStack.forward`: keep what drafts begin with in the model."""
    alone, other = engine_of(model), engine_of(model, device=LateDevice())
    expected, others = said(alone, PROMPTS), said(other, OTHERS)
    alone.close()
    engine = engine_of(model)
    drafter, calls = engine.controller.drafting.drafter, 0  # type: ignore[union-attr]
    propose = drafter.propose

    def propose_later(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            assert said(other, OTHERS) == others
        return propose(*arguments)

    drafter.propose = propose_later  # type: ignore[method-assign]
    assert said(engine, PROMPTS) == expected
    assert calls == engine.stats()["steps"]
    accepted = [each.stats()["accepted_tokens"] for each in (alone, engine)]
    assert accepted[0] == accepted[1]
    engine.close()


def test_two_engines_on_two_threads(model: torch.nn.Module) -> None:
    engines = [engine_of(model), engine_of(model)]
    expected = [said(engines[0], prompts) for prompts in (PROMPTS, OTHERS)]
    found: dict[int, list[Any]] = {0: [], 1: []}

    def serve(number: int) -> None:
        for _ in range(4):
            found[number].append(said(engines[number], (PROMPTS, OTHERS)[number]))

    threads = [threading.Thread(target=serve, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answers in found.items():
        assert answers == [expected[number]] * 4
        engines[number].close()
