"""The engine with 8-bit weights: the same tokens whatever the schedule, near float32's."""

import pytest
import torch

from megatron_async import LLM, SamplingParams
from megatron_async.models.linear import SharedLinear
from megatron_async.ops.linear.cpu.eight_bit import ENGINE, EightBitWeight
from tests.support.harness import random_prompts

pytestmark = pytest.mark.skipif(
    ENGINE not in torch.backends.quantized.supported_engines, reason="torch has no fbgemm here"
)
LENGTHS = (5, 70, 1, 33)


@pytest.mark.parametrize("model", ["dummy:tiny", "dummy:tiny-hybrid", "dummy:tiny-moe"])
def test_tokens_do_not_depend_on_the_schedule(model: str) -> None:
    found = []
    for settings in (
        {"lookahead": 0, "max_requests": 1},
        {"lookahead": 1},
        {"lookahead": 2, "max_tokens": 16, "max_requests": 3},
    ):
        with LLM(model, device="cpu", quantization="int8", check_integrity=True, **settings) as llm:
            prompts = random_prompts(3, LENGTHS, llm.engine.controller.vocab_size)
            params = SamplingParams(num_tokens_to_generate=12, temperature=0.0)
            found.append([list(r.generated_tokens) for r in llm.generate(prompts, params)])
            modules = llm.engine.controller.inference_wrapped_model.model.modules()
            packed = [m.packed_weight for m in modules if isinstance(m, SharedLinear)]
            assert packed
            assert all(isinstance(weight, EightBitWeight) for weight in packed)
    assert found[0] == found[1] == found[2]


def test_log_probs_are_near_float32s(smollm2_llm: LLM) -> None:
    """docs/records/figures.md has a longer comparison: 0.046 on the model's own answers."""
    text = "The Moon goes around the Earth, and the Earth goes around the Sun once a year."
    params = SamplingParams(
        num_tokens_to_generate=1,
        temperature=0.0,
        return_log_probs=True,
        skip_prompt_log_probs=False,
    )
    with LLM("smollm2", device="cpu", quantization="int8") as llm:
        found, expected = (
            torch.tensor(engine.generate(text, params)[0].prompt_log_probs)
            for engine in (llm, smollm2_llm)
        )
    distance = (found - expected).abs().mean()
    assert 0.001 < distance < 0.2
