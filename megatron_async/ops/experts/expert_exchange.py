"""Tokens with their routing to all ranks that share experts, and the sums of the experts' outputs
back, over symmetric memory, in a kernel each.

One program serves the t-th token of every rank, which is a place of a `Meeting`. `gather_tokens`'
writes its rank's token with its routing as one row, meets the other ranks, and copies the rows of
all ranks. `combine_sums`' writes its rank's partial sums of all these tokens, meets the others, and
reads all ranks' partial sums of its own t-th token. They are added in the order of ranks, in
float32. Residual add and RMSNorm may follow, as in `ops/ranks/symmetric_all_reduce.py`.

A decode step of a model with 48 layers has 96 exchanges of some kilobytes. NCCL's take longer than
the transfer of the bytes, and the gather needs four kernels before it that pack the rows. So these
serve up to `EXCHANGE_BYTES`; NCCL serves larger steps.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.experts.expert_routing import IN_KERNEL_NO_EXPERT, Routing
from megatron_async.ops.ranks.symmetric_memory import (
    Meeting,
    make_meeting,
    make_on_all,
    meet,
    tell_group,
)

ROW_ALIGNMENT = 32
"""Bytes that the row of a token is padded to, so that kernels read it in whole words."""
WORD = 4
"""Bytes that the kernel copies as one."""
EXCHANGE_BYTES = 4 << 20
"""Most bytes that a rank reads from others in one exchange: enough for decode steps. On 4 H200s our
kernels were ahead of NCCL at all sizes tried, up to three times this
(docs/records/several_gpus.md); more takes more memory."""
LIMIT_VARIABLE = "MEGATRON_ASYNC_EXCHANGE_BYTES"
"""Environment variable that stands in for `EXCHANGE_BYTES`; 0: NCCL serves all steps. Of several
ranks' values the least counts."""
MAX_PROGRAM_BYTES = 128 << 10
"""Rows of all ranks that a program holds in its registers."""


