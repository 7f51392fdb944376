"""Ranks that share experts have arrivals of their own: who is idle sleeps, and wakes for others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from ranks import run_ranks

PROMPTS = [[1, 2, 3], list(range(40, 90)), [7], list(range(30)), [5, 6], [9] * 17, [4], [8, 1]]
TOGETHER_S = 0.01
"""Requests of a burst come within about so long of each other."""
GAP_S = 0.4
"""Idle engines sleep for longer than a burst takes; on a slow machine the gap is shorter."""
SCHEDULES = (
    # Number of the prompt, after how many gaps it comes: rank 1 idles, then 0, then both.
    ((0, 0), (1, 0), (2, 0), (3, 0), (6, 3)),
    ((4, 1), (5, 1), (7, 3)),
)


def _llm(**options: Any) -> Any:
    from megatron_async import LLM

    settings = {"num_kv_blocks": 32, "block_size_tokens": 16, "max_sequence_length": 128}
    return LLM("dummy:tiny-moe", device="cpu", lookahead=1, **settings, **options)


def _params(number: int) -> Any:
    from megatron_async import SamplingParams

    kind = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
    return SamplingParams(num_tokens_to_generate=6 + number, termination_id=-1, **kind)


async def _serve(engine: Any, schedule: Sequence[tuple[int, int]], rank: int) -> dict[int, Any]:
    """Answers of a rank's requests, by number of the prompt."""
    from megatron_async.communication.bootstrap import join_job

    randomly = random.Random(rank)
    loop = asyncio.create_task(engine.run_engine())

    async def ask(number: int, gaps: int) -> list[int]:
        await asyncio.sleep(gaps * GAP_S + randomly.random() * TOGETHER_S)
        request = await engine.add_request(number, PROMPTS[number], _params(number))
        return list(request.generated_tokens)

    answers = await asyncio.gather(*(ask(*arrival) for arrival in schedule))
    # The other rank may still need this one's experts.
    await asyncio.to_thread(join_job().exchange, "all are answered", "")
    while engine.has_unfinished_requests():
        await asyncio.sleep(0.005)
    loop.cancel()
    await asyncio.wait([loop])
    return dict(zip((number for number, _ in schedule), answers, strict=True))


def _on_a_rank() -> tuple[dict[int, Any], int, int, int]:
    """Answers, steps, steps without requests of its own, and looks at what the other does."""
    looks = 0
    with _llm(expert_model_parallel_size=2) as llm:
        consensus = llm.engine.group._consensus
        has_started = consensus._communicator.has_started

        def watched() -> bool:
            nonlocal looks
            looks += 1
            return has_started()

        consensus._communicator.has_started = watched
        schedule = SCHEDULES[llm.data_parallel_rank]
        answers = asyncio.run(_serve(llm.engine, schedule, llm.data_parallel_rank))
        statistics = llm.engine.statistics
        return answers, statistics.steps, statistics.dummy_steps, looks


def test_arrivals_at_random_times_with_idle_gaps():
    with _llm() as llm:
        outputs = llm.generate(PROMPTS, [_params(number) for number in range(len(PROMPTS))])
    alone = {number: output.generated_tokens for number, output in enumerate(outputs)}
    ranks = run_ranks(2, _on_a_rank)
    answers = {number: tokens for found in ranks for number, tokens in found[0].items()}
    assert answers == alone
    (_, steps, *_), (_, other_steps, *_) = ranks
    assert steps == other_steps
    for _, steps, dummy_steps, looks in ranks:
        assert 0 < dummy_steps < steps
        # Idle for most of a second: a look every two milliseconds would be 400 more.
        assert looks < 3 * steps + 60
