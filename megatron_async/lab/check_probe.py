"""`LayerProbe`: what each layer leaves for one request, and the first layer where two runs part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.cli.ranks import has_other_ranks
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.lab.divergence import tolerance
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.ops.linear.stream import Stream
from megatron_async.planning.step_plan import StepPlan

POSITIONS = 512
"""Positions of a sequence that are kept, the last ones before the difference."""
MUCH = 16.0
"""Times the tolerance of one logit: rows of hidden states that differ by more differ by more than
rounding."""
NAMES = {"*": "attention", "-": "MLP", "E": "experts", "M": "Mamba-2", "G": "Gated DeltaNet"}


class LayerProbe:
    """Keeps the residual stream behind each layer at each position of one prompt's requests.

    Steps run eagerly and layer by layer meanwhile, so a captured or compiled step is not the very
    one that differed. Hidden states are copied to the host: the steps wait.

    Args:
        engine: idle; of ranks that share layers or experts each has a probe.
        prompt: token ids.
        end: positions from here on are not kept.
    """

    def __init__(self, engine: DynamicInferenceEngine, prompt: list[int], end: int) -> None:
        self._engine, self._prompt = engine, np.array(prompt)
        self._end = end
        stack: Any = engine.controller.inference_wrapped_model.model
        self._stack: Any = stack.decoder
        kinds = self._stack.layer_type_list
        self.names = [f"layer {number} ({NAMES[kind]})" for number, kind in enumerate(kinds)]
        self._numbers = {
            id(LAYER_KINDS[kind].block(layer)): number
            for number, (kind, layer) in enumerate(zip(kinds, self._stack.layers, strict=True))
        }
        self._spans: dict[int, list[range]] = {}
        self._now: list[range] = []
        self.rows: dict[tuple[int, int], Tensor] = {}
        """Float32 `[hidden]` on the host, by position and layer: of the step that wrote it last."""

    @contextmanager
    def watching(self) -> Iterator[LayerProbe]:
        """Inside, the engine's steps are watched."""
        controller, kinds = self._engine.controller, dict(LAYER_KINDS)
        enqueue, run, compiled = controller.enqueue_step, controller._run_step, self._stack.compiled

        def enqueue_noted(plan: StepPlan) -> Any:
            self._spans[plan.step] = self._spans_of(plan)
            return enqueue(plan)

        def run_noted(plan: StepPlan) -> None:
            self._now = self._spans.pop(plan.step, [])
            run(plan)

        hooks = {"enqueue_step": enqueue_noted, "_run_step": run_noted}
        vars(controller).update(hooks)
        vars(controller.graphs)["find"] = lambda *_: None
        self._stack.compiled = None
        for kind, how in kinds.items():
            LAYER_KINDS[kind] = replace(how, run=partial(self._run_layer, how.run))
        try:
            yield self
        finally:
            LAYER_KINDS.update(kinds)
            self._stack.compiled = compiled
            del vars(controller.graphs)["find"]
            for name in hooks:
                delattr(controller, name)

    def first_difference(self, other: LayerProbe, exact: bool, dtype: torch.dtype) -> str:
        """The first position, and there the first layer, at which two runs' rows differ.

        Args:
            other: of another run of the same prompt.
            exact: in bits; else by more than rounding in `dtype` explains.
            dtype: of the model.
        """
        for place in sorted(self.rows.keys() & other.rows.keys()):
            mine, others = self.rows[place], other.rows[place]
            allowed = 0.0 if exact else MUCH * tolerance(mine, dtype, len(self.names))
            distance = float((mine - others).abs().max())
            if not distance <= allowed:  # NaN too
                position, layer = place
                return (
                    f"first in {self.names[layer]} of {len(self.names)}, position {position}: "
                    f"hidden states differ by {distance:.2g}"
                )
        return "no layer's hidden states differ where the layers run one by one"

    def _spans_of(self, plan: StepPlan) -> list[range]:
        """The step's tokens that belong to the prompt's requests."""
        spans, slots = [], self._engine.context.slots
        for row, slot in enumerate(plan.slots):
            request = slots.requests[slot]
            if request is None or not np.array_equal(request.prompt_tokens, self._prompt):
                continue
            if row < plan.num_decode:
                first = row * plan.dims.width
                spans.append(range(first, first + int(plan.widths[row])))
            else:
                starts = plan.prefill_starts[row - plan.num_decode :][:2] + plan.first_prefill_token
                spans.append(range(*starts.tolist()))
        return spans

    def _run_layer(self, run: Any, block: Any, stream: Stream, view: Any, may_split: bool) -> Any:
        # Among ranks a sum that the next norm ends is not there yet.
        after: Stream = run(block, stream, view, may_split and not has_other_ranks())
        number = self._numbers.get(id(block))
        if number is not None and self._now:
            whole = after.value.float()
            whole = whole.sum(0) if whole.dim() == 3 else whole
            if after.residual is not None:
                whole = whole + after.residual.float()
            for span in self._now:
                rows = whole[span.start : span.stop].cpu().clone()
                positions = view.step.positions[span.start : span.stop].tolist()
                for position, row in zip(positions, rows, strict=True):
                    if self._end - POSITIONS <= position < self._end:
                        self.rows[position, number] = row
        return after
