"""Which experts each token goes to, and with what weights.

The router's linear layer is computed with float32 sums that are not rounded to bfloat16, in which
different logits could become equal. Among equal scores the expert with the lower number is chosen.
On a GPU there are two kernels: the first computes partial logits, split along the inputs so that a
few tokens fill the device; the second adds them in order and computes scores and choice.

Scores are the softmax of the logits, or the sigmoid of each (DeepSeek-V3, arXiv 2412.19437). A bias
of each expert, which balanced the load in training, is added to the score only for the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.ops.dependent_launch import (
    await_previous,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from megatron_async.ops.op import op, promising

NO_EXPERT = -1
"""Expert of a token that goes nowhere."""
IN_KERNEL_NO_EXPERT = tl.constexpr(NO_EXPERT)
LEAST_SUM = 1e-20
"""Added to the sum of sigmoids before it divides, as Megatron-Core and transformers do."""
IN_KERNEL_LEAST_SUM = tl.constexpr(LEAST_SUM)
BLOCK_TOKENS = 16
BLOCK_K = 64
PROGRAMS = 128
"""Programs of the logits' kernel that fill a device."""
MAX_SPLITS = 16
MOST_TILES = 128
"""Tiles of tokens up to which all parts of logits whose parts do not depend on the tokens are
stored: 16 MiB, of 128 experts. Beyond, a program adds them up itself; not measured."""


@dataclass
class Routing:
    """Experts of tokens.

    Attributes:
        experts: int32 `[tokens, topk]`, best first; `NO_EXPERT` where a token goes nowhere.
        weights: float32 `[tokens, topk]`, what the experts' outputs are multiplied by; 0 there.
    """

    experts: Tensor
    weights: Tensor


@op(cpu="experts.cpu.host_routing")
def route(
    x: Tensor,
    weight: Tensor,
    topk: int,
    pre_softmax: bool,
    places: Tensor | None = None,
    dummy_place: int = 0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
) -> Routing:
    """Choose experts.

    Args:
        x: `[tokens, hidden]` on a GPU, its rows contiguous.
        weight: `[experts, hidden]`, same dtype, contiguous.
        topk: experts a token.
        pre_softmax: weights are the softmax over all experts, not over the chosen ones.
        places: int64 `[tokens or fewer]`, where in the KV cache tokens are written; None: all
            tokens are real.
        dummy_place: tokens with this place, and those without a place, are dummies: they go
            nowhere.
        sigmoid: scores are the logits' sigmoids; with more than one expert a token, weights are
            divided by their sum, and `pre_softmax` is not read.
        bias: float32 `[experts]`, contiguous, added to the sigmoids for the choice; or None.
        scale: weights are multiplied by it at last.
        logit_bias: `[experts]`, contiguous, the linear layer's own bias; or None.

    Raises:
        ValueError: shapes, dtypes or strides do not fit; a bias of softmax scores.
    """
    check(x, weight, topk, sigmoid, bias, logit_bias)
    logits = _logits(x, weight, logit_bias)
    scores = logits.sigmoid() if sigmoid else logits
    preferred = scores if bias is None else scores + bias
    experts = preferred.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    weights = _weights_of(logits, experts, pre_softmax, sigmoid, scale)
    experts = experts.to(torch.int32)
    if places is not None:
        real = torch.zeros((x.size(0), 1), dtype=torch.bool, device=x.device)
        real[: len(places), 0] = places != dummy_place
        experts, weights = experts.where(real, NO_EXPERT), weights.where(real, 0.0)
    return Routing(experts.contiguous(), weights.contiguous())


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = x.float() @ weight.float().t()
    return logits if bias is None else logits + bias.float()


def _weights_of(
    logits: Tensor, experts: Tensor, pre_softmax: bool, sigmoid: bool, scale: float
) -> Tensor:
    """Weights of chosen experts, float32 `[tokens, topk]`, from all logits."""
    if not sigmoid:
        chosen = logits.softmax(1).gather(1, experts) if pre_softmax else logits.gather(1, experts)
        return (chosen if pre_softmax else chosen.softmax(1)) * scale
    weights = logits.sigmoid().gather(1, experts)
    if experts.size(1) > 1:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
    return weights * scale


