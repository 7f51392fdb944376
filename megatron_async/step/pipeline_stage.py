"""`PipelineStage`: a controller's stage of a pipeline, and the exchanges of its steps.

A step of a model in p stages runs on all p ranks: stage 0 embeds tokens, each stage runs its layers
and sends hidden states to the next, and the last stage computes logits and samples. The samples
return to the other stages on the copy stream; the next step of the same requests needs them.
Meanwhile the compute stream runs steps of other requests.

Ranks stay in step also if one fails: each message has the number of the stage that failed, 0 for
none, and every rank books the same result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, override

import torch
from torch import Tensor

from megatron_async.device_state.bookkeeping_layout import BookkeepingLayout
from megatron_async.devices import Event
from megatron_async.errors import ConfigurationError, StageFailed
from megatron_async.models.parallel_state import ensure_process_groups
from megatron_async.models.partition import routed_layers
from megatron_async.models.pipeline import stage_of
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.step.pipeline_links import PipelineLinks

if TYPE_CHECKING:
    from megatron_async.planning.dynamic_context import DynamicInferenceContext
    from megatron_async.step.constrained_sampling import MaskEntry
    from megatron_async.step.prompt_log_probs import PromptEntry


class PipelineStage:
    """The only stage of a model: no messages.

    Attributes:
        is_last: whether it computes logits and samples.
        returns_samples: whether samples go to other stages, or come from one.
    """

    is_last = True
    returns_samples = False

    def await_samples(self, plan: StepPlan) -> None:
        """Let the compute stream wait for the samples that the step's rows read."""
        return

    def receive(self, plan: StepPlan) -> None:
        """Receive the previous stage's message; work of the compute stream."""
        return

    def hidden_states(self, dims: BatchDimensions) -> Tensor | None:
        """Input of the stage's layers, `[tokens, 1, hidden]`; None on the stage that embeds."""
        return None

    def lengths(self, dims: BatchDimensions) -> Tensor | None:
        """Lengths of the decode rows' sequences, int32 `[decode rows]`; None on the stage that has
        them by slot."""
        return None

    def keep(self, hidden_states: Tensor) -> None:
        """The output of the stage's layers, `[tokens, 1, hidden]`; a part of captured work."""
        raise AssertionError("the last stage hands no hidden states on")

    def send(self, plan: StepPlan, failed: bool) -> None:
        """Send the kept output, or that the step failed here; work of the compute stream."""
        return

    def return_samples(
        self, plan: StepPlan, prompt: PromptEntry, part: tuple[MaskEntry, slice] | None = None
    ) -> None:
        """Enqueue the return of the samples; every stage does so for every step, in order.

        Args:
            plan: of the step.
            prompt: where its prompt log probs are.
            part: rows of an entry that were sampled separately; None: all other rows.
        """
        return

    def whole_record(self, rows: Tensor) -> Tensor:
        """Rows of a routing record, `[positions, layers, topk]`, with the layers of all stages;
        work of the copy stream, on every stage at the same place of the log."""
        return rows

    def finish(self, plan: StepPlan, prompt: PromptEntry) -> None:
        """Take part in the remaining messages of a step whose launch failed here."""
        return

    def transfer_failure(self, plan: StepPlan) -> None:
        """Copy to the host which stage failed; work of the copy stream."""
        return

    def failure(self, plan: StepPlan) -> Exception | None:
        """The failure of another stage from the messages; valid once samples are on the host."""
        return None


