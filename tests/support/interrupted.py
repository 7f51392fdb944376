"""Interrupts in the middle of an engine's turns: prompts, moments, fixtures of two files."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.engine.listener import EngineListener
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.harness import greedy, make_engine, random_prompts

TOKENS = 8
PROMPTS = random_prompts(5, (5, 9, 3), VOCABULARY)
MOMENTS = ("added", "launching", "launched", "booked", "resolved", "ended")


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    return AttentionModel()


@pytest.fixture(scope="module")
def expected(model: AttentionModel) -> list[list[int]]:
    engine = make_engine(model, lookahead=0, max_sequence_length=64)
    found = [r.generated_tokens for r in engine.generate(PROMPTS, greedy(TOKENS))]
    engine.close()
    return found


class At(EngineListener):
    """Does something at the given call of one of its methods, which are all in a turn's middle."""

    def __init__(self, moment: str, act: Callable[[], Any], call: int = 2) -> None:
        self.calls, self.passed = 0, 0
        self._act, self._call = act, call
        setattr(self, moment, self._at)

    def _at(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self._call:
            self._act()
            self.passed += 1


def right(engine: DynamicInferenceEngine, expected: list[list[int]]) -> bool:
    return [r.generated_tokens for r in engine.generate(PROMPTS, greedy(TOKENS))] == expected
