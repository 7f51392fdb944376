"""Stopping an engine and going on: pause and unpause, suspend and resume.

A stop never takes anything back: the steps in flight are resolved, their tokens are booked, and
what is planned next is planned when the engine goes on. So it cannot change a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from enum import Enum, auto

from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.contexts.kv_cache import GIB
from megatron_async.contexts.step_output import StepOutput
from megatron_async.engines.engine_thread import EngineThread
from megatron_async.engines.observer import EngineObserver
from megatron_async.engines.rank_group import RankGroup
from megatron_async.engines.request_registry import RequestRegistry
from megatron_async.engines.statistics import EngineStatistics
from megatron_async.errors import EngineStopped, JobFailed, OutOfMemoryError
from megatron_async.text_generation_controllers.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)


class EngineState(Enum):
    """Whether an engine launches steps; Megatron-Core's names, of which it needs more."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()


class ControllableEngine(ABC):
    """The part of an engine that stops it.

    With experts on other ranks that hold other requests, each rank must call them, and those that
    stop return when all have stopped.

    All methods may be called from synchronous code and from a coroutine beside `run_engine`, on the
    thread that steps the engine; on others they raise `WrongThread` while it is at work. While it
    is stopped, requests may be added and aborted, `async_step` waits until there is something to do
    or to report, and `step_modern` and `generate` raise `EngineStopped` where they would wait for
    ever.

    Attributes are those of `DynamicInferenceEngine`, and:
        thread: that is at work in it.
    """

    controller: TextGenerationController
    context: DynamicInferenceContext
    lookahead: int
    in_flight: deque[LaunchedStep]
    requests: RequestRegistry
    statistics: EngineStatistics
    group: RankGroup
    observer: EngineObserver

    def __init__(self) -> None:
        self._is_paused = False
        self._is_suspended = False
        self._is_closed = False
        self._cache_is_released = False
        self.thread = EngineThread()
        self._undelivered: list[StepOutput] = []
        self._failure: JobFailed | None = None

    @contextmanager
    def _giving_up_with_the_job(self) -> Iterator[None]:
        """When the other ranks are lost, so are this engine's requests: tell who waits for them."""
        self._check_has_its_job()
        try:
            yield
        except JobFailed as error:
            self._failure = error
            self._keep_booked_tokens()
            self.requests.fail_all(error)
            self.group.close(error)
            raise

    def _check_has_its_job(self) -> None:
        """Raise what this engine gave up for, if it has."""
        if self._failure is not None:
            raise copy(self._failure) from self._failure

    @property
    def state(self) -> EngineState:
        """An engine that is paused and suspended is SUSPENDED; it runs when it is neither."""
        if self._is_suspended:
            return EngineState.SUSPENDED
        return EngineState.PAUSED if self._is_paused else EngineState.RUNNING

    def pause(self) -> None:
        """Launch no further step, until `unpause`; a paused engine stays as it is.

        Waits for the steps in flight (at most lookahead + 1) and books their tokens: futures and
        streams see them, and the next step's report carries their outputs.
        """
        self.thread.check()
        if not self._is_paused:
            self._is_paused = True
            self.statistics.engine_pauses += 1
        self._drain()
        self.group.controlled("pause")

    def unpause(self) -> None:
        """Take a `pause` back; without one, nothing happens. A suspended engine stays suspended."""
        self.thread.check()
        self.group.controlled("unpause")
        self._is_paused = False
        self.group.stop_together(self.is_stopped)
        self.requests.news.notify()

    def suspend(self, free_kv_cache: bool = False) -> int:
        """Launch no further step, until `resume`, and book the steps in flight as `pause` does. It
        stands beside `pause`: an engine that is both runs after `unpause` and `resume`.

        Args:
            free_kv_cache: give the device memory of the KV cache back, and that of captured graphs,
                which hold its addresses. Running requests are evicted: they keep their tokens, and
                prefill them again after `resume`. An engine that is suspended already may be
                suspended again to this end.

        Returns:
            bytes given back; on a GPU as the driver counts them. 0 without `free_kv_cache`, and
            when they were given back before.
        """
        self.thread.check()
        if not self._is_suspended:
            self._is_suspended = True
            self.statistics.engine_suspends += 1
        self._drain()
        self.group.controlled("suspend", free_kv_cache)
        if not free_kv_cache or self._cache_is_released:
            return 0
        self._cache_is_released = True
        self.context.evict_all()
        self.observer.evicted_all()
        device, cache = self.context.device, self.context.gpu_view.kv_cache
        before = device.memory_in_use()
        cache.release()
        self.controller.graphs.clear()
        device.trim()
        return before - device.memory_in_use() if before else cache.num_bytes

    def resume(self) -> None:
        """Take a `suspend` back: allocate the KV cache and capture graphs again where they were
        given back, and go on. Without a `suspend`, nothing happens. A paused engine stays paused.

        Raises:
            OutOfMemoryError: the cache does not fit any more; the engine stays suspended.
        """
        self.thread.check()
        self._check_is_open()
        self.group.controlled("resume")
        if self._cache_is_released:
            device, cache = self.context.device, self.context.gpu_view.kv_cache
            cache.release()  # of an attempt that failed behind this point
            free = device.free_memory()
            if cache.num_bytes > free:
                raise OutOfMemoryError(
                    f"resuming needs {cache.num_bytes / GIB:.3g} GiB for the KV cache on "
                    f"{device.torch_device}, but {free / GIB:.3g} GiB is free: free memory there "
                    "and call resume() again."
                )
            cache.allocate()
            device.fence()
            self.controller.recapture_cuda_graphs()
            self._cache_is_released = False
        self._is_suspended = False
        self.group.stop_together(self.is_stopped)
        self.requests.news.notify()

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        return self._is_paused or self._is_suspended or self._is_closed

    def _drain(self) -> None:
        """Resolve all steps in flight; their outputs go to the next report."""
        self._check_is_open()
        with self._giving_up_with_the_job():
            self.group.stop_together(True)
            while self.group.must_keep_up:
                self.launch_dummy_step()
                self._resolve_down_to(self.lookahead)
            self._resolve_down_to(0)
        self.statistics.drained = True

    def _resolve_down_to(self, in_flight: int) -> None:
        while len(self.in_flight) > in_flight:
            self._undelivered += self.resolve_step()

    def _take_undelivered(self) -> list[StepOutput]:
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _must_wait(self) -> bool:
        """Whether a step could neither launch, nor resolve, nor report."""
        can_resolve = self.in_flight and not self._is_closed
        return self.is_stopped and not (
            can_resolve or self._undelivered or self.requests.has_ended
        )

    async def _wait_while_stopped(self) -> None:
        while self._must_wait():
            self._check_is_open()
            await self.requests.news.wait()

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise EngineStopped("the engine is closed: make a new engine (or LLM) and use that.")

    def _check_is_running(self) -> None:
        """Raise EngineStopped if it is not: synchronous code cannot wait for it."""
        self._check_is_open()
        if self.is_stopped:
            undo = [("unpause()", self._is_paused), ("resume()", self._is_suspended)]
            calls = " and ".join(call for call, is_due in undo if is_due)
            raise EngineStopped(
                f"the engine is {self.state.name.lower()} and launches no step: call {calls} first."
            )

    def _end_for_good(self) -> None:
        """Let nobody wait any longer: nothing more will come."""
        self._is_closed = True
        self._keep_booked_tokens()
        self.requests.close()
        self.requests.news.notify()

    def _keep_booked_tokens(self) -> None:
        """Who ends without having been released has what the books have of it."""
        slots = self.context.slots
        for request, slot in ((slots.request_at(slot), slot) for slot in slots.slot_of.values()):
            request.generated_tokens = slots.generated_tokens(slot)

    @abstractmethod
    def launch_dummy_step(self) -> LaunchedStep | None:
        """Launch a step without requests, if others need one."""

    @abstractmethod
    def resolve_step(self) -> list[StepOutput]:
        """Wait for the oldest step in flight, and book it."""