def packed_row_bytes(hidden: int, topk: int, dtype: torch.dtype) -> int:
    """Bytes of a token, its experts (int32) and their weights (float32), and padding."""
    row = hidden * dtype.itemsize + topk * (torch.int32.itemsize + torch.float32.itemsize)
    return -(-row // ROW_ALIGNMENT) * ROW_ALIGNMENT


def gather_tokens(x: Tensor, routing: Routing, tokens: int, meeting: Meeting) -> Tensor:
    """Packed rows of all ranks' tokens.

    Args:
        x: `[own tokens, hidden]`, contiguous, on a GPU; rows of whole words.
        routing: of these tokens, contiguous.
        tokens: of each rank, padding included, the same on all. Padding goes to no expert.
        meeting: its data are packed rows, int32 words.

    Returns:
        uint8 `[ranks * tokens, packed_row_bytes(...)]`, in the order of ranks.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or there are more tokens than places.
    """
    own, hidden = x.shape
    experts, weights = routing.experts, routing.weights
    row = hidden * x.element_size()
    if not own <= tokens <= meeting.places or row % WORD:
        raise ValueError(
            f"gather_tokens: there may be at most {tokens} tokens here and {meeting.places} on "
            f"each rank, of whole words; found {own} of {row} bytes."
        )
    if experts.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(
            f"gather_tokens: experts must be int32 and weights float32; found {experts.dtype} and "
            f"{weights.dtype}."
        )
    if experts.shape != weights.shape or len(experts) != own:
        raise ValueError(
            f"gather_tokens: {own} tokens, but experts {tuple(experts.shape)} and weights "
            f"{tuple(weights.shape)}."
        )
    if not (x.is_contiguous() and experts.is_contiguous() and weights.is_contiguous()):
        raise ValueError("gather_tokens: x and routing must be contiguous: call .contiguous().")
    topk = experts.size(1)
    words = packed_row_bytes(hidden, topk, x.dtype) // WORD
    x_words = row // WORD
    out = torch.empty((len(meeting.pointers) * tokens, words), dtype=torch.int32, device=x.device)
    if tokens:
        block = triton.next_power_of_2(x_words)
        _gather_kernel[(tokens,)](
            x.view(torch.int32),
            experts,
            weights.view(torch.int32),
            out,
            meeting.pointers,
            meeting.turns,
            own,
            tokens,
            **meeting.constants,
            x_words=x_words,
            topk=topk,
            words=words,
            block=block,
            block_topk=triton.next_power_of_2(topk),
            block_rest=triton.next_power_of_2(words - x_words),
            num_warps=meeting.warps(block * WORD),
            **launch_options(x),
        )
    return out.view(torch.uint8)


@triton.jit(do_not_specialize=["own", "tokens"])
def _gather_kernel(
    x: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    pointers: tl.tensor,
    turns: tl.tensor,
    own: tl.tensor,
    tokens: tl.tensor,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    first: tl.constexpr,
    x_words: tl.constexpr,
    topk: tl.constexpr,
    words: tl.constexpr,
    block: tl.constexpr,
    block_topk: tl.constexpr,
    block_rest: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One word of `x`, `experts`, `weights` and `out` is an int32."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < x_words
    choice = tl.arange(0, block_topk)
    is_choice = choice < topk
    bases = ()
    for peer in tl.static_range(ranks):
        base = tl.load(pointers + peer).to(tl.pointer_type(tl.int32))
        bases += (tl.multiple_of(base, 16),)  # type: ignore[assignment]
    wait_for_previous(overlap)
    real = place < own
    turn = tl.load(turns + place) + 1
    start = first + ((turn & 1).to(tl.int64) * places + place) * words
    mine = bases[rank] + start
    found = tl.load(x + place * x_words + column, mask=inside & real, other=0)
    chosen = tl.load(
        experts + place * topk + choice, mask=is_choice & real, other=IN_KERNEL_NO_EXPERT
    )
    weight = tl.load(weights + place * topk + choice, mask=is_choice & real, other=0)
    tl.store(mine + column, found, mask=inside)
    tl.store(mine + x_words + choice, chosen, mask=is_choice)
    tl.store(mine + x_words + topk + choice, weight, mask=is_choice)
    meet(pointers, turns, place, turn, rank, ranks, lanes)
    # All loads before all stores: each would wait for the one before it.
    rest = x_words + tl.arange(0, block_rest)
    is_rest = rest < x_words + 2 * topk
    rows = ()
    tails = ()
    for peer in tl.static_range(ranks):
        its = bases[peer] + start
        row = tl.load(its + column, mask=inside, other=0, cache_modifier=".cg")
        tail = tl.load(its + rest, mask=is_rest, other=0, cache_modifier=".cg")
        rows += (row,)  # type: ignore[assignment]
        tails += (tail,)  # type: ignore[assignment]
    for peer in tl.static_range(ranks):
        target = out + (peer * tokens + place) * words
        tl.store(target + column, rows[peer], mask=inside)
        tl.store(target + rest, tails[peer], mask=is_rest)


def combine_sums(sums: Tensor, own_tokens: int, meeting: Meeting) -> Tensor:
    """Sums over the ranks of this rank's tokens.

    Args:
        sums: `[ranks * tokens, hidden]`, partial sums of all ranks' tokens, contiguous, on a GPU.
        own_tokens: number of this rank's tokens without padding.
        meeting: its data are sums of the same dtype, `[2, places, ranks, hidden]`.

    Returns:
        `[own tokens, hidden]`.

    Raises:
        ValueError: shapes or strides do not fit, or there are more tokens than places.
    """
    out = torch.empty((own_tokens, sums.size(1)), dtype=sums.dtype, device=sums.device)
    _launch_combine(sums, None, out, 0.0, meeting)
    return out


def combine_in_slices(sums: Tensor, own_tokens: int, meeting: Meeting) -> Tensor:
    """`combine_sums` of any number of tokens, as many at a time as there are places."""
    ranks, most = len(meeting.pointers), meeting.places
    slices = sums.unflatten(0, (ranks, -1)).split(most, 1)
    counts = (min(max(own_tokens - n * most, 0), part.size(1)) for n, part in enumerate(slices))
    return torch.cat([
        combine_sums(part.flatten(0, 1).contiguous(), count, meeting)
        for part, count in zip(slices, counts, strict=True)
    ])  # fmt: skip


def combine_add_rms_norm(
    sums: Tensor, residual: Tensor, weight: Tensor, eps: float, meeting: Meeting
) -> tuple[Tensor, Tensor]:
    """`combine_sums` of as many tokens as the residual has, added to it, and the norm of that.

    Args:
        sums, meeting: see `combine_sums`.
        residual: `[own tokens, hidden]`; rows may be strided.
        weight: `[hidden]`, the norm's weight.
        eps: added to the mean square.

    Returns:
        normed `[own tokens, hidden]`, and the new residual.

    Raises:
        ValueError: shapes or strides do not fit, or there are more tokens than places.
    """
    own, hidden = residual.shape
    if sums.size(1) != hidden or weight.shape != (hidden,):
        raise ValueError(
            f"combine_add_rms_norm: sums are {tuple(sums.shape)}, so weight and residual must be "
            f"{sums.size(1)} wide; found {tuple(weight.shape)} and {tuple(residual.shape)}."
        )
    if residual.dtype != sums.dtype or residual.stride(1) != 1:
        raise ValueError(
            f"combine_add_rms_norm: residual must be {sums.dtype} with adjacent elements in its "
            f"rows; found {residual.dtype}, strides {residual.stride()}."
        )
    normed = torch.empty((own, hidden), dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed)
    _launch_combine(sums, (residual, weight, normed), total, eps, meeting)
    return normed, total


def _launch_combine(
    sums: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | None,
    total: Tensor,
    eps: float,
    meeting: Meeting,
) -> None:
    """Check and launch; `norm` are residual, weight and where to put the norm."""
    residual, weight, normed = norm or (total, total, total)
    own, hidden = total.shape
    ranks = len(meeting.pointers)
    tokens, rest = divmod(sums.size(0), ranks)
    if rest or not own <= tokens <= meeting.places or not sums.is_contiguous():
        raise ValueError(
            f"combine_sums: sums must be contiguous, of {ranks} times at least {own} and at most "
            f"{meeting.places} tokens; found {tuple(sums.shape)}, strides {sums.stride()}."
        )
    block = triton.next_power_of_2(hidden)
    if tokens:
        _combine_kernel[(tokens,)](
            sums,
            residual,
            weight,
            normed,
            total,
            meeting.pointers,
            meeting.turns,
            own,
            tokens,
            residual.stride(0),
            eps,
            **meeting.constants,
            hidden=hidden,
            block=block,
            has_norm=norm is not None,
            num_warps=meeting.warps(block * sums.element_size()),
            **launch_options(sums),
        )


@triton.jit(do_not_specialize=["own", "tokens"])
def _combine_kernel(
    sums: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    pointers: tl.tensor,
    turns: tl.tensor,
    own: tl.tensor,
    tokens: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    first: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
    has_norm: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    dtype: tl.constexpr = total.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    bases = ()
    for peer in tl.static_range(ranks):
        base = tl.load(pointers + peer).to(tl.pointer_type(dtype))
        bases += (tl.multiple_of(base, 16),)  # type: ignore[assignment]
    if has_norm:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(overlap)
    turn = tl.load(turns + place) + 1
    start = first + ((turn & 1).to(tl.int64) * places + place) * ranks * hidden
    mine = bases[rank] + start
    rows = ()
    for peer in tl.static_range(ranks):
        source = sums + (peer * tokens + place) * hidden
        row = tl.load(source + column, mask=inside, other=0.0)
        rows += (row,)  # type: ignore[assignment]
    for peer in tl.static_range(ranks):
        tl.store(mine + peer * hidden + column, rows[peer], mask=inside)
    meet(pointers, turns, place, turn, rank, ranks, lanes)
    real = inside & (place < own)
    value = tl.zeros((block,), tl.float32)
    for peer in tl.static_range(ranks):
        theirs = bases[peer] + start + rank * hidden
        value += tl.load(theirs + column, mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
    if has_norm:
        value = value.to(dtype).to(tl.float32)
        before = tl.load(residual + place * residual_stride + column, mask=real, other=0.0)
        rounded = (before.to(tl.float32) + value).to(dtype)
        tl.store(total + place * hidden + column, rounded, mask=real)
        value = rounded.to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value) / hidden + eps)
        tl.store(normed + place * hidden + column, value * factor * scale, mask=real)
    else:
        tl.store(total + place * hidden + column, value, mask=real)


class SymmetricExchange(NamedTuple):
    """Workspaces of a group for `gather_tokens`, and for `combine_sums`."""

    gathers: Meeting
    combines: Meeting


class ExpertExchange:
    """Which exchanges of one group go through symmetric memory; get it by `exchange_of`.

    Args:
        group: the ranks.

    Attributes:
        symmetric: what `prepare` has made, by width, experts of a token and dtype. They stay,
            because captured steps hold their addresses.
        fallback: why there are none, or "".
        calls: exchanges of eager and captured steps by kernel, as they were enqueued.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.symmetric: dict[tuple[int, int, torch.dtype], SymmetricExchange] = {}
        self.fallback = ""
        self.calls: Counter[str] = Counter()

    def prepare(
        self, max_tokens: int, hidden: int, topk: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the workspaces of the largest step that they serve, before the first; all ranks
        together. `max_tokens` are those of a rank's step.

        Raises:
            ConfigurationError: `LIMIT_VARIABLE` is not a number of bytes.
        """
        ranks = self._group.size()
        if ranks == 1 or device.type != "cuda":
            return
        if (hidden, topk, dtype) in self.symmetric or self.fallback:
            return
        largest = str(self._largest(max_tokens, hidden, topk, dtype))
        wanted = min(map(int, tell_group(self._group, "limits of exchanges", largest)))
        if not wanted:
            self.fallback = f"{LIMIT_VARIABLE} is less than a token, or the model is too wide"
            return
        words = packed_row_bytes(hidden, topk, dtype) // WORD
        made, self.fallback = make_on_all(
            self._group,
            lambda: SymmetricExchange(
                make_meeting(self._group, wanted, words, torch.int32, device),
                make_meeting(self._group, wanted, ranks * hidden, dtype, device),
            ),
        )
        if made is not None:
            self.symmetric[hidden, topk, dtype] = made

    def check_order(self) -> None:
        """Refuse what no kernel adds up in one order, after `prepare`.

        Raises:
            ConfigurationError: of more than two summands, which have one sum in any order.
        """
        if (ranks := self._group.size()) > 2 and not self.symmetric:
            raise ConfigurationError(
                f"batch_invariant_mode=True is not served with experts on {ranks} ranks here: "
                f"{self.fallback}. Use at most 2, or leave the mode out."
            )

    def find(
        self, tokens: int, hidden: int, topk: int, dtype: torch.dtype
    ) -> SymmetricExchange | None:
        """The exchange for so many tokens of each rank; the same on all ranks."""
        found = self.symmetric.get((hidden, topk, dtype))
        return found if found is not None and tokens <= found.gathers.places else None

    @property
    def report(self) -> str | None:
        """The exchange for each range of sizes, with reasons; None if there is no choice."""
        ranks = self._group.size()
        if self.symmetric:
            tokens = ", ".join(str(found.gathers.places) for found in self.symmetric.values())
            return (
                f"exchange of experts' tokens over {ranks} ranks: one kernel up to {tokens} tokens "
                "a rank, over symmetric memory; NCCL beyond"
            )
        if self.fallback:
            return f"exchange of experts' tokens over {ranks} ranks: NCCL ({self.fallback})"
        return None

    def _largest(self, max_tokens: int, hidden: int, topk: int, dtype: torch.dtype) -> int:
        """Tokens of a rank that the kernels take by this rank's limit."""
        ranks, row = self._group.size(), hidden * dtype.itemsize
        held = triton.next_power_of_2(ranks) * triton.next_power_of_2(row)
        if held > MAX_PROGRAM_BYTES or row % WORD:
            return 0
        read = (ranks - 1) * packed_row_bytes(hidden, topk, dtype)
        return min(max_tokens, _limit() // read)


@cache
def exchange_of(group: dist.ProcessGroup) -> ExpertExchange:
    """The exchange of a group: one object, and one set of workspaces, for all its users."""
    return ExpertExchange(group)


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, str(EXCHANGE_BYTES))
    if not text.isdecimal():
        raise ConfigurationError(f"{LIMIT_VARIABLE}={text!r} must be a number of bytes, 0 or more.")
    return int(text)
