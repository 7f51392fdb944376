"""How an engine is stopped and goes on, as Megatron's scripts and training loops ask for it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.engines.dynamic_engine import EngineState

from megatron_async.compat.conversions.not_served import COORDINATOR, refuse
from megatron_async.compat.conversions.request_book import RequestBook
from megatron_async.compat.conversions.suspension_log import suspension_log
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine


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
    """

    suspend_resume_ctx = staticmethod(suspension_log)
    context: DynamicInferenceContext
    book: RequestBook

    @property
    def state(self) -> Any:
        """Megatron's `EngineState`: RUNNING, PAUSED, SUSPENDED, or STOPPED once closed."""
        if self.pausing.is_closed:
            return EngineState.STOPPED
        return EngineState[self.pausing.state.name]

    async def wait_until(self, state: EngineState) -> None:
        """Wait until the engine is in a state that lasts.

        Raises:
            ValueError: the state is one that passes by.
        """
        lasting = ("RUNNING", "PAUSED", "SUSPENDED", "RESUMED", "STOPPED")
        if state.name not in lasting:
            raise ValueError(f"{state} passes by: wait for one of {', '.join(lasting)}.")
        while not self._is_in(state):
            await self.requests.news.wait()

    def _is_in(self, state: EngineState) -> bool:
        if state is EngineState.RESUMED:
            return self.state in (EngineState.RUNNING, EngineState.PAUSED)
        return bool(self.state is state)

    def pause(self) -> None:
        """As in our engine."""
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
        if self.state is EngineState.SUSPENDED and free_kv_cache is None:
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
        if self.state is not EngineState.SUSPENDED:
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

    def reset(self) -> None:
        """Remove all requests without reporting them (their futures get failed records), forget
        what blocks hold, run if stopped, and count from 0."""
        self.thread.check()
        for request_id in self.book.ids():
            self.abort_request(request_id)
        self.pause()  # books the steps in flight
        self.unpause()
        self.resume()
        self.pausing.take_undelivered()
        self.requests.take_ended()
        self.book.take_ended()
        self.book.epoch, self.book.finished = None, 0
        self.reset_prefix_cache()
        self.context.watch.reset()

    def close(self) -> None:
        """As in our engine."""
        super().close()
        self.requests.news.notify()

    async def shutdown(self) -> None:
        """Close the engine; unfinished requests fail."""
        self.close()

    # ---- What is not served ------------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(self, *_: Any, **__: Any) -> str:
        """Refused: raises ConfigurationError."""
        refuse("start_listening_to_data_parallel_coordinator", COORDINATOR)

    async def run_engine_with_coordinator(self, *_: Any, **__: Any) -> None:
        """Refused: raises ConfigurationError."""
        refuse("run_engine_with_coordinator", COORDINATOR)

    def schedule_requests(self) -> int:
        """Refused: raises ConfigurationError."""
        refuse("schedule_requests", COORDINATOR)
