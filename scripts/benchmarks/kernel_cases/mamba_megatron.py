"""Kernels of Mamba-2 of others that do what ours do: convolution and state update for decode,
convolution and chunk scan for prefill.

Megatron-Core's own, and those of causal-conv1d and mamba-ssm where these are installed
(CONTRIBUTING.md). What our prefill does besides (it leaves inputs in the pools) has no counterpart
there. Of decode the convolution is timed alone too: ours is part of a kernel that writes the rings
as well. mamba-ssm's state update takes one token a row.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from kernel_cases.case import random
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.recurrent_pools import RecurrentPools


def megatron_decode(
    shape: MambaShape,
    params: MambaParams,
    pools: list[RecurrentPools],
    zxbcdt: Tensor,
    index: Tensor,
    width: int,
) -> dict[str, Callable[[], None]]:
    """A decode step by Megatron-Core's kernels and by the packages', which write the state in every
    step; convolutions alone."""
    from megatron.core.ssm.ops.causal_conv1d_triton import causal_conv1d_update
    from megatron.core.ssm.ops.mamba_ssm import selective_state_update

    heads, dim, n = shape.heads, shape.head_dim, shape.d_state
    rows, indices = len(index), index.int()
    a = -params.a_log.exp()[:, None, None].expand(heads, dim, n)
    d = params.d[:, None].expand(heads, dim)
    dt_bias = params.dt_bias[:, None].expand(heads, dim)
    strips = [shape.d_inner, shape.conv_dim, heads]
    _z, xbc, dt = zxbcdt.view(rows, width, -1).split(strips, dim=2)
    dt = dt[..., None].expand(-1, -1, -1, dim)
    conv_states = [random(rows + 1, shape.conv_dim, 4) for _ in pools]
    weights = params.conv_weight, params.conv_bias

    def conv() -> None:
        for conv_state in conv_states:
            causal_conv1d_update(xbc, conv_state, *weights, True, indices)

    def compiled_conv() -> None:
        for conv_state in conv_states:
            compiled(xbc.transpose(1, 2), conv_state, *weights, "silu", conv_state_indices=indices)

    def packages() -> None:
        for pool, conv_state in zip(pools, conv_states):
            x, b, c = compiled(
                xbc[:, 0], conv_state, *weights, "silu", conv_state_indices=indices
            ).split([shape.d_inner, shape.bc_dim, shape.bc_dim], dim=1)
            their_update(
                pool.state,
                x.unflatten(1, (heads, dim)),
                dt[:, 0],
                a,
                b.unflatten(1, (shape.groups, n)),
                c.unflatten(1, (shape.groups, n)),
                d,
                dt_bias=dt_bias,
                dt_softplus=True,
                state_batch_indices=indices,
            )

    def run() -> None:
        for pool, conv_state in zip(pools, conv_states):
            x, b, c = causal_conv1d_update(xbc, conv_state, *weights, True, indices).split(
                [shape.d_inner, shape.bc_dim, shape.bc_dim], dim=2
            )
            selective_state_update(
                pool.state,
                x.unflatten(2, (heads, dim)),
                dt,
                a,
                b.unflatten(2, (shape.groups, n)),
                c.unflatten(2, (shape.groups, n)),
                d,
                dt_bias=dt_bias,
                dt_softplus=True,
                state_batch_indices=indices,
            )

    calls: dict[str, Callable[[], None]] = {"megatron": run, "megatron_conv": conv}
    if find_spec("causal_conv1d") is not None:
        from causal_conv1d import causal_conv1d_update as compiled

        calls["causal_conv1d"] = compiled_conv
        if find_spec("mamba_ssm") is not None and width == 1:
            from mamba_ssm.ops.triton.selective_state_update import (
                selective_state_update as their_update,
            )

            calls["mamba_ssm"] = packages
    return calls


def megatron_prefill(
    shape: MambaShape,
    params: MambaParams,
    lengths: list[int],
    layers: int,
    zxbcdt: Tensor,
    ends: Tensor,
) -> dict[str, Callable[[], None]]:
    """Prefill chunks by Megatron-Core's kernels and by the packages'; metadata is made before."""
    from megatron.core.ssm.ops.causal_conv1d_varlen import causal_conv1d_varlen_fn
    from megatron.core.ssm.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    heads, dim, n = shape.heads, shape.head_dim, shape.d_state
    cuts, owners, last = [0], [], []
    for number, length in enumerate(lengths):
        for begin in range(0, length, 128):
            cuts.append(cuts[-1] + min(128, length - begin))
            owners.append(number)
        last.append(len(owners) - 1)
    cuts_there, owners_there, last_there = (
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in (cuts, owners, last)
    )
    token_owner = torch.repeat_interleave(ends.diff()).int()
    token_start = ends[token_owner]
    conv_states = random(len(lengths), shape.conv_dim, 3)
    states = random(len(lengths), heads, dim, n, dtype=torch.float32)
    out = random(len(zxbcdt), heads, dim)
    rate, dt_bias = -params.a_log.exp(), params.dt_bias.float()

    def packages() -> None:
        for _ in range(layers):
            _z, xbc, dt = zxbcdt[None].split([shape.d_inner, shape.conv_dim, heads], dim=2)
            xbc = compiled(
                xbc.transpose(1, 2),
                params.conv_weight,
                params.conv_bias,
                seq_idx=token_owner[None],
                activation="silu",
            ).transpose(1, 2)
            x, b, c = xbc.split([shape.d_inner, shape.bc_dim, shape.bc_dim], dim=2)
            scan(
                x.unflatten(2, (heads, dim)),
                dt,
                rate,
                b.unflatten(2, (shape.groups, n)),
                c.unflatten(2, (shape.groups, n)),
                128,
                D=params.d,
                dt_bias=dt_bias,
                seq_idx=token_owner[None],
                cu_seqlens=ends,
                dt_softplus=True,
                return_varlen_states=True,
            )

    def run() -> None:
        for _ in range(layers):
            _z, xbc, dt = zxbcdt.split([shape.d_inner, shape.conv_dim, heads], dim=1)
            xbc = causal_conv1d_varlen_fn(
                xbc.contiguous(),
                params.conv_weight,
                params.conv_bias,
                ends,
                conv_states,
                precomputed_seq_idx=token_owner,
                precomputed_seq_start=token_start,
            )
            x, b, c = xbc.split([shape.d_inner, shape.bc_dim, shape.bc_dim], dim=1)
            mamba_chunk_scan_combined_varlen(
                x.unflatten(1, (heads, dim)),
                dt,
                rate,
                b.unflatten(1, (shape.groups, n)),
                c.unflatten(1, (shape.groups, n)),
                128,
                cuts_there,
                last_there,
                owners_there,
                out,
                D=params.d,
                dt_bias=dt_bias,
                initial_states=states,
                dt_softplus=True,
                state_dtype=torch.float32,
            )

    calls: dict[str, Callable[[], None]] = {"megatron": run}
    if find_spec("causal_conv1d") is not None and find_spec("mamba_ssm") is not None:
        from causal_conv1d import causal_conv1d_fn as compiled
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as scan

        calls["mamba_ssm"] = packages
    return calls
