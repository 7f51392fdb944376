"""Gated DeltaNet decode: one to eight query tokens a row against the row's state and the ring.

Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024. To write the state only every few tokens
(`flush.py`) is ReplaySSM's idea (Dao AI Lab and NVIDIA 2026). The ring keeps pseudo values, so the
recurrence need not be repeated for later tokens (`delta_pools.py`). Two kernels, in
`delta_decode_kernels.py`. A step reads only data at or before its own positions, so running a step
again gives the same bits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options
from megatron_async.ops.recurrent.delta_decode_kernels import inputs_kernel, outputs_kernel
from megatron_async.ops.recurrent.delta_pools import DeltaParams, shape_of
from megatron_async.ops.recurrent.delta_reference import delta_decode
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, RecurrentPools
from megatron_async.ops.recurrent.step_arguments import check_decode_rows, output_for

CHANNELS = 256
"""Channels of v in a program of the convolution."""
LANES = 8
"""Elements of a value that a program processes: with more, fewer bytes are in flight at a time."""
WARPS = 1


@delta_decode.gpu
def delta_decode_gpu(
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
    """Convolution and recurrence of a step's decode rows.

    Args:
        qkvzba: `[decode rows * width, 2 key_inner + 2 value_inner + 2 value heads]` or more rows:
            output of in_proj in Megatron's order q, k, v, z, beta, alpha; bfloat16, float16 or
            float32 on a GPU; rows may be strided.
        params: the layer's parameters.
        pools: the layer's pools, changed in place.
        row_index: int32 or int64 `[decode rows]`: pool row of each decode row, all different but
            for the dummy row.
        positions: int64 `[decode rows * width]` or more. Query tokens that do not follow the row's
            first are padding, and so are all where the first is 0: they write nothing and give 0.
        base: int32 `[decode rows]` or more, of `next_bases`: the tokens that are in the states,
            which `flush` has brought there.
        width: query tokens of a row, 1 to 8.
        rule: when ring entries move into the state; that of `next_bases`.
        out: `[decode rows * width, value_inner]`, adjacent elements; None: made here.

    Returns:
        o `[decode rows * width, value_inner]`, dtype of `qkvzba`: before norm and gate.

    Raises:
        ValueError: sizes, dtypes or layouts do not fit each other, or a size is not served.
    """
    op = "delta_decode"
    check_decode_rows(op, qkvzba, row_index, positions, base, width)
    shape = shape_of(op, qkvzba, params, pools, rule, width)
    rows, window = row_index.numel(), triton.next_power_of_2(rule.window(width))
    out = output_for(op, out, qkvzba, rows * width, shape.value_inner)
    if not rows:
        return out
    q = torch.empty((rows * width, shape.key_inner), dtype=qkvzba.dtype, device=qkvzba.device)
    v = torch.empty((rows * width, shape.value_inner), dtype=qkvzba.dtype, device=qkvzba.device)
    beta = torch.empty((rows * width, shape.value_heads), device=qkvzba.device)
    scores = torch.empty((rows * width, shape.key_heads, 2, window), device=qkvzba.device)
    sizes = {
        "width": width,
        "key_heads": shape.key_heads,
        "key_dim": shape.key_dim,
        "value_heads": shape.value_heads,
        "value_dim": shape.value_dim,
        "ring": pools.ring_xb.size(1),
        "window": window,
    }
    options = launch_options(qkvzba)
    rings = (
        pools.ring_xb,
        pools.ring_xb.stride(0),
        pools.ring_gates,
        pools.ring_gates.stride(0),
    )
    parts = shape.key_heads + triton.cdiv(shape.value_inner, CHANNELS)
    inputs_kernel[(parts, rows)](
        qkvzba,
        qkvzba.stride(0),
        params.conv_weight,
        params.dt_bias,
        params.a_log,
        *rings,
        pools.conv,
        pools.conv.stride(0),
        row_index,
        positions,
        base,
        q,
        v,
        beta,
        scores,
        conv_ring=pools.conv.size(1),
        heads_tile=triton.next_power_of_2(shape.value_heads),
        tile=CHANNELS,
        **sizes,
        num_warps=4,
        **options,
    )
    outputs_kernel[(shape.value_heads * triton.cdiv(shape.value_dim, LANES), rows)](
        q,
        v,
        beta,
        scores,
        *rings,
        pools.state,
        pools.state.stride(0),
        row_index,
        positions,
        base,
        out,
        out.stride(0),
        tile=LANES,
        **sizes,
        num_warps=WARPS,
        **options,
    )
    return out
