"""Mamba-2 and Gated DeltaNet ops alone, in graphs over many layers' pools, beside the bytes that
they must move.

Decode rows stand at all phases of the flush rule, so one row in 16 writes its state. With
--megatron the kernels of Megatron-Core that do the same are timed beside ours: convolution and
state update for decode, convolution and chunk scan for prefill. They have no counterpart for what
our prefill does besides (it leaves states and inputs in the pools). Of decode the convolution is
timed alone too, and where the package causal-conv1d is installed (it must be built; nothing else
here uses it), its compiled one: ours is part of a kernel that writes the rings as well. There are
none for Gated DeltaNet.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import delta_calls
import torch
from benchmark_fused_ops import graph_us
from recurrent_inputs import layers_that_fit, random
from torch import Tensor

from megatron_async.ops.recurrent.delta_pools import DeltaShape
from megatron_async.ops.recurrent.flush import flush
from megatron_async.ops.recurrent.gated_rms_norm import gated_rms_norm
from megatron_async.ops.recurrent.mamba_decode import mamba_decode
from megatron_async.ops.recurrent.mamba_pools import MambaParams, MambaShape
from megatron_async.ops.recurrent.mamba_prefill import mamba_prefill
from megatron_async.ops.recurrent.recurrent_pools import FlushRule, PrefillRows, RecurrentPools
from megatron_async.profiling.benchmark_record import write_record

SHAPES = {
    "nemotron-3-nano": MambaShape(64, 64, 8, 128),
    "nemotron-nano-9b-v2": MambaShape(128, 80, 8, 128),
    "granite-4.0-h-350m": MambaShape(48, 32, 1, 128),
}
BANDWIDTH = 4.3e12
"""Bytes a second that a large copy moves on an H200, reads and writes together."""
PEAK = 989e12
"""Dense bfloat16 operations a second of an H200."""
OURS = ("ours", "flush", "norm")
"""What must run; kernels of others may refuse a case."""


def parameters(shape: MambaShape) -> MambaParams:
    """One layer's parameters."""
    f32 = torch.float32
    a_log = torch.log(torch.linspace(0.001, 0.1, shape.heads, device="cuda"))
    return MambaParams(
        random(shape.conv_dim, 4),
        random(shape.conv_dim),
        random(shape.heads),
        a_log,
        random(shape.heads, dtype=f32),
    )


def gates(shape: MambaShape, *sizes: int) -> Tensor:
    """Gates of the rings' inputs: the logarithm of a decay, and dt."""
    dt = torch.rand(*sizes, shape.heads, device="cuda") / 10
    return torch.stack((-dt / 10, dt), -2)


def layer_pools(shape: MambaShape, rows: int, rule: FlushRule, width: int) -> RecurrentPools:
    """Pools of as many layers as fit, so that no layer's state stays in a cache."""
    state = rows * shape.d_inner * shape.d_state * 4
    layers, ring = layers_that_fit(state), rule.ring_length(width)
    return RecurrentPools(
        random(layers, rows, shape.heads, shape.head_dim, shape.d_state, dtype=torch.float32),
        random(layers, rows, ring, shape.d_inner + shape.bc_dim),
        gates(shape, layers, rows, ring),
        random(layers, rows, rule.conv_length(width), shape.conv_dim),
    )


