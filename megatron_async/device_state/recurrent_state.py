"""`RecurrentState`: the state of recurrent layers for each slot's sequence.

A slot's state includes the tokens before a position, its *base*. The inputs of the tokens from the
base on are in a ring, at their position modulo its length (ReplaySSM, Dao AI Lab and NVIDIA 2026).
A decode step reads both, and writes the state only every few tokens. So nothing has to be undone
when a step is taken back (policy "rollback") or drafts are rejected: the next step begins at an
earlier position, and the state and the inputs that it needs are still there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_async.config import InferenceConfig
from megatron_async.device_state.pools import Pools
from megatron_async.device_state.recurrences import RECURRENCES, MambaRecurrence, Recurrence
from megatron_async.device_state.slot_states import PerSlotState, StateStep
from megatron_async.device_state.state_table import StateSharing, StateTable
from megatron_async.errors import ConfigurationError
from megatron_async.models.sizes import RecurrentSizes
from megatron_async.ops.recurrent.mamba_pools import Gating, MambaParams, make_gating
from megatron_async.ops.recurrent.recurrent_pools import (
    MAX_WIDTH,
    TILE,
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
    replaying_rule,
    wide_dtype,
)
from megatron_async.ops.sampling.slot_records import RowFeature


class RecurrentState(PerSlotState):
    """The pools of all recurrent layers of a stage. Without memory until `allocate`.

    A slot's row is its own number. With a `table` a slot may have any row, and other rows hold
    snapshots, from which requests begin (`planning/state_rows.py`). The last row is for rows
    without a request.

    A row's new owner never reads the data of the previous owner: a sequence begins at position 0,
    where the scan starts from zero, or at a snapshot.

    Args:
        layers: the recurrent layers in their order, of any kinds; the kinds share their bases.
        capacity: slots.
        dtype: of activations.
        state_dtype: of the states, float32 or bfloat16; for float64 activations float64.
        width: most query tokens of a decode row.
        lag: tokens that may be taken back: the state does not include the last `lag` tokens.
        memory: of the pools.
        is_invariant: whether a token's bits are those of its sequence alone.
        snapshots: rows beside the slots' rows.
        table: the row of each slot; None: a slot's row is its own number.

    Attributes:
        base: int32 `[rows]`: tokens that are in each row's state.
    """

    def __init__(
        self,
        layers: Sequence[Recurrence],
        capacity: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        width: int,
        lag: int,
        memory: Pools,
        is_invariant: bool = False,
        snapshots: int = 0,
        table: StateTable | None = None,
    ) -> None:
        tile = max((kind.tile for kind in layers), default=TILE)
        self.rule = rule = replaying_rule(lag, tile) if is_invariant else FlushRule(lag=lag)
        self._memory, self._rows = memory, capacity + snapshots + 1
        self._snapshots, self._table = snapshots, table
        if dtype == torch.float64:
            state_dtype = dtype
        self._kinds = tuple(layers)
        ring, conv = rule.ring_length(width), rule.conv_length(width)
        self._pools: dict[Recurrence, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {}
        for kind in self._kinds:
            widths = kind.pool_widths(rule.replays)
            self._pools[kind] = (
                (widths.state, state_dtype),
                ((ring, widths.ring_xb), dtype),
                ((ring, *widths.ring_gates), wide_dtype(dtype)),
                ((conv, widths.conv), dtype),
            )
        self._by_kind: list[RecurrentPools] = []
        self._layers: list[RecurrentPools] = []
        self.base = torch.zeros(self._rows, dtype=torch.int32, device=memory.device)
        self._prefill: PrefillRows | None = None
        self._chunk_dest: Tensor | None = None
        self._decode_rows: DecodeRows | None = None

    @property
    def bytes_per_slot(self) -> int:
        return sum(
            torch.Size(sizes).numel() * dtype.itemsize
            for kind in self._kinds
            for sizes, dtype in self._pools[kind]
        )

    @property
    def bytes_of_snapshots(self) -> int:
        return self._snapshots * self.bytes_per_slot

    def allocate(self) -> None:
        # Zeroed only so that a mistake is seen as wrong tokens and not as NaN now and then: nothing
        # reads what its own sequence has not written.
        counts, layers_of = Counter(self._kinds), {}
        for number, (kind, pools) in enumerate(self._pools.items()):
            whole = RecurrentPools(
                *(
                    self._memory.zeros(
                        f"{name} of kind {number}", (counts[kind], self._rows, *sizes), dtype
                    )
                    for name, (sizes, dtype) in zip(RecurrentPools._fields, pools, strict=True)
                )
            )
            self._by_kind.append(whole)
            layers_of[kind] = iter(list(zip(*whole, strict=True)))
        self._layers = [RecurrentPools(*next(layers_of[kind])) for kind in self._kinds]

    def release(self) -> None:
        self._by_kind, self._layers = [], []

    def begin_step(self, view: StateStep) -> None:
        """Move inputs into the states of the step's decode rows, where this is due."""
        step, dims = view.step, view.dims
        decode = dims.decode_rows
        rows, saves = step.row_slots, None
        reads = rows[decode:]
        if self._table is not None:
            states = self._table.unpack(view.bookkeeping, step.entry, dims, step.row_slots)
            rows, reads, saves = states.rows, states.read_rows, states.saves
            self._chunk_dest = states.chunk_dest
        self._prefill = None
        if dims.prefill_rows:
            # Its ops get the chunks' tokens alone, so no such step is packed (`graph_shapes.py`).
            starts = step.prefill_starts - dims.decode_tokens
            is_last = (step.features[dims.decode_tokens :] & int(RowFeature.PRODUCES)) != 0
            first = step.lengths[decode:] - starts.diff()
            self._prefill = PrefillRows(starts, first, reads, rows[decode:], is_last)
        ops, index = view.ops, rows[:decode]
        before, after = ops.next_bases(
            self.base, index, step.positions, dims.width, self._prefill, self.rule
        )
        self._decode_rows = DecodeRows(index, step.positions, after, dims.width)
        for pools in self._by_kind:
            ops.flush(pools, index, before, after, self.rule, saves)

    def decoding(self) -> tuple[DecodeRows, Sequence[RecurrentPools]] | None:
        """The rows of a step that has begun and each layer's pools, if all its rows decode and
        states follow from them alone."""
        if self._prefill is not None or self._decode_rows is None or self.rule.replays:
            return None
        return self._decode_rows, self._layers

    def run(self, view: StateStep, layer: int, projected: Tensor, params: Any) -> Tensor:
        """Convolution and recurrence of one layer.

        Returns:
            `[tokens, channels]`, before the gated norm.
        """
        kind, pools = self._kinds[layer], self._layers[layer]
        assert self._decode_rows is not None, "a layer before its step has begun"
        dims, ops = view.dims, view.ops
        shape = (len(projected), kind.sizes.channels)
        out = torch.empty(shape, dtype=projected.dtype, device=projected.device)
        tokens = dims.decode_tokens
        if tokens:
            self._decode(view, layer, projected[:tokens], params, out[:tokens])
        if self._prefill is not None:
            kind.prefill(ops)(
                projected[tokens:],
                params,
                pools,
                self._prefill,
                self._decode_rows.bases[dims.decode_rows :],
                self.rule,
                out[tokens:],
                self._chunk_dest,
            )
        return out

    def run_gated(
        self,
        view: StateStep,
        layer: int,
        projected: Tensor,
        params: MambaParams,
        norm_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`run` of a Mamba-2 layer in a step of decode rows of one query token, with the gate and
        the weight of the norm after it; the product after that norm divides.

        Returns:
            `[tokens, channels]`, and `Stream.squares` of it.
        """
        kind = self._kinds[layer]
        assert isinstance(kind, MambaRecurrence), "other layers' gates are of other norms"
        sizes, rows = kind.sizes, view.dims.decode_rows
        gating = make_gating(norm_weight, rows, sizes.groups, sizes.heads, sizes.head_dim)
        shape = (len(projected), kind.sizes.channels)
        out = torch.empty(shape, dtype=projected.dtype, device=projected.device)
        self._decode(view, layer, projected, params, out, gating)
        return out, gating.squares

    def _decode(
        self,
        view: StateStep,
        layer: int,
        projected: Tensor,
        params: Any,
        out: Tensor,
        *gating: Gating,
    ) -> None:
        self._kinds[layer].decode(view.ops)(
            projected,
            params,
            self._layers[layer],
            self._decode_rows,
            self.rule,
            out,
            *gating,
        )


def make_recurrent_state(
    layers: Sequence[RecurrentSizes],
    config: InferenceConfig,
    dtype: torch.dtype,
    device: torch.device,
    sharing: StateSharing | None = None,
    pools: Pools | None = None,
) -> RecurrentState:
    """State of an engine's recurrent layers, with no memory allocated yet.

    Args:
        layers: sizes of the recurrent layers of this rank's pipeline stage, on this rank.
        config: settings of the engine.
        dtype: of activations.
        device: where it goes; "meta" to learn how large it is.
        sharing: of states; None: each request has its slot's row.
        pools: their memory on that device; None: of their own.

    Raises:
        ConfigurationError: sizes or settings that the ops of these layers do not serve.
    """
    kinds = [RECURRENCES[type(sizes)](sizes) for sizes in layers]
    if config.decode_width > MAX_WIDTH:
        raise ConfigurationError(
            f"num_speculative_tokens={config.num_speculative_tokens} is not served with "
            f"{kinds[0].name} layers: use at most {MAX_WIDTH - 1}."
        )
    for kind in kinds:
        kind.check(config.batch_invariant_mode)
    if config.batch_invariant_mode and len({kind.tile for kind in kinds}) > 1:
        names = " beside ".join(sorted({kind.name for kind in kinds}))
        raise ConfigurationError(
            f"batch_invariant_mode=True is not served with {names} layers, whose tiles differ: "
            "leave it out."
        )
    table = None
    if sharing is not None:
        slots, rows = config.max_requests, config.max_requests + sharing.snapshots
        table = StateTable(slots, rows, config.max_rows, config.max_tokens, device)
    return RecurrentState(
        kinds,
        config.max_requests,
        dtype,
        getattr(torch, config.mamba_ssm_states_dtype),
        config.decode_width,
        config.steps_in_flight if config.invalidation == "rollback" else 0,
        pools or Pools(device),
        config.batch_invariant_mode,
        sharing.snapshots if sharing else 0,
        table,
    )
