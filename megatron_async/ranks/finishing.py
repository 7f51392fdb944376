"""`finish_together`: leaders whose engines run as tasks end at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.job import FINISH_TIMEOUT_S
from megatron_async.ranks.join_group import RankPlace


async def finish_together(
    has_work: Callable[[], bool], place: RankPlace, timeout_s: float | None = FINISH_TIMEOUT_S
) -> None:
    """On a leader whose engine runs as a task: wait, before you cancel the task, until the leaders
    of all replicas have called this and have nothing left to do. If replicas share experts, the
    others need this rank's until then.

    Args:
        has_work: `has_unfinished_requests` of this rank's engine.
        place: of this rank.
        timeout_s: seconds; None waits for ever.

    Raises:
        RankLost, CommunicationTimeout: a leader has died, or has not called in time.
    """
    exchange, ranks = join_job().exchange, place.primary_ranks
    # A report alone begins a round, too: after the exchange nobody may answer any more.
    await _until_idle(has_work)
    await asyncio.to_thread(exchange, "the end of serving", "", ranks, timeout_s)
    await _until_idle(has_work)


async def _until_idle(has_work: Callable[[], bool]) -> None:
    while has_work():
        await asyncio.sleep(1e-3)
