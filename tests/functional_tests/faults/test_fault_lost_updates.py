"""A step that fails before its block-table updates have reached the device, with steps launched
behind it: they write by tables of former owners, and no request that goes on may notice."""

import contextlib
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine
from tests.support.harness import (
    EngineFactory,
    drain,
    fail_call,
    greedy,
    make_engine,
    random_prompts,
)

FORMER, RUNNING, PAUSED, NEWCOMER = random_prompts(17, (20, 8, 16, 7))
PROMPTS = {"running": RUNNING, "paused": PAUSED, "newcomer": NEWCOMER}
TOKENS = {"running": 10, "paused": 10, "newcomer": 8}
CALLS = range(1, 9)
"""Which step fails, counted from the arrival of the requests."""


def place(engine: DynamicInferenceEngine, where: str) -> tuple[Any, str]:
    if where == "pack":
        return engine.context._staging, "pack"
    if where == "launch":
        return engine.controller, "enqueue_step"
    return engine.context.gpu_view, where


@pytest.fixture(scope="module")
def expected(tiny_model: torch.nn.Module) -> dict[str, list[int]]:
    """What each request says alone."""
    engine = make_engine(tiny_model, lookahead=0, num_kv_blocks=8, block_size_tokens=8)
    answers = {
        name: engine.generate([prompt], greedy(TOKENS[name]))[0].generated_tokens
        for name, prompt in PROMPTS.items()
    }
    engine.close()
    return answers


@pytest.mark.pairs
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("pack", ValueError("made up")),
        ("pack", KeyboardInterrupt()),
        ("begin_step", ValueError("made up")),
        ("launch", ValueError("made up")),
    ],
)
def test_lost_updates_harm_nobody_else(
    make_tiny_engine: EngineFactory,
    expected: dict[str, list[int]],
    lookahead: int,
    invalidation: str,
    where: str,
    error: BaseException,
) -> None:
    """Whichever step fails, requests that do not fail with it give the tokens that they give alone.
    Break it, and it fails: `DynamicInferenceEngine._book_oldest` without `evict_all`."""
    survivors = 0
    for call in CALLS:
        engine = make_tiny_engine(
            lookahead=lookahead,
            invalidation=invalidation,
            num_kv_blocks=4,
            block_size_tokens=8,
            max_requests=3,
        )
        engine.generate([FORMER], greedy(1))  # it leaves its blocks in slot 0's table
        drain(engine)
        fail_call(*place(engine, where), call, error)
        futures = {
            name: engine.add_request(number, prompt, greedy(TOKENS[name]))
            for number, (name, prompt) in enumerate(PROMPTS.items(), 10)
        }
        while engine.has_unfinished_requests():
            with contextlib.suppress(KeyboardInterrupt):
                engine.step_modern()
        for name, future in futures.items():
            tokens, error_of_it = future.result().generated_tokens, future.result().error
            survivors += error_of_it is None
            wanted = expected[name] if error_of_it is None else expected[name][: len(tokens)]
            assert tokens == wanted, f"the step of call {call} fails: {name}"
    assert survivors >= len(CALLS)
