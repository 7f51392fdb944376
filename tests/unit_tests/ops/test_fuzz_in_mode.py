"""The fuzzer's schedules in the bit-stable mode, in Triton's interpreter: bits, not near ties.

export TRITON_INTERPRET=1 MEGATRON_ASYNC_FUZZ_SCHEDULES=100 MEGATRON_ASYNC_FUZZ_SEED=100
pytest tests/unit_tests/ops/test_fuzz_in_mode.py
"""

import os
from dataclasses import replace

import pytest
from hypothesis import Phase

from tests.functional_tests.fuzz.stable_machine import StableMachine
from tests.functional_tests.fuzz.test_fuzz_engine import (
    FIRST_SEED,
    fuzz,
    no_clock,  # noqa: F401  # a fixture
    same_draws,  # noqa: F401
)
from tests.support.attention_model import VOCABULARY
from tests.unit_tests.ops.bit_stable_engines import ARCHITECTURES, make_weights, use_interpreter

SCHEDULES = int(os.environ.get("MEGATRON_ASYNC_FUZZ_SCHEDULES", "2"))
LAYERS = {"qwen": "*E", "nemotron": "M*", "next": "G*"}


def test_random_schedules_give_the_bits_of_the_serial_answers(
    interpreter: None, matrix_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_interpreter(monkeypatch)
    for name, layers in LAYERS.items():
        few = {"pattern": layers, "num_layers": 2, "mtp_pattern": "", "mtp_num_depths": 0}
        shape = replace(ARCHITECTURES[name], vocab_size=VOCABULARY, **few)
        StableMachine.models[name] = make_weights(shape)
    before = StableMachine.counts["steps"]
    fuzz(SCHEDULES, FIRST_SEED, Phase.generate, machine=StableMachine)
    assert StableMachine.counts["steps"] - before > 10  # the schedules are worth their name
