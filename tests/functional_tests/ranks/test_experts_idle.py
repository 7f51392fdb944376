"""Ranks that share experts have own arrivals: an idle rank sleeps, and wakes for others."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from tests.support.ranks import run_ranks

PROMPTS = [[1, 2, 3], list(range(40, 90)), [7], list(range(30)), [5, 6], [9] * 17, [4], [8, 1]]
TOGETHER_S = 0.01
"""Requests of a burst come within about so long of each other."""
GAP_S = 0.2
"""How long all ranks are idle between two bursts."""
BURSTS = (
    # Numbers of the prompts, by rank: one rank idles, then the other, then both have work.
    ((0, 1, 2, 3), ()),
    ((), (4, 5)),
    ((6,), (7,)),
)


def _llm(**options: Any) -> Any:
    from megatron_async import LLM

    settings = {"num_kv_blocks": 32, "block_size_tokens": 16, "max_sequence_length": 128}
    return LLM("dummy:tiny-moe", device="cpu", lookahead=1, **settings, **options)


def _params(number: int) -> Any:
    from megatron_async import SamplingParams

    kind = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
    return SamplingParams(num_tokens_to_generate=6 + number, termination_id=-1, **kind)


async def _serve(engine: Any, rank: int) -> dict[int, Any]:
    """Answers of a rank's requests, by number of the prompt."""
    from megatron_async.communication.bootstrap import join_job

    randomly = random.Random(rank)
    job, loop = join_job(), asyncio.create_task(engine.run_engine())
    answers = {}

    async def ask(number: int) -> None:
        await asyncio.sleep(randomly.random() * TOGETHER_S)
        request = await engine.add_request(number, PROMPTS[number], _params(number))
        answers[number] = list(request.generated_tokens)

    for number, burst in enumerate(BURSTS):
        await asyncio.gather(*map(ask, burst[rank]))
        # The next burst begins when this one has ended on all ranks, however slow they are.
        await asyncio.to_thread(job.exchange, f"burst {number} is answered", "")
        await asyncio.sleep(GAP_S)
    while engine.has_unfinished_requests():
        await asyncio.sleep(0.005)
    loop.cancel()
    await asyncio.wait([loop])
    return answers


def _on_a_rank(late: bool) -> tuple[dict[int, Any], int, int, int, int]:
    """Answers, steps, steps without requests of its own, looks at what the other does, and launches
    that waited, if they are `late`."""
    from tests.support.tiny_launches import TickingLaunches

    looks = 0
    with _llm(expert_model_parallel_size=2, late_launch=late) as llm:
        ticking = TickingLaunches(llm.engine.launching) if late else None
        communicator = llm.engine.group._communicator
        has_started = communicator.has_started

        def watched() -> bool:
            nonlocal looks
            looks += 1
            return has_started()

        communicator.has_started = watched
        answers = asyncio.run(_serve(llm.engine, llm.data_parallel_rank))
        statistics = llm.engine.statistics
        waits = ticking.waits if ticking else 0
        return answers, statistics.steps, statistics.dummy_steps, looks, waits


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late launches"])
def test_arrivals_at_random_times_with_idle_gaps(late):
    with _llm() as llm:
        outputs = llm.generate(PROMPTS, [_params(number) for number in range(len(PROMPTS))])
    alone = {number: output.generated_tokens for number, output in enumerate(outputs)}
    ranks = run_ranks(2, partial(_on_a_rank, late))
    answers = {number: tokens for found in ranks for number, tokens in found[0].items()}
    assert answers == alone
    (_, steps, *_), (_, other_steps, *_) = ranks
    assert steps == other_steps
    for _, steps, dummy_steps, looks, waits in ranks:
        assert (waits > 0) == late
        assert 0 < dummy_steps < steps
        # Idle for 0.6 s at least: a look every two milliseconds would be 300 more.
        assert looks < 3 * steps + 60
