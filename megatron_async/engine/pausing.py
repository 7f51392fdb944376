"""`Pausing`: stop an engine and let it continue: pause and unpause, suspend and resume; and close.

A stop discards nothing: the steps in flight are resolved and their tokens booked, and the next step
is planned when the engine continues. So a stop cannot change a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from megatron_async.config import MEMORY_TAGS
from megatron_async.device_state.kv_cache import GIB
from megatron_async.engine.step_loop import StepLoop
from megatron_async.errors import ConfigurationError, EngineStopped, OutOfMemoryError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.text.grammar_compiler import GrammarCompiler

KV_CACHE, WEIGHTS = MEMORY_TAGS


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
        self._away: list[str] = []
        self._must_capture = False

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

    def suspend(self, free: Iterable[str], copies: Iterable[str]) -> int:
        """Suspend the engine."""
        loop, memories = self._loop, self._loop.context.memories
        free, copies = self._checked(free), self._checked(copies)
        if extra := [tag for tag in copies if tag not in free]:
            raise ConfigurationError(f"copies={extra} is not given back: free it too.")
        if not loop.is_suspended:
            loop.is_suspended = True
            loop.statistics.engine_suspends += 1
        self._drain()
        wanted = [tag for tag in dict.fromkeys(free) if tag not in self._away]
        kept = [tag for tag in wanted if tag in copies]
        try:
            for tag in wanted:
                memories[tag].save(loop.context.device, tag in kept)
        except BaseException:
            for tag in wanted:  # no copy of one without the others'
                memories[tag].save(loop.context.device, keeps=False)
            raise
        with loop.turn:
            loop.group.controlled("suspend", False, free, copies)
            return self._release(wanted, kept) if wanted else 0

    def _checked(self, tags: Iterable[str]) -> list[str]:
        known, tags = self._loop.context.memories, [tags] if isinstance(tags, str) else [*tags]
        for tag in tags:
            if tag not in MEMORY_TAGS:
                raise ConfigurationError(f"{tag!r} is no memory: use {' or '.join(MEMORY_TAGS)}.")
            if tag not in known:
                raise ConfigurationError(
                    "the weights lie in memory that is not the engine's own: make the LLM with "
                    "enable_sleep_mode=True, or free only the kv_cache."
                )
        return tags

    def _release(self, wanted: list[str], kept: list[str]) -> int:
        self._away += wanted
        context = self._loop.context
        if KV_CACHE in wanted and KV_CACHE not in kept:
            context.evict_all(keeps_routing=True)
            for listener in self._loop.listeners:
                listener.evicted_all()
        if WEIGHTS in wanted and WEIGHTS not in kept:
            self._loop.updating.tear("they were given back, and no copy was kept")
        context.device.wait()  # not long: for copies of what the evicted keep
        before = context.device.memory_in_use()
        freed = sum(map(self._give_back, wanted))
        if not all(context.memories[tag].keeps_addresses for tag in wanted):
            self._loop.controller.graphs.clear()
            self._must_capture = True
        context.device.trim()
        return before - context.device.memory_in_use() if before else freed

    def resume(self, tags: Iterable[str] | None) -> None:
        """Undo `suspend`."""
        self.check_is_open()
        tags = None if tags is None else self._checked(tags)
        with HeldInterrupts():
            self._loop.group.controlled("resume", tags)
            for tag in [tag for tag in self._away if tags is None or tag in tags]:
                self._take(tag)
            if self._away:
                return
            if self._must_capture:
                self._loop.controller.recapture_cuda_graphs()
                self._must_capture = False
            self._loop.is_suspended = False
            self._go_on()

    def _give_back(self, tag: str) -> int:
        view = self._loop.context.gpu_view
        if tag == KV_CACHE:
            view.kv_cache.release()
            view.states.release()
        return self._loop.context.memories[tag].release()

    def _take(self, tag: str) -> None:
        context, device = self._loop.context, self._loop.context.device
        memory, view = context.memories[tag], context.gpu_view
        self._give_back(tag)  # what an attempt that failed has taken
        needed, free = memory.num_bytes, device.free_memory()
        if needed > free:
            raise OutOfMemoryError(
                f"resuming needs {needed / GIB:.3g} GiB for the {tag} that the engine gave back "
                f"on {device.torch_device}, but {free / GIB:.3g} GiB is free: free memory there "
                "and call resume() again."
            )
        memory.take()
        if tag == KV_CACHE:
            view.kv_cache.allocate()
            view.states.allocate()
        device.fence()
        memory.restore(device)
        self._away.remove(tag)

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
        torn, writing = self._loop.updating.torn, self._loop.updating.writing
        if (torn or writing) and not self._loop.is_suspended:
            raise EngineStopped(
                "the engine launches no step until new weights have come "
                f"({torn or 'they are being written in place'}): finish the update, or begin "
                "another that brings all of them."
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
        can_act = can_resolve or loop.updating.is_due
        return loop.is_stopped and not (
            can_act or loop.booking.undelivered or loop.requests.has_ended
        )
