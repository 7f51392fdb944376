"""`DynamicInferenceEngine` as Megatron's scripts use it: requests and reports are of Megatron's
classes.

The engine is ours. What a request is, how it comes back and which numbers can be read is
converted at the border: once a request and once a step, never once a token.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from megatron.core.inference.engines.dynamic_engine import (
    DynamicInferenceEngine as MegatronEngine,
)
from megatron.core.inference.engines.dynamic_engine import EngineState, EngineSuspendedError
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord as Record
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
)

from megatron_async.compat.conversions import errors
from megatron_async.compat.conversions.coordinated_states import CoordinatedStates
from megatron_async.compat.conversions.engine_control import EngineControl
from megatron_async.compat.conversions.errors import refuse
from megatron_async.compat.conversions.events import TokenTimes
from megatron_async.compat.conversions.logs import MetricsLog
from megatron_async.compat.conversions.requests import RequestBook, RequestEntry
from megatron_async.compat.conversions.sampling import (
    RefusedParams,
    resolve_limits,
    to_megatron_params,
    to_own_params,
)
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.compat.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_async.engine.validation import check_request_id
from megatron_async.errors import EngineStopped, RequestError
from megatron_async.planning.step_output import StepOutput
from megatron_async.requests.sampling_params import SamplingParams as OwnParams

if TYPE_CHECKING:
    from megatron_async.compat.conversions.coordinator_service import CoordinatorService
    from megatron_async.compat.conversions.service_ranks import ServiceRanks

__all__ = ["DynamicInferenceEngine", "EngineState", "EngineSuspendedError", "RequestEntry"]


class DynamicInferenceEngine(EngineControl):
    """Our engine with Megatron's calls.

    Args:
        controller: of this package's `compat`.
        context: likewise, the controller's.

    Attributes:
        book: Megatron's requests beside ours.
        engine_loop_task: serves a coordinator; None without one.
        use_coordinator: whether it has come behind a coordinator.

    Raises:
        ConfigurationError: the parts are not those of `compat`, or a `metrics_writer` cannot write.
    """

    controller: TextGenerationController
    engine_loop_task: asyncio.Task[None] | None = None
    use_coordinator = False
    _service: CoordinatorService | None = None
    _ranks: ServiceRanks | None = None
    """Once it has come behind a coordinator."""

    def __init__(
        self, controller: TextGenerationController, context: DynamicInferenceContext
    ) -> None:
        for part, kind in (
            (controller, TextGenerationController),
            (context, DynamicInferenceContext),
        ):
            if not isinstance(part, kind):
                found = type(part)
                refuse(
                    f"a {found.__module__}.{found.__qualname__}",
                    f"give the {kind.__name__} of {kind.__module__}",
                )
        super().__init__(controller, context)
        config = context.megatron_config
        self.metrics_writer = config.metrics_writer
        self.logging_step_interval = context.config.logging_step_interval
        self.track_generated_token_events = config.track_generated_token_events
        self.track_paused_request_events = config.track_paused_request_events
        self.enable_chunked_prefill = context.enable_chunked_prefill
        self.num_speculative_tokens = context.num_speculative_tokens
        self.unified_memory_level = context.unified_memory_level
        self.materialize_only_last_token_logits = config.materialize_only_last_token_logits
        self._times = TokenTimes() if self.track_generated_token_events else None
        self.book = RequestBook(
            controller.tokenizer, context.slots, self.track_paused_request_events, self._times
        )
        self.requests.on_end = self.book.ended
        self.listeners.append(context.watch)
        context.watch.count_with(self.statistics)
        context.belong_to(self)
        self._loops = False
        if self.metrics_writer is not None and self.logging_step_interval:
            metrics = MetricsLog(
                self.metrics_writer, self.logging_step_interval, context, self.statistics,
                self.requests,
            )  # fmt: skip
            self.listeners.append(metrics)

    # ---- Requests ----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: SamplingParams | OwnParams | None = None,
        priority: int = 0,
        traceparent: str = "",
    ) -> asyncio.Future[Record]:
        """Queue a request.

        A request that cannot be served fails alone, whatever is wrong with it: its record has
        status FAILED and an ERROR_NONTRANSIENT event with the reason.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, a list of token ids, or a tensor of them, int64 `[prompt length]`. One on
                the device is copied, which waits for the caller's own stream.
            sampling_params: Megatron's or ours; copied; defaults when None.
            priority, traceparent: of our engine.

        Returns:
            a future of the record of the finished (or failed) request.

        Raises:
            RequestError: the id is no 64-bit integer, or in use; the fourth argument is main's
                `precomputed_block_hashes`.
            EngineStopped: the engine is closed.
            WrongThread: another thread is at work in the engine.
        """
        fourth: Any = priority
        if isinstance(fourth, list):
            raise RequestError(
                "add_request() has priority as its fourth argument, and a list was given, as for "
                "Megatron's precomputed_block_hashes: leave it out, blocks are found by tokens."
            )
        entry = self.add_for(request_id, prompt, sampling_params, priority, traceparent)
        assert entry.future is not None
        return entry.future

    def add_for(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: Any,
        priority: int,
        traceparent: str = "",
    ) -> RequestEntry:
        """Queue a request as `add_request` does; its entry in the book, which has the futures of
        both forms of the request."""
        request_id = check_request_id(request_id)
        params, own_params, tokens = self._convert(prompt, sampling_params)
        if request_id in self.book:
            super().add_request(request_id, tokens, own_params, priority)  # raises
        text = prompt if isinstance(prompt, str) else None
        entry = self.book.begin(request_id, text, params)
        try:
            own_future = super().add_request(
                request_id, tokens, own_params, priority, traceparent=traceparent
            )
        except BaseException:
            self.book.drop(request_id)
            raise
        entry.own_future = own_future
        entry.future = own_future.get_loop().create_future()
        if entry.has_ended:
            entry.future.set_result(entry.record)
            return entry
        own = super().get_request(request_id)
        own.prompt = text
        self.book.added(entry, own)
        assert entry.request.sampling_params is not None
        longest, length = self.context.max_sequence_length, len(own.prompt_tokens)
        resolve_limits(entry.request.sampling_params, own.sampling_params, length, longest)
        return entry

    def _convert(self, prompt: Any, given: Any) -> tuple[SamplingParams, OwnParams, Any]:
        """Megatron's parameters, ours, and the prompt's tokens; where that fails, parameters that
        fail the request."""
        params = given if isinstance(given, SamplingParams) else SamplingParams()
        try:
            if isinstance(given, OwnParams):
                params, own = to_megatron_params(given), given
            else:
                own = to_own_params(given or params, self.context.megatron_config.logprobs_mode)
            if isinstance(prompt, str):
                prompt = self.controller.tokenize_prompt(
                    self.controller.tokenizer, prompt, own.add_BOS
                )
            elif isinstance(prompt, torch.Tensor):
                prompt = prompt.cpu()
        except Exception as error:  # whatever it is, also from a user's tokenizer
            own = RefusedParams(error)
        return params, own, prompt

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """An unfinished request as it stands, always the same object (KeyError if there is
        none)."""
        return self.book.live(request_id)

    @property
    def waiting_request_ids(self) -> deque[int]:
        """Ids of the requests without a slot, first in the order of service first."""
        return deque(waiting.request_id for waiting in self.context.waiting.in_order())

    @property
    def finished_request_count(self) -> int:
        """Requests that completed."""
        return self.book.finished

    @property
    def evicted_request_count(self) -> int:
        """Evictions."""
        return self.context.scheduler.evictions

    # ---- The loop ----------------------------------------------------------------------------

    @property
    def decode_only(self) -> DecodeOnly:
        """Whether the step launched in the last turn of the loop, and the one resolved in it, had
        no prefill; None for a part that did not happen."""
        return self.context.watch.decode_only

    def step_modern(self) -> dict[str, Any]:
        """A turn of the loop.

        Returns:
            "active_request_ids": list, requests with a token in it that go on;
            "finished_request_records": records of the requests that ended, failed ones too;
            "step_time": seconds;
            "cuda_graph_request_count": rows of the captured shape of the resolved step, None if it
                was launched kernel by kernel;
            "outputs": `StepOutput`s of our engine.

        Raises:
            EngineSuspendedError: the engine is suspended, paused or closed, and nothing is left to
                report.
        """
        with _megatron_errors():
            return super().step_modern()

    async def async_step(self) -> dict[str, Any]:
        """`step_modern` for an event loop."""
        with _megatron_errors():
            if not self._loops:
                self.pausing.check_can_step()
            return await super().async_step()

    def step_legacy(
        self, sampling_params: SamplingParams | None = None
    ) -> tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]:
        """A turn of the loop, reported as requests that go on, merged finished requests, seconds;
        the argument has no effect, as in Megatron, where this call is deprecated."""
        warnings.warn(
            "step_legacy() is deprecated: use step_modern().", DeprecationWarning, stacklevel=2
        )
        result = self.step_modern()
        active = [self.get_request(request_id) for request_id in result["active_request_ids"]]
        finished = [record.merge() for record in result["finished_request_records"]]
        return active, finished, result["step_time"]

    step = step_legacy

    def report(self, start: float) -> dict[str, Any]:
        """End a turn of the loop, and return what `step_modern` does."""
        report = super().report(start)
        outputs = report["outputs"]
        if self._times is not None:
            facts = self._block_facts()
            for output in outputs:
                self._times.add(output, facts)
        self.context.watch.end_turn(outputs)
        records = self.book.take_ended()
        report["finished_request_records"] = records
        report["active_request_ids"] = _active_ids(outputs, records)
        report["cuda_graph_request_count"] = self.context.watch.graph_requests
        return report

    def take_back(self, report: dict[str, Any]) -> None:
        """Nobody gets this report: the next one has what it has."""
        self.booking.undelivered[:0] = report["outputs"]
        self.book.give_back(report["finished_request_records"])

    def forget_ended(self, request_ids: Collection[int]) -> None:
        """No report shall have these requests, if they have ended: nobody waits for them."""
        super().forget_ended(request_ids)
        self.book.forget(request_ids)

    def _block_facts(self) -> dict[str, int]:
        counts = self.context.kv_block_allocator
        used = counts.get_total_used()
        return {
            "blocks_total": counts.total_count,
            "blocks_hashed_total": used,
            "blocks_hashed_active": used,
            "pre_fwd_active_token_count": self.context.active_token_count,
            "pre_fwd_step_count": self.context.step_count,
        }

    def generate(
        self, prompts: Any, sampling_params: Any = None, on_step: Any = None
    ) -> list[Record]:
        """Run prompts to their ends: the records in the order of `prompts`.

        Args:
            prompts: texts or token ids.
            sampling_params: for all, or one for each prompt.
            on_step: called with each step's report.
        """
        with _megatron_errors():
            return cast(list[Record], super().generate(prompts, sampling_params, on_step))

    async def run_engine(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Step whenever there is work, until the task is cancelled (it then returns, as in
        Megatron) or the engine closed. While the engine is suspended, it waits.

        Raises:
            ConfigurationError: `loop` is another than the running one.
        """
        if loop is not None and loop is not asyncio.get_running_loop():
            refuse("run_engine(loop=) with another loop than the running one", "leave it out")
        self._loops = True
        try:
            await super().run_engine()
        except asyncio.CancelledError:
            pass
        finally:
            self._loops = False

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
            hostname: name or IP address that others reach this host by; None: 127.0.0.1, or in a
                job of several hosts this one's address in it. Every peer that reaches it can send
                requests and stop engines (docs/serving.md).
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
        share_seed(self.controller.sampling_rng)
        if self._ranks is None:
            self._ranks = join_ranks(self)
        address = find_address(inference_coordinator_port, launch_inference_coordinator, hostname)
        self.coordinated = CoordinatedStates()
        self._service = CoordinatorService(
            self, self.add_for, address, self.coordinated, self._ranks
        )
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

    def close(self) -> None:
        """End the engine for good; unfinished requests fail."""
        super().close()
        if self._ranks is not None:
            self._ranks.group.close()

    # ---- Graphs ------------------------------------------------------------------------------

    @property
    def capture_stats(self) -> dict[str, float | int] | None:
        """What capturing graphs took: seconds, and bytes of their memory; None without graphs."""
        found = self.controller.capture_report
        if found is None:
            return None
        names = ("allocated_bytes", "reserved_bytes", "pool_reserved_bytes", "pool_allocated_bytes")
        return {"time": found.seconds, **dict.fromkeys(names, found.bytes)}

    def create_cuda_graphs(self, reset_context: bool = True) -> None:
        """Capture graphs, unless that is done already; the argument has no effect, as capturing
        leaves nothing in the context."""
        self.controller.create_cuda_graphs()


@contextmanager
def _megatron_errors() -> Iterator[None]:
    """Raise what both worlds catch."""
    try:
        yield
    except EngineSuspendedError:
        raise
    except EngineStopped as error:
        raise errors.EngineSuspendedError(str(error)) from error


def _active_ids(outputs: list[StepOutput], records: list[Record]) -> list[int]:
    """Ids of the requests with tokens in `outputs` that have not ended."""
    if not outputs:
        return []
    ids = outputs[0].request_ids
    if len(outputs) > 1:
        ids = np.unique(np.concatenate([output.request_ids for output in outputs]))
    if records:
        ids = ids[~np.isin(ids, [record.request_id for record in records])]
    found: list[int] = ids.tolist()
    return found


# Megatron asks `isinstance`, and an engine of ours is one.
MegatronEngine.register(DynamicInferenceEngine)
