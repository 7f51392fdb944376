"""What the tests of the engine share: prompts, and parameters that give exactly 12 tokens."""

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)

PROMPTS = [[1, 2, 3], [400, 5], list(range(20, 60)), [9]]
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=12, termination_id=-1)


def engine_around(model, device=None, tokenizer=None, **settings):
    """An engine on the CPU whose books are checked after every step."""
    defaults = {"max_sequence_length": 128, "num_kv_blocks": 8, "block_size_tokens": 16}
    config = InferenceConfig(device="cpu", check_integrity=True, **(defaults | settings))
    context = DynamicInferenceContext(model.config, config, device)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), tokenizer)
    return DynamicInferenceEngine(controller, context)
