"""`Pausing`: stop an engine and let it continue: pause and unpause, suspend and resume; and close.

A stop discards nothing: the steps in flight are resolved and their tokens booked, and the next step
is planned when the engine continues. So a stop cannot change a token.
"""

from __future__ import annotations

from enum import Enum, auto

from megatron_async.device_state.kv_cache import GIB
from megatron_async.engine.step_loop import StepLoop
from megatron_async.errors import EngineStopped, OutOfMemoryError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.text.grammar_compiler import GrammarCompiler


class EngineState(Enum):
    """Whether an engine launches steps: some of the names of Megatron-Core's `EngineState`."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()


class Pausing:
    """Stops an engine and lets it continue: `DynamicInferenceEngine` documents the calls.

    Args:
        loop: of the engine's steps.
        grammars: of the engine; `close` ends their compiler.
    """

    def __init__(self, loop: StepLoop, grammars: GrammarCompiler) -> None:
        self._loop = loop
        self._grammars = grammars
        self._cache_is_released = False

    @property
    def state(self) -> EngineState:
        """An engine that is paused and suspended is SUSPENDED; it runs when it is neither."""
        if self._loop.is_suspended:
            return EngineState.SUSPENDED
        return EngineState.PAUSED if self._loop.is_paused else EngineState.RUNNING

    def pause(self) -> None:
        """Pause the engine."""
        loop = self._loop
        if not loop.is_paused:
            loop.is_paused = True
            loop.statistics.engine_pauses += 1
        self._drain()
        with HeldInterrupts():
            loop.group.controlled("pause")

    def unpause(self) -> None:
        """Undo `pause`."""
        with HeldInterrupts():
            self._loop.group.controlled("unpause")
            self._loop.is_paused = False
            self._go_on()

    def suspend(self, free_kv_cache: bool) -> int:
        """Suspend the engine."""
        loop = self._loop
        if not loop.is_suspended:
            loop.is_suspended = True
            loop.statistics.engine_suspends += 1
        self._drain()
        with loop.turn:
            loop.group.controlled("suspend", free_kv_cache)
            if not free_kv_cache or self._cache_is_released:
                return 0
            return self._release_cache()

    def _release_cache(self) -> int:
        self._cache_is_released = True
        self._loop.context.evict_all(keeps_routing=True)
        for listener in self._loop.listeners:
            listener.evicted_all()
        context, view = self._loop.context, self._loop.context.gpu_view
        before = context.device.memory_in_use()
        view.kv_cache.release()
        view.states.release()
        self._loop.controller.graphs.clear()
        context.device.trim()
        if before:
            return before - context.device.memory_in_use()
        return view.kv_cache.num_bytes + view.states.num_bytes(context.max_requests)

    def resume(self) -> None:
        """Undo `suspend`."""
        self.check_is_open()
        with HeldInterrupts():
            self._loop.group.controlled("resume")
            if self._cache_is_released:
                self._allocate_cache()
            self._loop.is_suspended = False
            self._go_on()

    def _allocate_cache(self) -> None:
        context, device = self._loop.context, self._loop.context.device
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
        self._loop.controller.recapture_cuda_graphs()
        self._cache_is_released = False

    def close(self) -> None:
        """End the engine for good."""
        loop = self._loop
        with HeldInterrupts():
            loop.group.close()
            loop.context.device.close(wait=not loop.is_lost)
            loop.tracer.collect()
            self._grammars.close()
            loop.requests.compiling.clear()
            loop.is_closed = True
            loop.updating.close()
            loop.requests.close(loop.context.slots)

    def check_can_step(self) -> None:
        """Raise EngineStopped if a step would wait for ever: synchronous code cannot."""
        if self._must_wait():
            self.check_is_running()

    async def until_can_step(self) -> None:
        """Wait while a step could do nothing.

        Raises:
            EngineStopped: the engine is closed, so no step can ever run.
        """
        while self._must_wait():
            self.check_is_open()
            await self._loop.requests.news.wait()

    def check_is_open(self) -> None:
        """Raise EngineStopped if the engine is closed."""
        if self._loop.is_closed:
            raise EngineStopped("the engine is closed: make a new engine (or LLM) and use that.")

    def check_is_running(self) -> None:
        """Raise EngineStopped if it is closed, paused or suspended."""
        self.check_is_open()
        if self._loop.is_frozen:
            raise EngineStopped(
                "the engine launches no step until new weights have come "
                f"({self._loop.updating.torn or 'they are being written in place'}): finish the "
                "update, or begin another that brings all of them."
            )
        if self._loop.is_stopped:
            undo = [("unpause()", self._loop.is_paused), ("resume()", self._loop.is_suspended)]
            calls = " and ".join(call for call, is_due in undo if is_due)
            raise EngineStopped(
                f"the engine is {self.state.name.lower()} and launches no step: call {calls} first."
            )

    def _drain(self) -> None:
        self.check_is_open()
        self._loop.drain()

    def _go_on(self) -> None:
        self._loop.group.stop_together(self._loop.is_stopped)
        self._loop.requests.news.notify()

    def _must_wait(self) -> bool:
        """Whether a step could neither launch, nor resolve, nor report."""
        loop = self._loop
        can_resolve = loop.in_flight and not loop.is_closed
        can_do = can_resolve or loop.booking.undelivered or loop.requests.has_ended
        return loop.is_stopped and not (can_do or loop.updating.is_due)
