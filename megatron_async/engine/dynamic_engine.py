"""`DynamicInferenceEngine`: the lifecycle of requests, and the loop.

One loop serves every lookahead: prepare a step, launch it, and resolve the oldest steps until no
more than `lookahead` are in flight. Serial is lookahead 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor

from megatron_async.engine.admission import POLL_S, Admission
from megatron_async.engine.following import follow
from megatron_async.engine.listener import EngineListener
from megatron_async.engine.pausing import KV_CACHE, EngineState, Pausing
from megatron_async.engine.step_log import StepLog
from megatron_async.engine.step_loop import StepLoop
from megatron_async.engine.turn import EngineThread
from megatron_async.engine.updating import UpdateDone
from megatron_async.engine.weight_books import Policy
from megatron_async.engine.weight_update import WeightUpdate, weights_open
from megatron_async.errors import RequestError
from megatron_async.names_of_megatron import NamesOfMegatron
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_output import StepOutput
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.moved_request import MovedRequest
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.requests.sampling_params import SamplingParams, scoring_params
from megatron_async.requests.streaming import RequestStream
from megatron_async.requests.weight_versions import Version
from megatron_async.step.text_generation_controller import (
    LaunchedStep,
    TextGenerationController,
)
from megatron_async.text.grammar_compiler import GrammarCompiler
from megatron_async.text.token_watch import TokenWatch

Prompt = str | Sequence[int] | Any
"""Text, or token ids (list, NumPy array or CPU tensor)."""
NO_IDS = np.empty(0, dtype=np.int64)


class DynamicInferenceEngine(NamesOfMegatron):
    """Continuous batching with up to `lookahead` steps in flight while the next one is prepared.

    Args:
        controller: runs steps on the device.
        context: schedules them.
        group: the ranks that hold the model together (`ranks.join_group`); None: this rank alone.

    Attributes:
        loop: launches and resolves steps. `in_flight`, `listeners`, `invalidation`, `launching`,
            `booking` and `turn` are the loop's own, which documents them.
        requests: the unfinished requests, with their futures and readers.
        admission: how requests enter and leave.
        pausing: stops the engine and lets it continue.
        updating: commits new weights between two steps.
        thread: the thread that may use the engine now.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        group: RankGroup | None = None,
    ) -> None:
        self.controller, self.context, self.tracer = controller, context, controller.tracer
        self.statistics = EngineStatistics.of(context.config)
        self.requests = RequestRegistry(self.statistics)
        steps = StepLog(context, self.statistics, self.requests.traces)
        self.listeners: list[EngineListener] = [steps]
        vocabulary = controller.tokenizer, controller.vocab_size
        self.grammars, watch = GrammarCompiler(*vocabulary), TokenWatch(*vocabulary)
        self.loop = loop = StepLoop(
            controller, group or RankGroup(), self.requests, self.statistics, watch, self.listeners
        )
        self.in_flight, self.invalidation = loop.in_flight, loop.invalidation
        self.launching, self.booking, self.turn = loop.launching, loop.booking, loop.turn
        self.updating = loop.updating
        self.admission = Admission(controller, self.grammars, watch, loop)
        self.pausing, self.thread = Pausing(loop, self.grammars), EngineThread()
        controller.create_cuda_graphs()

    @property
    def group(self) -> RankGroup:
        """The ranks that hold the model together."""
        return self.loop.group

    @property
    def lookahead(self) -> int:
        """Steps that may be unresolved when another is prepared."""
        return self.loop.lookahead

    # ---- Requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        traceparent: str = "",
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Queue a request. It joins the next step with room; a request with a grammar joins when
        the grammar is compiled.

        A request that cannot be served fails alone: its status is FAILED, its `error` says why, and
        the next step reports it among the finished requests.

        Args:
            request_id: the caller's number, unique among unfinished requests.
            prompt: text or token ids.
            sampling_params: copied; defaults when None.
            priority: higher ones are admitted first, get blocks first when these are short, and are
                evicted last; of equal ones, the earlier first. Admissions never preempt.
            traceparent: of the trace that the log names; see `requests/traces.py`.

        Returns:
            a future of the finished (or failed) request, for `await`.

        Raises:
            RequestError: the id is no 64-bit integer, or an unfinished request uses it; that
                request goes on.
            EngineStopped: the engine is closed.
            WrongThread: another thread is at work in the engine. Whatever is raised (Ctrl-C too),
                the request is not added.
        """
        self.thread.check()
        self.pausing.check_is_open()
        return self.admission.add(request_id, prompt, sampling_params, priority, traceparent)

    def abort_request(self, request_id: int) -> None:
        """End an unfinished request now; its rows in flight are dropped when they arrive.

        Raises:
            KeyError: no unfinished request has this id.
            WrongThread: another thread is at work in the engine.
        """
        self.thread.check()
        self.admission.abort(request_id)

    def export_request(self, request_id: int) -> dict[str, Any]:
        """End an unfinished request (KeyError if there is none) with finish reason "moved". What is
        returned, values that JSON and msgpack can hold, goes to `import_request` of an engine of
        the same model, which goes on with the tokens that would have come here."""
        self.thread.check()
        return self.admission.export(request_id).plain()

    def import_request(
        self, request_id: int, data: dict[str, Any], traceparent: str = ""
    ) -> asyncio.Future[DynamicInferenceRequest]:
        """Go on with what `export_request` gave, as `add_request`: RequestError if it is no such
        data. The request's stream begins with its first new token."""
        self.thread.check()
        self.pausing.check_is_open()
        moved = MovedRequest.read(data)
        given = request_id, moved.prompt, moved.params, moved.priority, traceparent
        return self.admission.add(*given, moved)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The unfinished request with this id (KeyError if there is none)."""
        return self.requests.get(request_id).request

    def stream(self, request_id: int) -> RequestStream:
        """The tokens and text of an unfinished request as they are booked, for `async for`
        (KeyError if there is none)."""
        self.thread.check()
        return self.requests.stream(request_id, self.context.slots, self.controller.tokenizer)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do, or ended requests to report."""
        waits = bool(self.requests.compiling) or self.updating.is_due
        return waits or self.loop.has_other_work

    # ---- The loop ----------------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """Launch one step, if there is work, and resolve what is due.

        Returns:
            "outputs": the resolved steps' `StepOutput`s, oldest first;
            "active_request_ids": int64 array, requests with a token in the last of them;
            "finished_request_records": requests that ended since the last step, FAILED ones too;
            "step_time": seconds.

        Raises:
            EngineStopped: the engine is paused, suspended or closed; nothing is left to report.
            WrongThread: another thread is at work in the engine.
            JobFailed: ranks are lost, so all requests have failed; or this rank follows a leader.
        """
        loop = self.loop
        loop.group.check_leads()
        self.pausing.check_can_step()
        start = time.perf_counter()
        self.admission.tend()
        if loop.only_waits:
            self.admission.wait_for_others()
        with self.thread.works(), loop.giving_up(), self.tracer.call(self.context.next_step):
            launched = loop.launch_next()
            for oldest in loop.due(launched):
                if not loop.resolve(oldest):
                    break
        return self._end_turn(start)

    async def async_step(self) -> dict[str, Any]:
        """`step_modern` for an event loop: other coroutines run during each wait."""
        loop = self.loop
        loop.group.check_leads()
        await self.launching.until_due()
        await self.pausing.until_can_step()
        start = time.perf_counter()
        self.admission.tend()
        if loop.only_waits:
            await asyncio.sleep(POLL_S)
        with self.thread.works(), loop.giving_up(), self.tracer.call(self.context.next_step):
            launched = loop.launch_next()
            for oldest in loop.due(launched):
                if not await loop.resolve_async(oldest):
                    break
        return self._end_turn(start)

    def _end_turn(self, start: float) -> dict[str, Any]:
        """`report`. If Ctrl-C takes effect at its end, the next report has what this one had."""
        report = None
        try:
            with self.turn:
                report = self.report(start)
        except BaseException:
            if report is not None:
                self.take_back(report)
            raise
        return report

    async def run_engine(self) -> None:
        """Step whenever there is work, until the task is cancelled or the engine closed. Answers
        come by the futures of `add_request` and by `stream`. Until it ends, calls on other threads
        raise `WrongThread`."""
        loop = self.loop
        self.updating.event_loop = asyncio.get_running_loop()
        with self.thread.works():
            while not loop.is_closed:  # steps of an earlier run come first
                while self.has_unfinished_requests() and not loop.is_closed:
                    await self.async_step()
                    await asyncio.sleep(0)  # a step whose samples are there already never waits
                if not loop.is_closed:
                    with loop.giving_up():
                        await loop.group.wait_for_work(self.requests)

    # ---- Its parts ---------------------------------------------------------------------------

    def launch_step(self) -> LaunchedStep | None:
        """Prepare the next step and launch it after those in flight, without waiting.

        Returns:
            the step; None if none was launched: the engine is stopped, no request can run before a
            step in flight is resolved (or at all), or more than `lookahead` are in flight.
        """
        self.thread.check()
        return self.loop.launch_next()

    def launch_dummy_step(self) -> LaunchedStep | None:
        """Launch a step without requests, if other ranks need this one's experts; else None."""
        return self.loop.launch_dummy()

    def resolve_step(self) -> list[StepOutput]:
        """Wait for the oldest step in flight (IndexError if there is none), and book it: its
        output, or nothing if it is discarded."""
        self.thread.check()
        before = len(self.booking.undelivered)
        self.loop.resolve_oldest()
        return self.booking.take_undelivered(before)

    def report(self, start: float) -> dict[str, Any]:
        """End a turn of the loop that began at `start`, as `step_modern` does."""
        outputs = self.booking.take_undelivered()
        ended, step_time = self.requests.take_ended(), time.perf_counter() - start
        self.tracer.collect()
        self.statistics.count_step_time(step_time, not self.loop.has_other_work)
        return {
            "outputs": outputs,
            "active_request_ids": outputs[-1].request_ids if outputs else NO_IDS,
            "finished_request_records": ended,
            "step_time": step_time,
        }

    def take_back(self, report: dict[str, Any]) -> None:
        """Nobody gets this report: the next one has what it has."""
        self.booking.undelivered[:0] = report["outputs"]
        self.requests.give_back(report["finished_request_records"])

    def forget_ended(self, request_ids: Collection[int]) -> None:
        """No report shall have these requests, if they have ended: nobody waits for them."""
        self.requests.forget(request_ids)

    # ---- Weights -----------------------------------------------------------------------------

    @property
    def weight_version(self) -> Version:
        """The version of the weights that the next step runs with; None until one is told."""
        return self.updating.version

    @property
    def weight_epoch(self) -> int:
        """Updates of the weights so far."""
        return self.updating.epoch

    def begin_weight_update(
        self, version: Version, *, policy: Policy = "keep", **options: Any
    ) -> WeightUpdate:
        """Begin a round of new weights: then `load` (any number of calls) and `finish`, or `drop`.
        Steps go on meanwhile. On several ranks each rank makes the same calls.

        Args:
            version: a name for the weights, text or number; requests tell it of each token.
            policy: what becomes of requests that have tokens: "keep" (they go on with the keys and
                values that they have), "recompute" (these are computed again) or "abort" (they end
                with the tokens so far, finish reason "weight_update").
            **options: of `updates.weight_round.WeightRound`: staging, names, partial, selector,
                checks_finite.

        Raises:
            UpdateError: an option is unknown, or there is no memory for the round.
        """
        return WeightUpdate(self, version, policy, **options)

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], version: Version, **options: Any
    ) -> UpdateDone:
        """Take new weights in one call; the options are those of `begin_weight_update`.

        Raises:
            UpdateError: a tensor is not the model's, or one is missing; the old weights serve on.
        """
        update = self.begin_weight_update(version, **options)
        update.load(tensors)
        return update.finish()

    def weights_open(
        self, version: Version, policy: Policy = "keep"
    ) -> AbstractContextManager[None]:
        """`with` it around a change of the very parameters that the engine serves, such as an
        optimizer's step. The device orders the change behind the steps in flight, and later steps
        behind the change. No step can be launched inside. What is raised there leaves weights that
        may be torn: no step runs until a whole round, or another `weights_open`, has ended.
        """
        return weights_open(self, version, policy)

    # ---- Stopping and going on ---------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """An engine that is paused and suspended is SUSPENDED; it runs when it is neither."""
        return self.pausing.state

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        return self.loop.is_stopped

    def pause(self) -> None:
        """Launch no further step until `unpause`. On a paused engine, nothing happens.

        Waits for the steps in flight and books their tokens; the next step's report has them.
        During a pause requests may be added and aborted, `async_step` waits, and `step_modern` and
        `generate` raise `EngineStopped`. With experts on other ranks, each rank must call this;
        all ranks stop together.
        """
        self.thread.check()
        self.pausing.pause()

    def unpause(self) -> None:
        """Undo `pause`; without one, nothing happens. A suspended engine stays suspended."""
        self.thread.check()
        self.pausing.unpause()

    def suspend(
        self, free_kv_cache: bool = False, free: Iterable[str] = (), copies: Iterable[str] = ()
    ) -> int:
        """Launch no further step until `resume`, and book the steps in flight as `pause` does.
        `suspend` is independent of `pause`: an engine with both runs after `unpause` and `resume`.

        Args:
            free_kv_cache: free "kv_cache".
            free: what memory to give back, also when the engine is suspended already: "kv_cache",
                with the states of requests and, unless `enable_sleep_mode` keeps the addresses,
                captured graphs; "weights" (only with `enable_sleep_mode`).
            copies: of which of it a copy is kept in (pinned) host memory. Without one of the cache
                running requests are evicted: they keep their tokens, and prefill them again after
                `resume`. Without one of the weights no step runs before a weight update.

        Returns:
            bytes freed, on a GPU as the driver counts them; 0 if nothing was freed.

        Raises:
            ConfigurationError: such memory cannot be given back.
            OutOfMemoryError: the copy does not fit on the host; the engine is suspended, and has
                given back nothing.
        """
        self.thread.check()
        free = [free] if isinstance(free, str) else [*free]
        return self.pausing.suspend([*free, KV_CACHE] if free_kv_cache else free, copies)

    def resume(self, tags: Iterable[str] | None = None) -> None:
        """Undo `suspend`: take memory again, capture graphs again if they were freed, and continue.
        Without a `suspend`, nothing happens. A paused engine stays paused.

        Args:
            tags: what memory to take again, of `suspend`'s `free`; the engine continues when none
                is left. None: all.

        Raises:
            OutOfMemoryError: it does not fit any more; the engine stays suspended.
        """
        self.thread.check()
        self.pausing.resume(tags)

    def reset_prefix_cache(self) -> None:
        """Forget what KV blocks hold, as after a change of weights (docs/prefix_caching.md)."""
        self.thread.check()
        with self.turn:
            self.group.controlled("reset_prefix_cache")
            self.context.reset_prefix_cache()

    # ---- Conveniences ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Run prompts to their ends.

        Args:
            prompts: texts or token ids.
            sampling_params: for all, or one for each prompt.
            on_step: called with each step's report (progress bars, streaming).

        Returns:
            the requests in the order of `prompts`; a failed one has status FAILED and its `error`.

        Raises:
            RequestError: the number of sampling_params differs from the number of prompts.
            EngineStopped: the engine is paused or suspended.
            Exception: what `on_step` raises; the requests are still there, and go on.
            KeyboardInterrupt, SystemExit: the requests are aborted.
        """
        self.pausing.check_is_running()
        each: Sequence[SamplingParams | None]
        if isinstance(sampling_params, Sequence):
            each = sampling_params
            if len(each) != len(prompts):
                raise RequestError(
                    f"{len(each)} sampling_params were given for {len(prompts)} prompts: give one "
                    "for all, or one for each."
                )
        else:
            each = [sampling_params] * len(prompts)
        # None: nobody knows whether the request was added.
        futures: dict[int, asyncio.Future[DynamicInferenceRequest] | None] = {}
        with self.thread.works():
            try:
                for prompt, params in zip(prompts, each, strict=True):
                    number = self.requests.free_id()
                    futures[number] = None
                    futures[number] = self.add_request(number, prompt, params)
                # Ranks that share experts make their n-th calls together. A call ends when no rank
                # has work. A rank that already waits for call n + 1 does not count as work.
                self.group.begin_together()
                added = [future for future in futures.values() if future is not None]
                while not all(future.done() for future in added) or self.group.others_work:
                    report = self.step_modern()
                    if on_step is not None:
                        on_step(report)
                return [future.result() for future in added]
            except BaseException as error:
                if not isinstance(error, Exception):
                    try:
                        self._abandon(futures)
                    finally:  # another Ctrl-C may have cut that short
                        self._abandon(futures)
                raise

    def score(
        self,
        sequences: Sequence[Prompt],
        start: int | Sequence[int] = 0,
        sampling_params: SamplingParams | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Log probs of given tokens, texts or ids: `generate` of prompts that are not continued.
        Among running requests, `add_request` with `SamplingParams.scoring` is the same.
        `start` is the first token of all, or of each, whose log prob is wanted; what comes before
        may be found in the prefix cache. Log probs are raw, or with `logprobs_mode="processed"` of
        what a token is drawn from. `prompt_log_probs` of the requests have them (but of the very
        first token, which has none). RequestError: as many starts as sequences are needed.
        """
        return self.generate(sequences, scoring_params(len(sequences), start, sampling_params))

    def _abandon(
        self, futures: Mapping[int, asyncio.Future[DynamicInferenceRequest] | None]
    ) -> None:
        """End requests of a call that is interrupted, so that the next call does not pay for them,
        and its reports do not have them."""
        if self.loop.is_closed or self.loop.is_lost:
            return
        for number, future in futures.items():
            if number in self.requests and (future is None or not future.done()):
                self.abort_request(number)
        self.forget_ended(futures)

    def follow(self) -> bool:
        """Repeat the leader's actions until it releases its followers or closes its engine.

        Returns:
            whether it goes on; False also where this rank leads.

        Raises:
            JobFailed: the leader died or gave up, or an action had another result here.
        """
        return follow(self)

    def stats(self) -> Mapping[str, float | int]:
        """Counters and ratios since the engine was made; docs/observing.md lists them."""
        return self.statistics.as_dict(
            self.lookahead, self.context.counters(), self.group.agreement_ns
        )

    def close(self) -> None:
        """Finish launched work, end the device's threads, and fail unfinished requests."""
        self.pausing.close()
