"""How an engine of `compat` comes behind a coordinator: its address, its replica, its task."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from megatron_async.communication.bootstrap import join_job
from megatron_async.compat.conversions.coordinated_states import CoordinatedStates
from megatron_async.compat.conversions.engine_control import EngineControl
from megatron_async.compat.conversions.errors import refuse
from megatron_async.compat.conversions.megatron_replica import MegatronReplica
from megatron_async.compat.conversions.requests import RequestEntry
from megatron_async.compat.conversions.sampling import SamplingSeed
from megatron_async.compat.conversions.service_ranks import (
    FollowerTask,
    ServiceRanks,
    all_there,
    place_in_job,
)
from megatron_async.compat.inference.data_parallel_inference_coordinator.coordinator import (
    DataParallelInferenceCoordinator,
)
from megatron_async.errors import ConfigurationError, JobFailed
from megatron_async.ranks.finishing import finish_together
from megatron_async.ranks.rank_group import RankGroup

logger = logging.getLogger("megatron_async")


class CoordinatorService:
    """One rank's part. The first rank of each model is a replica; the others follow it, and never
    see the coordinator. On the first rank of all there is the coordinator, too, in a thread.

    Args:
        engine: idle.
        add_for: the engine's, which queues a request of Megatron's.
        address: of the coordinator.
        states: of the engine.
        ranks: of the job.
    """

    def __init__(
        self,
        engine: EngineControl,
        add_for: Callable[..., RequestEntry],
        address: str,
        states: CoordinatedStates,
        ranks: ServiceRanks,
    ) -> None:
        self._engine = engine
        self._states = states
        self._ranks = ranks
        self._replica: MegatronReplica | None = None
        self._follower: FollowerTask | None = None
        place = ranks.place
        if not place.is_primary:
            self._follower = FollowerTask(engine, states)
            return
        finish = None
        if ranks.shares_experts:
            finish = partial(finish_together, engine.has_unfinished_requests, place, None)
        name = f"dp-{place.data_parallel_rank}"
        self._replica = MegatronReplica(engine, add_for, address, "megatron", name, states, finish)

    async def joined(self, task: asyncio.Task[None]) -> None:
        """Wait until the coordinator has taken all replicas of the job, where a model is spread
        over ranks; else this one.

        Args:
            task: of `run`; what ends it early is raised.
        """
        failure = None
        try:
            await self._joined(task)
        except Exception as error:
            failure = error
        await all_there(self._ranks, failure)

    async def _joined(self, task: asyncio.Task[None]) -> None:
        if self._replica is None:
            return
        waiting = asyncio.ensure_future(self._replica.joined.wait())
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await task
            raise RuntimeError("the engine left its coordinator before it had joined")

    async def run(self) -> None:
        """Serve until the engines are told to stop."""
        error: BaseException | None = None
        engine = self._engine
        engine.loop.join(self._ranks.group)
        if self._ranks.is_spread:
            # Others serve the requests of a lost replica that this one does not need.
            join_job().watch.needed = self._ranks.place.needed_ranks
        try:
            if self._follower is not None:
                await self._follower.run()
            elif self._replica is not None:
                await self._replica.run()
        except asyncio.CancelledError:
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            engine.group.release()
            if not isinstance(error, JobFailed):  # or the engine is lost with the ranks
                engine.loop.join(RankGroup())
            self._states.stop(error)


def share_seed(rng: SamplingSeed) -> None:
    """Give all ranks' engines the first one's seed; collective. A request has its random numbers
    from the seed and its own number, wherever it is served, and again after a replica is lost; so
    `offset_sampling_seed_by_dp_rank` has no effect behind a coordinator."""
    if place_in_job()[1] > 1:
        seeds = join_job().exchange("the sampling seed", str(rng.initial_seed()))
        rng.manual_seed(int(seeds[0]))


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
    rank, ranks = place_in_job()
    address, text, failure = "", "", None
    if rank == 0:
        try:
            address = _start(host, port)
        except Exception as error:  # the others wait for the address, and must not for ever
            failure, text = error, str(error) or repr(error)
    if ranks > 1:
        said = msgspec.json.encode((address, text)).decode()
        told = join_job().exchange("the coordinator's address", said)[0]
        address, text = msgspec.json.decode(told, type=tuple[str, str])
        if text and failure is None:
            raise ConfigurationError(text)
    if failure is not None:
        raise failure
    return address


def _start(host: str, port: int | None) -> str:
    coordinator = DataParallelInferenceCoordinator.bound(host, port)
    threading.Thread(target=coordinator.run, name="coordinator", daemon=True).start()
    return coordinator.address
