"""How an engine is stopped and goes on, as Megatron's scripts and training loops ask for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.compat.conversions.coordinated_states import LASTING, CoordinatedStates
from megatron_async.compat.conversions.errors import refuse
from megatron_async.compat.conversions.logs import suspension_log
from megatron_async.compat.conversions.request_book import RequestBook
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.engines.pausing import EngineState as OwnState
from megatron_async.errors import EngineStopped

if TYPE_CHECKING:
    from megatron_async.compat.conversions.coordinator_service import CoordinatorService
    from megatron_async.compat.conversions.service_ranks import ServiceRanks
    from megatron_async.compat.inference.engines.dynamic_engine import (
        DynamicInferenceEngine as CompatEngine,
    )


@runtime_checkable
class RefreshesWeights(Protocol):
    """A wrapper that serves copies of some weights."""

    def refresh_weights(self) -> bool:
        """Make what is served follow from the model's present parameters; whether some lie
        elsewhere now, so that captured steps would read old memory."""
        ...


class EngineControl(DynamicInferenceEngine):
    """Our engine with Megatron's states; the part of `compat`'s engine that stops it.

    Attributes:
        book: Megatron's requests beside ours.
        engine_loop_task: serves a coordinator; None without one.
        use_coordinator: whether it has come behind a coordinator.
        coordinated: its states behind a coordinator; None without one.
    """

    suspend_resume_ctx = staticmethod(suspension_log)
    coordinated: CoordinatedStates | None = None
    engine_loop_task: asyncio.Task[None] | None = None
    use_coordinator = False
    _service: CoordinatorService | None = None
    _ranks: ServiceRanks | None = None
    """Once it has come behind a coordinator."""
    context: DynamicInferenceContext
    book: RequestBook

    @property
    def state(self) -> Any:
        """Megatron's `EngineState`: RUNNING, PAUSED, SUSPENDED, or STOPPED once closed. Behind a
        coordinator the transient ones too, while not all engines have done what they were told."""
        if self.pausing.is_closed:
            return EngineState.STOPPED
        if self.coordinated is not None:
            return self.coordinated.state
        return EngineState[self.pausing.state.name]

    async def wait_until(self, state: EngineState) -> None:
        """Wait until the engine is in a state that lasts.

        Raises:
            ValueError: the state is one that passes by.
            EngineStopped: the engine has stopped, so that the state cannot come.
        """
        if state not in LASTING:
            names = ", ".join(lasting.name for lasting in LASTING)
            raise ValueError(f"{state} passes by: wait for one of {names}.")
        if self.coordinated is not None and not self.pausing.is_closed:
            await self.coordinated.wait_until(state)
            return
        while not self._is_in(state):
            if self.pausing.is_closed:
                raise EngineStopped(f"the engine is closed and will not be {state.name} again.")
            await self.requests.news.wait()

    def _is_in(self, state: EngineState) -> bool:
        if state is EngineState.RESUMED:
            return self.state in (EngineState.RUNNING, EngineState.PAUSED)
        return bool(self.state is state)

    @property
    def _is_suspended(self) -> bool:
        return self.pausing.state is OwnState.SUSPENDED

    def pause(self) -> None:
        """Launch no further step, until `unpause`; readers of a waiting engine are told."""
        super().pause()
        self.requests.news.notify()

    def suspend(self, free_kv_cache: bool | None = None) -> int:
        """Launch no further step, until `resume`; suspended already: nothing happens.

        Args:
            free_kv_cache: give the memory of KV cache and graphs back, and prefill running requests
                again later. None: if `kv_cache_management_mode` is RECOMPUTE.

        Returns:
            bytes given back.
        """
        if self._is_suspended and free_kv_cache is None:
            return 0
        if free_kv_cache is None:
            mode = self.context.kv_cache_management_mode
            free_kv_cache = mode is KVCacheManagementMode.RECOMPUTE
        with suspension_log("suspended"):
            freed = super().suspend(free_kv_cache)
        self.requests.news.notify()
        return freed

    def resume(self) -> None:
        """Go on, with the weights that the model has now; not suspended: nothing happens.

        Copies that the wrapper made of weights are made again, and the prefix cache is forgotten:
        its keys and values are the old weights'. Those of running requests stay, but with
        RECOMPUTE.
        """
        if not self._is_suspended:
            return
        wrapper = self.controller.inference_wrapped_model
        with suspension_log("resumed"):
            moved = isinstance(wrapper, RefreshesWeights) and wrapper.refresh_weights()
            self.reset_prefix_cache()
            captured = self.controller.graphs.count
            super().resume()
            if moved and captured:  # those of a freed cache were captured again just now
                self.controller.graphs.clear()
                self.controller.recapture_cuda_graphs()

    def reset(
        self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False
    ) -> None:
        """Remove all requests without reporting them (their futures get failed records), and run if
        stopped.

        Args:
            preserve_prefix_cache: do not forget what blocks hold; a suspended engine does, as its
                weights may be others.
            preserve_counters: do not count from 0.
        """
        self.thread.check()
        for request_id in self.book.ids():
            self.abort_request(request_id)
        self.pause()  # books the steps in flight
        self.unpause()
        self.resume()
        self.booking.take_undelivered()
        self.requests.take_ended()
        self.book.take_ended()
        self.book.epoch = None
        if not preserve_prefix_cache:
            self.reset_prefix_cache()
        if not preserve_counters:
            self.book.finished = 0
            self.context.watch.reset()

    def close(self) -> None:
        """End the engine for good; unfinished requests fail."""
        super().close()
        if self._ranks is not None:
            self._ranks.group.close()
        self.requests.news.notify()

    async def shutdown(self) -> None:
        """Close the engine; unfinished requests fail."""
        self.close()

    # ---- Behind a coordinator ----------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        hostname: str | None = None,
        coordinator_schedule_output_path: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> str:
        """Come behind a coordinator, and serve its requests in the task `engine_loop_task` until
        `InferenceClient.stop_engines`. Every rank of the job calls this (it is collective). The
        first rank of each model gets the requests; the task of its other ranks does what it does.

        Args:
            inference_coordinator_port: of the coordinator; None, or one that is taken: another.
            launch_inference_coordinator: the first rank starts one, in a thread.
            hostname: name or IP address that others reach this host by; None: 127.0.0.1. Whoever
                reaches it can send requests and stop engines (docs/serving.md).
            coordinator_schedule_output_path: refused, unless None.
            loop: the running event loop, or None.

        Returns:
            the coordinator's address, "tcp://HOST:PORT".

        Raises:
            ConfigurationError: the ranks' settings differ, the model's groups are not those of
                Megatron's `parallel_state`, no port can be bound, an argument is not served, or
                another rank had such an error.
            RankLost, CommunicationTimeout: a rank died, or did not call this.
            EngineStopped: the engine is closed.
        """
        from megatron_async.compat.conversions.coordinator_service import (
            CoordinatorService,
            find_address,
            share_seed,
        )
        from megatron_async.compat.conversions.service_ranks import join_ranks

        self.pausing.check_is_open()
        if coordinator_schedule_output_path is not None:
            refuse("coordinator_schedule_output_path", "leave it out")
        if loop is not None and loop is not asyncio.get_running_loop():
            refuse("loop= with another loop than the running one", "leave it out")
        engine = cast("CompatEngine", self)
        share_seed(engine)
        if self._ranks is None:
            self._ranks = join_ranks(engine)
        address = find_address(inference_coordinator_port, launch_inference_coordinator, hostname)
        self.coordinated = CoordinatedStates()
        self._service = CoordinatorService(engine, address, self.coordinated, self._ranks)
        self.use_coordinator = True
        task = self.engine_loop_task = asyncio.create_task(self.run_engine_with_coordinator())
        await self._service.joined(task)
        return address

    async def run_engine_with_coordinator(
        self, *, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """What `engine_loop_task` does: serve until the engines are told to stop.

        Raises:
            ConfigurationError: there is no coordinator yet.
        """
        if self._service is None:
            refuse(
                "run_engine_with_coordinator before start_listening_to_data_parallel_coordinator",
                "await that, which starts it as engine_loop_task",
            )
        await self._service.run()
