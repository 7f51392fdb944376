"""`GroupedWeight`: a weight of 4 bits, with a scale and an offset for each 32 inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.linear.cpu.helpers import compile_products, helpers_of
from megatron_async.ops.linear.weight_format import INT4

GROUP = 32
"""Inputs that share a scale and an offset, as in GGUF's blocks."""
LEVELS = 15
"""The largest weight as an integer."""
TOLERANCE = 1e-6
"""How far a weight may be from its grid, as a share of its group's largest one. float32's own
rounding, where a file's integers were multiplied by their scales, is a tenth of this."""
LEAST_STEP = 1e-38
"""Step of a group of equal weights, which are divided by it."""
SAMPLE = 64
"""Groups that tell whether the others are looked at."""


class GroupedWeight:
    """A weight as 4-bit integers, in the order of `group_products.py`, with what loops read of a
    `WidenedWeight`; its scales are beside their integers.

    Args:
        integers: uint8 `[outputs, groups, 32]`, 0 to 15, on a CPU.
        scales, offsets: float32 `[outputs, groups]`.
    """

    format = INT4
    scale_address = 0

    def __init__(self, integers: Tensor, scales: Tensor, offsets: Tensor) -> None:
        from megatron_async.ops.linear.cpu.group_products import LANES

        compile_products()
        self._outputs, groups, size = integers.shape
        self.k, self._blocks = groups * size, -(-self._outputs // LANES)
        self.is_whole = self._blocks * LANES == self._outputs
        self._weight = pack_groups(integers, scales, offsets, LANES)
        self.address, self.nbytes = self._weight.data_ptr(), self._weight.numel()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, float32, with x rounded to 8 bits."""
        from megatron_async.ops.linear.cpu.group_products import LANES

        if not x.is_contiguous():
            x = x.contiguous()
        rows = x.numel() // self.k
        out = torch.empty((*x.shape[:-1], self._blocks * LANES), dtype=torch.float32)
        helpers_of(torch.get_num_threads()).product(
            x.data_ptr(), rows, self.k, self.address, self._blocks, 0, out.data_ptr()
        )
        if not self.is_whole:
            out = out[..., : self._outputs].contiguous()
        return out if bias is None else out.add_(bias)


def pack_groups(integers: Tensor, scales: Tensor, offsets: Tensor, lanes: int) -> Tensor:
    """`GroupedWeight`'s arguments as uint8 `[blocks, groups, bytes of a group]`, of blocks of
    `lanes` outputs; outputs beyond the last one are zeros."""
    outputs, groups, _ = integers.shape
    blocks = -(-outputs // lanes)
    missing = blocks * lanes - outputs
    # Of a group: halves of bytes, instructions, lanes, the four inputs of an instruction.
    padded = F.pad(integers, (0, 0, 0, 0, 0, missing)).view(blocks, lanes, groups, 2, 4, 4)
    by_lane = padded.permute(0, 2, 3, 4, 1, 5).reshape(blocks, groups, 2, -1)
    low, high = by_lane.unbind(2)
    parts = [low | (high << 4)]
    for of_groups in (scales, offsets):
        by_group = F.pad(of_groups, (0, 0, 0, missing)).view(blocks, lanes, groups).mT
        parts.append(by_group.contiguous().view(torch.uint8))
    return torch.cat(parts, dim=2)


def find_grid(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The 4-bit integers that a weight was made of, if it was.

    In each group of 32 inputs the weights of a file of 4 bits are a smallest one plus 0 to 15 equal
    steps. float32 weights from elsewhere never are, to within `TOLERANCE`.

    Returns:
        what `GroupedWeight` takes; None: some group is on no grid, or k is no multiple of 32.
    """
    outputs, k = weight.shape
    if k % GROUP:
        return None
    groups = weight.reshape(-1, GROUP)
    if _grids(groups[:SAMPLE]) is None:
        return None
    found = _grids(groups)
    if found is None:
        return None
    integers, scales, offsets = found
    sizes = (outputs, k // GROUP)
    return integers.view(*sizes, GROUP), scales.view(sizes), offsets.view(sizes)


def _grids(groups: Tensor, levels: int = LEVELS) -> tuple[Tensor, Tensor, Tensor] | None:
    """Integers, scales and offsets of groups `[count, 32]`, at most `levels` steps each; or None.

    Where no weight of a group has the largest integer, its range is of fewer steps.
    """
    low, most = groups.aminmax(dim=1)
    step = (most - low).div_(levels)
    # Groups of equal weights have no step.
    rounded = (groups - low[:, None]).div_(step.clamp_min(LEAST_STEP)[:, None]).round_()
    integers = rounded.to(torch.uint8)
    error = rounded.mul_(step[:, None]).add_(low[:, None]).sub_(groups).abs_().amax(1)
    largest = torch.maximum(low.abs(), most.abs())
    left = (error > TOLERANCE * largest).nonzero().flatten()  # sync-ok: CPU
    if len(left):
        fewer = _grids(groups[left], levels - 1) if levels > 1 else None
        if fewer is None:
            return None
        integers[left], step[left] = fewer[:2]
    return integers, step, low
