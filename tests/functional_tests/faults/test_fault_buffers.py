"""Buffers that are shared with a copy in flight: early or late, no token changes.

Streams of a `LateDevice` do their work at the first or at the last moment that events allow. So a
buffer that is used again too early, or a wait that is missing, gives a wrong token every time.
"""

from collections.abc import Callable

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.devices import Event
from tests.support.harness import EngineFactory, greedy, random_prompts
from tests.support.late_device import LateDevice

TOKENS = 14
PROMPTS = random_prompts(31, (5, 21, 9, 14, 3, 17))
VICTIM = 1
"""The request that is aborted; its id is used again at once."""
EAGER = [(), ("upload",), ("compute",), ("copy",), ("upload", "compute"), ("upload", "copy")]
SAME_AGAIN = {"max_requests": 4, "max_tokens": 12, "block_size_tokens": 4}


def play(engine: DynamicInferenceEngine, step: Callable[[], object]) -> list[list[int]]:
    """The tokens of each prompt. Requests join, end and are aborted while others run, so that rows
    change in every few steps. One asks for log probs: its steps' samples are copied, those of other
    steps are not."""
    futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(3)]
    for _ in range(6):
        step()
    engine.abort_request(VICTIM)
    asking = greedy(TOKENS, return_log_probs=True)
    futures[VICTIM] = engine.add_request(VICTIM, PROMPTS[VICTIM], asking)
    for _ in range(4):
        step()
    futures += [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(3, 6)]
    while engine.has_unfinished_requests():
        step()
    return [future.result().generated_tokens for future in futures]


@pytest.mark.parametrize("eager", EAGER, ids=lambda names: "+".join(names) or "all late")
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_no_copy_meets_another_step_s_data(
    make_tiny_engine: EngineFactory,
    expected: list[list[int]],
    lookahead: int,
    eager: tuple[str, ...],
) -> None:
    """Break one of these, and it fails:

    - `HostStaging.pack`: `entry = 0`
    - `ContextGPUView.__init__`: `self.bookkeeping` with one entry
    - `ContextGPUView.__init__`: `self.sample_ring` with one entry
    - `store_samples`: store into row 0 of the ring, not into row `now`
    - `transfer_bookkeeping_to_gpu`: no `compute.wait(arrived)`
    - `HostStaging.pack`: None for every decode step
    - `TextGenerationController._copy_samples`: no `copy.wait(buffers.sampled)`
    - `TextGenerationController._deliver`: `ready` recorded on the copy stream
    - `store_samples`: nothing stored in `host`
    - `RankGroup.wait`: no `event.wait()`
    """
    device = LateDevice(eager)
    engine = make_tiny_engine(lookahead=lookahead, device=device, **SAME_AGAIN)
    assert play(engine, engine.step_modern) == expected
    if lookahead:
        assert engine.stats()["overlap_ratio"] == 1.0


def test_an_interrupted_wait_leaves_the_rings_alone(
    make_tiny_engine: EngineFactory,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    lookahead: int,
) -> None:
    """Break `launch_next`: go on with more than `lookahead` in flight, so that a step is launched
    on top of steps that nobody has resolved."""
    engine = make_tiny_engine(lookahead=lookahead, device=LateDevice(), **SAME_AGAIN)
    wait, calls = engine.group.wait, 0

    def interrupted(event: Event) -> None:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise KeyboardInterrupt
        wait(event)

    def step() -> None:
        try:
            engine.step_modern()
        except KeyboardInterrupt:
            assert len(engine.in_flight) <= lookahead + 1

    monkeypatch.setattr(engine.group, "wait", interrupted)
    assert play(engine, step) == expected
    assert calls > 30
