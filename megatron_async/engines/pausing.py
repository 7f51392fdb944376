"""`Pausing`: stop an engine and let it continue: pause and unpause, suspend and resume; and close.

A stop discards nothing: the steps in flight are resolved and their tokens booked, and the next step
is planned when the engine continues. So a stop cannot change a token.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from megatron_async.device_state.kv_cache import GIB
from megatron_async.errors import EngineStopped, OutOfMemoryError
from megatron_async.interrupts import HeldInterrupts

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine


class EngineState(Enum):
    """Whether an engine launches steps: some of the names of Megatron-Core's `EngineState`."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()


class Pausing:
    """Whether an engine may launch steps.

    Methods that stop or continue an engine take the engine as an argument. The engine refers to
    this object; a reference back would delay the release of the engine's memory.

    Attributes:
        is_closed: the engine is closed for good.
    """

    def __init__(self) -> None:
        self._is_paused = False
        self._is_suspended = False
        self._cache_is_released = False
        self.is_closed = False

    @property
    def state(self) -> EngineState:
        """An engine that is paused and suspended is SUSPENDED; it runs when it is neither."""
        if self._is_suspended:
            return EngineState.SUSPENDED
        return EngineState.PAUSED if self._is_paused else EngineState.RUNNING

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        return self._is_paused or self._is_suspended or self.is_closed

    def pause(self, engine: DynamicInferenceEngine) -> None:
        """Pause the engine; see `DynamicInferenceEngine.pause`."""
        if not self._is_paused:
            self._is_paused = True
            engine.statistics.engine_pauses += 1
        self._drain(engine)
        with HeldInterrupts():
            engine.group.controlled("pause")

    def unpause(self, engine: DynamicInferenceEngine) -> None:
        """Undo `pause`; see `DynamicInferenceEngine.unpause`."""
        with HeldInterrupts():
            engine.group.controlled("unpause")
            self._is_paused = False
            self._go_on(engine)

    def suspend(self, engine: DynamicInferenceEngine, free_kv_cache: bool) -> int:
        """Suspend the engine; see `DynamicInferenceEngine.suspend`."""
        if not self._is_suspended:
            self._is_suspended = True
            engine.statistics.engine_suspends += 1
        self._drain(engine)
        with engine.turn:
            engine.group.controlled("suspend", free_kv_cache)
            if not free_kv_cache or self._cache_is_released:
                return 0
            return self._release_cache(engine)

    def _release_cache(self, engine: DynamicInferenceEngine) -> int:
        self._cache_is_released = True
        engine.context.evict_all()
        for listener in engine.listeners:
            listener.evicted_all()
        context, view = engine.context, engine.context.gpu_view
        before = context.device.memory_in_use()
        view.kv_cache.release()
        view.states.release()
        engine.controller.graphs.clear()
        context.device.trim()
        if before:
            return before - context.device.memory_in_use()
        return view.kv_cache.num_bytes + view.states.num_bytes(context.max_requests)

    def resume(self, engine: DynamicInferenceEngine) -> None:
        """Undo `suspend`; see `DynamicInferenceEngine.resume`."""
        self.check_is_open()
        with HeldInterrupts():
            engine.group.controlled("resume")
            if self._cache_is_released:
                self._allocate_cache(engine)
            self._is_suspended = False
            self._go_on(engine)

    def _allocate_cache(self, engine: DynamicInferenceEngine) -> None:
        context, device = engine.context, engine.context.device
        cache, states = context.gpu_view.kv_cache, context.gpu_view.states
        cache.release()  # of an attempt that failed after this point
        states.release()
        needed = cache.num_bytes + states.num_bytes(context.max_requests)
        free = device.free_memory()
        if needed > free:
            raise OutOfMemoryError(
                f"resuming needs {needed / GIB:.3g} GiB for the KV cache and what else the engine "
                f"gave back on {device.torch_device}, but {free / GIB:.3g} GiB is free: free "
                "memory there and call resume() again."
            )
        cache.allocate()
        states.allocate()
        device.fence()
        engine.controller.recapture_cuda_graphs()
        self._cache_is_released = False

    def close(self, engine: DynamicInferenceEngine) -> None:
        """End the engine for good; see `DynamicInferenceEngine.close`."""
        with HeldInterrupts():
            engine.group.close()
            engine.context.device.close(wait=not engine.job.is_lost)
            engine.tracer.collect()
            engine.admission.close()
            self.is_closed = True
            engine.requests.close(engine.context.slots)

    def check_can_step(self, engine: DynamicInferenceEngine) -> None:
        """Raise EngineStopped if a step would wait for ever: synchronous code cannot."""
        if self._must_wait(engine):
            self.check_is_running()

    async def until_can_step(self, engine: DynamicInferenceEngine) -> None:
        """Wait while a step could do nothing.

        Raises:
            EngineStopped: the engine is closed, so no step can ever run.
        """
        while self._must_wait(engine):
            self.check_is_open()
            await engine.requests.news.wait()

    def check_is_open(self) -> None:
        """Raise EngineStopped if the engine is closed."""
        if self.is_closed:
            raise EngineStopped("the engine is closed: make a new engine (or LLM) and use that.")

    def check_is_running(self) -> None:
        """Raise EngineStopped if it is closed, paused or suspended."""
        self.check_is_open()
        if self.is_stopped:
            undo = [("unpause()", self._is_paused), ("resume()", self._is_suspended)]
            calls = " and ".join(call for call, is_due in undo if is_due)
            raise EngineStopped(
                f"the engine is {self.state.name.lower()} and launches no step: call {calls} first."
            )

    def _drain(self, engine: DynamicInferenceEngine) -> None:
        """Resolve all steps in flight; their outputs go to the next report."""
        self.check_is_open()
        with engine.job.giving_up(engine.group):
            engine.group.stop_together(True)
            while engine.group.must_keep_up:
                # First: an `async_step` that waits for samples has as many steps in flight as there
                # are buffers, and a further one would overwrite the samples of the oldest.
                self._resolve_down_to(engine.lookahead, engine)
                engine.launch_dummy_step()
            self._resolve_down_to(0, engine)
        engine.statistics.drained = True
        if engine.booking.undelivered:  # also where the engine's loop waits for requests
            engine.requests.wake()

    def _resolve_down_to(self, in_flight: int, engine: DynamicInferenceEngine) -> None:
        while len(engine.in_flight) > in_flight:
            engine.resolve_oldest()

    def _go_on(self, engine: DynamicInferenceEngine) -> None:
        engine.group.stop_together(self.is_stopped)
        engine.requests.news.notify()

    def _must_wait(self, engine: DynamicInferenceEngine) -> bool:
        """Whether a step could neither launch, nor resolve, nor report."""
        can_resolve = engine.in_flight and not self.is_closed
        return self.is_stopped and not (
            can_resolve or engine.booking.undelivered or engine.requests.has_ended
        )
