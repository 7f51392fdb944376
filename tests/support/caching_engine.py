"""An engine with a prefix cache of small blocks, and a text whose blocks are all different."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_async import DynamicInferenceEngine
from tests.support.attention_model import VOCABULARY
from tests.support.harness import Job, assert_all_is_back, drain, make_engine
from tests.support.poison import poison_blocks

TEXT = [(7 * n * n + 3) % VOCABULARY for n in range(64)]


def caching(model: torch.nn.Module, **config: Any) -> DynamicInferenceEngine:
    return make_engine(
        model, enable_prefix_caching=True, **{"block_size_tokens": 4, "max_requests": 8, **config}
    )


def answers_without_the_donor(
    engine: DynamicInferenceEngine, jobs: Sequence[Job], steps: int
) -> list[list[int]]:
    """Tokens of all jobs but the first, which is aborted while its steps are in flight and others
    begin from what it has left."""
    blocks = poison_blocks(engine)
    futures = [engine.add_request(0, jobs[0].prompt, jobs[0].params)]
    for _ in range(steps):
        engine.step_modern()
    for number, job in enumerate(jobs[1:], 1):
        futures.append(engine.add_request(number, job.prompt, job.params))
    engine.step_modern()
    engine.abort_request(0)
    drain(engine)
    assert_all_is_back(engine)
    blocks.check_free_blocks()
    return [future.result().generated_tokens for future in futures[1:]]
