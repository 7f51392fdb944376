"""What the tests of the engine share: prompts, and parameters that give exactly 12 tokens."""

from megatron_async import SamplingParams

PROMPTS = [[1, 2, 3], [400, 5], list(range(20, 60)), [9]]
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=12, termination_id=-1)
