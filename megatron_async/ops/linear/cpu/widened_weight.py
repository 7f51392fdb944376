"""`WidenedWeight`: 8-bit weights that become 16 bits in registers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.linear.cpu.helpers import compile_products, helpers_of
from megatron_async.ops.linear.weight_format import INT8

LARGEST = 127
"""The largest weight as an integer."""
LEAST_SCALE = 1e-30
"""Scale of an output whose weights are zeros, and of a row of zeros."""


class WidenedWeight:
    """A float32 weight `[outputs, k]` on a CPU as 8-bit integers, in the order of
    `integer_products.py`.

    Attributes:
        k, outputs: inputs and outputs.
        address: of the integers.
        record: what loops know of them.
        is_whole: whether the outputs fill the last block.
    """

    format = INT8

    def __init__(self, weight: Tensor) -> None:
        from megatron_async.ops.linear.cpu import integer_tile as kernels
        from megatron_async.ops.linear.cpu.weight_record import UNIT, WeightRecord

        compile_products()
        self.outputs, self.k = weight.shape
        blocks, steps = -(-self.outputs // kernels.OUTPUTS), -(-self.k // kernels.STEP)
        scales = weight.abs().amax(1).div_(LARGEST).clamp_min_(LEAST_SCALE)
        # torch aligns memory to cache lines, and a step's 64 bytes are one.
        packed = torch.zeros((blocks, steps, kernels.OUTPUTS, kernels.STEP), dtype=torch.int8)
        whole = torch.zeros(blocks * kernels.OUTPUTS, steps * kernels.STEP, dtype=torch.int8)
        whole[: self.outputs, : self.k] = (weight / scales[:, None]).round_()
        by_step = whole.view(blocks, kernels.OUTPUTS, steps, kernels.STEP)
        packed.copy_(by_step.transpose(1, 2))
        self._weight, self.address = packed, packed.data_ptr()
        self._scales = F.pad(scales, (0, len(whole) - self.outputs))
        self.record = WeightRecord(kernels.OUTPUTS, kernels.OUTPUTS * UNIT, self._scales.data_ptr())
        self.is_whole = len(whole) == self.outputs
        self.nbytes = packed.numel() + 4 * self.outputs

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, float32, with x rounded to 16 bits."""
        from megatron_async.ops.linear.cpu.integer_products import whole_tiles

        if not x.is_contiguous():
            x = x.contiguous()
        rows, outputs, blocks = x.numel() // self.k, self.outputs, len(self._weight)
        tiles, columns = whole_tiles(rows), len(self._scales)
        is_whole = tiles == rows and outputs == columns
        sizes = (*x.shape[:-1], outputs) if is_whole else (tiles, columns)
        out = torch.empty(sizes, dtype=torch.float32)
        helpers_of(torch.get_num_threads()).product(
            x.data_ptr(), rows, self.k, self.address, blocks, self.record, out.data_ptr()
        )
        if not is_whole:
            out = out[:rows, :outputs].reshape(*x.shape[:-1], outputs)
        return out if bias is None else out.add_(bias)
