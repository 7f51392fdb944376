"""`TextGenerationController`: the device work of one step, from its bookkeeping to its samples."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import COUNT, TOKENS
from megatron_async.devices import Event, makes_ordinary_tensors
from megatron_async.models.pipeline import stage_of
from megatron_async.models.step_routing import StepRouting
from megatron_async.names_of_megatron import NamesOfMegatron
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.step.constrained_sampling import (
    ConstrainedSampler,
    StepLogits,
)
from megatron_async.step.drafting import Drafter, Drafting, make_drafting
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.step.pipeline_stage import PipelineStage, make_stage
from megatron_async.step.prompt_log_probs import PromptLogProbs
from megatron_async.step.routing_recorder import RoutingRecorder, forced_routing
from megatron_async.step.sample_buffers import SampleBuffers
from megatron_async.step.step_graphs import CaptureReport, EagerStep, StepGraphs, mixed_question
from megatron_async.step.token_sampler import TokenSampler


class ControllerTokenizer(Protocol):
    """The methods that the engine needs of a tokenizer; the names are Megatron-Core's."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def detokenize(self, ids: list[int]) -> str:
        """Text of token ids."""
        ...


class LaunchedStep:
    """A step in flight: its plan, the memory for its samples, and the event after their copy.

    Attributes:
        plan: immutable.
        ready: reached when the samples are on the host.
        raised: exception that the step's own work raised on this rank; read it after `ready`.
        awaits_masks: whether its constrained rows are still to be sampled; until then `ready` has
            no meaning.
        unsampled_rows: constrained rows of the plan whose masks are not known yet.
        num_constrained: constrained rows whose sampling is launched.
        logits: from which they are sampled.
    """

    def __init__(self, plan: StepPlan, buffers: SampleBuffers, stage: PipelineStage) -> None:
        self.plan = plan
        self._buffers = buffers
        self._stage = stage
        self.ready: Event = buffers.ready
        self.raised: BaseException | None = None
        self.awaits_masks = len(plan.features.constrained_rows) > 0
        self.unsampled_rows = plan.features.constrained_rows
        self.num_constrained = 0
        self.logits: StepLogits | None = None

    @property
    def error(self) -> BaseException | None:
        """Why the step failed, here or on another pipeline stage; valid as long as `samples`."""
        return self.raised or self._stage.failure(self.plan)

    @property
    def samples(self) -> IntArray:
        """int32 `[rows of the plan, most tokens of a row]`, host memory; valid once `ready` is
        reached and until the ring comes round (the step's resolve reads it before)."""
        tokens = slice(TOKENS, TOKENS + self._buffers.max_width)
        return self.plan.rows_of(self._buffers.array[: self.plan.dims.rows])[:, tokens]

    @property
    def counts(self) -> IntArray:
        """int32 `[rows of the plan]`: how many of its samples each row yields; as `samples`."""
        return self.plan.rows_of(self._buffers.array[: self.plan.dims.rows])[:, COUNT]

    @property
    def drafts(self) -> IntArray:
        """int32 `[rows of the plan, drafts]` that the next step of each row may bring, -1 from
        where on there are none; as `samples`."""
        drafts = slice(TOKENS + self._buffers.max_width, None)
        return self.plan.rows_of(self._buffers.array[: self.plan.dims.rows])[:, drafts]

    @property
    def log_probs(self) -> IntArray | None:
        """int32 `[rows of the plan, most tokens of a row, OUT_WORDS]`, as `samples`; None where no
        row asked for log probs."""
        plan = self.plan
        if not plan.features.wants_log_probs:
            return None
        found = self._buffers.log_probs_array
        first = plan.sample_rows(np.arange(plan.num_rows))
        # Beyond a row's own samples stands anything.
        index = first[:, None] + np.arange(self._buffers.max_width)
        return found[np.minimum(index, len(found) - 1)]

    @property
    def prompt_log_probs(self) -> IntArray:
        """int32 `[tokens, OUT_WORDS]`: of the tokens of `plan.features.prompt_spans`, end to end;
        valid as long as `samples`."""
        return self._buffers.prompt.array[: self.plan.features.num_prompt_log_probs]


