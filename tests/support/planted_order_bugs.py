"""Bugs of the bit-stable mode, planted one at a time in engines whose kernels run in Triton's
interpreter (see `planted_bugs`): another order of sums, where what runs beside decides."""

import random
from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.device_state import recurrent_state
from megatron_async.models import moe
from megatron_async.ops.attention import decode_attention, prefill_attention
from megatron_async.ops.attention.decode_schedule import DecodeSchedule
from megatron_async.ops.attention.join_parts import add_sink, join_one
from megatron_async.ops.experts import expert_mlp, few_token_chains
from megatron_async.ops.linear import products
from megatron_async.ops.linear.tile import TILE
from megatron_async.ops.recurrent.recurrent_pools import FlushRule
from tests.support.planted_bugs import Plant

CHOOSER = random.Random(0)
"""Chooser of what comes first on a GPU; programs of the interpreter come in their order."""


def keys_split_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of keys are shorter where several rows decode."""
    update, parts = DecodeSchedule.update, dict[DecodeSchedule, int]()

    def update_by_rows(schedule: DecodeSchedule, lengths: Tensor, *limit: Any) -> None:
        part = parts.setdefault(schedule, schedule.part)
        schedule.part = part if len(lengths) == 1 else part // 2
        update(schedule, lengths, *limit)

    monkeypatch.setattr(DecodeSchedule, "update", update_by_rows)


def inputs_split_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of few rows is the sum of two, which are rounded before."""

    def plan(problem: Any) -> Any:
        found = TILE.plan(problem)
        if found is None or problem.rows > 16:
            return found
        return replace(found, block_k=problem.k // 2, splits=2)

    def launch(x: Tensor, *arguments: Any) -> Tensor:
        sums = TILE.launch(x, *arguments)
        return sums.to(x.dtype).sum(0) if sums.dim() == 3 else sums

    kernel = replace(TILE, plan=plan, launch=launch)
    monkeypatch.setattr(products, "INVARIANT", (kernel,))
    monkeypatch.setattr(products, "choose", products.choose.__wrapped__)  # keeps nothing


@triton.jit
def _join_as_they_came(
    part_output: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    first_slot: tl.tensor,
    parts: tl.tensor,
    head: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    at_once: tl.constexpr = 1,
    scale: tl.tensor = 1.0,
    sink: tl.tensor = None,
) -> tl.tensor:
    maximum = tl.full((inside.shape[0],), -float("inf"), tl.float32)
    total = tl.zeros((inside.shape[0],), tl.float32)
    gathered = tl.zeros(inside.shape, tl.float32)
    mine = tl.max(inside.to(tl.int32), 1) > 0
    for nth in _order(parts):
        at = (first_slot + nth) * heads
        its_maximum = tl.load(part_maximum + at + head, mine, -float("inf"))
        its_total = tl.load(part_total + at + head, mine, 0.0)
        output = tl.load(part_output + at * dim + place, inside, 0.0)
        maximum, total, gathered = join_one(
            maximum, total, gathered, its_maximum, its_total, output, scale
        )
        gathered = gathered.to(tl.float16).to(tl.float32)
    if sink is not None:
        total = add_sink(total, maximum, sink, scale)
    return gathered / tl.maximum(total, 1e-30)[:, None]


def _order(parts: Any) -> list[int]:
    return CHOOSER.sample(range(int(parts)), int(parts))


def parts_joined_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is joined to the row's 16-bit output when it is done."""
    for module in (decode_attention, prefill_attention):
        monkeypatch.setattr(module, "join_parts", _join_as_they_came)


def tiles_cut_at_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan's tile begins again where a chunk does, and decode steps have sums of their own."""

    def cutting_rule(lag: int, tile: int) -> FlushRule:
        return FlushRule(16, lag)

    monkeypatch.setattr(recurrent_state, "replaying_rule", cutting_rule)


class _SumsAsTheyCame:
    """In place of the kernel that adds a token's experts."""

    def __getitem__(self, grid: Any) -> Any:
        return self._add

    @staticmethod
    def _add(
        outputs: Tensor, _experts: Tensor, _stride: int, out: Tensor, *_: Any, **named: Any
    ) -> None:
        pairs = outputs.view(len(out), named["topk"], -1)
        out.zero_()
        for token, its in enumerate(pairs):
            for nth in _order(len(its)):
                out[token] += its[nth]


def experts_added_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert adds to a token's 16-bit sum when it is done."""
    monkeypatch.setattr(expert_mlp, "combine_kernel", _SumsAsTheyCame())


@triton.jit
def _not_rounded(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return value


def one_token_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a lone token's experts are rounded behind what follows them."""
    monkeypatch.setattr(few_token_chains, "round_to", _not_rounded)
    monkeypatch.setattr(moe, "FEW_CHAINS", 1)


ORDER_BUGS: dict[Plant, tuple[str, int]] = {
    keys_split_by_rows: ("*-", 6),
    inputs_split_by_rows: ("*-", 5),
    parts_joined_as_they_came: ("*-", 5),
    tiles_cut_at_chunks: ("M*", 5),
    experts_added_as_they_came: ("*E", 1),
    one_token_rounded_once: ("*E", 6),
}
"""Each with the layers in which it shows, and a schedule that finds it soon."""
