"""What the tests of faults compare with."""

import signal
from collections.abc import Iterator

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


@pytest.fixture
def usual_handler() -> Iterator[None]:
    """Ctrl-C raises, and does so afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