def force_routing(
    routing: Routing,
    forced: Tensor,
    x: Tensor,
    weight: Tensor,
    pre_softmax: bool,
    sigmoid: bool,
    scale: float,
    logit_bias: Tensor | None = None,
) -> Routing:
    """Send tokens to given experts, in plain torch on any device; their weights follow from the
    scores.

    Args:
        routing: by the router's own choice.
        forced: int32 `[tokens or fewer, topk]`; -1 in a row: it stays as it is. Dummies do too.
        x, weight, pre_softmax, sigmoid, scale, logit_bias: as for `route`.
    """
    given = torch.full_like(routing.experts, NO_EXPERT)
    given[: len(forced)] = forced
    is_forced = (given >= 0) & (routing.experts != NO_EXPERT)
    logits = _logits(x, weight, logit_bias)
    weights = _weights_of(logits, given.clamp(min=0).long(), pre_softmax, sigmoid, scale)
    return Routing(
        given.where(is_forced, routing.experts), weights.where(is_forced, routing.weights)
    )


@route.gpu
def route_gpu(
    x: Tensor,
    weight: Tensor,
    topk: int,
    pre_softmax: bool,
    places: Tensor | None = None,
    dummy_place: int = 0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
) -> Routing:
    """In as many parts as fill the device."""
    rule = pre_softmax, places, dummy_place, sigmoid, bias, scale, logit_bias
    tiles = max(triton.cdiv(len(x), BLOCK_TOKENS), 1)
    return _route(x, weight, topk, *rule, most=PROGRAMS // tiles)


@route.gpu
@promising("invariant")
def route_invariant_gpu(
    x: Tensor,
    weight: Tensor,
    topk: int,
    pre_softmax: bool,
    places: Tensor | None = None,
    dummy_place: int = 0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
) -> Routing:
    """In parts that do not depend on the number of tokens."""
    rule = pre_softmax, places, dummy_place, sigmoid, bias, scale, logit_bias
    return _route(x, weight, topk, *rule, MAX_SPLITS, len(x) > MOST_TILES * BLOCK_TOKENS)


def _route(
    x: Tensor,
    weight: Tensor,
    topk: int,
    pre_softmax: bool,
    places: Tensor | None,
    dummy_place: int,
    sigmoid: bool,
    bias: Tensor | None,
    scale: float,
    logit_bias: Tensor | None,
    most: int,
    joins: bool = False,
) -> Routing:
    """`most`: parts of logits. `joins`: a program adds up the parts of its tokens."""
    tokens, hidden = x.shape
    experts = weight.size(0)
    check(x, weight, topk, sigmoid, bias, logit_bias)
    out = Routing(
        torch.empty((tokens, topk), dtype=torch.int32, device=x.device),
        torch.empty((tokens, topk), dtype=torch.float32, device=x.device),
    )
    if not tokens:
        return out
    tiles = triton.cdiv(tokens, BLOCK_TOKENS)
    share = share_of_inputs(hidden, most)
    splits, shares = triton.cdiv(hidden, share), 1
    if joins:
        splits, shares = 1, splits
    logits = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    block = max(16, triton.next_power_of_2(experts))
    _logits_kernel[(tiles, splits)](
        x,
        weight,
        logits,
        x.stride(0),
        tokens,
        logit_bias,
        hidden=hidden,
        experts=experts,
        share=share,
        shares=shares,
        block_tokens=BLOCK_TOKENS,
        block_experts=block,
        block_k=BLOCK_K,
        num_warps=4 if block <= 128 else 8,
        **launch_options(x),
    )
    _choose_kernel[(tokens,)](
        logits,
        out.experts if places is None else places,
        logits if bias is None else bias,
        out.experts,
        out.weights,
        tokens,
        0 if places is None else len(places),
        dummy_place,
        scale,
        splits=splits,
        experts=experts,
        topk=topk,
        block=block,
        block_topk=triton.next_power_of_2(topk),
        pre_softmax=pre_softmax,
        sigmoid=sigmoid,
        has_bias=bias is not None,
        has_places=places is not None,
        num_warps=1 if block <= 256 else 4,
        **launch_options(x),
    )
    return out


def share_of_inputs(hidden: int, most: int = MAX_SPLITS) -> int:
    """Inputs of each of at most `most` parts of logits, a multiple of `BLOCK_K`."""
    steps = triton.cdiv(hidden, BLOCK_K)
    return triton.cdiv(steps, max(1, min(MAX_SPLITS, steps, most))) * BLOCK_K


def check(
    x: Tensor,
    weight: Tensor,
    topk: int,
    sigmoid: bool,
    bias: Tensor | None,
    logit_bias: Tensor | None,
) -> None:
    """Raise the errors of `route`."""
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1) or x.dtype != weight.dtype:
        raise ValueError(
            f"route: x must be [tokens, hidden] and weight [experts, hidden] of one dtype; found "
            f"{tuple(x.shape)} ({x.dtype}) and {tuple(weight.shape)} ({weight.dtype})."
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("route: rows of x and the weight must be contiguous: call .contiguous().")
    if not 0 < topk <= weight.size(0):
        raise ValueError(f"route: topk={topk} must be between 1 and {weight.size(0)} experts.")
    of_logits = weight.shape[:1] if logit_bias is None else logit_bias.shape
    if of_logits != weight.shape[:1]:
        raise ValueError(f"route: logit_bias must be ({weight.size(0)},); found {of_logits}.")
    if bias is None:
        return
    if bias.shape != weight.shape[:1] or bias.dtype != torch.float32 or not bias.is_contiguous():
        raise ValueError(
            f"route: bias must be float32 ({weight.size(0)},), contiguous; found "
            f"{tuple(bias.shape)} ({bias.dtype})."
        )
    if not sigmoid:
        raise ValueError("route: a bias is for sigmoid scores alone: pass sigmoid=True.")


@triton.jit
def _share_of_logits(
    source: tl.tensor,
    rows: tl.tensor,
    is_token: tl.tensor,
    is_expert: tl.tensor,
    begin: tl.tensor,
    hidden: tl.constexpr,
    share: tl.constexpr,
    block_k: tl.constexpr,
) -> tl.tensor:
    """Partial logits, float32 `[tokens, experts]`, of `share` inputs from `begin` on."""
    column = begin + tl.arange(0, block_k)
    sums = tl.zeros((is_token.shape[0], is_expert.shape[0]), tl.float32)
    for at in range(0, share, block_k):
        inside = (column + at < hidden)[None, :]
        v = tl.load(source + (column + at)[None, :], mask=is_token & inside, other=0.0)
        w = tl.load(rows + (column + at)[None, :], mask=is_expert & inside, other=0.0)
        sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    logits: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    logit_bias: tl.tensor | None,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    share: tl.constexpr,
    shares: tl.constexpr,
    block_tokens: tl.constexpr,
    block_experts: tl.constexpr,
    block_k: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Partial logits of `block_tokens` tokens over one share of the inputs; or of all `shares`,
    added up in order."""
    let_next_start(overlap)
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    part = tl.program_id(1)
    expert = tl.arange(0, block_experts)
    is_token, is_expert = (token < tokens)[:, None], (expert < experts)[:, None]
    source = x + token[:, None].to(tl.int64) * x_stride
    rows = weight + expert[:, None] * hidden
    await_previous(overlap)
    sums = _share_of_logits(source, rows, is_token, is_expert, part * share, hidden, share, block_k)
    if logit_bias is not None:
        added = tl.load(logit_bias + expert, mask=expert < experts, other=0.0).to(tl.float32)
        sums += tl.where(part == 0, added, 0.0)[None, :]
    if shares > 1:
        for number in range(1, shares):
            own = _share_of_logits(
                source, rows, is_token, is_expert, number * share, hidden, share, block_k
            )
            # With `+` Triton begins a share of one step's product with the sums before it.
            sums = tl.fma(own, tl.full(own.shape, 1.0, tl.float32), sums)
    target = logits + (part * tokens + token[:, None]).to(tl.int64) * experts + expert[None, :]
    tl.store(target, sums, mask=is_token & (expert < experts)[None, :])


@triton.jit
def powers_and_scores(
    raw: tl.tensor,
    favour: tl.tensor,
    inside: tl.tensor,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What weights of experts are in proportion to, and by what experts are chosen."""
    scores = raw
    if sigmoid:
        powers_of = tl.sigmoid(raw)
        # -inf of experts that are not there stays below any score with its bias.
        scores = tl.where(inside, powers_of, raw)
        if has_bias:
            scores += favour
    else:
        powers_of = tl.exp(raw - tl.max(raw, 0))
    return powers_of, scores


@triton.jit
def total_of(
    powers: tl.tensor,
    every: tl.tensor,
    topk: tl.constexpr,
    pre_softmax: tl.constexpr,
    sigmoid: tl.constexpr,
) -> tl.tensor:
    """What the powers of a token's experts, best first and zeros behind them, are divided by;
    `every`: the sum over all experts."""
    total = tl.sum(powers, 0)
    if sigmoid:
        total = total + IN_KERNEL_LEAST_SUM if topk > 1 else 1.0
    elif pre_softmax:
        total = every
    return total


@triton.jit(do_not_specialize=["tokens", "num_places", "dummy_place"])
def _choose_kernel(
    logits: tl.tensor,
    places: tl.tensor,
    bias: tl.tensor,
    out_experts: tl.tensor,
    out_weights: tl.tensor,
    tokens: tl.tensor,
    num_places: tl.tensor,
    dummy_place: tl.tensor,
    scale: tl.tensor,
    splits: tl.constexpr,
    experts: tl.constexpr,
    topk: tl.constexpr,
    block: tl.constexpr,
    block_topk: tl.constexpr,
    pre_softmax: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    has_places: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token: the `topk` largest of its scores, in order."""
    token = tl.program_id(0)
    expert = tl.arange(0, block)
    inside = expert < experts
    if has_bias:
        favour = tl.load(bias + expert, mask=inside, other=0.0)
    wait_for_previous(overlap)
    favour = favour if has_bias else 0.0
    raw = tl.zeros((block,), tl.float32)
    for part in range(splits):
        start = logits + (part * tokens + token).to(tl.int64) * experts
        raw += tl.load(start + expert, mask=inside, other=0.0)
    raw = tl.where(inside, raw, float("-inf"))
    powers_of, scores = powers_and_scores(raw, favour, inside, sigmoid, has_bias)
    every = 1.0 if sigmoid else tl.sum(powers_of, 0)
    rank = tl.arange(0, block_topk)
    chosen = tl.zeros((block_topk,), tl.int32)
    powers = tl.zeros((block_topk,), tl.float32)
    for nth in tl.static_range(topk):
        best = tl.max(scores, 0)
        # Logits that are no numbers are equal to nothing, and the choice must still exist.
        index = tl.minimum(tl.min(tl.where(scores == best, expert, block), 0), experts - 1)
        chosen = tl.where(rank == nth, index, chosen)
        power = tl.sum(tl.where(expert == index, powers_of, 0.0), 0)
        powers = tl.where(rank == nth, power, powers)
        scores = tl.where(expert == index, float("-inf"), scores)
    total = total_of(powers, every, topk, pre_softmax, sigmoid)
    real = token < tokens
    if has_places:
        real = token < num_places
        real = real & (tl.load(places + token, mask=real, other=0) != dummy_place)
    target = token * topk + rank
    tl.store(out_experts + target, tl.where(real, chosen, IN_KERNEL_NO_EXPERT), mask=rank < topk)
    tl.store(out_weights + target, tl.where(real, powers / total * scale, 0.0), mask=rank < topk)
