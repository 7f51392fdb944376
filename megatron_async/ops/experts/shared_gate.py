"""The shared expert behind its gate, added to the other experts' sum.

One number a token says how much of the shared expert counts: the sigmoid of a product of the
token's hidden state (Qwen2-MoE and Qwen3-Next; Megatron-Core's `moe_shared_expert_gate`). One
program a token: product, sigmoid and addition, in float32, rounded once; or each rounded, as
Megatron's modules do, where the promise "invariant" is to be kept.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.linear.activations import round_to, rounded_product
from megatron_async.ops.op import op, promising

MAX_HIDDEN = 16384
"""A row is held in the registers of one program."""


@op
def add_shared_expert(sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`sums + sigmoid(x @ weight.T) * shared`.

    Args:
        sums: `[tokens, hidden]`, contiguous, what the routed experts give; bfloat16, float16 or
            float32 on a GPU.
        shared: like `sums`: what the shared expert gives.
        x: like `sums`: the input of the layer.
        weight: `[1, hidden]`, contiguous, of the gate.

    Returns:
        `[tokens, hidden]`, dtype of `sums`.

    Raises:
        ValueError: shapes do not match, a tensor is not contiguous, or rows are too long.
    """
    _check(sums, shared, x, weight)
    wide = torch.promote_types(sums.dtype, torch.float32)
    gate = (x.to(wide) @ weight.to(wide).t()).sigmoid()
    return (sums.to(wide) + gate * shared.to(wide)).to(sums.dtype)


def add_shared_expert_gpu(
    sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor, rounds: bool = False
) -> Tensor:
    """`rounds`: as Megatron's modules do, between operations too."""
    tokens, hidden = sums.shape
    _check(sums, shared, x, weight)
    if hidden > MAX_HIDDEN:
        raise ValueError(
            f"add_shared_expert: hidden size {hidden} is over {MAX_HIDDEN}, what one program "
            "holds: use add_shared_expert.reference."
        )
    out = torch.empty_like(sums)
    if tokens:
        block = triton.next_power_of_2(hidden)
        _add_shared_expert_kernel[(tokens,)](
            sums,
            shared,
            x,
            weight,
            out,
            hidden=hidden,
            block=block,
            rounds=rounds,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(sums),
        )
    return out


add_shared_expert.gpu(add_shared_expert_gpu)
add_shared_expert.gpu(promising("invariant")(partial(add_shared_expert_gpu, rounds=True)))


def _check(sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in (sums, shared, x)}
    if len(shapes) > 1 or weight.shape != (1, sums.size(1)):
        raise ValueError(
            f"add_shared_expert: sums, shared and x must be alike and weight (1, {sums.size(1)}); "
            f"found {tuple(sums.shape)}, {tuple(shared.shape)}, {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if not all(tensor.is_contiguous() for tensor in (sums, shared, x, weight)):
        raise ValueError("add_shared_expert: tensors must be contiguous: call .contiguous().")


@triton.jit
def _add_shared_expert_kernel(
    sums: tl.tensor,
    shared: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    hidden: tl.constexpr,
    block: tl.constexpr,
    rounds: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    column = tl.arange(0, block)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    place = tl.program_id(0).to(tl.int64) * hidden + column
    row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gate = gate_of(gate_logit(row, scale), out.dtype.element_ty, rounds)
    value = tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(shared + place, mask=inside, other=0.0).to(tl.float32)
    if rounds:
        other = rounded_product(other, gate, out.dtype.element_ty)
        tl.store(out + place, value + other, mask=inside)
    else:
        tl.store(out + place, value + gate * other, mask=inside)


@triton.jit
def gate_logit(row: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """A token times the gate's weight, both float32 of one layout."""
    return tl.sum(row * scale)


@triton.jit
def gate_of(logit: tl.tensor, dtype: tl.constexpr, rounds: tl.constexpr) -> tl.tensor:
    """How much of the shared expert counts; rounded to `dtype`, as the logit is, if `rounds`."""
    if rounds:
        logit = round_to(logit, dtype)
    gate = 1.0 / (1.0 + tl.exp(-logit))
    return round_to(gate, dtype) if rounds else gate
