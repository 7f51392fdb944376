"""Ops of recurrent layers' decode rows on a CPU, with the signatures of their references.

Where tensors are of another kind (16 bits, a state of another dtype than the activations,
parameters of several dtypes), or outputs are to be gated, the references in plain torch do it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.ops.recurrent import delta_pools, delta_reference, mamba_pools, mamba_reference
from megatron_async.ops.recurrent.delta_pools import DeltaParams
from megatron_async.ops.recurrent.delta_reference import delta_decode
from megatron_async.ops.recurrent.mamba_pools import Gating, MambaParams
from megatron_async.ops.recurrent.mamba_reference import mamba_decode
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, RecurrentPools
from megatron_async.ops.recurrent.step_arguments import check_decode_rows, output_for

ONES: dict[torch.dtype, Any] = {torch.float32: np.float32(1), torch.float64: np.float64(1)}
"""1 in each dtype that the loops are compiled for."""
EPS: dict[torch.dtype, Any] = {
    dtype: type(one)(delta_pools.NORM_EPS) for dtype, one in ONES.items()
}
"""`NORM_EPS` in each of them."""


def _serves(
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
) -> bool:
    """Whether the loops take a layer's tensors (one dtype for all, float32 or float64) and a
    step's."""
    dtype = inputs.dtype
    return (
        dtype in ONES
        and all(tensor.dtype == dtype for tensor in (*params, *pools))
        and row_index.dtype in (torch.int32, torch.int64)
        and positions.dtype == torch.int64
        and base.dtype == torch.int32
        and all(tensor.is_contiguous() for tensor in (row_index, positions, base))
    )


def _decode(
    loop: Any,
    inputs: Tensor,
    params: tuple[Tensor, ...],
    pools: RecurrentPools,
    step: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, ...],
    out: Tensor,
    *others: Any,
) -> None:
    """Run the loop of a layer's decode rows, whose tensors were checked.

    Args:
        loop: of its kind.
        inputs, params, pools, out: of the layer.
        step: row_index, positions and base.
        sizes: of the layer.
        others: arguments of the loop's kind.
    """
    rows, size = step[0].numel(), inputs.element_size()
    loop(
        tuple(tensor.data_ptr() for tensor in (inputs, *params, *pools, *step, out)),
        tuple(size * tensor.stride(0) for tensor in (inputs, *pools, out)),
        (rows, *sizes, pools.ring_xb.size(1), pools.conv.size(1), size),
        step[0].dtype == torch.int64,
        *others,
        ONES[inputs.dtype],
    )


@mamba_decode.cpu
def mamba_decode_cpu(
    zxbcdt: Tensor,
    params: MambaParams,
    pools: RecurrentPools,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
    width: int,
    rule: FlushRule,
    out: Tensor | None = None,
    gating: Gating | None = None,
) -> Tensor:
    """`ops/recurrent/mamba_decode.py`: convolution and recurrence of decode rows.

    Args:
        zxbcdt, params, pools: of one dtype, float32 or float64, for the loop.
        row_index, positions, base, width, rule: of the step.
        out: `[decode rows * width, d_inner]` or None.
        gating: None, for the loop.

    Raises:
        IndexError: the pools do not have a row of `row_index`.
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    if gating is not None or not _serves(zxbcdt, params, pools, row_index, positions, base):
        return mamba_reference.mamba_decode.reference(
            zxbcdt, params, pools, row_index, positions, base, width, rule, out, gating
        )
    from megatron_async.ops.cpu.recurrent.mamba_kernels import mamba_decode as loop

    op = "mamba_decode"
    check_decode_rows(op, zxbcdt, row_index, positions, base, width)
    shape = mamba_pools.shape_of(op, zxbcdt, params, pools, rule, width)
    out = output_for(op, out, zxbcdt, row_index.numel() * width, shape.d_inner)
    step = row_index, positions, base
    _decode(loop, zxbcdt, params, pools, step, (width, len(pools.state), *shape), out)
    return out


@delta_decode.cpu
def delta_decode_cpu(
    qkvzba: Tensor,
    params: DeltaParams,
    pools: RecurrentPools,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
    width: int,
    rule: FlushRule,
    out: Tensor | None = None,
) -> Tensor:
    """`ops/recurrent/delta_decode.py`: convolution and recurrence of decode rows.

    Args:
        qkvzba, params, pools: of one dtype, float32 or float64, for the loop.
        row_index, positions, base, width, rule: of the step.
        out: `[decode rows * width, value heads * value_dim]` or None.

    Raises:
        IndexError: the pools do not have a row of `row_index`.
        ValueError: sizes, dtypes or layouts do not fit each other.
    """
    if not _serves(qkvzba, params, pools, row_index, positions, base):
        return delta_reference.delta_decode.reference(
            qkvzba, params, pools, row_index, positions, base, width, rule, out
        )
    from megatron_async.ops.cpu.recurrent.delta_kernels import delta_decode as loop

    op = "delta_decode"
    check_decode_rows(op, qkvzba, row_index, positions, base, width)
    shape = delta_pools.shape_of(op, qkvzba, params, pools, rule, width)
    out = output_for(op, out, qkvzba, row_index.numel() * width, shape.value_inner)
    step = row_index, positions, base
    eps = EPS[qkvzba.dtype]
    _decode(loop, qkvzba, params, pools, step, (width, len(pools.state), *shape), out, eps)
    return out


def compile_loops(dtype: torch.dtype = torch.float32) -> None:
    """Compile the loops for float32 or float64, by calls for a dummy row of the smallest layers."""
    zeros, ones = partial(torch.zeros, dtype=dtype), partial(torch.ones, dtype=dtype)
    rule, heads, dim, keys = FlushRule(), 1, 16, 16
    index, base = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)

    def pools(entry: int, gates: int, channels: int) -> RecurrentPools:
        ring, conv = rule.ring_length(1), rule.conv_length(1)
        return RecurrentPools(
            zeros(1, heads, dim, keys),
            zeros(1, ring, entry),
            zeros(1, ring, gates, heads),
            zeros(1, conv, channels),
        )

    one, channels = ones(heads), dim + 2 * keys
    weight, columns = ones(channels, 4), dim + channels + heads
    mamba = MambaParams(weight, ones(channels), one, one, one)
    mamba_decode_cpu(
        ones(1, columns), mamba, pools(dim + keys, mamba_pools.GATES, channels), index,
        index, base, 1, rule,
    )  # fmt: skip
    delta_decode_cpu(
        ones(1, columns + heads), DeltaParams(weight, one, one),
        pools(dim + keys, delta_pools.GATES, channels), index, index, base, 1, rule,
    )  # fmt: skip
