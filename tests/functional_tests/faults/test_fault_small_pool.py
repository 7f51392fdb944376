"""A pool that is too small for ever: every request ends all the same, and at what cost."""

import pytest

from tests.support.harness import greedy, random_prompts
from tests.support.late_device import LateDevice
from tests.support.step_watch import StepWatch

REQUESTS, TOKENS = 10, 18
PROMPTS = random_prompts(71, [4 + number % 9 for number in range(REQUESTS)])
BLOCK = 2
LONGEST = max(map(len, PROMPTS)) + TOKENS
TWO_REQUESTS = 2 * -(-(LONGEST - 1) // BLOCK)
LEAST_SHARE = 0.9
"""Share of the tokens a step that two slots give in a large pool. The small one holds two requests
at their limits and more of them on their way there, but pays for evictions with prefill."""


@pytest.mark.parametrize("limit", [None, 1e-9], ids=["pauses", "evicts"])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_many_requests_over_blocks_for_two(make_tiny_engine, lookahead, limit: float | None):
    """Eight slots compete for the blocks of two requests. Break `_make_room`: `if False:` instead
    of `if self.blocks.allocatable == 0:`, and it stands still."""
    settings = {"lookahead": lookahead, "block_size_tokens": BLOCK, "max_tokens": 40}
    counts = {}
    tokens = {}
    for name, slots, blocks in (("small", 8, TWO_REQUESTS), ("two", 2, 999), ("large", 8, 999)):
        engine = make_tiny_engine(
            device=LateDevice(),
            max_requests=slots,
            num_kv_blocks=blocks,
            paused_buffer_size_gb=limit,
            **settings,
        )
        watch = StepWatch(engine)
        futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(REQUESTS)]
        while engine.has_unfinished_requests():
            watch.before_step()
            engine.step_modern()
            watch.after_step()
            assert engine.stats()["steps"] < REQUESTS * LONGEST, "requests evict each other in turn"
        tokens[name] = [future.result().generated_tokens for future in futures]
        counts[name] = engine.stats()
    assert tokens["small"] == tokens["large"]
    assert counts["small"]["pauses"] > 0
    rates = {name: REQUESTS * TOKENS / stats["steps"] for name, stats in counts.items()}
    print(f"lookahead {lookahead}, {limit}: tokens a step {rates}", counts["small"]["evictions"])
    assert rates["small"] > LEAST_SHARE * rates["two"]
