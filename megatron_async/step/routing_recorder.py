"""`RoutingRecorder`: keeps the experts of each token beside its keys, and copies a request's to the
host when it loses its blocks.

A step writes the record at the places of the keys, behind the forward, with one kernel. So chunks,
drafts and shared blocks need nothing more: a rejected draft's row is written again with the token
that stands there, and a request that finds a prefix finds the rows of the one that wrote it.

The copy is launched when the request's end is booked, or when it is evicted: the rows are gathered
on the compute stream, into memory of their own, and go to the host on the copy stream. Later steps
may write the blocks: they are launched later, and the compute stream is a total order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.devices import Device
from megatron_async.errors import ConfigurationError
from megatron_async.models.partition import routed_layers
from megatron_async.models.pipeline import stage_of
from megatron_async.ops.experts.expert_routing import NO_EXPERT
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.routing_record import Rows

if TYPE_CHECKING:
    from megatron_async.device_state.gpu_view import ContextGPUView
    from megatron_async.planning.dynamic_context import DynamicInferenceContext
    from megatron_async.requests.inference_request import DynamicInferenceRequest
    from megatron_async.step.pipeline_stage import PipelineStage


class RoutingRecorder:
    """Writes routing records, and takes them to the host.

    Args:
        context: whose scheduler says when a request loses its blocks.
        stage: of the model's pipeline. Each stage keeps the experts of its layers; a record that is
            copied has those of all, on every stage.
    """

    def __init__(self, context: DynamicInferenceContext, stage: PipelineStage) -> None:
        self._device, self._view, self._stage = context.device, context.gpu_view, stage
        self._layers = routed_layers(context.model_config)
        context.scheduler.before_release = self.keep

    def store(self, view: ContextGPUView) -> None:
        """Behind a step's forward, inside its work: keep what its layers have chosen."""
        routing, record = view.routing, view.kv_cache.block_routing
        assert routing is not None, "a step that is recorded has one"
        assert record is not None, "a step on a released KV cache"
        if len(routing.experts) != record.size(2):
            raise ConfigurationError(
                f"enable_routing_replay=True: {len(routing.experts)} layers with experts told what "
                f"they chose, and the model's configuration has {record.size(2)}: use "
                "megatron_async.models.moe.MoELayer for each, or leave it out."
            )
        if not routing.experts:
            return  # a stage without such layers
        experts = torch.stack(routing.experts)
        view.ops.keep_routing(experts, view.step.write_index, record.flatten(0, 1))

    def keep(self, request: DynamicInferenceRequest, slot: int, end: int) -> None:
        """A request is about to lose the blocks of `slot`, whose first `end` positions are
        computed: copy the rows that its record lacks."""
        record, kept = request.routing, self._view.kv_cache.block_routing
        if record is None or kept is None or end <= record.num_rows:
            return
        size = self._view.kv_cache.block_size
        first = record.num_rows // size
        table = self._view.slots.block_table[slot, first : -(-end // size)]
        rows = slice(record.num_rows - first * size, end - first * size)
        record.add(*self._copied(kept, table, rows), end)

    def _copied(
        self, kept: Tensor, table: Tensor, rows: slice
    ) -> tuple[Callable[[], bool], Callable[[], Rows]]:
        """Copy rows of some blocks to the host: whether they are there, and what waits for them."""
        device, stage = self._device, self._stage
        shape = len(table) * kept.size(1), sum(self._layers), kept.size(3)
        host = device.host_buffer(math.prod(shape), kept.dtype, is_zero=False).view(shape)
        gathered, ready, found = device.event(), device.event(), list[Tensor]()

        def take() -> Rows:
            ready.wait()
            taken = host[rows].numpy().copy()  # sync-ok: host memory
            return taken.view(np.uint16) if taken.dtype == np.int16 else taken

        device.compute.launch(lambda: found.append(_gather(kept, table)))
        device.compute.record(gathered)
        device.copy.wait(gathered)
        device.copy.launch(lambda: _send(found.pop(), host, stage))
        device.copy.record(ready)
        return ready.query, take


def forced_routing(plan: StepPlan, model: Any, device: Device) -> Tensor | None:
    """`StepRouting`'s argument for a step, inside its work; None: nothing is forced. `model`:
    Megatron's `TransformerConfig`, whose stage has a part of the layers."""
    given = plan.features.forced_routing
    if given is None:
        return None
    layers, here = routed_layers(model), stage_of(model).index
    before = sum(layers[:here])
    given = given[:, before : before + layers[here]]
    count, _, topk = given.shape
    size, first = (layers[here], plan.dims.tokens, topk), plan.first_prefill_token
    forced = torch.full(size, NO_EXPERT, dtype=torch.int32, device=device.torch_device)
    rows = torch.from_numpy(given).to(device.torch_device, non_blocking=True)
    forced[:, first : first + count] = rows.transpose(0, 1)
    return forced


def _gather(kept: Tensor, table: Tensor) -> Tensor:
    return kept.index_select(0, table).flatten(0, 1)


def _send(source: Tensor, host: Tensor, stage: PipelineStage) -> None:
    host.copy_(stage.whole_record(source), non_blocking=True)
    if source.is_cuda:  # nobody needs it behind the copy
        source.record_stream(torch.cuda.current_stream(source.device))
