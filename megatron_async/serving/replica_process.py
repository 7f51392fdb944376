"""`serve_replica`: what each rank of a job does whose replicas serve a coordinator; `frozen_heap`:
Python's garbage collector beside an engine that serves for a long time."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from megatron_async.communication.bootstrap import join_job
from megatron_async.serving.replica import Replica

if TYPE_CHECKING:
    from megatron_async.llm import LLM


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from scanning objects that exist at the start.

    Now and then the collector scans every object of the process, and no step is prepared meanwhile.
    With torch, Megatron-Core and a model there are some 400,000 objects, which takes 0.19 s (one
    core of a server; a decode step takes milliseconds). Objects made later take 4.5 ms after 9,600
    requests. Other servers do the same (vLLM's `freeze_gc_heap`).

    For processes that serve one engine until they end. An older object that is dropped inside the
    `with` block is freed as usual, unless it is part of a cycle, which then stays until the end.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve_replica(
    llm: LLM, address: str, model: str, name: str | None = None, secret: bytes | None = None
) -> None:
    """Serve a coordinator with an LLM until it removes the replica; SIGTERM and Ctrl-C make the
    replica leave in order.

    Every rank of the job calls this function. Each primary rank is a replica; if there are several,
    their names get a number as suffix.

    Args:
        llm: idle.
        address: of the coordinator.
        model: what is served, with its dtype: the coordinator takes replicas of one model only.
        name: unique among the replicas; None: host and process id.
        secret: the coordinator's, if it asks for one.

    Raises:
        ConfigurationError: the coordinator refuses the replica.
    """
    llm.engine.grammars.prepare()  # now it holds up nobody
    # Replicas of the job that this one does not need may be lost: others serve their requests.
    join_job().watch.needed = llm.needed_ranks
    if not llm.is_primary_rank:
        # The end of a job is signalled to all its ranks; when to end, the primary rank says.
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        with frozen_heap():
            llm.follow()
        return
    if name is not None and llm.data_parallel_size > 1:
        name = f"{name}-{llm.data_parallel_rank}"
    finish = partial(llm.finish_together, timeout_s=None) if llm.shares_experts else None
    replica = Replica(llm.engine, address, model, name, finish, secret)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVE_SIGNALS:
            loop.add_signal_handler(number, replica.leave)
        await replica.run()

    with frozen_heap():
        asyncio.run(serve())
