"""`RecurrentState`: what Mamba-2 layers remember of each slot's sequence.

A slot's state stands at its *base*: it holds the tokens before that position. The inputs of the
tokens from there on lie in a ring, at their position modulo its length (ReplaySSM, Dao AI Lab and
NVIDIA 2026). A decode step reads both and writes the state every few tokens only. So a step that is
taken back (policy "rollback", or drafts that are not accepted) leaves nothing to be put back: the
next one begins at an earlier position, and finds the state and the inputs that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async.device_state.slot_states import PerSlotState
from megatron_async.devices import makes_ordinary_tensors
from megatron_async.ops.kernels import kernels_for
from megatron_async.ops.recurrent.mamba_pools import (
    GATES,
    FlushRule,
    MambaParams,
    MambaPools,
    MambaShape,
    PrefillRows,
    wide_dtype,
)
from megatron_async.ops.sampling.slot_records import RowFeature

if TYPE_CHECKING:
    from megatron_async.device_state.gpu_view import ContextGPUView


class RecurrentState(PerSlotState):
    """The pools of all recurrent layers of a stage; one row more than there are slots, for rows
    without a request. Without memory until `allocate`.

    A slot's new owner finds what the last one left, and reads none of it: a sequence begins at
    position 0, where the scan starts from nothing.

    Args:
        layers: recurrent layers.
        shape: of one layer, on this rank.
        capacity: slots.
        dtype: of activations.
        state_dtype: of the states, float32 or bfloat16; for float64 activations float64.
        width: most query tokens of a decode row.
        lag: tokens that may be taken back behind a step: the state stays so far behind.
        device: where the pools live.

    Attributes:
        base: int32 `[slots + 1]`: tokens that are in each slot's state.
    """

    def __init__(
        self,
        layers: int,
        shape: MambaShape,
        capacity: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        width: int,
        lag: int,
        device: torch.device,
    ) -> None:
        self.rule = rule = FlushRule(lag=lag)
        self._device, self._rows = device, capacity + 1
        ring, conv = rule.ring_length(width), rule.conv_length(width)
        if dtype == torch.float64:
            state_dtype = dtype
        self._pools = {
            "state": (layers, (shape.heads, shape.head_dim, shape.d_state), state_dtype),
            "ring_xb": (layers, (ring, shape.d_inner + shape.bc_dim), dtype),
            "ring_gates": (layers, (ring, GATES, shape.heads), wide_dtype(dtype)),
            "conv": (layers, (conv, shape.conv_dim), dtype),
        }
        self._every: MambaPools | None = None
        self._layers: list[MambaPools] = []
        self.base = torch.zeros(self._rows, dtype=torch.int32, device=device)
        self._prefill: PrefillRows | None = None
        self._after: Tensor | None = None

    @property
    def bytes_per_slot(self) -> int:
        return sum(
            layers * torch.Size(sizes).numel() * dtype.itemsize
            for layers, sizes, dtype in self._pools.values()
        )

    @makes_ordinary_tensors
    def allocate(self) -> None:
        # Zeroed only so that a mistake is seen as wrong tokens and not as NaN now and then: nothing
        # reads what its own sequence has not written.
        self._every = MambaPools(
            *(
                torch.zeros(layers, self._rows, *sizes, dtype=dtype, device=self._device)
                for layers, sizes, dtype in self._pools.values()
            )
        )
        self._layers = [MambaPools(*layer) for layer in zip(*self._every, strict=True)]

    def release(self) -> None:
        self._every, self._layers = None, []

    def begin_step(self, view: ContextGPUView) -> None:
        """Bring the states of the step's decode rows to where they stand in it."""
        step, dims = view.step, view.dims
        decode = dims.decode_rows
        self._prefill = None
        if dims.prefill_rows:
            slots, starts = step.row_slots[decode:], step.prefill_starts
            is_last = (step.features[dims.decode_tokens :] & int(RowFeature.PRODUCES)) != 0
            first = step.lengths[decode:] - starts.diff()
            self._prefill = PrefillRows(starts, first, slots, slots, is_last)
        ops, slots = kernels_for(self.base), step.row_slots[:decode]
        before, self._after = ops.next_bases(
            self.base, slots, step.positions, dims.width, self._prefill, self.rule
        )
        assert self._every is not None, "a step without memory"
        ops.flush(self._every, slots, before, self._after, self.rule)

    def run(self, view: ContextGPUView, layer: int, zxbcdt: Tensor, params: MambaParams) -> Tensor:
        """Convolution and recurrence of one layer.

        Args:
            view: the step.
            layer: index among the recurrent layers.
            zxbcdt: `[tokens, ...]`, the output of the layer's first product.
            params: of the layer.

        Returns:
            `[tokens, heads * head_dim]`, before the gated norm.
        """
        after = self._after
        assert after is not None, "a layer before its step has begun"
        pools, dims, ops = self._layers[layer], view.dims, kernels_for(zxbcdt)
        channels = pools.state.size(1) * pools.state.size(2)
        out = torch.empty(len(zxbcdt), channels, dtype=zxbcdt.dtype, device=zxbcdt.device)
        rows, tokens = dims.decode_rows, dims.decode_tokens
        if rows:
            ops.mamba_decode(
                zxbcdt[:tokens],
                params,
                pools,
                view.step.row_slots[:rows],
                view.step.positions,
                after,
                dims.width,
                self.rule,
                out[:tokens],
            )
        if self._prefill is not None:
            ops.mamba_prefill(
                zxbcdt[tokens:], params, pools, self._prefill, after[rows:], self.rule, out[tokens:]
            )
        return out
