"""How an engine of `compat` comes behind a coordinator: its address, its replica, its task."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from megatron_async.compat.conversions.coordinated_states import CoordinatedStates
from megatron_async.compat.conversions.megatron_replica import MegatronReplica
from megatron_async.compat.conversions.not_served import refuse
from megatron_async.compat.inference.data_parallel_inference_coordinator.coordinator import (
    DataParallelInferenceCoordinator,
)

if TYPE_CHECKING:
    from megatron_async.compat.inference.engines.dynamic_engine import DynamicInferenceEngine

logger = logging.getLogger("megatron_async")


class CoordinatorService:
    """One rank's part: its replica, and on the first rank the coordinator, in a thread.

    Args:
        engine: idle.
        address: of the coordinator.
        states: of the engine.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, address: str, states: CoordinatedStates
    ) -> None:
        self._states = states
        self._replica = MegatronReplica(engine, address, "megatron", f"dp-{_place()[0]}", states)

    async def joined(self, task: asyncio.Task[None]) -> None:
        """Wait until the coordinator has taken this replica.

        Args:
            task: of `run`; what ends it early is raised.
        """
        waiting = asyncio.ensure_future(self._replica.joined.wait())
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await task
            raise RuntimeError("the engine left its coordinator before it had joined")

    async def run(self) -> None:
        """Serve until the engines are told to stop."""
        try:
            await self._replica.run()
        finally:
            self._states.stop()


def check_ranks() -> None:
    """Refuse what cannot come behind a coordinator here.

    Raises:
        ConfigurationError: a model that is spread over ranks.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, size in sizes.items():
        if size > 1:
            refuse(
                f"a coordinator before an engine of {name}_model_parallel_size={size}",
                "a model over several ranks is served by `torchrun -m megatron_async replica`, "
                "behind `megatron-async coordinator` (docs/serving.md); data-parallel ranks of "
                "whole models are served here",
            )


def share_seed(engine: DynamicInferenceEngine) -> None:
    """Give all ranks' engines the first one's seed; collective. A request has its random numbers
    from the seed and its own number, wherever it is served, and again after a replica is lost; so
    `offset_sampling_seed_by_dp_rank` has no effect behind a coordinator."""
    if _place()[1] > 1:
        said = [engine.context.config.inference_sampling_seed]
        torch.distributed.broadcast_object_list(said, src=0)
        engine.controller.sampling_rng.manual_seed(said[0])


def find_address(port: int | None, launches: bool, hostname: str | None) -> str:
    """The coordinator's address, on all ranks; collective. The first rank starts the coordinator.

    Args:
        port: wanted; None: any that is free.
        launches: False: one is there already, at `port`.
        hostname: name or address of this host; None: this host alone can reach it.

    Raises:
        ConfigurationError: the address cannot be bound, or no port was given for one that is there.
    """
    host = hostname or "127.0.0.1"
    if not launches:
        if port is None:
            refuse(
                "launch_inference_coordinator=False without inference_coordinator_port",
                "say at which port the coordinator is",
            )
        return f"tcp://{host}:{port}"
    rank, ranks = _place()
    said: list[Any] = [None]
    if rank == 0:
        try:
            said = [_start(host, port)]
        except Exception as error:  # the others wait in the collective, and must not for ever
            said = [error]
    if ranks > 1:
        torch.distributed.broadcast_object_list(said, src=0)
    if isinstance(said[0], Exception):
        raise said[0]
    return str(said[0])


def _start(host: str, port: int | None) -> str:
    coordinator = DataParallelInferenceCoordinator.bound(host, port)
    threading.Thread(target=coordinator.run, name="coordinator", daemon=True).start()
    return coordinator.address


def _place() -> tuple[int, int]:
    """Rank and ranks of the job."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