def decode_calls(
    shape: MambaShape, rows: int, width: int, with_megatron: bool
) -> tuple[int, int, dict[str, Callable[[], object]]]:
    """Layers, least bytes of a layer's decode, and what to time."""
    rule, params = FlushRule(), parameters(shape)
    every = layer_pools(shape, rows + 1, rule, width)
    pools = [RecurrentPools(*layer) for layer in zip(*every)]
    # Rows at all phases; a step of `width` tokens before this one.
    first = 1000 + torch.arange(rows, device="cuda") * 7 % rule.period
    before = ((first - width) // rule.period * rule.period).int()
    after = (first // rule.period * rule.period).int()
    positions = (first[:, None] + torch.arange(width, device="cuda")).view(-1)
    index = torch.arange(rows, device="cuda")
    tokens = rows * width
    zxbcdt = random(tokens, 2 * shape.d_inner + 2 * shape.bc_dim + shape.heads)
    y, weight = random(tokens, shape.d_inner), random(shape.d_inner)

    def ours() -> None:
        flush(every, index, before, after, rule)
        for pool in pools:
            mamba_decode(zxbcdt, params, pool, index, positions, after, width, rule, out=y)

    def only_flush() -> None:
        flush(every, index, before, after, rule)

    def norm() -> None:
        for _ in pools:
            gated_rms_norm(y, zxbcdt[:, : shape.d_inner], weight, shape.groups, 1e-5)

    calls: dict[str, Callable[[], object]] = {"ours": ours, "flush": only_flush, "norm": norm}
    if with_megatron:
        calls |= megatron_decode(shape, params, pools, zxbcdt, index, width)
    state = shape.d_inner * shape.d_state * 4 * (1 + width / rule.period)
    # On average half a period of inputs, and the query tokens themselves, written and read.
    ring = (rule.period / 2 + 2 * width) * ((shape.d_inner + shape.bc_dim) * 2 + shape.heads * 8)
    conv = (3 + width) * shape.conv_dim * 2
    token = (shape.conv_dim + shape.heads + shape.d_inner) * 2 * width
    return len(pools), int(rows * (state + ring + conv + token)), calls


def megatron_decode(
    shape: MambaShape,
    params: MambaParams,
    pools: list[RecurrentPools],
    zxbcdt: Tensor,
    index: Tensor,
    width: int,
) -> dict[str, Callable[[], object]]:
    """A decode step by Megatron-Core's kernels, which write the state in every step; convolutions
    alone, Megatron-Core's and that of causal-conv1d where it is installed."""
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

    calls: dict[str, Callable[[], object]] = {"megatron": run, "megatron_conv": conv}
    if find_spec("causal_conv1d") is not None:
        from causal_conv1d import causal_conv1d_update as compiled

        calls["causal_conv1d"] = compiled_conv
    return calls


def prefill_calls(
    shape: MambaShape, lengths: list[int], with_megatron: bool
) -> tuple[int, int, dict[str, Callable[[], object]]]:
    """Layers, least bytes of a layer's prefill, and what to time."""
    rule, params, chunks = FlushRule(), parameters(shape), len(lengths)
    pools = [RecurrentPools(*layer) for layer in zip(*layer_pools(shape, chunks + 1, rule, 1))][:4]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    index = torch.arange(chunks, device="cuda")
    rows = PrefillRows(ends, torch.zeros_like(ends[1:]), index, index, torch.ones_like(ends[1:]))
    base = (ends.diff() // rule.period * rule.period).int()
    tokens = sum(lengths)
    zxbcdt = random(tokens, 2 * shape.d_inner + 2 * shape.bc_dim + shape.heads)
    y = random(tokens, shape.d_inner)

    def ours() -> None:
        for pool in pools:
            mamba_prefill(zxbcdt, params, pool, rows, base, rule, out=y)

    calls: dict[str, Callable[[], object]] = {"ours": ours}
    if with_megatron:
        calls["megatron"] = megatron_prefill(shape, params, lengths, len(pools), zxbcdt, ends)
    token = (shape.conv_dim + shape.heads + shape.d_inner) * 2
    return len(pools), tokens * token + chunks * shape.d_inner * shape.d_state * 4, calls


def megatron_prefill(
    shape: MambaShape,
    params: MambaParams,
    lengths: list[int],
    layers: int,
    zxbcdt: Tensor,
    ends: Tensor,
) -> Callable[[], object]:
    """Prefill chunks by Megatron-Core's kernels, their metadata made before."""
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

    return run


def operations(shape: MambaShape, tokens: int) -> float:
    """What the products of a scan in chunks of 128 take, those of C and B once a group."""
    by_head = 2 * 128 * shape.head_dim + 4 * shape.head_dim * shape.d_state
    return tokens * (shape.heads * by_head + 2 * 128 * shape.bc_dim)


def main() -> None:
    """Print microseconds a layer, the bytes' floor and their ratio; with --json, write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    shapes: dict[str, MambaShape | DeltaShape] = {**SHAPES, **delta_calls.SHAPES}
    parser.add_argument("--shapes", nargs="+", default=list(shapes), choices=shapes)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["8192", "2048", "16x512", "64x32"],
        help="prompts of a step: a length, or COUNTxLENGTH",
    )
    parser.add_argument("--megatron", action="store_true", help="time Megatron-Core's kernels too")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmark_recurrent: needs a CUDA device, and torch finds none.\n")
    figures = []

    def measure(
        case: str, calls: tuple[int, int, dict[str, Callable[[], object]]], **more: Any
    ) -> None:
        layers, least, timed = calls
        floor = least / BANDWIDTH * 1e6
        found = {}
        for name, call in timed.items():
            try:
                found[name] = graph_us(call, 1) / layers
            except Exception as error:
                if name in OURS:
                    raise
                print(f"{case}: {name} does not run: {error}", flush=True)
        cells = "".join(f"  {name} {us:.2f} us" for name, us in found.items())
        share = ""
        if "operations" in more:
            share = f"  {more['operations'] / found['ours'] * 1e6 / PEAK:.0%} of the peak"
        ratio = found["ours"] / floor
        print(f"{case:<44} floor {floor:.2f} us  ratio {ratio:.2f}{cells}{share}", flush=True)
        times = {f"{name}_us": us for name, us in found.items()}
        figures.append({"case": case, "floor_us": floor, **times, **more})

    for name in args.shapes:
        shape = shapes[name]
        for rows, width in itertools.product(args.rows, args.widths):
            if isinstance(shape, MambaShape):
                calls = decode_calls(shape, rows, width, args.megatron)
            else:
                calls = delta_calls.decode_calls(shape, rows, width)
            measure(f"{name} decode {rows} x {width}", calls)
        for prompts in args.prompts:
            count, _, length = prompts.rpartition("x")
            lengths = [int(length)] * int(count or 1)
            if isinstance(shape, MambaShape):
                work = operations(shape, sum(lengths))
                calls = prefill_calls(shape, lengths, args.megatron)
            else:
                work = delta_calls.operations(shape, sum(lengths))
                calls = delta_calls.prefill_calls(shape, lengths)
            measure(f"{name} prefill {prompts}", calls, operations=work)
    if args.json:
        write_record(args.json, "recurrent", {"device": "cuda", **vars(args)}, figures)


if __name__ == "__main__":
    main()
