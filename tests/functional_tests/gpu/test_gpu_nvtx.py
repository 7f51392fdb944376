"""A captured step with NVTX has kernels that end its parts, in order; one without has none."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from megatron_async import LLM, DynamicInferenceEngine
from megatron_async.lab.gpu_profile import (
    FIRST_KERNEL,
    device_activities,
    profile_device,
)
from megatron_async.observe.tracer import PARTS
from tests.support.harness import greedy

pytestmark = pytest.mark.gpu
MARKERS = [f"{part}_ends" for part in PARTS]


def step_often(engine: DynamicInferenceEngine) -> None:
    for _ in range(4):
        engine.step_modern()


def kernels_of_steps(nvtx: bool) -> list[list[str]]:
    """Names of the kernels of each profiled step, which is captured and has a draft."""
    settings = {"num_speculative_tokens": 1, "speculative_method": "ngram", "num_kv_blocks": 32}
    with LLM("dummy:tiny", device="cuda", nvtx=nvtx, max_requests=4, **settings) as llm:
        engine = llm.engine
        engine.add_request(0, [1, 2, 3], greedy(24))
        step_often(engine)
        before = engine.stats()["captured_steps"]
        profiler = profile_device(partial(step_often, engine))
        assert engine.stats()["captured_steps"] == before + 4
        steps: list[list[str]] = []
        for activity in sorted(device_activities(profiler), key=lambda each: each.start_us):
            if FIRST_KERNEL in activity.name:
                steps.append([])
            if steps:
                steps[-1].append(activity.name)
    return steps


def test_kernels_end_the_parts_of_a_captured_step():
    steps = kernels_of_steps(nvtx=True)
    assert len(steps) >= 3
    for kernels in steps[:-1]:
        assert [name for name in kernels if name in MARKERS] == MARKERS
        places = [0, *(kernels.index(name) for name in MARKERS)]
        assert all(end - start > 1 for start, end in pairwise(places)), kernels
    plain = kernels_of_steps(nvtx=False)
    assert not set(MARKERS) & {name for kernels in plain for name in kernels}