class TextGenerationController(NamesOfMegatron):
    """Runs steps on the device. It never decides which requests run, and never waits.

    Args:
        inference_wrapped_model: the model, wrapped for its context.
        tokenizer: for text prompts and texts out; None serves token ids only.
        drafter: proposes `InferenceConfig.num_speculative_tokens` tokens for each row, or None.

    Raises:
        ConfigurationError: a drafter without tokens to draft, or the reverse.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        inference_wrapped_model: GPTInferenceWrapper,
        tokenizer: ControllerTokenizer | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self.context = inference_wrapped_model.inference_context
        self.vocab_size = inference_wrapped_model.vocab_size
        self.device = self.context.device
        self.tracer = self.context.tracer
        view, config = self.context.gpu_view, self.context.config
        dtype = self.context.model_config.params_dtype
        is_last = stage_of(self.context.model_config).is_last
        shard = inference_wrapped_model.shard
        self.sampler = TokenSampler(view, self.vocab_size if is_last else 0, dtype, shard)
        self.constrained = ConstrainedSampler(view, self.sampler, self.vocab_size, self.device)
        self._prompt = PromptLogProbs(inference_wrapped_model, self.sampler, self.device)
        self._ring = [
            SampleBuffers(samples, host, config.decode_width, log_probs, prompt, self.device)
            for samples, host, log_probs, prompt in zip(
                view.sample_ring,
                view.host_samples,
                self.sampler.log_probs,
                self._prompt.ring,
                strict=True,
            )
        ]
        self.stage = make_stage(self.context, self.sampler.log_probs)
        self.drafting = self._make_drafting(drafter)
        self.routing = None
        if config.enable_routing_replay:
            self.routing = RoutingRecorder(self.context, self.stage)
        self.graphs = StepGraphs(self.device, without_gather=shard is not None)
        self.capture_report: CaptureReport | None = None
        self.device.fence()

    def _make_drafting(self, drafter: Drafter | None) -> Drafting | None:
        """What drafts, by the settings or as passed in; a controller without a model has another
        answer."""
        model, config = self.inference_wrapped_model, self.context.config
        return make_drafting(drafter, config, model, self.sampler)

    def enqueue_step(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue a step whose bookkeeping is on its way: forward, sampling, samples to the host.

        Returns without waiting. An error of the step's own work is kept in the result's `error`.
        """
        buffers = self._ring[plan.step % len(self._ring)]
        if plan.features.num_prompt_log_probs:
            buffers.prompt.allocate()
        if len(plan.features.constrained_rows):
            self.constrained.entry_of(plan.step).allocate()
        launched = LaunchedStep(plan, buffers, self.stage)
        self.stage.await_samples(plan)
        self.device.compute.launch(partial(self._run_guarded, launched))
        self.stage.return_samples(plan, buffers.prompt)
        if not launched.awaits_masks:
            self._deliver(launched)
        return launched

    def enqueue_failed_step(self, plan: StepPlan, error: BaseException) -> LaunchedStep:
        """A step that could not be launched, in the form of one that failed on the device.

        Args:
            plan: of the step, of which any part may have been launched.
            error: why.
        """
        buffers = self._ring[plan.step % len(self._ring)]
        launched = LaunchedStep(plan, buffers, self.stage)
        launched.raised = error
        launched.awaits_masks = False
        self.stage.finish(plan, buffers.prompt)
        self.context.expect_step(plan.step + 1)
        self._deliver(launched)
        return launched

    def masks_for(self, launched: LaunchedStep, rows: IntArray) -> NDArray[np.int32]:
        """Masks of constrained rows of a step, int32 `[rows, words]`, host memory, to be filled
        before `sample_constrained`.

        Args:
            launched: a step that awaits masks.
            rows: indices in its plan.
        """
        plan, entry = launched.plan, self.constrained.entry_of(launched.plan.step)
        return entry.fill(
            launched.num_constrained,
            plan.device_rows(rows),
            plan.sample_rows(rows),
            plan.slots[rows],
            plan.kv_at_most[rows],  # exact: under a grammar rows have width 1
        )

    def sample_constrained(self, launched: LaunchedStep, count: int, *, is_last: bool) -> None:
        """Enqueue the sampling of the `count` rows of a step whose masks were filled last, and,
        after the last of them, the sample copy. Nothing here waits."""
        device, first = self.device, launched.num_constrained
        if count:
            plan, part = launched.plan, slice(first, first + count)
            entry = self.constrained.entry_of(plan.step)
            if self.stage.is_last:
                device.upload.launch(partial(entry.receive, part))
                if device.upload is not device.compute:
                    device.upload.record(entry.arrived)
                    device.compute.wait(entry.arrived)
                device.compute.launch(partial(self._sample_guarded, launched, part))
            prompt = self._ring[plan.step % len(self._ring)].prompt
            self.stage.return_samples(plan, prompt, (entry, part))
            launched.num_constrained += count
        if is_last:
            launched.awaits_masks = False
            self._deliver(launched)

    def _deliver(self, launched: LaunchedStep) -> None:
        """Say when a step's samples are on the host, behind the copy of those that the step has not
        written there itself."""
        plan, buffers = launched.plan, self._ring[launched.plan.step % len(self._ring)]
        if plan.features.needs_copy or self.stage.returns_samples:
            self._copy_samples(plan, buffers)
        else:
            self.device.compute.record(buffers.ready)

    def _copy_samples(self, plan: StepPlan, buffers: SampleBuffers) -> None:
        compute, copy = self.device.compute, self.device.copy
        compute.record(buffers.sampled)
        copy.wait(buffers.sampled)
        copy.launch(partial(self._transfer_samples_to_cpu, plan, buffers))
        copy.record(buffers.ready)

    def _run_guarded(self, launched: LaunchedStep) -> None:
        plan, stage = launched.plan, self.stage
        with self.tracer.of_step(plan):
            stage.receive(plan)
            try:
                self._run_step(plan)
                if len(plan.features.constrained_rows) and stage.is_last:
                    launched.logits = self.constrained.keep(plan.dims.sample_rows)
                stage.send(plan, failed=False)
            except Exception as error:
                launched.raised = error
                # It may not have come as far as to unpack its bookkeeping and to count itself.
                view = self.context.gpu_view
                view.routing = None
                view.take_block_updates(plan.step, plan.dims, len(plan.block_updates.slots))
                view.expect_step(plan.step + 1)
                stage.send(plan, failed=True)

    def _sample_guarded(self, launched: LaunchedStep, part: slice) -> None:
        if launched.raised is not None:
            return
        plan, compute = launched.plan, self.device.compute
        try:
            assert launched.logits is not None, "its first part kept them"
            with self.tracer.of_step(plan), self.tracer.stage("sampling", plan.step, compute):
                self.constrained.sample(plan.step, launched.logits, part)
        except Exception as error:
            launched.raised = error
            self.stage.send(launched.plan, failed=True)

    def _run_step(self, plan: StepPlan) -> None:
        """The step's device work, on the compute stream."""
        graph = self.graphs.find(plan.dims, plan.sampling_mode)
        with self.tracer.stage("device_step", plan.step, self.device.compute):
            if graph is not None:
                graph.replay()
            else:
                forced = forced_routing(plan, self.context.model_config, self.device)
                self._compute_step(plan.dims, plan.sampling_mode, plan.step, forced)
            if plan.features.num_prompt_log_probs and self.stage.is_last:
                hidden = (
                    self._hidden() if graph is None else self.graphs.hidden[plan.dims.graph_key]
                )
                assert hidden is not None, "of the last stage"
                self._prompt.compute(plan, hidden)

    def _hidden(self) -> Tensor | None:
        return getattr(self.context.gpu_view, "hidden_states", None)

    @torch.inference_mode()
    def _compute_step(
        self,
        dims: BatchDimensions,
        mode: SamplingMode,
        step: int = -1,
        forced: Tensor | None = None,
    ) -> None:
        """Unpack, forward, sample, feed back: what a graph captures. It depends on its arguments'
        shapes and on device memory, and on nothing else. A pipeline stage that is not the last
        ends with its forward."""
        view, tracer, stage = self.context.gpu_view, self.tracer, self.stage
        compute = self.device.compute
        with tracer.stage("forward_pass", step, compute):
            view.begin_step(dims, mode, stage.lengths(dims))
            if (hidden_states := stage.hidden_states(dims)) is not None:
                self.inference_wrapped_model.set_input_tensor(hidden_states)
            has_routing = self.routing is not None or forced is not None
            if has_routing:
                view.routing = StepRouting(forced)
            output = self.inference_wrapped_model.forward(view)
            if self.routing is not None:
                self.routing.store(view)
            if has_routing:
                view.routing = None
            if not stage.is_last:
                stage.keep(output)
                view.move_on()
        if not stage.is_last:
            return
        with tracer.stage("sampling", step, compute):
            sampled = self.sampler.sample(output, mode)
        with tracer.stage("feed_back", step, compute):
            view.feed_back(sampled)
            self.sampler.remember(sampled, mode)
        if self.drafting is not None:
            with tracer.stage("drafting", step, compute):
                self.drafting.draft(view)

    def create_cuda_graphs(self, progress: bool = False) -> CaptureReport | None:
        """Capture the context's padded shapes, unless that is done already. Mixed shapes that do
        not pay are dropped from `context.graph_shapes`.

        Args:
            progress: show a bar.

        Returns:
            what it cost; None where there is nothing to capture.
        """
        context = self.context
        shapes = context.graph_shapes
        if not shapes.decode_sizes or self.capture_report is not None:
            return self.capture_report
        prepare, step = context.transfer_dummy_rows_to_gpu, self._compute_step
        start = time.perf_counter()
        asked, eager = dict(shapes.mixed_sizes), tuple[EagerStep, ...]()
        model, choices = self.inference_wrapped_model.model, context.choices
        question = mixed_question(context, model, self.vocab_size)
        row = choices.find(question) if asked else question.rule
        if row is None:
            eager = self.graphs.measure_mixed_shapes(shapes, prepare, step)
        else:
            shapes.apply(row, asked)
        self.graphs.capture(shapes.all_shapes(), prepare, step, progress, self._hidden)
        if row is None:
            self.graphs.time_mixed_shapes(shapes, prepare, progress)
            shapes.apply(choices.keep(question, shapes.row), asked)
            # Another process may have kept other sizes meanwhile.
            if missing := self.graphs.missing(shapes.all_shapes()):
                self.graphs.capture(missing, prepare, step, progress, self._hidden)
        context.expect_step()
        self.capture_report = CaptureReport(
            graphs=self.graphs.count,
            seconds=time.perf_counter() - start,
            bytes=self.graphs.bytes,
            mixed_sizes=tuple(shapes.mixed_sizes),
            mixed_step_tokens=shapes.mixed_step_tokens,
            source=choices.used[question.kind][1] if asked else "",
            eager_steps=eager,
        )
        return self.capture_report

    def recapture_cuda_graphs(self) -> None:
        """Capture the shapes of `create_cuda_graphs` again, on the addresses of a new KV cache.
        Nothing is measured anew."""
        context = self.context
        if self.capture_report is None:
            return
        prepare, step = context.transfer_dummy_rows_to_gpu, self._compute_step
        shapes = context.graph_shapes.all_shapes()
        self.graphs.capture(shapes, prepare, step, False, self._hidden)
        context.expect_step()

    def _transfer_samples_to_cpu(self, plan: StepPlan, buffers: SampleBuffers) -> None:
        rows, tracer = plan.dims.rows, self.tracer
        with tracer.of_step(plan), tracer.range("transfer_samples_to_cpu", plan.step):
            buffers.host[:rows].copy_(buffers.source[:rows], non_blocking=True)
            if plan.features.wants_log_probs:
                found = buffers.log_probs_source[: plan.dims.sample_rows].view(-1)
                buffers.log_probs_host[: len(found)].copy_(found, non_blocking=True)
            if plan.features.num_prompt_log_probs:
                buffers.prompt.transfer(plan.features.num_prompt_log_probs)
            self.stage.transfer_failure(plan)

    # ---- Text --------------------------------------------------------------------------------

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:  # noqa: N803
        """Token ids of a text prompt.

        Args:
            prompt: the text.
            add_BOS: put the tokenizer's beginning-of-sequence token first, if it is not there.

        Raises:
            ValueError: there is no tokenizer, or it has no such token.
        """
        if self.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer and this model has none: give token ids, or a "
                "tokenizer folder."
            )
        tokens = list(self.tokenizer.tokenize(prompt))
        if add_BOS:
            bos = getattr(self.tokenizer, "bos", None)
            if bos is None:
                raise ValueError(
                    "add_BOS=True, but the tokenizer has no beginning-of-sequence token: leave "
                    "add_BOS False."
                )
            if tokens[:1] != [bos]:
                tokens.insert(0, bos)
        return tokens
