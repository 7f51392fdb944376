"""What the tests of faults compare with."""

import pytest
import torch

from tests.support.harness import greedy, make_engine


@pytest.fixture(scope="module")
def expected(tiny_model: torch.nn.Module, request: pytest.FixtureRequest) -> list[list[int]]:
    """`TOKENS` tokens of each of the file's `PROMPTS`, alone on a serial engine."""
    engine = make_engine(
        tiny_model, lookahead=0, max_requests=1, num_kv_blocks=1, block_size_tokens=512
    )
    params = greedy(request.module.TOKENS)
    tokens = [r.generated_tokens for r in engine.generate(request.module.PROMPTS, params)]
    engine.close()
    return tokens
