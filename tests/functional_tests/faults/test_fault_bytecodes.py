"""Interrupts between any two bytecodes of a step: afterwards every answer is right, or its request
has failed with the cause, and the next call is as a new engine's.

Such interrupts have found a step that was taken from those in flight before it was booked (its
tokens were lost, and the requests COMPLETED with all later ones one place early), and a block in
the host's table of which the device was never told.
"""

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.errors import StepFailed
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.bytecodes import AtBytecode, ctrl_c, interrupt
from tests.support.harness import assert_all_is_back, drain, greedy, make_engine, random_prompts
from tests.support.hybrid_model import MixedAttentionModel
from tests.support.pairs import ALL_CASES
from tests.support.tiny_launches import use_small_grid

TOKENS = 6
PROMPTS = random_prompts(3, (5, 9, 3, 12), VOCABULARY)
NEXT = random_prompts(4, (6, 2, 11), VOCABULARY)
MODELS = {"attention": AttentionModel, "hybrid": MixedAttentionModel}
STRIDE = 5 if os.environ.get(ALL_CASES) == "1" else 1709
"""One bytecode of a step is tried, then the one so many behind it."""
STEPS = 10
"""Steps of a run that are interrupted: with all of `PROMPTS`' prefills, and the ends of most."""
MOST_STEPS = 200
ACTS = {"signal": ctrl_c, "raised": interrupt}


@pytest.fixture(autouse=True)
def small_grid(usual_handler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences pass as many borders of states as long ones do; Ctrl-C raises."""
    use_small_grid(monkeypatch.setattr)


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    return MODELS[request.param]()


def engine_of(model: Any, lookahead: int, sharing: bool = False) -> DynamicInferenceEngine:
    return make_engine(
        model, lookahead=lookahead, enable_prefix_caching=sharing, max_requests=3, max_tokens=12,
        block_size_tokens=3, num_kv_blocks=20, max_sequence_length=48, late_launch=False,
    )  # fmt: skip


def answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    engine = engine_of(model, 0)
    found = [engine.generate([prompt], greedy(TOKENS))[0].generated_tokens for prompt in prompts]
    engine.close()
    return found


def run(
    engine: DynamicInferenceEngine, step: int, number: int, act: Callable[[], None]
) -> tuple[Any, Any]:
    """Serve `PROMPTS`, with an interrupt at a bytecode of a step: their futures, and where it was.
    The other steps are not traced, which takes most of the time."""
    futures = [engine.add_request(n, prompt, greedy(TOKENS)) for n, prompt in enumerate(PROMPTS)]
    for _ in range(step):
        engine.step_modern()
    with AtBytecode(number, act) as interrupted:
        try:
            engine.step_modern()
        except KeyboardInterrupt:
            assert interrupted.where is not None
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished_requests():
            break
        engine.step_modern()
    return futures, interrupted.where


@pytest.mark.pairs
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("sharing", [False, True])
def test_an_interrupt_at_any_bytecode(model: Any, lookahead: int, sharing: bool, act: str) -> None:
    """Break one of these, and it fails:

    - `Turn.__enter__`: no `begin` (signal)
    - `Turn.__exit__`: no `_make_whole` (raised)
    - `DynamicInferenceContext.start_again`: no `slots.clear`, or no `expect_step` (raised)
    """
    expected, after = answers(model, PROMPTS), answers(model, NEXT)
    engine = engine_of(model, lookahead, sharing)
    tried = 0
    step, number = 0, 1 + 100 * lookahead
    while step < STEPS:
        futures, where = run(engine, step, number, ACTS[act])
        if where is None:
            step, number = step + 1, 1 + (number + 977) % STRIDE
            continue
        tried += 1
        for future, tokens in zip(futures, expected, strict=True):
            assert future.done(), where
            request = future.result()
            if request.error is None:
                assert request.generated_tokens == tokens, where
            else:
                assert act == "raised", where
                assert isinstance(request.error, StepFailed), where
                assert isinstance(request.error.__cause__, KeyboardInterrupt), where
                assert request.generated_tokens == tokens[: request.generated_length], where
        assert_all_is_back(engine)
        if tried % 5 == 0:
            found = engine.generate(NEXT, greedy(TOKENS))
            assert [request.generated_tokens for request in found] == after, where
        number += STRIDE
    assert tried > 20, "the bytecodes of all steps were counted"


def test_signals_at_random_moments_of_generate(lookahead: int) -> None:
    """A person runs a cell, interrupts it, and runs the next one."""
    model = AttentionModel()
    expected, after = answers(model, PROMPTS), answers(model, NEXT)
    engine, moments, interrupted = engine_of(model, lookahead), random.Random(lookahead), 0
    before = signal.signal(signal.SIGALRM, lambda *_: ctrl_c())
    try:
        for _ in range(25):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 8e-3))
                found = engine.generate(PROMPTS, greedy(TOKENS))
                assert [request.generated_tokens for request in found] == expected
                while True:
                    signal.pause()
            except KeyboardInterrupt:
                interrupted += 1
            found = engine.generate(NEXT, greedy(TOKENS))
            assert [request.generated_tokens for request in found] == after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 25
    drain(engine)
