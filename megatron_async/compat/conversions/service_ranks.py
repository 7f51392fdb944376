"""The ranks of a Megatron job behind a coordinator: leaders, followers, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_async.communication.bootstrap import join_job
from megatron_async.compat.conversions.coordinated_states import CoordinatedStates, Signal
from megatron_async.compat.conversions.engine_control import EngineControl
from megatron_async.compat.conversions.errors import refuse
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.join_group import RankPlace, join_group
from megatron_async.ranks.rank_group import RankGroup

SIZES: dict[str, Callable[[], int]] = {
    "tp": parallel_state.get_tensor_model_parallel_world_size,
    "pp": parallel_state.get_pipeline_model_parallel_world_size,
    "ep": parallel_state.get_expert_model_parallel_world_size,
}
"""Groups over which a model may be spread, and Megatron's sizes of them."""
LAST_WORD_S = 5.0
"""Seconds that a follower whose task is cancelled waits for its leader's end."""
CONFIRM = "CONFIRM"
"""What a leader tells its followers beside signals: all engines have followed this one."""


@dataclass(frozen=True)
class ServiceRanks:
    """This rank's place, and its connection to the other ranks of its model: a `Leader`, a
    `Follower`, or a lone rank's. Where a model is spread over ranks, all of the job are
    connected."""

    group: RankGroup
    place: RankPlace
    is_spread: bool

    @property
    def shares_experts(self) -> bool:
        """Whether other replicas need the experts of this one."""
        return self.is_spread and SIZES["ep"]() > 1


def join_ranks(engine: EngineControl) -> ServiceRanks:
    """Connect the ranks of the job; collective. Whole models on each rank need no connection.

    Raises:
        ConfigurationError: the model is spread over groups that this job's `parallel_state` does
            not know, or ranks have other settings.
        CommunicationTimeout, RankLost: a rank did not come.
    """
    sizes = dict.fromkeys(SIZES, 1)
    if parallel_state.model_parallel_is_initialized():
        sizes = {name: size() for name, size in SIZES.items()}
    _check_groups(engine.controller.inference_wrapped_model.model, sizes)
    if max(sizes.values()) == 1:
        rank, ranks = place_in_job()
        return ServiceRanks(RankGroup(), RankPlace(rank, ranks), is_spread=False)
    context = engine.context
    given = {
        field.name: getattr(context.config, field.name)
        for field in fields(InferenceConfig)
        if field.name != "device"
    }
    found = {"kv blocks": context.blocks.total, "slots": context.max_requests}
    join_job().check_same("InferenceConfig", given | found)
    group, place = join_group(context.config.check_ranks_agree)
    return ServiceRanks(group, place, is_spread=True)


def place_in_job() -> tuple[int, int]:
    """Rank and ranks of the job."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _check_groups(model: Any, sizes: dict[str, int]) -> None:
    """A model may have been made with a `ProcessGroupCollection` of its own."""
    groups = getattr(model, "pg_collection", None)
    for name, size in sizes.items():
        group = getattr(groups, name, None)
        if group is not None and group.size() != size:
            refuse(
                f"a coordinator before a model whose pg_collection.{name} has {group.size()} "
                f"ranks, where parallel_state has {size}",
                "make the groups by parallel_state.initialize_model_parallel, by which the ranks "
                "of a service find each other",
            )


async def all_there(ranks: ServiceRanks, failure: Exception | None) -> None:
    """Wait until every rank of the job has come behind the coordinator; collective, where a model
    is spread over ranks. Why this rank could not (`failure`) is raised after the others have been
    told.

    Raises:
        ConfigurationError: another rank could not.
        RankLost, CommunicationTimeout: it died, or did not come.
    """
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    found = {}
    if ranks.is_spread:
        # In a thread: this rank's replica must go on answering pings.
        exchange = partial(join_job().exchange, "ranks behind the coordinator", said)
        found = await asyncio.to_thread(exchange)
    if failure is not None:
        raise failure
    for rank, why in sorted(found.items()):
        if why:
            raise ConfigurationError(f"rank {rank} could not come behind the coordinator: {why}")


class FollowerTask:
    """A rank that does what its leader does, in a thread, while the rank's event loop waits for
    states, which are changed there alone."""

    def __init__(self, engine: EngineControl, states: CoordinatedStates) -> None:
        self._engine = engine
        self._states = states

    async def run(self) -> None:
        """Follow until the leader ends its service or closes its engine.

        Raises:
            RankLost: a rank died that steps need.
            RanksDisagree: the leader gave up, or did what this rank cannot.
        """
        loop = asyncio.get_running_loop()
        group = self._engine.group
        assert isinstance(group, Follower)
        group.on_told = partial(self._hear, loop)
        ended: asyncio.Future[None] = loop.create_future()
        # A thread of its own, and a daemon: no event loop's end, and no process', waits for it.
        threading.Thread(
            target=self._follow, args=(loop, ended), name="follower", daemon=True
        ).start()
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            # A script's last line may be `wait_until(STOPPED)`: the leader says its last word now.
            await asyncio.wait({ended}, timeout=LAST_WORD_S)
            raise
        ended.result()

    def _follow(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        device = self._engine.context.device.torch_device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # new threads begin with the first GPU
            with self._engine.thread.works():
                self._engine.follow()
        except BaseException as raised:
            error = raised

        def end() -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        if not loop.is_closed():
            loop.call_soon_threadsafe(end)

    def _hear(self, loop: asyncio.AbstractEventLoop, what: str, value: Any) -> None:
        """News of the leader, on the thread that follows. The leader's answer to the coordinator
        waits until the event loop has taken them in."""
        if what == Signal.SET_GENERATION_EPOCH.value:
            self._engine.set_generation_epoch(value)
            return
        if what in (Signal.START_CUDA_PROFILER.value, Signal.STOP_CUDA_PROFILER.value):
            tell_cuda_profiler(starts=what == Signal.START_CUDA_PROFILER.value)
            return

        async def take_in() -> None:
            if what == CONFIRM:
                self._states.confirm(Signal(value))
            else:
                self._states.begin(Signal(what))

        if not loop.is_closed():
            asyncio.run_coroutine_threadsafe(take_in(), loop).result()


def tell_cuda_profiler(*, starts: bool) -> None:
    """Start or stop CUDA's profiler in this process. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here, so no CUDA profiler can be started or stopped.")
    if starts:
        torch.cuda.profiler.start()
    else:
        torch.cuda.profiler.stop()