class LinkedStage(PipelineStage):
    """One of several stages.

    Args:
        context: of the engine.
        log_probs: the sampler's ring of log probs.
        pipeline: group of the stages.

    Raises:
        ConfigurationError: a setting that pipelines do not serve.
    """

    def __init__(self, context: DynamicInferenceContext, log_probs: Tensor, pipeline: Any) -> None:
        if context.config.invalidation == "rollback":
            raise ConfigurationError(
                "invalidation='rollback' is not served with pipeline_model_parallel_size > 1, "
                "where samples arrive beside the steps that would be taken back: use 'reconcile'."
            )
        model, view = context.model_config, context.gpu_view
        stage = stage_of(model)
        self.returns_samples = True
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self._number = stage.index + 1
        self._context, self._view, self._device = context, view, context.device
        self._log_probs = log_probs
        target = self._device.torch_device
        # A rank holds its share of the tokens where the residual stream is split.
        sequence_parallel = getattr(model, "sequence_parallel", False)
        self._shares = model.tensor_model_parallel_size if sequence_parallel else 1
        config = context.config
        tokens = context.max_requests * config.decode_width + context.max_tokens
        self._row_bytes = model.hidden_size * model.params_dtype.itemsize
        rows = self._header_rows(context.max_requests) + -(-tokens // self._shares)
        shape = rows, model.hidden_size
        # The first rows of a message are its header: int32 words, of which the first says which
        # stage failed, and the others how long the decode rows' sequences are. Steps use them one
        # after another, on the compute stream; what is being sent lies apart, so that the next
        # step may begin.
        self._input = torch.zeros(shape, dtype=model.params_dtype, device=target)
        self._output = torch.zeros_like(self._input)
        self._sending = torch.zeros(2, *shape, dtype=model.params_dtype, device=target)
        # Ring: word 0 is the failed stage; then the rows of the sample ring. Written by the last
        # stage's step (word 0) and on the copy stream; used again only after the host has resolved
        # the step.
        entries, rows, self._row_words = view.sample_ring.shape
        words = 1 + rows * self._row_words
        self._words = torch.zeros(entries, words, dtype=torch.int32, device=target)
        self._host = self._device.host_buffer(entries, torch.int32)
        self._failed: IntArray = self._host.numpy()  # sync-ok: host memory
        self._returned: dict[int, tuple[int, Event]] = {}
        """Micro-batch -> the last step whose samples are in transfer, and the event of their
        arrival."""
        # Of the last step that did so; the first two are counted by launched work.
        self._last_received = self._last_sent = self._last_returned = -1
        self._links = PipelineLinks(pipeline, target)
        self._device.fence()

    # ---- Forth: on the compute stream --------------------------------------------------------

    @override
    def await_samples(self, plan: StepPlan) -> None:
        if not self.is_first or plan.num_decode == 0:
            return
        step, event = self._returned.get(self._micro_batch(plan), (-1, None))
        # The host has seen the samples of all steps but the last ones.
        if event is not None and plan.step - step < len(self._words):
            self._device.compute.wait(event)

    @override
    def receive(self, plan: StepPlan) -> None:
        if not self.is_first:
            with self._context.tracer.range("receive_hidden_states", plan.step):
                self._links.receive(self._input[: self._message_rows(plan.dims)])
        self._last_received = plan.step

    def hidden_states(self, dims: BatchDimensions) -> Tensor | None:
        """Hidden states in the message received last."""
        if self.is_first:
            return None
        return self._input[self._header_rows(dims.decode_rows) : self._message_rows(dims), None]

    def lengths(self, dims: BatchDimensions) -> Tensor | None:
        """Lengths in the message received last: only the first stage keeps lengths by slot."""
        return None if self.is_first else self._header(self._input)[1 : 1 + dims.decode_rows]

    def keep(self, hidden_states: Tensor) -> None:
        """Keep a step's output until `send`."""
        self._output[: len(hidden_states)].copy_(hidden_states[:, 0])

    @override
    def send(self, plan: StepPlan, failed: bool) -> None:
        # The last stage only writes which one failed.
        with self._context.tracer.range("send_hidden_states", -1 if self.is_last else plan.step):
            self._write(plan, failed)
        self._last_sent = plan.step

    def _write(self, plan: StepPlan, failed: bool) -> None:
        if self.is_last:
            word = self._words[plan.step % len(self._words), 0]
            if failed:
                word.fill_(self._number)
            else:
                word.copy_(self._header(self._input)[0])
            return
        place, end = plan.step % 2, self._message_rows(plan.dims)
        self._links.await_sent(place)
        message, rows = self._sending[place, :end], plan.dims.decode_rows
        header = self._header(message)
        if failed:
            # Rows of length 0 write no request's key.
            message.zero_()
            header[0] = self._number
        else:
            header[0] = self._header(self._input)[0]
            header[1 : 1 + rows] = self._view.row_lengths(rows)
            first = self._header_rows(rows)
            message[first:] = self._output[: end - first]
        self._links.send(message, place)

    def _header_rows(self, decode_rows: int) -> int:
        """Rows of a message that its header takes."""
        return -(-(1 + decode_rows) * 4 // self._row_bytes)

    def _message_rows(self, dims: BatchDimensions) -> int:
        return self._header_rows(dims.decode_rows) + -(-dims.tokens // self._shares)

    def _header(self, message: Tensor) -> Tensor:
        """The words of a message, int32; the words after its header are hidden states."""
        return message.view(torch.int32).view(-1)

    # ---- Back: on the copy stream ------------------------------------------------------------

    @override
    def return_samples(
        self,
        plan: StepPlan,
        prompt: PromptEntry,
        part: tuple[MaskEntry, slice] | None = None,
        failed_here: bool = False,
    ) -> None:
        self._last_returned = plan.step
        compute, copy = self._device.compute, self._device.copy
        if self.is_last:
            computed = self._device.event()
            compute.record(computed)
            copy.wait(computed)
        elif part is not None:
            copy.launch(partial(part[0].receive, part[1]))
        copy.launch(partial(self._share, plan, prompt, part))
        if not self.is_last:
            copy.launch(partial(self._take, plan, part, failed_here))
        if self.is_first and plan.num_rows:
            returned = self._device.event()
            copy.record(returned)
            self._returned[self._micro_batch(plan)] = plan.step, returned

    def _share(
        self, plan: StepPlan, prompt: PromptEntry, part: tuple[MaskEntry, slice] | None
    ) -> None:
        view, rows, tracer = self._view, plan.dims.rows, self._context.tracer
        entry = plan.step % len(self._words)
        words = self._words[entry, : 1 + rows * self._row_words]
        with tracer.of_step(plan), tracer.range("return_samples", plan.step):
            if self.is_last:
                words[1:] = view.sample_ring[entry, :rows].view(-1)
            self._links.share_samples(words)
            if plan.features.wants_log_probs:
                self._links.share_samples(self._log_probs[entry, : plan.dims.sample_rows])
            if part is None and plan.features.num_prompt_log_probs:
                self._links.share_samples(prompt.source[: plan.features.num_prompt_log_probs])

    @torch.inference_mode()
    def _take(
        self, plan: StepPlan, part: tuple[MaskEntry, slice] | None, failed_here: bool
    ) -> None:
        """Store samples as `ContextGPUView.feed_back` does on the last stage."""
        view, entry, rows = self._view, plan.step % len(self._words), plan.dims.rows
        found = view.sample_ring[entry, :rows]
        found.copy_(self._words[entry, 1 : 1 + rows * self._row_words].view_as(found))
        if failed_here:
            return  # whose slots they are may never have come here
        if part is None:
            start, end = BookkeepingLayout.for_batch(plan.dims, 0).spans["row_slots"]
            slots = view.bookkeeping[entry, start:end].long()
        else:
            places, slots = part[0].rows_and_slots(part[1])
            found = found.index_select(0, places)
        view.slots.store(found, slots)

    @override
    def whole_record(self, rows: Tensor) -> Tensor:
        layers = routed_layers(self._context.model_config)
        parts = [rows.new_empty(len(rows), count, rows.size(2)) for count in layers]
        parts[self._number - 1] = rows
        for stage, part in enumerate(parts):
            if layers[stage]:
                self._links.share(part.view(torch.uint8), stage)  # no link takes int16
        return torch.cat(parts, 1)

    def _micro_batch(self, plan: StepPlan) -> int:
        return int(plan.slots[0]) % self._context.slots.num_micro_batches

    # ---- Failures ----------------------------------------------------------------------------

    @override
    def finish(self, plan: StepPlan, prompt: PromptEntry) -> None:
        self.await_samples(plan)
        self._device.compute.launch(partial(self._pass_on, plan))
        if self._last_returned < plan.step:
            self.return_samples(plan, prompt, failed_here=True)

    def _pass_on(self, plan: StepPlan) -> None:
        """Receive and send the messages that the failed step did not, so that no stage waits."""
        if self._last_received < plan.step:
            self.receive(plan)
        if self._last_sent < plan.step:
            self.send(plan, failed=True)

    @override
    def transfer_failure(self, plan: StepPlan) -> None:
        entry = plan.step % len(self._words)
        self._host[entry : entry + 1].copy_(self._words[entry, :1], non_blocking=True)

    @override
    def failure(self, plan: StepPlan) -> Exception | None:
        number = int(self._failed[plan.step % len(self._failed)])
        if number == 0:
            return None
        return StageFailed(f"it failed on pipeline stage {number - 1}, whose rank says why")


def make_stage(context: DynamicInferenceContext, log_probs: Tensor) -> PipelineStage:
    """The place of this process in the pipeline of the context's model.

    Args:
        context: of the engine; its model's configuration says how many stages there are.
        log_probs: the sampler's ring of log probs.

    Raises:
        ConfigurationError: a setting that pipelines do not serve.
    """
    if stage_of(context.model_config).count == 1:
        return PipelineStage()
    return LinkedStage(context, log_probs, ensure_process_groups().pp)
