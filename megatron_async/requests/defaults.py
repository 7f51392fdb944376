"""Parameters of a request that gives none, in Python and on the command line.

`SamplingParams()` itself has Megatron-Core's defaults (temperature 1, no limit of tokens), since
scripts for Megatron-Core rely on them. A prompt given to `LLM` or `megatron-async` without
parameters is greedy, so its answer is the same every time, and short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async.requests.sampling_params import SamplingParams

TEMPERATURE = 0.0
NUM_TOKENS = 256
"""Most tokens of an answer."""


def default_sampling_params() -> SamplingParams:
    """Greedy, at most `NUM_TOKENS` tokens."""
    # Imported here because it imports torch, and the command line has these defaults in its help.
    from megatron_async.requests.sampling_params import SamplingParams

    return SamplingParams(temperature=TEMPERATURE, num_tokens_to_generate=NUM_TOKENS)
