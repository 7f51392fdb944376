"""How an engine is stopped and goes on, as Megatron's scripts and training loops ask for it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.compat.conversions.coordinated_states import LASTING, CoordinatedStates
from megatron_async.compat.conversions.logs import suspension_log
from megatron_async.compat.conversions.requests import RequestBook
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.engine.pausing import KV_CACHE
from megatron_async.engine.pausing import EngineState as OwnState
from megatron_async.errors import EngineStopped


@runtime_checkable
class RefreshesWeights(Protocol):
    """A wrapper that serves copies of some weights."""

    def refresh_weights(self) -> bool:
        """Make what is served follow from the model's present parameters; whether some lie
        elsewhere now, so that captured steps would read old memory."""
        ...


class EngineControl(DynamicInferenceEngine):
    """Our engine with Megatron's states; the part of `compat`'s engine that stops it. `book` has
    Megatron's requests beside ours, `coordinated` the states behind a coordinator."""

    suspend_resume_ctx = staticmethod(suspension_log)
    coordinated: CoordinatedStates | None = None
    context: DynamicInferenceContext
    book: RequestBook
    local_metadata_ledger_enabled = False
    """Main's: whether requests that complete behind a coordinator are put into the ledger."""

    @cached_property
    def local_metadata_ledger(self) -> dict[str, Any]:
        """Main's: `FinishedRequestRecord`s by `uid`, the id of an HTTP answer. The caller takes the
        dictionary, and gives an empty one."""
        return {}

    @property
    def pg_collection(self) -> Any:
        """The process groups of the configuration, or those of Megatron's `parallel_state`."""
        given = self.context.megatron_config.pg_collection
        return given or ProcessGroupCollection.use_mpu_process_groups()

    def get_prefix_coordination_metrics(self) -> dict[str, int]:
        """Waits for a prefix that another request computes: none here, since a block is found as
        soon as the step that writes it is planned."""
        return {"waits": 0}

    @property
    def _state_events(self) -> dict[EngineState, Any]:
        """Megatron's private events, of which megatron.rl asks `is_set()`."""
        is_alone = self.coordinated is None or self.loop.is_closed
        is_in = self._is_in if is_alone or self.coordinated is None else self.coordinated.is_in
        return {state: SimpleNamespace(is_set=partial(is_in, state)) for state in LASTING}

    @property
    def state(self) -> Any:
        """Megatron's `EngineState`: RUNNING, PAUSED, SUSPENDED, or STOPPED once closed. Behind a
        coordinator the transient ones too, while not all engines have done what they were told."""
        if self.loop.is_closed:
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
        if self.coordinated is not None and not self.loop.is_closed:
            await self.coordinated.wait_until(state)
            return
        while not self._is_in(state):
            if self.loop.is_closed:
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

    def suspend(
        self,
        free_kv_cache: bool | None = None,
        free: Iterable[str] = (),
        copies: Iterable[str] = (),
    ) -> int:
        """Launch no further step, until `resume`; suspended already: nothing happens.

        Args:
            free_kv_cache: give the memory of KV cache and states back. None: unless
                `kv_cache_management_mode` is PERSIST; and OFFLOAD keeps a copy on the host, so that
                running requests are not prefilled again later.
            free, copies: as of our engine.

        Returns:
            bytes given back.
        """
        if free_kv_cache is None:
            if self._is_suspended:
                return 0
            mode = self.context.kv_cache_management_mode
            free_kv_cache = mode is not KVCacheManagementMode.PERSIST
            copies = [KV_CACHE] if mode is KVCacheManagementMode.OFFLOAD else copies
        with suspension_log("suspended"):
            freed = super().suspend(free_kv_cache, free, copies)
        self.requests.news.notify()
        return freed

    def resume(self, tags: Iterable[str] | None = None) -> None:
        """Go on, with the weights that the model has now; not suspended: nothing happens.

        Copies that the wrapper made of weights are made again, and the prefix cache is forgotten:
        its keys and values are the old weights'. Keys and values of running requests stay, but with
        RECOMPUTE. `tags` as of our engine.
        """
        if not self._is_suspended:
            return
        wrapper = self.controller.inference_wrapped_model
        with suspension_log("resumed"):
            moved = isinstance(wrapper, RefreshesWeights) and wrapper.refresh_weights()
            self.reset_prefix_cache()
            captured = self.controller.graphs.count
            super().resume(tags)
            if moved and captured:  # those of a freed cache were captured again just now
                self.controller.graphs.clear()
                self.controller.recapture_cuda_graphs()

    def reset(
        self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False
    ) -> None:
        """Remove all requests without reporting them (their futures get failed records), and run if
        stopped. With `preserve_prefix_cache` blocks keep what they hold (but not in a suspended
        engine, whose weights may be others); with `preserve_counters` counters go on."""
        self.thread.check()
        for request_id in self.book.ids():
            self.abort_request(request_id)
        self.pause()  # books the steps in flight
        self.unpause()
        self.resume()
        self.booking.take_undelivered()
        self.requests.take_ended()
        self.book.take_ended()
        self.updating.label(None)
        if not preserve_prefix_cache:
            self.reset_prefix_cache()
        if not preserve_counters:
            self.book.finished = 0
            self.context.watch.reset()

    def set_generation_epoch(self, epoch: int) -> None:
        """The weights are those of generation `epoch` from now on: unfinished and new requests are
        stamped with it (`policy_epoch`, `kv_cache_epoch`). Steps in flight count as the ones
        before. (Megatron's `InferenceClient` has it.)"""
        self.thread.check()
        self.updating.label(epoch)

    def close(self) -> None:
        """End the engine for good; unfinished requests fail."""
        super().close()
        self.requests.news.notify()

    async def shutdown(self) -> None:
        """Close the engine; unfinished requests fail."""
        self.close()
