"""`GroupedWeight`: a weight of 4 or 8 bits, with scales and offsets for each 32 or 16 inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.linear.cpu.group_form import (
    GROUP,
    GroupForm,
    Groups,
    StoredGroups,
    widened,
)
from megatron_async.ops.linear.cpu.helpers import compile_products, helpers_of
from megatron_async.ops.linear.weight_format import INT4, INT8

PIECE = 1 << 21
"""Weights that are unpacked at once, a byte each."""


class GroupedWeight:
    """A `KeptWeight` in the order of `group_products.py`.

    Args:
        stored: the weight, which is read piece by piece.
        is_fine: rows are rounded to 16 bits, else to 8.

    Attributes:
        format, nbytes, looped: of a `KeptWeight`.
        k, address, record, is_whole: of a `WidenedWeight`.
        outputs: of the weight.
        row_bytes: of a row as rounded for it.

    Raises:
        ValueError: scales or offsets that are not finite, or beyond float16 where they have that.
    """

    def __init__(self, stored: StoredGroups, is_fine: bool = False) -> None:
        from megatron_async.ops.linear.cpu.group_products import KIND, LANES

        compile_products()
        self.outputs, self.k, form, read = stored
        self._form = form._replace(is_fine=is_fine)
        self.format = INT4 if form.bits == 4 else INT8
        groups, size = self.k // GROUP, KIND.group_bytes(self._form)
        self.row_bytes = groups * self._form.row_group_bytes
        blocks = -(-self.outputs // LANES)
        self._weight = torch.empty((blocks, groups, size), dtype=torch.uint8)
        step = max(PIECE // self.k // LANES, 1)
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            piece = read(first * LANES, min(last * LANES, self.outputs))
            pack_groups(widened(piece, form), self._form, LANES, self._weight[first:last])
        self._point()

    def _point(self) -> None:
        from megatron_async.ops.linear.cpu.group_products import KIND, LANES, loop_of
        from megatron_async.ops.linear.cpu.weight_record import WeightRecord

        self.is_whole = len(self._weight) * LANES == self.outputs
        self.address, self.nbytes = self._weight.data_ptr(), self._weight.numel()
        loop, size = loop_of(self._form), KIND.group_bytes(self._form)
        self.record = WeightRecord(LANES, size, 0, loop, self._form.is_fine)

    @property
    def looped(self) -> GroupedWeight:
        """This weight: our own loops multiply it."""
        return self

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, float32, with x rounded."""
        from megatron_async.ops.linear.cpu.group_products import LANES

        if not x.is_contiguous():
            x = x.contiguous()
        rows, blocks = x.numel() // self.k, len(self._weight)
        out = torch.empty((*x.shape[:-1], blocks * LANES), dtype=torch.float32)
        helpers_of(torch.get_num_threads()).product(
            x.data_ptr(), rows, self.k, self.address, blocks, self.record, out.data_ptr()
        )
        if not self.is_whole:
            out = out[..., : self.outputs].contiguous()
        return out if bias is None else out.add_(bias)

    def first(self, outputs: int) -> GroupedWeight:
        """The first outputs alone, of the same memory."""
        from megatron_async.ops.linear.cpu.group_products import LANES

        part: GroupedWeight = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.outputs = min(outputs, self.outputs)
        part._weight = self._weight[: -(-part.outputs // LANES)]
        part._point()
        return part

    def rows(self, numbers: Tensor) -> Tensor:
        """Weights of some outputs, float32 `[n, k]`, exactly; numbers: int64 `[n]`: of an output
        that there is not, zeros."""
        from megatron_async.ops.linear.cpu.group_products import LANES

        elsewhere = (numbers < 0) | (numbers >= self.outputs)
        here = numbers.masked_fill(elsewhere, 0)
        groups = unpack_groups(self._weight[here // LANES], here % LANES, self._form, LANES)
        return groups.values().masked_fill_(elsewhere[:, None], 0.0)


class GroupedExperts(NamedTuple):
    """A weight `[experts, outputs, k]`: the outputs of all experts one after the other, those of
    each a multiple of `LANES`."""

    weight: GroupedWeight
    experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[experts, outputs, k]`."""
        return self.experts, self.weight.outputs // self.experts, self.weight.k


def pack_groups(groups: Groups, form: GroupForm, lanes: int, out: Tensor) -> None:
    """Put numbers into uint8 `[blocks, groups, bytes of a group]`, of blocks of `lanes` outputs;
    outputs beyond the last one are zeros.

    Raises:
        ValueError: scales or offsets that are not finite, or beyond float16 where they have that.
    """
    outputs, count, _ = groups.integers.shape
    blocks = len(out)
    missing = blocks * lanes - outputs
    # Of a group: halves, instructions, lanes, the four inputs of an instruction.
    padded = F.pad(groups.integers, (0, 0, 0, 0, 0, missing)).view(blocks, lanes, count, 2, 4, 4)
    by_lane = padded.permute(0, 2, 3, 4, 1, 5).reshape(blocks, count, 2, -1)
    if form.bits == 4:
        low, high = by_lane.unbind(2)
        integers = low | (high << 4)
    else:
        integers = by_lane.flatten(2)
    at = integers.size(2)
    out[..., :at] = integers
    for of_groups in groups[1:]:
        padded = F.pad(of_groups, (0, 0, 0, 0, 0, missing))
        numbers = padded.view(blocks, lanes, count, -1).permute(0, 2, 3, 1).contiguous()
        numbers = numbers.half() if form.is_half else numbers
        if not numbers.isfinite().all():
            raise ValueError("has scales that are not finite, or that float16 does not hold")
        as_bytes = numbers.flatten(2).view(torch.uint8)
        out[..., at : at + as_bytes.size(2)] = as_bytes
        at += as_bytes.size(2)


def unpack_groups(blocks: Tensor, lane: Tensor, form: GroupForm, lanes: int) -> Groups:
    """The numbers of one output of each block: of `pack_groups`, `[n, groups, bytes]`, and the
    output's place in its block, `[n]`."""
    size, every = lanes * GROUP * form.bits // 8, torch.arange(len(blocks))
    codes = blocks[..., :size].unflatten(-1, (-1, lanes, 4))[every, :, :, lane].flatten(2)
    integers = torch.cat((codes & 15, codes >> 4), -1) if form.bits == 4 else codes
    kind = torch.float16 if form.is_half else torch.float32
    numbers = blocks[..., size:].contiguous().view(kind).unflatten(-1, (2, form.scales, lanes))
    of_lane = numbers[every, :, :, :, lane].float()
    return Groups(integers, of_lane[:, :, 0], of_lane[:, :, 1])
