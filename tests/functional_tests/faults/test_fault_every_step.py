"""Steps that fail one after the other: each must end its requests, and the others go on."""

from typing import Any

import pytest
import torch

from megatron_async import Status
from megatron_async.errors import StepFailed
from tests.support.harness import drain, greedy, make_engine, random_prompts

PROMPTS = random_prompts(5, (20, 70, 100, 3))
POISON = 2
MOST_STEPS = 200


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize("fails", ["all", "those of one request, after another one"])
def test_failures_end(tiny_model: torch.nn.Module, lookahead: int, fails: str) -> None:
    """Steps in flight behind a failed one fail too. Their requests were evicted and began again,
    for ever, while steps were launched meanwhile."""
    engine = make_engine(
        tiny_model, lookahead=lookahead, max_requests=4, max_sequence_length=128, max_tokens=48
    )
    expected = [r.generated_tokens for r in engine.generate(PROMPTS, greedy(6))]
    controller, original = engine.controller, engine.controller._compute_step
    planned: list[set[int]] = []

    def launching(plan: Any) -> Any:
        slots = engine.context.slots
        planned.append({slots.request_at(s).request_id for s in plan.slots.tolist()})
        return launch(plan)

    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        served, calls = planned[calls], calls + 1
        if fails == "all" or calls == 1 or POISON in served:
            raise ValueError("planned")
        return original(*arguments)

    launch, controller.enqueue_step = controller.enqueue_step, launching  # type: ignore[method-assign]
    controller._compute_step = fail  # type: ignore[method-assign]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(number, prompt, greedy(6))
    ended = {}
    for _ in range(MOST_STEPS):
        for request in engine.step_modern()["finished_request_records"]:
            ended[request.request_id] = request
        if not engine.has_unfinished_requests():
            break
    assert len(ended) == len(PROMPTS), "some requests begin again for ever"
    assert isinstance(ended[POISON].error, StepFailed)
    for number, request in ended.items():
        if fails == "all":
            assert request.status == Status.FAILED
        elif request.status != Status.FAILED:
            assert request.generated_tokens == expected[number]
    del controller._compute_step, controller.enqueue_step
    after = engine.generate(PROMPTS, greedy(6))
    assert [r.generated_tokens for r in after] == expected
    drain(engine)
